"""Where this program keeps files of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def data_folder() -> Path:
    """For what it learns and what it is asked to keep: $XDG_DATA_HOME/mlx-mtp where that is set,
    else ~/Library/Application Support/mlx-mtp on a Mac, ~/.local/share/mlx-mtp elsewhere."""
    mac = sys.platform == "darwin"
    usual = Path("Library", "Application Support") if mac else Path(".local", "share")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / usual) / "mlx-mtp"
