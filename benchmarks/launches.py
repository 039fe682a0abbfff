"""What one round launches on a GPU and reads there: stock MLX against this project's kernels.

    python -m benchmarks.launches [E2B E4B 12B 26B-A4B 31B] [--configs DIR] [--json]
                                  [--draft-lens 0 2 4 8] [--context 4000]

Counted in the traced graph of one greedy round of one row, so it takes no GPU and no weights; it
says nothing about time. DIR holds the published configs: gemma-4-E2B-it.json,
gemma-4-E2B-it-assistant.json and so on. Targets are packed in 4 bits, drafters in 8, in groups of
64; activations and KV are bfloat16. `benchmarks.graphs` says what counts as a launch and how often
MLX reads what. MLX 0.32.4 has fused attention for blocks of up to 8 tokens and 32 rows a kv head;
for head dim 512 it has none under a mask that is an array.

`ours` has this project's kernels wherever they fit, where a machine would use only those that won a
race there. They read their inputs once: of KV what is committed or written, for 40 rows; and of E
experts, n of them for each of M rows, the E (1 - (1 - n / E)^M) that uniform routing hits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from benchmarks.graphs import CHIPS, Graph, Node, bytes_read, fused
from mlx_mtp.config import DrafterConfig, TargetConfig, TextConfig
from mlx_mtp.engine import calibrate
from mlx_mtp.engine import round as rounds
from mlx_mtp.engine.kv import KVLayout, capacity_for
from mlx_mtp.engine.processors import ProcessorState
from mlx_mtp.engine.round import RoundShape, RoundState
from mlx_mtp.engine.sampling import SamplerState, Sampling
from mlx_mtp.kernels.attention import MOST_TILES
from mlx_mtp.kernels.head import BLOCK
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.rows import wrap
from mlx_mtp.models.target import Target

MODELS = ("E2B", "E4B", "12B", "26B-A4B", "31B")
CHUNK = 128  # keys of a part of `kernels.attention` in bfloat16; parts without keys are not read
PARTS = ("draft", "verify", "head and accept")
RUNS = ("stock_eager", "stock_fused", "ours_fused")

Counts = dict[str, dict[str, int]]  # by part of the round: launches, and bytes by chip


def with_kernels(target: Target, drafter: Drafter, layout: KVLayout) -> KVLayout:
    """Switches this project's kernels on wherever they fit; returns the layout to run with."""
    for model in (target, drafter):
        wrap(model)
        for site in calibrate.sites(model):
            if site.ways and site.take:
                site.take(dict.fromkeys(calibrate.ROWS, site.ways[-1]))
    site = calibrate.attention_site(layout)
    return replace(layout, full_ways=dict.fromkeys(calibrate.ROWS, site.ways[-1]))


