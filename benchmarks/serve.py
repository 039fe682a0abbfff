"""`mlx-mtp serve` over HTTP: 8 streams at once against the same 8 one by one, and how long a stream
waits while a long prompt joins.

    python -m benchmarks.serve [--pair compute|overhead] [--openblas] [--draft-len 0,4,auto]

A process of the real command, with a random pair (`benchmarks.shapes`). Both ways turn by turn,
medians, from the first request's start to the last one's end, prefills included; all texts must be
the same. The wait is in units of the time that a prefill chunk of 512 tokens takes alone.

MLX's Linux wheel brings the reference BLAS, where a row costs what the first one does. Where a
matrix is read once for all rows, as on a GPU, batches pay: --openblas puts numpy's in its place.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import numpy as np

from benchmarks.shapes import SHAPES, write_pair

TINY = Path(__file__).parent.parent / "weights" / "tiny" / "target"
CHUNK = 512  # tokens of a prefill's pass
LONG = 2000


# numpy's functions have names of their own, and take 64-bit sizes.
SHIM = """
void scipy_cblas_sgemm64_(int, int, int, long, long, long, float, const float*, long, const float*,
                          long, float, float*, long);
void cblas_sgemm(int order, int a, int b, int m, int n, int k, float alpha, const float* x, int ldx,
                 const float* y, int ldy, float beta, float* z, int ldz) {
  scipy_cblas_sgemm64_(order, a, b, m, n, k, alpha, x, ldx, y, ldy, beta, z, ldz);
}
"""


def openblas(folder: Path) -> dict[str, str]:
    """An environment in which MLX's CPU products are numpy's, in one thread."""
    (library,) = (Path(np.__file__).parent.parent / "numpy.libs").glob("libscipy_openblas64_*")
    source, built = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    command = ["gcc", "-O2", "-shared", "-fPIC", source, library, "-o", built]
    subprocess.run([*command, f"-Wl,-rpath,{library.parent}"], check=True)
    return {"LD_PRELOAD": str(built), "OPENBLAS_NUM_THREADS": "1"}


class Server:
    def __init__(self, port: int) -> None:
        self.port = port

    def stream(
        self, prompt: list[int], tokens: int, seen: Callable[[], object] = lambda: None, **more: int
    ) -> list[int]:
        """The answer's ids; `seen` is called at every event."""
        body = {"prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "temperature": 0}
        body |= {"stream": True, "return_token_ids": True} | more
        connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body))
        ids: list[int] = []
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                seen()
                ids += (chunk["choices"] or [{}])[0].get("token_ids") or []
        connection.close()
        return ids


@contextmanager
def serving(
    target: Path, drafter: Path, rows: int, environment: dict[str, str]
) -> Iterator[Server]:
    command = [sys.executable, "-m", "mlx_mtp.cli.main", "serve", "--port", "0"]
    command += ["--model", str(target), "--drafter", str(drafter), "--parallel", str(rows)]
    command += ["--cache-gb", "0"]
    env = os.environ | environment
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stderr is not None
            (port,) = re.findall(r":(\d+)/v1", process.stderr.readline())
            print(process.stderr.readline().strip())
            yield Server(int(port))
        finally:
            process.terminate()


def tokenizer(folder: Path, vocabulary: int) -> None:
    """The embedded pair's, with words that it never makes up to so many tokens."""
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    known = content["model"]["vocab"]
    known |= {f"▁w{i}": i for i in range(len(known), vocabulary)}
    file.write_text(json.dumps(content))


def at_once(server: Server, prompts: list[list[int]], tokens: int, rows: int, k: int | None):
    """Seconds from the first start to the last end, and the texts."""
    more = {} if k is None else {"draft_len": k}
    started = time.perf_counter()
    with ThreadPoolExecutor(rows) as pool:
        texts = list(pool.map(lambda prompt: server.stream(prompt, tokens, **more), prompts))
    return time.perf_counter() - started, texts


def longest_wait(server: Server, prompt: list[int], tokens: int) -> tuple[float, float, float]:
    """Seconds between two events of a stream, the longest while a long prompt joins and the median
    before it does, and what a chunk of that prompt takes alone."""
    rng = random.Random(tokens)
    alone, joins = ([prompt[0], *rng.choices(prompt, k=LONG - 1)] for _ in range(2))
    started = time.perf_counter()
    server.stream(alone, 1)
    chunk = (time.perf_counter() - started) * CHUNK / LONG
    times: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            server.stream, prompt, tokens, lambda: times.append(time.perf_counter())
        )
        while len(times) < 8:
            time.sleep(0.005)
        joined = len(times)
        server.stream(joins, 1)
        assert not running.done(), "the stream was too short: more --tokens"
        until = len(times)
        running.result()
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return max(gaps[joined:until]), statistics.median(gaps[1:joined]), chunk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", choices=SHAPES, default="compute", help="(default: compute)")
    parser.add_argument("--openblas", action="store_true", help="numpy's BLAS instead of MLX's")
    parser.add_argument("--draft-len", default="0,4,auto", help="lengths (default: 0,4,auto)")
    parser.add_argument("--rows", type=int, default=8, help="streams (default: 8)")
    parser.add_argument("--tokens", type=int, default=48, help="of each (default: 48)")
    parser.add_argument("--repeats", type=int, default=3, help="runs a figure (default: 3)")
    parser.add_argument("--least", type=float, default=0.0, help="x one by one, or it fails")
    given = parser.parse_args()
    lengths = [None if n == "auto" else int(n) for n in given.draft_len.split(",")]
    shape = SHAPES[given.pair]
    vocabulary, rng = shape.shared["vocab_size"], random.Random(5)
    prompts = [
        [rng.randrange(512, vocabulary) for _ in range(8 + 5 * i)] for i in range(given.rows)
    ]
    ratios: dict[int | None, list[tuple[float, float]]] = {k: [] for k in lengths}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer(folder / "target", vocabulary)
        target, drafter = write_pair(folder, shape)
        environment = openblas(folder) if given.openblas else {}
        with serving(target, drafter, given.rows, environment) as server:
            print(f"pair {given.pair}, {given.rows} streams of {given.tokens} tokens")
            same: list[list[int]] = []
            for turn in range(given.repeats + 1):
                for k in lengths:
                    alone, texts = at_once(server, prompts, given.tokens, 1, k)
                    together, others = at_once(server, prompts, given.tokens, given.rows, k)
                    same = same or texts
                    assert texts == others == same, f"texts differ, draft length {k}"
                    if turn:
                        ratios[k].append((alone, together))
            slow = False
            for k, pairs in ratios.items():
                alone, together = (statistics.median(times) for times in zip(*pairs, strict=True))
                speed = given.rows * given.tokens / together
                print(
                    f"draft {'auto' if k is None else k:>4}  one by one {alone:6.2f} s, "
                    f"at once {together:6.2f} s ({speed:.1f} tokens/s)  {alone / together:.2f}x"
                )
                slow |= alone < given.least * together
            for _ in range(given.repeats):
                wait, usual, chunk = longest_wait(server, prompts[0], 8 * given.tokens)
                print(
                    f"a prompt of {LONG} tokens joins: {wait:.3f} s between two events at most, "
                    f"{usual:.3f} s before; a chunk takes {chunk:.3f} s: {wait / chunk:.2f} chunks"
                )
    sys.exit(f"at once less than {given.least}x as fast" if slow else 0)


if __name__ == "__main__":
    main()
