"""Time per round against the length of the context, and prefill, beside mlx-lm on the same weights.

    python -m benchmarks.context [--lengths 500,8300,33000,65000] [--repeats 9]

A random pair of E2B's kind in small. KV is filled with random numbers, so that no prompt of 65,000
tokens has to run; buffers are long enough on both sides, so that none grows while it is timed.
Contenders take turns; medians. The drafter is random and a round brings one token: draft length 4
pays where its rounds bring more tokens than its column says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma4_text
from mlx_lm.models.cache import KVCache

from mlx_mtp.config import FULL, DrafterConfig, TargetConfig
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.session import Engine
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.layers import lay_out_for_cpu, on_cpu
from mlx_mtp.models.target import Target
from tests import checkpoints
from tests.checkpoints import F, S

LAYERS = [S, S, S, S, F, S, S, S, S, F]
VOCAB, WINDOW, STEP = 4096, 512, 256  # mlx-lm's buffers grow by STEP slots
WIDTHS = {"head_dim": 64, "global_head_dim": 128, "sliding_window": WINDOW, "vocab_size": VOCAB}
LONG = WIDTHS | {"max_position_embeddings": 1 << 17, "use_double_wide_mlp": False}
DEEP = {"num_hidden_layers": len(LAYERS), "layer_types": LAYERS, "num_kv_shared_layers": 4}
WIDE = {"hidden_size": 128, "intermediate_size": 512, "vocab_size_per_layer_input": VOCAB}
TEXT: dict[str, Any] = checkpoints.target_config("e2b", flat=True, **LONG, **DEEP, **WIDE)
DRAFTER = checkpoints.drafter_config("e2b", ordered=False, backbone=128, **LONG)


def make_pair() -> tuple[Target, Drafter, gemma4_text.Model]:
    """The pair, and the target's weights in mlx-lm's class."""
    mx.random.seed(0)
    ours = Target(TargetConfig.from_dict(TEXT)), Drafter(DrafterConfig.from_dict(DRAFTER))
    theirs = gemma4_text.Model(gemma4_text.ModelArgs.from_dict(TEXT))
    theirs.load_weights([(f"model.{n}", w) for n, w in tree_flatten(ours[0].parameters())])
    for model in ours:
        model.load_weights(tree_flatten(model.parameters()))  # which stacks what it can
        if on_cpu():
            lay_out_for_cpu(model)
    mx.eval([model.parameters() for model in (*ours, theirs)])
    return *ours, theirs


def our_rounds(engine: Engine, length: int, draft_len: int) -> Iterator[None]:
    """Rounds behind `length` positions; each next() runs one."""
    batch, layout = engine._batch, engine.layout
    batch.grow(length + 1024)
    row, slots = batch.rows[0], layout.capacity(batch.state.kv)
    filled = []
    for kind in layout._kinds:
        shape = (1, 1, slots if kind == FULL else layout.ring, layout.text.head_dim_of(kind))
        filled.append(layout.encode(kind, mx.random.normal(shape), mx.random.normal(shape)))
    batch.state = batch.state._replace(kv=filled)
    del filled
    row.slot.ids, row.length = [i % VOCAB for i in range(length)], length
    batch.sync({0})
    mx.eval(batch.state)
    engine.add(Request([*row.slot.ids, 1], 1 << 20, draft_len=draft_len))
    while True:
        if any(event.tokens for event in engine.step()):
            yield


def their_rounds(model: gemma4_text.Model, length: int) -> Iterator[Any]:
    """The same for mlx-lm: plain decoding through its own loop."""
    cache = model.make_cache()
    for kind, one in zip(LAYERS, cache, strict=False):
        full = isinstance(one, KVCache)
        shape = (1, 1, length // STEP * STEP if full else WINDOW, 128 if kind == FULL else 64)
        one.keys, one.values = mx.random.normal(shape), mx.random.normal(shape)
        one.offset = length // STEP * STEP
        if not full:
            one._idx = WINDOW
    mx.eval([(one.keys, one.values) for one in cache])
    return iter(generate_step(mx.array([1]), model, max_tokens=-1, prompt_cache=cache))


def our_prefills(target: Target, drafter: Drafter, prompt: list[int]) -> Iterator[None]:
    while True:
        engine = Engine(target, drafter)
        engine.add(Request(prompt, 1))
        while engine.busy:
            engine.step()
        yield


def their_prefills(model: gemma4_text.Model, prompt: list[int]) -> Iterator[None]:
    while True:
        next(generate_step(mx.array(prompt), model, max_tokens=1))
        yield


def medians(contenders: dict[str, Iterator[Any]], warm: int, repeats: int) -> dict[str, float]:
    """Seconds of one run of each; they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warm + repeats):
        for name, runs in contenders.items():
            start = time.perf_counter()
            next(runs)
            if turn >= warm:
                seconds[name].append(time.perf_counter() - start)
    return {name: median(one) for name, one in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="500,8300,33000,65000")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prefill")
    given = parser.parse_args()
    target, drafter, theirs = make_pair()
    print("| context | mlx-lm, ms | plain | draft length 4 | plain, KV in 8 bits |")
    print("|---|---|---|---|---|")
    for length in map(int, given.lengths.split(",")):
        contenders = {"theirs": their_rounds(theirs, length)}
        for name, k, bits in [("plain", 0, None), ("draft_4", 4, None), ("plain_kv_8", 0, 8)]:
            contenders[name] = our_rounds(Engine(target, drafter, kv_bits=bits), length, k)
        base, *ours = medians(contenders, 3, given.repeats).values()
        ratios = " | ".join(f"{one / base:.2f}x" for one in ours)
        print(f"| {length} | {base * 1e3:.1f} | {ratios} |", flush=True)
    prompt = [i % VOCAB for i in range(given.prompt)]
    prefills = {"theirs": their_prefills(theirs, prompt)}
    prefills["ours"] = our_prefills(target, drafter, prompt)
    base, mine = medians(prefills, 1, max(3, given.repeats // 3)).values()
    print(f"prefill: mlx-lm {len(prompt) / base:.0f}, ours {len(prompt) / mine:.0f} tokens/s")


if __name__ == "__main__":
    main()