def share_read(graph: Graph, node: Node, text: TextConfig, slots: int) -> dict[str, float]:
    """Which part of its inputs a kernel of this project reads, where not all, once; `slots` of KV
    are committed or written."""
    first, *others = (graph.arrays[name] for name in (*node.inputs, *node.outputs))
    if node.name.startswith("attend_chunks"):
        blocks = -(-first.shape[2] // (8 * MOST_TILES))
        return dict.fromkeys(node.inputs[1:7], blocks * slots / others[0].shape[2])
    if node.name.startswith("attend_join"):
        parts = first.shape[1]
        return {node.inputs[0]: min(parts, -(-slots // CHUNK)) / parts}
    if node.name.startswith("expert_rows"):
        rows, experts = len(others[4]) / text.top_k_experts, len(others[0])
        missed = (1 - text.top_k_experts / experts) ** rows
        return dict.fromkeys(node.inputs[1:4], 1 - missed)
    if node.name.startswith("head_blocks") and node.inputs[4] != node.inputs[2]:
        scored = others[-1].size * BLOCK / others[0].size * others[0].shape[-1]
        return dict.fromkeys((*node.inputs[1:4], node.inputs[5]), scored)
    return {}


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Models are built and rounds described as on a GPU, whatever this runs on. What MLX fuses is
    one node each."""

    def stand_in(name: str, like: mx.array, *inputs: mx.array, width: int = 0) -> mx.array:
        names = [f"in{i}" for i in range(len(inputs))]
        (out,) = mx.fast.metal_kernel(name, names, ["out"], "")(
            inputs=list(inputs),
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(*like.shape[:-1], width or like.shape[-1])],
            output_dtypes=[like.dtype],
        )
        return out

    def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        return stand_in("rms_norm", x, x, *([] if weight is None else [weight]))

    def rope(x: mx.array, dims: int, *, offset: mx.array, freqs: mx.array, **_: Any) -> mx.array:
        return stand_in("rope", x, x, offset, freqs)

    unfused = mx.fast.scaled_dot_product_attention

    def scaled_dot_product_attention(
        q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: mx.array
    ) -> mx.array:
        rows, head_dim = q.shape[2:]
        together = rows * q.shape[1] // k.shape[1]
        if head_dim in (64, 96, 128, 256) and rows <= 8 and together <= 32:
            return stand_in("attention", q, q, k, v, mask)
        return unfused(q, k, v, scale=scale, mask=mask)

    def dequantize(
        w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int, mode: str
    ) -> mx.array:
        return stand_in("dequantize", scales, w, scales, biases, width=w.shape[-1] * 32 // bits)

    with ExitStack() as stack, mx.stream(mx.cpu):
        for (name, module), asked in product(list(sys.modules.items()), ("on_cpu", "on_metal")):
            if name.startswith("mlx_mtp") and hasattr(module, asked):
                answer = mock.patch.object(module, asked, return_value=asked == "on_metal")
                stack.enter_context(answer)
        for function in (rms_norm, rope, scaled_dot_product_attention):
            stack.enter_context(mock.patch.object(mx.fast, function.__name__, function))
        stack.enter_context(mock.patch.object(mx, "dequantize", dequantize))
        yield


def build(configs: Path, model: str) -> tuple[Target, Drafter]:
    """A pair of published shapes; nothing of it is evaluated."""

    def config(name: str) -> dict[str, Any]:
        return json.loads((configs / f"gemma-4-{name}.json").read_text())

    target = Target(TargetConfig.from_dict(config(f"{model}-it")))
    drafter = Drafter(DrafterConfig.from_dict(config(f"{model}-it-assistant")))
    for module, bits in ((target, 4), (drafter, 8)):
        module.set_dtype(mx.bfloat16)
        nn.quantize(module, 64, bits)
        module.load_weights(tree_flatten(module.parameters()))
    return target, drafter


def leaves(tree: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(tree) if leaf is not None]


def trace(
    target: Target, drafter: Drafter, layout: KVLayout, k: int, context: int, ours: bool
) -> tuple[Graph, dict[str, list[str]]]:
    """The graph of a round of `k` drafts behind `context` positions, and the ids that each part of
    it ends with. Weights are inputs, so that nothing evaluates them; the pair is used up."""
    one = mx.zeros((1,), dtype=mx.int32)
    state = RoundState(
        kv=layout.allocate(1, capacity_for(context + k + 1)),
        bonus=one,
        hidden=mx.zeros((1, layout.text.hidden_size), layout.dtype),
        length=one,
        budget=one,
        active=one,
        sampler=SamplerState.of([Sampling()]),
        processors=ProcessorState(),
    )
    known = [target.parameters(), drafter.parameters(), state]
    ends: dict[str, list[mx.array]] = {}

    def watched(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            result = function(*given)
            ends[part] = leaves([result])
            return result

        return run

    def one_round(*given: mx.array) -> list[mx.array]:
        left = iter(given)
        weights, more, now = tree_map(lambda leaf: None if leaf is None else next(left), known)
        target.update(weights)
        drafter.update(more)
        shape = RoundShape(k, context, "greedy")
        how = with_kernels(target, drafter, layout) if ours else layout
        ends[PARTS[2]] = leaves(rounds.run_round(target, drafter, how, now, None, shape))
        return [array for part in PARTS for array in ends[part]]

    graph = Graph()
    with ExitStack() as stack:
        for part in PARTS[:2]:
            watch = watched(part, getattr(rounds, part))
            stack.enter_context(mock.patch.object(rounds, part, watch))
        mx.export_function(graph.tell, one_round, *leaves(known))
    names = iter(graph.outputs)
    return graph, {part: [next(names) for _ in ends[part]] for part in PARTS}


def parts_of(graph: Graph, ends: dict[str, list[str]]) -> dict[str, str]:
    """The id of an output -> the part of the round that needs it first."""
    parts: dict[str, str] = {}
    makers = {name: node for node in graph.nodes for name in node.outputs}
    for part, names in ends.items():
        wanted = list(names)
        while wanted:
            node = makers.get(wanted.pop())
            if node and node.outputs[0] not in parts:
                parts.update(dict.fromkeys(node.outputs, part))
                wanted += node.inputs
    return parts


def count(
    graph: Graph, groups: list[list[Node]], parts: dict[str, str], text: TextConfig, slots: int
) -> Counts:
    counts = {part: dict.fromkeys(("launches", *CHIPS), 0) for part in PARTS}
    for group in groups:
        node = group[0]
        if node.launches:
            of_part = counts[parts[node.outputs[0]]]
            of_part["launches"] += node.launches
            share = share_read(graph, node, text, slots)
            for chip, size in bytes_read(graph, group, share).items():
                of_part[chip] += size
    return counts


def measure(configs: Path, model: str, draft_lens: Sequence[int], context: int) -> list[Any]:
    """For each draft length the counts of RUNS."""
    counts: dict[tuple[str, int], Counts] = {}
    with as_on_gpu():
        for k, who in product(draft_lens, ("stock", "ours")):
            target, drafter = build(configs, model)
            layout = KVLayout(target.config.text, mx.bfloat16)
            graph, ends = trace(target, drafter, layout, k, context, who == "ours")
            known = parts_of(graph, ends), layout.text, context + k + 1
            eager, compiled = [[node] for node in graph.nodes], fused(graph, {*ends[PARTS[2]]})
            counts[f"{who}_eager", k] = count(graph, eager, *known)
            counts[f"{who}_fused", k] = count(graph, compiled, *known)
    return [
        {"model": model, "draft_len": k, **{run: counts[run, k] for run in RUNS}}
        for k in draft_lens
    ]


def row(result: dict[str, Any]) -> str:
    """One row of the table: sums, and in brackets the parts of the round."""

    def cell(run: str, what: str) -> str:
        numbers = [result[run][part][what] for part in PARTS]
        digits, unit = (0, 1) if what == "launches" else (2, 1e9)
        parts = " + ".join(f"{number / unit:,.{digits}f}" for number in numbers)
        return f"{sum(numbers) / unit:,.{digits}f} ({parts})"

    cells = [cell(run, "launches") for run in RUNS]
    cells += [cell(run, chip) for run in RUNS[1:] for chip in CHIPS]
    return f"| {result['model']} | {result['draft_len']} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS, help="default: all five")
    parser.add_argument("--configs", type=Path, default=Path("../shared/configs"))
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--context", type=int, default=4000, help="committed positions")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not given.json:
        print(f"Launches, and GB read: in all ({' + '.join(PARTS)})\n")
        heads = ["model", "drafts", *(run.replace("_", ", ") for run in RUNS)]
        heads += [f"GB {run.split('_')[0]}, {chip}" for run in RUNS[1:] for chip in CHIPS]
        print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    results = []
    for model in given.models:
        for result in measure(given.configs, model, given.draft_lens, given.context):
            results.append(result)
            if not given.json:
                print(row(result), flush=True)
    if given.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
