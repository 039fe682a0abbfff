"""Tokens/s of ragged batches of 1 to 16 rows, at several draft lengths: prompts, lengths and
acceptances of their own.

    python -m benchmarks.batch [--pair compute|overhead] [--draft-len 0,4,auto] [--rows 1,2,4,8]

Random pairs (`benchmarks.shapes`). One process, all settings turn by turn, medians; `auto` has one
controller a size, as a server has. Every row's text is compared with its solo run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import mlx.core as mx

from benchmarks.shapes import SHAPES, write_pair
from mlx_mtp.engine.draft_length import AutoLength
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.session import Engine
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.target import Target
from mlx_mtp.weights.load import load_drafter, load_target


class Bench:
    def __init__(self, target: Target, drafter: Drafter, tokens: int):
        self.target, self.drafter, self.tokens = target, drafter, tokens
        self.auto = {rows: AutoLength() for rows in range(17)}
        rng, vocabulary = random.Random(5), target.config.text.vocab_size
        self.prompts = [[rng.randrange(vocabulary) for _ in range(8 + 5 * i)] for i in range(16)]

    def run(self, rows: int, draft_len: int | None) -> tuple[float, list[list[int]]]:
        """Tokens/s of all rows together, prefill left out, and their texts."""
        engine = Engine(self.target, self.drafter, rows=rows, draft_length=self.auto[rows])
        requests = [
            Request(prompt, self.tokens + 3 * i, draft_len=draft_len)
            for i, prompt in enumerate(self.prompts[:rows])
        ]
        for request in requests:
            engine.add(request)
        while any(not request.tokens for request in requests):
            engine.step()
        before, started = sum(len(r.tokens) for r in requests), time.perf_counter()
        while engine.busy:
            engine.step()
        seconds = time.perf_counter() - started
        return (sum(len(r.tokens) for r in requests) - before) / seconds, [
            r.tokens for r in requests
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", choices=SHAPES, default="compute", help="(default: compute)")
    parser.add_argument("--draft-len", default="0,4,auto", help="lengths (default: 0,4,auto)")
    parser.add_argument("--rows", default="1,2,4,8", help="batch sizes (default: 1,2,4,8)")
    parser.add_argument(
        "--blind", type=float, default=0.3, help="tokens the drafter never finds (default: 0.3)"
    )
    parser.add_argument("--tokens", type=int, default=32, help="of the shortest (default: 32)")
    parser.add_argument("--repeats", type=int, default=5, help="runs a figure (default: 5)")
    given = parser.parse_args()
    sizes = [int(n) for n in given.rows.split(",")]
    lengths = [None if n == "auto" else int(n) for n in given.draft_len.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        target, drafter = write_pair(Path(folder), SHAPES[given.pair], given.blind)
        bench = Bench(load_target(target), load_drafter(drafter), given.tokens)
    print(f"MLX {mx.__version__}, {mx.default_device()}, pair {given.pair}")
    speeds: dict[tuple[int, int | None], list[float]] = {}
    alone = [bench_solo(bench, i) for i in range(max(sizes))]
    for turn in range(given.repeats + 1):
        for rows in sizes:
            for draft_len in lengths:
                speed, texts = bench.run(rows, draft_len)
                assert texts == alone[:rows], f"{rows} rows differ from their solo runs"
                if turn:
                    speeds.setdefault((rows, draft_len), []).append(speed)
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    for (rows, draft_len), speed in sorted(medians.items(), key=lambda item: item[0][0]):
        name = "auto" if draft_len is None else draft_len
        line = f"rows {rows:2}  draft {name:>4}  {speed:7.1f} tokens/s"
        if (rows, 0) in medians:
            line += f"  {speed / medians[rows, 0]:.2f}x plain decoding"
        print(f"{line}  {speed / medians[sizes[0], draft_len]:.2f}x {sizes[0]} row(s)")


def bench_solo(bench: Bench, i: int) -> list[int]:
    """What row i says alone, plainly."""
    request = Request(bench.prompts[i], bench.tokens + 3 * i, draft_len=0)
    engine = Engine(bench.target)
    engine.add(request)
    while engine.busy:
        engine.step()
    return request.tokens


if __name__ == "__main__":
    main()
