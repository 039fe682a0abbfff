"""This engine, mlx-lm's plain decoding and mlx-vlm's MTP on the same weights and prompts.

    python -m benchmarks.compare [--pairs embedded overhead compute] [--draft-len 4] [--json FILE]

Each contestant is a process that stays alive; they take turns on every prompt, so that a busy
machine slows all alike. Greedy, batch 1, weights and KV of one dtype (float32 on the CPU, as stored
on a GPU). mlx-vlm gets --draft-block-size N+1, which is N drafts, and runs its own generate_step
over its `models.gemma4` classes. Tokens/s are medians over prompts and repeats from the first token
on, prefill left out. `compiled` is Engine(compile=True) with every kernel and trace made before;
what the first run took longer than the second is the cold cost. MLX's cache of compiled CPU kernels
starts empty, one folder a contestant. The figures are the same text's: exit code 1 if it differs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_mtp.measure.peers import Worker

LANES = {
    "ours_mtp": "ours",
    "mlx_vlm_mtp": "mlx-vlm",
    "ours_plain": "ours",
    "mlx_lm_plain": "mlx-lm",
}
RATIOS = {
    "MTP, ours / mlx-vlm": ("ours_mtp", "mlx_vlm_mtp"),
    "plain, ours / mlx-lm": ("ours_plain", "mlx_lm_plain"),
    "ours, MTP / plain": ("ours_mtp", "ours_plain"),
}
PAIRS = ("embedded", "overhead", "compute")
PROMPTS = 4  # a pair


@dataclass
class Column:
    """What one pair gave under one setting. rates: tokens/s of a lane's runs; per_cpu: the same by
    the process's CPU seconds. cold: seconds a lane's first run took longer."""

    rates: dict[str, list[float]] = field(default_factory=lambda: {lane: [] for lane in LANES})
    per_cpu: dict[str, list[float]] = field(default_factory=lambda: {lane: [] for lane in LANES})
    cold: dict[str, float] = field(default_factory=dict)
    tokens_per_round: float = 0.0
    same_text: bool = True

    def median(self, lane: str) -> float:
        return statistics.median(self.rates[lane])

    def ratios(self, a: str, b: str) -> str:
        by_cpu = statistics.median(self.per_cpu[a]) / statistics.median(self.per_cpu[b])
        return f"{self.median(a) / self.median(b):.2f} ({by_cpu:.2f})"

    def figures(self) -> dict[str, float | bool]:
        return {**{lane: self.median(lane) for lane in LANES}, "same_text": self.same_text}


def measure(
    workers: dict[str, Worker],
    prompts: list[list[int]],
    eos: list[int],
    given: argparse.Namespace,
    compiled: bool,
) -> Column:
    column = Column()

    def ask(lane: str, prompt: list[int]) -> dict[str, Any]:
        length = given.draft_len if lane.endswith("mtp") else 0
        return workers[LANES[lane]].ask(
            prompt=prompt,
            max_tokens=given.max_tokens,
            eos=eos,
            draft_len=length,
            compiled=compiled,
        )

    counted = rounds = 0
    for lane in LANES:
        pace = []  # seconds a token
        for prompt in prompts:
            started = time.perf_counter()
            tokens = len(ask(lane, prompt)["tokens"])
            pace.append((time.perf_counter() - started) / tokens)
            column.cold.setdefault(lane, tokens)
        column.cold[lane] *= max(pace[0] - pace[-1], 0.0)
    for repeat in range(given.repeats):
        for at, prompt in enumerate(prompts):
            results = {}
            # Whoever comes first may find another machine than the last: they take turns at that.
            turn = (repeat + at) % len(LANES)
            for lane in [*LANES][turn:] + [*LANES][:turn]:
                results[lane] = ask(lane, prompt)
            texts = [result["tokens"] for result in results.values()]
            column.same_text &= all(text == texts[0] for text in texts)
            for lane, result in results.items():
                column.rates[lane].append(result["counted"] / result["seconds"])
                column.per_cpu[lane].append(result["counted"] / result["cpu_seconds"])
            counted += results["ours_mtp"]["counted"]
            rounds += results["ours_mtp"]["rounds"]
    column.tokens_per_round = counted / rounds
    return column


def questions(name: str, max_tokens: int) -> tuple[list[list[int]], list[int]]:
    """Prompts as token ids, and the ids that end an answer."""
    if name != "embedded":
        return [[2, *range(start, start + 40, 3)] for start in range(11, 2000, 500)][:PROMPTS], []
    import mlx_mtp
    from benchmarks.embedded import decode, loops
    from mlx_mtp.weights.find import TINY

    pair = mlx_mtp.load()
    chosen: list[list[int]] = []
    for listed in json.loads((TINY / "prompts.json").read_text()).values():
        enough = len(chosen) + PROMPTS // 2
        for prompt in (entry["prompt"] for entry in listed):
            answer = decode(pair, prompt, 0, 160)
            looping = loops(pair.tokenizer.decode(answer.tokens), answer)
            # Drafting a loop is too easy, and a short answer measures noise.
            if len(answer.tokens) >= min(48, max_tokens) and not looping:
                chosen.append(answer.prompt)
            if len(chosen) == enough:
                break
    return chosen, [*pair.defaults.eos_token_ids]


def folders(name: str, work: Path) -> tuple[Path, Path]:
    if name == "embedded":
        from mlx_mtp.weights.find import TINY

        return TINY / "target", TINY / "drafter"
    from benchmarks.shapes import SHAPES, write_pair

    return write_pair(work / "weights", SHAPES[name])


def run_pair(name: str, given: argparse.Namespace) -> tuple[list[Column], dict[str, str]]:
    """The columns (default, compiled) and the contestants' versions."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        target, drafter = folders(name, work)
        prompts, eos = questions(name, given.max_tokens)
        workers: dict[str, Worker] = {}
        try:
            for each in dict.fromkeys(LANES.values()):
                workers[each] = Worker(each, target, drafter, work / each)
            columns = [
                measure(workers, prompts, eos, given, compiled) for compiled in (False, True)
            ]
        finally:
            for worker in workers.values():
                worker.close()
        return columns, {worker.name: worker.version for worker in workers.values()}


