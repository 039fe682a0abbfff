"""Conversions of small checkpoints, and what lies in their files, byte by byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mtp.weights import recipe as recipes
from mlx_mtp.weights.checkpoint import Folder, Tensor
from mlx_mtp.weights.convert import How, plan, write
from tests.checkpoints import add_tokenizer, write_target


def target(folder: Path, shape: str = "e2b", **options: Any) -> Path:
    """A target with a tokenizer; options are `checkpoints.write_target`'s."""
    return add_tokenizer(write_target(folder, shape, **options))


def convert(
    source: Path,
    out: Path,
    bits: int | None = None,
    *,
    mode: str = "affine",
    group_size: int | None = None,
    recipe: Path | None = None,
    dtype: str | None = None,
    requantize: bool = False,
    drafter: str | None = None,
) -> Path:
    """`out`, written from `source`; without a drafter unless it is asked for."""
    how = How(recipes.make(bits, mode, group_size, recipe), dtype, requantize)
    write(plan(str(source), how, drafter=drafter).fetch(None), out, force=True)
    return out


def headers(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every weight file."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(Folder(folder).header(file.name))
    return found


def raw(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> dtype, shape and bytes."""
    found = {}
    for name, tensor in headers(folder).items():
        with (folder / tensor.file).open("rb") as file:
            file.seek(tensor.start)
            found[name] = (tensor.dtype, tensor.shape, file.read(tensor.nbytes))
    return found


def arrays(folder: Path) -> dict[str, mx.array]:
    """Every tensor of every weight file, as MLX reads them."""
    found: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= mx.load(str(file))  # type: ignore[arg-type]
    return found


def array(folder: Path, name: str) -> mx.array:
    return arrays(folder)[name]


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def hashes(folder: Path) -> dict[str, str]:
    """Every file by its path, with its sha256."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def leftovers(out: Path) -> list[str]:
    """Whatever is beside `out` and hidden."""
    return [path.name for path in out.parent.iterdir() if path.name.startswith(".")]
