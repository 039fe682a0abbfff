"""What rounds need: operations, memory over long KV, and the peak of a model's real shape.

    python -m benchmarks.memory
    python -m benchmarks.memory CONFIG DRAFTER_CONFIG [--folder DIR] [--max-tokens 4]

Alone it counts the operations of a round, and what a round and a prompt's last chunk need beside KV
at two capacities and two lengths, with tiny models; the compiled rounds take some minutes of g++
where its cache is cold.

CONFIG and DRAFTER_CONFIG are config.json files, say those of google/gemma-4-E2B-it and its
assistant. The checkpoint of random bf16 numbers (9.3 GB for E2B) is written shard by shard into
DIR, a temporary folder by default, with the embedded pair's tokenizer, loaded and run. Fails where
the process's peak is above weights + KV + 10 %, or `mlx-mtp plan` is 5 % off. Some minutes on 2 CPU
cores.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp.config import DrafterConfig, TargetConfig
from mlx_mtp.engine.round import RoundShape, run_round
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.target import Target
from mlx_mtp.weights.find import TINY
from tests.engine import peaks
from tests.engine.pairs import make_target

SHARD = 2 << 30


def write(folder: Path, config: dict[str, Any], module: nn.Module, prefix: str) -> int:
    """Random bf16 weights for all of `module`'s parameters; returns their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, mx.array]] = [{}]
    size, total, names = 0, 0, {}
    mx.random.seed(0)
    # Drawing billions of numbers takes minutes: one draw is repeated, at a length that no row's
    # width divides, so that rows differ.
    noise = mx.random.normal((1_000_003,)).astype(mx.bfloat16)

    def flush() -> None:
        nonlocal size
        file = f"model-{len(shards):05}.safetensors"
        mx.save_safetensors(str(folder / file), shards[-1], metadata={"format": "pt"})
        names.update(dict.fromkeys(shards[-1], file))
        shards[-1] = {}
        shards.append({})
        size = 0

    for name, shape in [(n, p.shape) for n, p in tree_flatten(module.parameters())]:
        if name.endswith("token_ordering"):
            array = mx.random.permutation(shape[0]).astype(mx.int64)
        elif len(shape) == 1:
            array = mx.random.uniform(0.5, 1.0, shape).astype(mx.bfloat16)
        else:
            # In pieces of rows: E2B's per-layer table has more elements than an int32 counts.
            rows = max(1, len(noise) * 64 // math.prod(shape[1:]))
            pieces = [
                _repeat(noise * shape[-1] ** -0.5, (min(rows, shape[0] - start), *shape[1:]))
                for start in range(0, shape[0], rows)
            ]
            array = mx.concatenate(pieces)
        inner = name.split(".")[0] in ("embed_tokens", "layers", "norm") or prefix.count(".") > 1
        key = (prefix if inner else "") + name
        shards[-1][key] = array
        size, total = size + array.nbytes, total + array.nbytes
        if size >= SHARD:
            flush()
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _repeat(noise: mx.array, shape: tuple[int, ...]) -> mx.array:
    count = math.prod(shape)
    return mx.concatenate([noise] * -(-count // noise.size))[:count].reshape(shape)


def write_pair(folder: Path, config: dict[str, Any], drafter_config: dict[str, Any]) -> None:
    """A random checkpoint of that shape in folder/target and folder/drafter, with the embedded
    pair's tokenizer; nothing where it is there already."""
    if (folder / "target" / "model.safetensors.index.json").exists():
        return
    target = Target(TargetConfig.from_dict(config))
    write(folder / "target", config, target, "model.language_model.")
    drafter = Drafter(DrafterConfig.from_dict(drafter_config))
    write(folder / "drafter", drafter_config, drafter, "model.")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / "target" / name, folder / "target" / name)


def show_rounds() -> None:
    """Bytes above the resting level, one round in flight."""
    print("| round: rows, KV, run | at 4k slots, MB | at 64k | KV at 64k |\n|---|---|---|---|")
    cases = product((False, True), (1, 2), (None, 8))
    for compiled, rows, bits in cases:
        above = []
        for capacity in (1 << 12, 1 << 16):
            engine = peaks.make_engine(rows, bits, compiled)
            above.append(peaks.of_rounds(engine, rows, capacity) / 1e6)
        kind = f"{rows}, {f'{bits} bits' if bits else 'float32'}, "
        kind += "compiled" if compiled else "eager"
        print(f"| {kind} | {above[0]:.2f} | {above[1]:.2f} | {engine.kv_bytes / 1e6:.0f} |")
    print("\n| last chunk of | of 2,500 tokens, MB | of 10,000 |\n|---|---|---|")
    target = make_target()
    for chunk in (64, 512, 2048):
        above = [peaks.of_chunk(target, chunk, n - chunk) / 1e6 for n in (2500, 10000)]
        print(f"| {chunk} | {above[0]:.1f} | {above[1]:.1f} |")


def show_graphs() -> None:
    """The operations of a round's graph: what the host describes and the device is handed."""
    pair = mlx_mtp.load()
    for k in (0, 4, 8):
        engine = pair.engine()
        state = engine._batch.state
        mx.eval(state)
        shape = RoundShape(k, 8, "greedy")
        after, result = run_round(pair.target, pair.drafter, engine.layout, state, None, shape)
        with tempfile.NamedTemporaryFile("r", suffix=".dot") as file:
            arrays = [leaf for _, leaf in tree_flatten([after, result]) if leaf is not None]
            mx.export_to_dot(file.name, *arrays)
            operations = len(re.findall(r'label ?= ?"[A-Za-z]', file.read()))
        print(f"embedded pair, {k} drafts: {operations} operations a round")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("drafter_config", type=Path, nargs="?")
    parser.add_argument("--folder", type=Path, help="kept afterwards (default: a temporary one)")
    parser.add_argument("--max-tokens", type=int, default=4, help="to generate (default: 4)")
    given = parser.parse_args()
    if given.config is None:
        show_graphs()
        show_rounds()
        return
    if given.drafter_config is None:
        parser.error("CONFIG needs DRAFTER_CONFIG beside it")
    folder = given.folder or Path(tempfile.mkdtemp())
    try:
        configs = (json.loads(path.read_text()) for path in (given.config, given.drafter_config))
        write_pair(folder, *configs)
        command = [sys.executable, "-m", "mlx_mtp.cli.main", "generate", "def gcd(a, b):"]
        command += ["--model", str(folder / "target"), "--drafter", str(folder / "drafter")]
        command += ["--json", "--temp", "0", "--max-tokens", str(given.max_tokens)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        plan = [*command[:3], "plan", str(folder / "target"), "--context", "256", "--json"]
        plan += ["--drafter", str(folder / "drafter")]
        planned = json.loads(subprocess.run(plan, stdout=subprocess.PIPE, check=True).stdout)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024
    finally:
        if given.folder is None:
            shutil.rmtree(folder)
    result = json.loads(done.stdout)
    memory, timing = result["memory"], result["timing"]
    stored = planned["pairs"][0]
    off = {
        "weights": 1e9 * (stored["weights_gb"] + stored["drafter_gb"]) / memory["weights_bytes"],
        "KV": 1e9 * stored["kv_gb"] / memory["kv_bytes"],
    }
    print("mlx-mtp plan, of what was measured:", {k: round(v, 4) for k, v in off.items()})
    allowed = 1.1 * (memory["weights_bytes"] + memory["kv_bytes"])
    print(
        f"weights {memory['weights_bytes'] / 1e9:.2f} GB, KV {memory['kv_bytes'] / 1e9:.3f} GB, "
        f"process's peak {peak / 1e9:.2f} GB ({peak / allowed * 1.1:.3f} of weights + KV), "
        f"MLX's peak {memory['peak_bytes'] / 1e9:.2f} GB; loaded in {timing['load_s']:.0f} s, "
        f"first token after {timing['first_token_s']:.0f} s, {len(result['token_ids'])} tokens"
    )
    if any(abs(share - 1) > 0.05 for share in off.values()):
        raise SystemExit("the plan is more than 5 % off")
    if peak > allowed:
        raise SystemExit(f"the peak is above weights + KV + 10 % ({allowed / 1e9:.2f} GB)")


if __name__ == "__main__":
    main()
