"""Which drafter belongs to which target: the short names, the rules for names, the shapes.

Everything here is a table or a pure function; nothing looks at a disk or a network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlx_mtp.config import TextConfig


@dataclass(frozen=True)
class Known:
    """A pair behind a short name. Revisions are commits, so that what it means never moves.
    tried: whether one of us has run these very weights with mlx-mtp."""

    target: str
    target_revision: str
    drafter: str
    drafter_revision: str
    tried: bool = False


# Commits as public lock files and logs name them, each in at least two unrelated places. To mark
# a pair as tried, run it and say so here.
SHORT = {
    "e2b": Known(
        "mlx-community/gemma-4-e2b-it-4bit",
        "99d9a53ff828d365a8ecae538e45f80a08d612cd",
        "google/gemma-4-E2B-it-assistant",
        "2d874ef7d29f9a30599a1e4b3c1cbc9595f005df",
    ),
    "e4b": Known(
        "mlx-community/gemma-4-e4b-it-4bit",
        "cc3b666c01c20395e0dcebd53854504c7d9821f9",
        "google/gemma-4-E4B-it-assistant",
        "8d0031ea8c2109e2b1e86bb9368a4539b537f80a",
    ),
    "12b": Known(
        "mlx-community/gemma-4-12B-it-4bit",
        "73bcf09092aa277861d5a191b989b666f7f32e8f",
        "google/gemma-4-12B-it-assistant",
        "364bd03c9952e5b7da73665ee30c9eccfc408345",
    ),
    "26b": Known(
        "mlx-community/gemma-4-26b-a4b-it-4bit",
        "0d77464eeb233a2da68ebf9d7dc4edaac7db956d",
        "google/gemma-4-26B-A4B-it-assistant",
        "6e5aaaf4c42b98394530b8fda2e95cadd65c151c",
    ),
    "31b": Known(
        "mlx-community/gemma-4-31b-it-4bit",
        "696d436c404745a59f30e4939a658162b0a9e57f",
        "google/gemma-4-31B-it-assistant",
        "627c5ec1458b9086b841a91e0512fd31fd2fbbf1",
    ),
}

# (hidden size, layers, kv heads of the sliding layers) -> the size as Google spells it.
SHAPES = {
    (1536, 35, 1): "E2B",
    (2560, 42, 2): "E4B",
    (3840, 48, 8): "12B",
    (2816, 30, 8): "26B-A4B",
    (5376, 60, 16): "31B",
}
_NAME = re.compile(
    r"gemma-4-(?P<size>e2b|e4b|12b|26b-a4b|31b)-it(?P<qat>-qat)?(?![a-z0-9])", re.IGNORECASE
)
_QAT_SUFFIX = "-qat-q4_0-unquantized"


def drafters_by_name(target: str) -> tuple[str, ...]:
    """Hub ids worth trying for a target's hub id, best first; () when the name says nothing.

    The drafter of a quantisation-aware target was tuned beside it, so it comes first there.
    """
    owner, _, name = target.rpartition("/")
    found = _NAME.search(name)
    if found is None or "assistant" in name.lower():
        return ()
    size = next(s for s in SHAPES.values() if s.lower() == found["size"].lower())
    plain = f"google/gemma-4-{size}-it-assistant"
    mlx = f"mlx-community/gemma-4-{size}-it"
    if found["qat"]:
        qat = f"google/gemma-4-{size}-it{_QAT_SUFFIX}-assistant"
        ours = (f"{mlx}-qat-assistant-bf16",) if owner == "mlx-community" else ()
        return (*ours, qat, plain)
    return (f"{mlx}-assistant-bf16", plain) if owner == "mlx-community" else (plain,)


def drafter_by_shape(text: TextConfig) -> str | None:
    """Google's drafter for a target of that shape, whatever its name."""
    size = SHAPES.get((text.hidden_size, text.num_hidden_layers, text.num_key_value_heads))
    return size and f"google/gemma-4-{size}-it-assistant"
