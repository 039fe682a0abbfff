"""How long a user waits: `mlx-mtp --help`, and from the command to the embedded pair's first text.

    python -m benchmarks.latency [--runs 5]

Each run is a new process. MLX's cache of compiled CPU kernels is an empty folder, and g++ has to be
there, so that anything which reached `mx.compile` would show as seconds; the folder must still be
empty afterwards.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "mlx_mtp.cli.main"]


def first_byte(arguments: list[str], environment: dict[str, str]) -> float:
    """Seconds from the start of the process to the first byte on its stdout."""
    started = time.perf_counter()
    with subprocess.Popen(
        COMMAND + arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None
        if not os.read(process.stdout.fileno(), 1):
            raise SystemExit(f"{' '.join(arguments)}: no output")
        seconds = time.perf_counter() - started
        while os.read(process.stdout.fileno(), 65536):
            pass
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit code {process.returncode}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="processes a figure (default: 5)")
    runs = parser.parse_args().runs
    if sys.platform == "linux" and shutil.which("g++") is None:
        raise SystemExit("g++ is not installed: a compiled kernel would not show")
    rows = {
        "--help": ["--help"],
        "first text": ["generate", "def fibonacci(n):", "--draft-len", "4", "--max-tokens", "32"],
    }
    with tempfile.TemporaryDirectory() as empty:
        environment = os.environ | {"TMPDIR": empty}
        seconds = {name: [] for name in rows}
        for _ in range(runs):
            for name, arguments in rows.items():
                seconds[name].append(first_byte(arguments, environment))
        kernels = [p for p in Path(empty).rglob("*") if p.suffix in (".so", ".cpp")]
    for name, times in seconds.items():
        print(
            f"{name:12} median {statistics.median(times):.2f} s   "
            f"({min(times):.2f} to {max(times):.2f}, {runs} runs)"
        )
    print(f"kernels compiled: {len(kernels)}")
    if kernels:
        raise SystemExit("something on the default path reached mx.compile")


if __name__ == "__main__":
    main()
