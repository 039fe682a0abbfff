"""What `mlx-mtp tune` measured of a model on this machine, kept in the user's data folder, one file
a model. A profile of anything else, or a damaged one, is none."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mtp.engine.draft_length import MAX_DRAFT
from mlx_mtp.kernels.profile import DAMAGED, machine, read_json
from mlx_mtp.weights import known
from mlx_mtp.weights.find import Found

Key = dict[str, str]
BUFFERS = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")
MISSING = "none"


@dataclass(frozen=True)
class Tuned:
    """seconds: drafts -> of a round of one row. acceptance: by position, on the built-in code
    prompts. drafter_bits: of the drafter that was measured with. buffer: operations and MB of a
    command buffer, None for MLX's own. made: an ISO date. Raises ValueError for what cannot be."""

    seconds: dict[int, float]
    acceptance: tuple[float, ...]
    compile: bool
    pipeline: bool
    drafter_bits: int
    buffer: tuple[int, int] | None
    made: str

    def __post_init__(self) -> None:
        numbers = [*self.seconds.values(), *self.acceptance]
        if not (
            set(self.seconds) == set(range(MAX_DRAFT + 1))
            and len(self.acceptance) == MAX_DRAFT
            and all(type(n) in (int, float) and math.isfinite(n) for n in numbers)
            and 1e-5 < self.seconds[0] < 1e3
            and all(0.5 <= s / self.seconds[0] <= 100 for s in self.seconds.values())
            and all(0 <= rate <= 1 for rate in self.acceptance)
            and type(self.compile) is type(self.pipeline) is bool
            and self.drafter_bits in (0, 4, 6, 8)
            and (self.buffer is None or valid_buffer(self.buffer))
        ):
            raise ValueError("no profile")
        date.fromisoformat(self.made)

    def line(self) -> str:
        times = [1e3 * self.seconds[n] for n in (0, MAX_DRAFT)]
        return (
            f"tuned on this machine on {self.made} (mlx-mtp tune): rounds of 0 to {MAX_DRAFT} "
            f"drafts take {times[0]:.3g} to {times[1]:.3g} ms"
        )


def valid_buffer(pair: Iterable[Any]) -> bool:
    sizes = list(pair)
    return len(sizes) == 2 and all(type(n) is int and 1 <= n <= 100_000 for n in sizes)


def key_of(found: Found, float32: bool, drafter_device: str) -> Key:
    """What a profile holds for."""
    target, drafter = found.target, found.drafter
    dtype = "float32" if float32 else "as stored"
    name = named(target.source.name)
    # A folder's weights may be written anew; those of a revision never are.
    times = [] if target.source.revision else Path(name).glob("*.safetensors")
    newest = max((path.stat().st_mtime_ns for path in times), default=0)
    return machine() | {
        "model": f"{name} {target.source.revision or ''} {target.plan.nbytes} {newest}",
        "quantisation": _schemes(target.quantized),
        "drafter": MISSING
        if drafter is None
        else f"{drafter.source.name} {drafter.source.revision or ''} {_schemes(drafter.quantized)}",
        "device": f"{mx.default_device().type.name} {dtype}, drafter on {drafter_device}",
    }


def _schemes(quantized: Mapping[str, Mapping[str, Any]]) -> str:
    """The layers by their schemes, in a few characters."""
    listed = json.dumps(quantized, sort_keys=True).encode()
    bits = sorted({scheme["bits"] for scheme in quantized.values()})
    return f"{bits} {hashlib.sha256(listed).hexdigest()[:12]}" if quantized else MISSING


def named(model: str) -> str:
    """The name of a source; of a folder its place, however it was written."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model


def path_of(folder: Path, model: str) -> Path:
    """model: its source's name."""
    model = named(model)
    plain = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-")[-60:]
    digest = hashlib.sha256(model.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return folder / "tuned" / f"{plain}-{digest}.json"


def read(path: Path) -> tuple[Tuned, Key]:
    """Raises one of DAMAGED."""
    raw = read_json(path)
    values = raw["tuned"]
    tuned = Tuned(
        **values
        | {
            "seconds": {int(n): s for n, s in values["seconds"].items()},
            "acceptance": tuple(values["acceptance"]),
            "buffer": values["buffer"] and tuple(values["buffer"]),
        }
    )
    return tuned, dict(raw["key"])


def load(
    folder: Path, model: str, key: Key, drafter_bits: int | None = None
) -> tuple[Tuned | None, str | None]:
    """The profile, and a line for the user where one is there: what it is of, or why it is of no
    use. drafter_bits: what the user wants."""
    path = path_of(folder, model)
    try:
        tuned, kept = read(path)
    except FileNotFoundError:
        return None, None
    except DAMAGED:
        return None, f"{path} cannot be read and is ignored; mlx-mtp tune makes a new one"
    # Plain decoding needs no drafter, and is not led astray by what was measured with one.
    asked = kept.get("drafter") if key["drafter"] == MISSING else key["drafter"]
    differs = [part for part in key if kept.get(part) != (key | {"drafter": asked})[part]]
    if differs:
        what = {"gpu": "machine", "mlx": "MLX", "kernels": "version of mlx-mtp"}
        named = what.get(differs[0], differs[0])
        return None, f"{path} is of another {named} and is ignored; mlx-mtp tune makes a new one"
    if drafter_bits not in (None, tuned.drafter_bits):
        return None, f"{path} is of a drafter in {tuned.drafter_bits} bits and is ignored"
    return tuned, tuned.line()


def save(folder: Path, model: str, key: Key, tuned: Tuned) -> Path:
    """Raises OSError."""
    path = path_of(folder, model)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"key": key, "tuned": asdict(tuned)}, indent=1), "utf-8")
    temporary.replace(path)
    return path


def set_buffers(folder: Path, model: str | None) -> None:
    """Put the command-buffer sizes of a model's profile into the environment, from which MLX takes
    them when it first opens a Metal device, before a key can be known: so only the chip's name is
    compared. What the user set stays. model: as `load_pair` takes it."""
    if sys.platform != "darwin" or any(name in os.environ for name in BUFFERS):
        return
    short = known.SHORT.get(model.lower()) if model and not Path(model).exists() else None
    name = short.target if short else model or "embedded target"
    try:
        raw = read_json(path_of(folder, name))
        buffer, gpu = raw["tuned"]["buffer"], raw["key"]["gpu"]
        sysctl = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        chip = subprocess.run(sysctl, capture_output=True, text=True, timeout=5).stdout.strip()
        if buffer and valid_buffer(buffer) and chip and gpu.startswith(f"{chip} "):
            os.environ.update(zip(BUFFERS, map(str, buffer), strict=True))
    except (*DAMAGED, subprocess.SubprocessError):
        pass  # `load` tells
