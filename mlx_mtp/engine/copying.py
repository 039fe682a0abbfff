"""Copied drafts: where the newest tokens occur earlier in a text, what follows there is a draft.

The search runs on the host over tokens that were read, one dictionary look-up a token. Which part
of the continuation still applies when the round runs is decided on the device (`Copies`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import mlx.core as mx

MATCH = 4  # so many tokens must agree before what follows them is tried


class Copies(NamedTuple):
    """What rows may copy. base: int32 [B], the row's length when it was looked up; tokens: int32
    [B, n], from the token at that position on, -1 where nothing matches."""

    base: mx.array
    tokens: mx.array

    def drafts(self, bonus: mx.array, length: mx.array, count: int) -> tuple[mx.array, mx.array]:
        """(int32 [B, count], int32 [B], 1 where they apply), for rows that now are at `length`
        with `bonus` [B]: unread rounds must have gone on along the copy up to their bonus token."""
        offset = mx.clip(length - self.base, 0, self.tokens.shape[1] - 1 - count)[:, None]
        window = mx.take_along_axis(self.tokens, offset + mx.arange(count + 1), 1)
        applies = (window[:, 0] == bonus) & (length - self.base == offset[:, 0])
        return window[:, 1:], applies.astype(mx.int32)


class CopyIndex:
    """One text, and where its newest tokens stand earlier in it."""

    def __init__(self, tokens: Iterable[int]):
        self.tokens: list[int] = []
        self.source: int | None = None  # where the earlier occurrence ends
        self._ends: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            along = self.source
            self.tokens.append(token)
            newest = len(self.tokens) - 1
            key = tuple(self.tokens[-MATCH:])
            found = self._ends.get(key) if len(key) == MATCH else None
            self._ends[key] = newest
            # A copy that goes on is followed, even where the same words stand elsewhere too.
            if along is not None and self.tokens[along + 1] == token:
                self.source = along + 1
            else:
                self.source = found

    def continuation(self, count: int) -> list[int]:
        """The token at the source and `count` that follow; a text that repeats itself up to its
        end goes on repeating. Empty without a match."""
        if self.source is None:
            return []
        period = len(self.tokens) - 1 - self.source
        places = [0, *((i % period) + 1 for i in range(count))]
        return [self.tokens[self.source + place] for place in places]
