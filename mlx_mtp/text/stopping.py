"""Stop strings, over text that comes in pieces, and the pieces that may already be shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mlx_mtp.errors import UsageError

Span = tuple[str, bool]


class StopStrings:
    """Finds the first stop string to be completed, whatever pieces the text comes in.

    `safe` counts the characters, from the start, that belong to no stop string and cannot become
    part of one: what lies behind may be shown, what lies ahead is held back. One
    Knuth-Morris-Pratt automaton a stop string, so a character costs the same in any text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise UsageError("a stop string is empty; give at least one character")
        self._stops = list(dict.fromkeys(stops))
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._seen = 0
        self.safe = 0
        self.stopped = False

    def feed(self, text: str) -> bool:
        """Whether a stop string is complete now; the rest of `text` is then ignored."""
        if not self._stops:
            self._seen += len(text)
            self.safe = self._seen
            return False
        for char in text:
            if self.stopped:
                break
            self._seen += 1
            for i, (stop, table) in enumerate(zip(self._stops, self._tables, strict=True)):
                self._matched[i] = _advance(stop, table, self._matched[i], char)
            whole = [len(s) for s, n in zip(self._stops, self._matched, strict=True) if n == len(s)]
            self.stopped = bool(whole)
            # Of two that end at the same character, the longer one started first.
            self.safe = self._seen - (max(whole) if whole else max(self._matched))
        return self.stopped

    def finish(self) -> None:
        """No more text comes: what was held back is safe, unless a stop string was found."""
        if not self.stopped:
            self.safe = self._seen


def _advance(stop: str, table: list[int], matched: int, char: str) -> int:
    if matched == len(stop):
        matched = table[matched - 1]
    while matched and stop[matched] != char:
        matched = table[matched - 1]
    return matched + (stop[matched] == char)


def _failure_table(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0]
    for char in stop[1:]:
        matched = table[-1]
        while matched and stop[matched] != char:
            matched = table[matched - 1]
        table.append(matched + (stop[matched] == char))
    return table


class TextStream:
    """Each token's text in, text that may be shown out, each part with the flag of its token.

    `add` decides token by token whether to stop. The flags (drafted or not) are known only when a
    round is over, so `release` brings them, in the order of the tokens added.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = StopStrings(stops)
        self._deltas: deque[str] = deque()
        self._held: deque[Span] = deque()
        self._shown = 0

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def add(self, delta: str) -> bool:
        """Takes what the next token adds to the text; True when it completes a stop string."""
        self._deltas.append(delta)
        return self._stops.feed(delta)

    def release(self, drafted: Sequence[bool]) -> list[Span]:
        """The text that became safe, as (text, drafted); `drafted` has a flag for each token added
        since the last call."""
        self._held.extend((self._deltas.popleft(), flag) for flag in drafted)
        return self._take()

    def finish(self) -> list[Span]:
        """The text that was still held back at the end of the generation."""
        self._stops.finish()
        return self._take()

    def _take(self) -> list[Span]:
        spans: list[Span] = []
        while self._held and self._shown < self._stops.safe:
            text, drafted = self._held.popleft()
            now = text[: self._stops.safe - self._shown]
            if now != text:
                self._held.appendleft((text[len(now) :], drafted))
            self._shown += len(now)
            if now:
                spans.append((now, drafted))
        return spans
