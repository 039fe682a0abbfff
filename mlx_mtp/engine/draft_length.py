"""How many tokens to draft in the next round. Pure objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mlx_mtp.errors import UsageError

MAX_DRAFT = 8  # more rows than this cost more in the verify pass than they bring


class DraftLength(Protocol):
    def choose(self) -> int:
        """N for the round that is dispatched next, 0 to MAX_DRAFT."""


@dataclass(frozen=True)
class FixedLength:
    """The same N every round; 0 is plain decoding through the same loop."""

    length: int

    def __post_init__(self) -> None:
        check_draft_len(self.length)

    def choose(self) -> int:
        return self.length


def check_draft_len(length: int) -> None:
    if not 0 <= length <= MAX_DRAFT:
        raise UsageError(f"draft length is {length}; it must be 0 to {MAX_DRAFT} drafted tokens")
