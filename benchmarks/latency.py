"""Cold start: seconds from the command to the first token, in a new process each time.

    python -m benchmarks.latency [--runs 5]

The embedded pair, then the same pair with a vocabulary of Gemma's size: 262,144 tokens, of which
those beyond the pair's own never occur, and a tokenizer.json of 32 MB. Against mlx-lm and mlx-vlm
(pip install 'mlx-mtp[bench]'), whose Python APIs load the target alone and print at their first
token, where ours is the command line, drafter included, and its first text. They take turns. Each
has a folder of its own for compiled CPU kernels, empty at first, so its first run is a column of
its own; with g++ at hand, ours must be empty at the end. Bytecode is kept, as that of
an installed package is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mtp.weights.find import TINY

PROMPT = "def fibonacci(n):"
OURS = [sys.executable, "-m", "mlx_mtp.cli.main"]
PEER = """
import sys
from {package} import load, stream_generate
model, words = load(sys.argv[1])
for _ in stream_generate(model, words, sys.argv[2], max_tokens=8):
    print("token", flush=True)
"""
VOCABULARY = 262_144


def write_large(folder: Path) -> None:
    """The embedded pair into `folder`, its vocabulary filled up with tokens that never occur."""
    for part in ("target", "drafter"):
        shutil.copytree(TINY / part, folder / part)
        config = json.loads((TINY / part / "config.json").read_text())
        text = config.get("text_config", config)
        small = text["vocab_size"]
        for level in (config, text):
            level |= {k: VOCABULARY for k in level if k.startswith("vocab_size") and level[k]}
        (folder / part / "config.json").write_text(json.dumps(config))
        tensors: Any = mx.load(str(TINY / part / "model.safetensors"))
        for name, array in tensors.items():
            if name.endswith("token_ordering"):  # every cluster gets its share
                clusters = config["num_centroids"]
                new = mx.arange(small, VOCABULARY, dtype=array.dtype).reshape(clusters, -1)
                old = array.reshape(clusters, -1)
                tensors[name] = mx.concatenate([old, new], axis=1).flatten()
            elif array.shape[0] == small:
                tensors[name] = mx.pad(array, [(0, VOCABULARY - small), (0, 0)])
        mx.save_safetensors(str(folder / part / "model.safetensors"), tensors, {"format": "pt"})
    write_large_tokenizer(folder / "target" / "tokenizer.json")


def write_large_tokenizer(file: Path) -> None:
    """Fills the vocabulary up with strings of 64 Chinese characters, two merges for each."""
    tokenizer = json.loads(file.read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    characters = [chr(0x4E00 + i) for i in range(64)]
    strings = (
        "".join(s) for n in itertools.count(1) for s in itertools.product(characters, repeat=n)
    )
    for text in itertools.islice(strings, VOCABULARY - len(vocabulary)):
        vocabulary[text] = len(vocabulary)
        merges += [[text[:i], text[i:]] for i in sorted({1, len(text) - 1}) if 0 < i < len(text)]
    file.write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False))


def first_byte(command: list[str], scratch: Path) -> float:
    """Seconds from the start of the process to the first byte on its stdout. Raises RuntimeError
    with the last line of its stderr."""
    log = scratch.with_suffix(".log")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment | {"TMPDIR": str(scratch)},
        ) as process,
    ):
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        seconds = time.perf_counter() - started
        while os.read(process.stdout.fileno(), 65536):
            pass
    if process.returncode or not first:
        said = log.read_text().strip().splitlines() or ["no output"]
        raise RuntimeError(said[-1])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="warm processes a figure (default: 5)")
    runs = parser.parse_args().runs
    if sys.platform == "linux" and shutil.which("g++") is None:
        raise SystemExit("g++ is not installed: a compiled kernel would not show")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        write_large(scratch / "large")
        generate = [*OURS, "generate", PROMPT, "--max-tokens", "32"]
        commands = {"--help": {"ours": [*OURS, "--help"]}}
        for vocabulary, pair in (("embedded", TINY), ("262,144 tokens", scratch / "large")):
            named = ["--model", str(pair / "target"), "--drafter", str(pair / "drafter")]
            rows = {"ours": generate + ([] if pair == TINY else named)}
            for package in ("mlx_lm", "mlx_vlm"):
                script = PEER.format(package=package)
                target = str(pair / "target")
                rows[package] = [sys.executable, "-c", script, target, PROMPT]
            commands[vocabulary] = rows
        for what, rows in commands.items():
            seconds: dict[str, list[float]] = {name: [] for name in rows}
            for _ in range(1 + runs):
                for name, command in list(rows.items()):
                    kernels = scratch / name
                    kernels.mkdir(exist_ok=True)
                    try:
                        seconds[name].append(first_byte(command, kernels))
                    except RuntimeError as error:
                        print(f"{what:15} {name:8} skipped: {error}")
                        del rows[name], seconds[name]
            for name, (cold, *warm) in seconds.items():
                print(
                    f"{what:15} {name:8} median {statistics.median(warm):.2f} s "
                    f"({min(warm):.2f} to {max(warm):.2f}), first run {cold:.2f} s"
                )
        compiled = [p for p in (scratch / "ours").rglob("*") if p.suffix in (".so", ".cpp")]
    if compiled:
        raise SystemExit(f"something on the default path reached mx.compile: {compiled[0].name}")


if __name__ == "__main__":
    main()
