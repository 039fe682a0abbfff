"""Prompts for measurements, by kind. The embedded pair answers all of them with Python functions,
so only `code` says something about it."""

from __future__ import annotations

import re
from pathlib import Path

KINDS = ("code", "prose", "json", "edit")


def prompts() -> dict[str, list[str]]:
    """The built-in prompts of every kind, each a user turn."""
    return {kind: split((Path(__file__).parent / f"{kind}.txt").read_text()) for kind in KINDS}


def split(text: str) -> list[str]:
    """Prompts out of a file, where a line `---` stands between two."""
    parts = re.split(r"^---$", text.replace("\r\n", "\n"), flags=re.MULTILINE)
    return [part.strip("\n") for part in parts if part.strip()]
