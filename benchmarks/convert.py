"""What converting takes: time, MB/s and peak memory, beside mlx_lm.convert on the same input.

    python -m benchmarks.convert CONFIG DRAFTER_CONFIG [--folder DIR] [--turns 2] [--limit 4]

CONFIG and DRAFTER_CONFIG are config.json files; a checkpoint of random bf16 numbers in their
shapes (24 GB for 12B, 9.3 GB for E2B) is written into DIR, a temporary folder by default, shard by
shard.
Both convert to 4 bits, turn by turn, each in a process of its own. mlx_lm converts the target
alone; ours has the drafter beside it. Fails where our peak is above --limit GB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.memory import write_pair

OURS, THEIRS = "mlx-mtp convert", "mlx_lm.convert"


def run(command: list[str], folder: Path) -> tuple[float, float]:
    """Seconds and peak resident bytes of a command."""
    started = time.perf_counter()
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{(folder / 'log').read_text()[-2000:]}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return time.perf_counter() - started, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("drafter_config", type=Path)
    parser.add_argument("--folder", type=Path, help="kept afterwards (default: a temporary one)")
    parser.add_argument("--turns", type=int, default=2, help="of each (default: 2)")
    parser.add_argument("--limit", type=float, default=4.0, help="GB of our peak (default: 4)")
    parser.add_argument("--alone", action="store_true", help="without mlx_lm")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[tuple[float, float]]] = {OURS: [], THEIRS: []}
    try:
        write_pair(
            folder,
            json.loads(given.config.read_text()),
            json.loads(given.drafter_config.read_text()),
        )
        source, out = str(folder / "target"), str(folder / "out")
        commands = {
            OURS: ["mlx_mtp.cli.main", "convert", source, "-o", out, "-q", "4", "--no-verify"],
            THEIRS: ["mlx_lm", "convert", "--hf-path", source, "--mlx-path", out, "-q"],
        }
        commands[OURS] += ["--drafter", str(folder / "drafter")]
        for _ in range(given.turns):
            for name, command in commands.items():
                if name == OURS or not given.alone:
                    results[name].append(run(command, folder))
                    shutil.rmtree(out)
        read = {
            name: sum(f.stat().st_size for f in Path(source).glob("*.safetensors"))
            for name in results
        }
        read[OURS] += sum(f.stat().st_size for f in (folder / "drafter").glob("*.safetensors"))
    finally:
        if given.folder is None:
            shutil.rmtree(folder)
    print("| | read, GB | seconds, median | MB/s | peak, GB |\n|---|---|---|---|---|")
    for name, turns in results.items():
        if turns:
            seconds = statistics.median(seconds for seconds, _ in turns)
            peak = max(peak for _, peak in turns) / 1e9
            print(
                f"| {name} | {read[name] / 1e9:.1f} | {seconds:.0f} | "
                f"{read[name] / seconds / 1e6:.0f} | {peak:.2f} |"
            )
    if max(peak for _, peak in results[OURS]) > given.limit * 1e9:
        raise SystemExit(f"our peak is above {given.limit} GB")


if __name__ == "__main__":
    main()