def table(results: dict[str, list[Column]]) -> str:
    """Markdown, two columns a pair."""
    columns = [column for pair in results.values() for column in pair]
    head = [f"{name}, {kind}" for name in results for kind in ("default", "compiled")]
    rows = [["", *head], ["---"] * (len(head) + 1)]
    for lane, contestant in LANES.items():
        label = f"{contestant} {'MTP' if lane.endswith('mtp') else 'plain'}, tokens/s"
        rows.append([label, *(f"{c.median(lane):.1f}" for c in columns)])
    for label, pair in RATIOS.items():
        rows.append([f"{label} (by CPU time)", *(c.ratios(*pair) for c in columns)])
    rows.append(["tokens a round (MTP)", *(f"{c.tokens_per_round:.2f}" for c in columns)])
    rows.append(["same text", *("yes" if c.same_text else "NO" for c in columns)])
    for lane, contestant in LANES.items():
        if lane != "ours_plain":  # what it would compile, MTP did already
            rows.append([f"{contestant}, cold, s", *(f"{c.cold[lane]:.1f}" for c in columns)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def as_json(results: dict[str, list[Column]], draft_len: int) -> dict[str, Any]:
    """`pairs` has the default settings' figures, `compiled_pairs` the other column's."""
    default, compiled = (
        {name: columns[i].figures() for name, columns in results.items()} for i in (0, 1)
    )
    return {"draft_len": draft_len, "pairs": default, "compiled_pairs": compiled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=PAIRS, metavar="PAIR")
    parser.add_argument("--draft-len", type=int, default=4, help="drafted tokens (default: 4)")
    parser.add_argument("--repeats", type=int, default=3, help="runs a prompt (default: 3)")
    parser.add_argument("--max-tokens", type=int, default=64, help="a run (default: 64)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    given = parser.parse_args()
    if importlib.util.find_spec("mlx_vlm") is None:
        parser.exit(2, "mlx-vlm is not installed; run: python3 -m pip install -e '.[bench]'\n")
    results = {}
    for name in given.pairs:
        results[name], versions = run_pair(name, given)
        print(f"{name}: done, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    print(
        f"MLX {importlib.metadata.version('mlx')}, {platform.machine()}, "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}; "
        f"draft length {given.draft_len} (mlx-vlm: --draft-block-size {given.draft_len + 1}), "
        f"{given.max_tokens} tokens, {PROMPTS} prompts, {given.repeats} repeats, interleaved\n"
    )
    print(table(results))
    if given.json:
        Path(given.json).write_text(json.dumps(as_json(results, given.draft_len), indent=1) + "\n")
    if not all(column.same_text for columns in results.values() for column in columns):
        raise SystemExit("the text differs: these figures compare different work")


if __name__ == "__main__":
    main()
