"""What a converted folder says about itself: mlx_mtp.json, and the card that the hub shows."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_mtp.weights.checkpoint import LISTING, Source
from mlx_mtp.weights.jobs import Side

if TYPE_CHECKING:
    from mlx_mtp.weights.convert import Conversion

FORMAT = 1  # of mlx_mtp.json


def manifest(conversion: Conversion, hashes: dict[str, str]) -> dict[str, Any]:
    def origin(side: Side | None) -> dict[str, Any] | None:
        source = side.planned.source if side else None
        return {"source": _title(source), "revision": source.revision} if source else None

    recipe = conversion.how.recipe
    return {
        "format": FORMAT,
        "made_by": f"mlx-mtp {metadata.version('mlx-mtp')}",
        "target": origin(conversion.target),
        "drafter": origin(conversion.drafter),
        "recipe": recipe.as_dict() if recipe else None,
        "bits": {
            f"{s.place}/{k}".lstrip("/"): v for s in conversion.sides for k, v in s.bits.items()
        },
        "files": {
            name.replace("config.json.part", "config.json"): digest
            for name, digest in hashes.items()
        },
    }


def foreign(folder: Path) -> str | None:
    """The first file in a folder that no conversion of ours wrote, None where there is none."""
    try:
        listed = set(json.loads((folder / LISTING).read_text("utf-8"))["files"]) | {LISTING}
    except (OSError, ValueError, KeyError, TypeError):
        listed = set()
    there = (path for path in sorted(folder.rglob("*")) if not path.is_dir() or path.is_symlink())
    names = (path.relative_to(folder).as_posix() for path in there)
    return next((name for name in names if name not in listed), None)


def _title(source: Source) -> str:
    """A hub id, or a folder's own name: where it lies is nobody's business."""
    return source.name if source.revision else Path(os.path.abspath(source.name)).name


def card(conversion: Conversion, name: str) -> str:
    """The model card that the hub shows."""
    source = _title(conversion.sides[0].planned.source)
    named = [s.planned.source.name for s in conversion.sides if s.planned.source.revision]
    base = "".join(f"\n- {name}" for name in named if name.count("/") == 1)  # no folder in one
    what = " and its MTP drafter" if conversion.target and conversion.drafter else ""
    packed = "as stored"
    if conversion.how.recipe:
        scheme = conversion.how.recipe.base
        packed = f"{scheme.bits} bits ({scheme.mode}, groups of {scheme.group_size})"
    front = "library_name: mlx-mtp\ntags:\n- mlx\n- gemma4\n- speculative-decoding"
    front += f"\nbase_model:{base}" if base else ""
    return f"""---
{front}
---
# {name}

{source}{what}, {packed}, converted with mlx-mtp. What was packed how, from which revisions,
and the hash of every file: `mlx_mtp.json`.

{_use(conversion)}
The terms of the models that it was made of apply.
"""


def _use(conversion: Conversion) -> str:
    if conversion.target is None:
        return """    mlx-mtp generate "Hello" --model TARGET --drafter FOLDER-OR-ID
    mlx-mtp verify FOLDER
"""
    return """    mlx-mtp generate "Hello" --model FOLDER-OR-ID
    mlx-mtp verify FOLDER

The target alone loads in mlx-lm and mlx-vlm.
"""
