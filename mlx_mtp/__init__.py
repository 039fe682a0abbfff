"""mlx-mtp: Gemma 4 with its MTP drafter on MLX. The same text as plain decoding, sooner.

    import mlx_mtp

    pair = mlx_mtp.load()  # the embedded pair; or a folder, a hub id, "e4b"
    print(mlx_mtp.generate(pair, "def fibonacci(n):").text)

`load`, `generate`, `generate_batch`, `stream`, `Options` and `Pair` are imported at first use, so
that `import mlx_mtp` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_mtp.generation import Options, generate, generate_batch, stream
    from mlx_mtp.pair import Pair
    from mlx_mtp.weights.load import load_pair as load

__all__ = ["Options", "Pair", "generate", "generate_batch", "load", "stream"]

# In a source tree `cli` and `weights` stand beside this folder; in a wheel they are inside it.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").exists():
    __path__.append(str(_root))

_HOMES = {
    "Options": ("mlx_mtp.generation", "Options"),
    "generate": ("mlx_mtp.generation", "generate"),
    "generate_batch": ("mlx_mtp.generation", "generate_batch"),
    "stream": ("mlx_mtp.generation", "stream"),
    "Pair": ("mlx_mtp.pair", "Pair"),
    "load": ("mlx_mtp.weights.load", "load_pair"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
