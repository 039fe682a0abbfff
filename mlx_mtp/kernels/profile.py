"""What races on this machine gave, kept in the user's data folder. A profile of another machine,
MLX or version of the kernels is none."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mtp.kernels.race import STOCK, Outcome

MOST = 16 << 20  # bytes of a profile
# What reading a file raises that is not what `save` wrote.
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


def read_json(path: Path) -> Any:
    """Raises one of DAMAGED. A pipe or a device, which may never end, is not opened."""
    if not (0 < path.stat().st_size <= MOST and path.is_file()):
        raise OSError
    return json.loads(path.read_text("utf-8"))


def machine() -> dict[str, str]:
    """What a profile holds for: the GPU, MLX, and the kernels' own source."""
    info = mx.device_info()
    source = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return {
        "gpu": f"{info.get('device_name', 'none')} {info.get('architecture', '')}".strip(),
        "mlx": metadata.version("mlx"),
        "kernels": hashlib.sha256(source).hexdigest()[:16],
    }


@dataclass
class Profile:
    """wins: key of an operation -> rows -> the way to use; missing means not raced yet."""

    wins: dict[str, dict[int, str]] = field(default_factory=dict)

    def raced(self, key: str, rows: int) -> bool:
        return rows in self.wins.get(key, {})

    def ways(self, key: str) -> dict[int, str]:
        """Rows -> the way that beat stock."""
        return {rows: way for rows, way in self.wins.get(key, {}).items() if way != STOCK}

    def learn(self, outcome: Outcome) -> None:
        for key, rows in outcome.wins.items():
            self.wins.setdefault(key, {}).update(rows)

    @classmethod
    def load(cls, folder: Path) -> tuple[Profile, str | None]:
        """The profile of this machine, and a line for the user where one is there but of no use."""
        path = folder / "kernels.json"
        try:
            raw = read_json(path)
            profile = cls(
                {k: {int(n): str(w) for n, w in rows.items()} for k, rows in raw["wins"].items()}
            )
            same = raw["machine"] == machine()
        except FileNotFoundError:
            return cls(), None
        except DAMAGED:
            return cls(), f"{path} cannot be read and is ignored"
        if not same:
            return cls(), f"{path} is of another machine, MLX or version and is ignored"
        return profile, None

    def save(self, folder: Path) -> None:
        """Raises OSError."""
        raw = {"machine": machine(), "wins": self.wins}
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"kernels.json.{os.getpid()}"
        temporary.write_text(json.dumps(raw, indent=1), "utf-8")
        temporary.replace(folder / "kernels.json")
