"""What to draft in the next round. Pure objects: no clock, no randomness, no arrays.

`AutoLength` chooses every round the shape with the most expected tokens per expected second. It
is told each round's result one round late, and learns across requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Any, NamedTuple, Protocol

from mlx_mtp.errors import UsageError

MAX_DRAFT = 8  # more rows than this cost more in the verify pass than they bring
COPIES = (4, 8)  # lengths of a copied block: few, as each is a shape to trace


class Shape(NamedTuple):
    """One round's drafts: `steps` by the drafter, `copied` from the context (0: none)."""

    steps: int
    copied: int = 0

    @property
    def draft_len(self) -> int:
        """Drafts a row; the verify pass has one place more."""
        return max(self.steps, self.copied)


@dataclass(frozen=True)
class Outcome:
    """One round, read back.

    rows: per served row (drafts it could accept, drafts accepted); copied: per served row,
    whether its drafts were copied ones; seconds: None where they say nothing about the shape.
    """

    shape: Shape
    rows: tuple[tuple[int, int], ...]
    copied: tuple[bool, ...]
    seconds: float | None


class DraftLength(Protocol):
    def choose(self, match: bool = False) -> Shape:
        """The shape of the round that is dispatched next. match: a row's last tokens occur
        earlier in its context."""

    def learn(self, outcome: Outcome) -> None:
        """Take in a round's result, in the order of the rounds."""


@dataclass(frozen=True)
class FixedLength:
    """The same N every round; 0 is plain decoding through the same loop."""

    length: int

    def __post_init__(self) -> None:
        check_draft_len(self.length)

    def choose(self, match: bool = False) -> Shape:
        return Shape(self.length)

    def learn(self, outcome: Outcome) -> None:
        pass


class Acceptance:
    """Per position, how often a draft is accepted once those before it were.

    Moving averages; a position that is seldom reached leans on the one before it.
    """

    def __init__(self, prior: float = 0.7, weight: float = 2.0, decay: float = 0.96):
        self.prior, self.weight, self.decay = prior, weight, decay
        self.tried = [0.0] * MAX_DRAFT
        self.hits = [0.0] * MAX_DRAFT

    def learn(self, rows: Iterable[tuple[int, int]]) -> None:
        self.tried = [n * self.decay for n in self.tried]
        self.hits = [n * self.decay for n in self.hits]
        for offered, accepted in rows:
            for i in range(min(offered, accepted + 1)):
                self.tried[i] += 1
                self.hits[i] += i < accepted

    def rates(self) -> list[float]:
        rate, rates = self.prior, []
        for tried, hits in zip(self.tried, self.hits, strict=True):
            rate = (hits + self.weight * rate) / (tried + self.weight)
            rates.append(rate)
        return rates

    def tokens(self, length: int) -> float:
        """Expected tokens of a round with this many drafts, the bonus token included."""
        total = reach = 1.0
        for rate in self.rates()[:length]:
            reach *= rate
            total += reach
        return total


class Costs:
    """Seconds a round takes in each shape, as a level that moves with the machine times a
    ratio per shape: the median of its last rounds, so that a hiccup counts for nothing."""

    def __init__(self, seconds: Mapping[int, float] | None = None):
        self.level: float | None = None
        self.ratios: dict[Shape, deque[float]] = {}
        if seconds:
            self.level = next(iter(seconds.values())) / _guess(Shape(next(iter(seconds))))
            for steps, value in seconds.items():
                self.ratios[Shape(steps)] = deque([value / self.level], maxlen=WINDOW)

    def learn(self, shape: Shape, seconds: float) -> None:
        if self.level is None:
            self.level = seconds / _guess(shape)
        elif shape in self.ratios:
            drift = seconds / (self.level * self.ratio(shape))
            self.level *= 1 + 0.05 * (min(max(drift, 0.8), 1.25) - 1)
        self.ratios.setdefault(shape, deque(maxlen=WINDOW)).append(seconds / self.level)

    def ratio(self, shape: Shape) -> float:
        """Measured, or guessed from the measured shapes around it."""
        if shape in self.ratios:
            return median_low(self.ratios[shape])
        known = sorted((s.draft_len, median_low(r) / _guess(s)) for s, r in self.ratios.items())
        below = [k for k in known if k[0] <= shape.draft_len][-1:]
        above = [k for k in known if k[0] >= shape.draft_len][:1]
        near = below + above
        if not near:
            return _guess(shape)
        (a, low), (b, high) = near[0], near[-1]
        part = (shape.draft_len - a) / (b - a) if b > a else 0.5
        return _guess(shape) * (low + (high - low) * part)


WINDOW = 15


def _guess(shape: Shape) -> float:
    """Cost against plain decoding before anything was measured."""
    return 1 + 0.06 * shape.steps + 0.1 * shape.draft_len


class AutoLength:
    """Chooses by what it has seen; the same outcomes give the same choices.

    seconds: a calibration, steps -> seconds of a round.
    """

    def __init__(
        self,
        seconds: Mapping[int, float] | None = None,
        max_draft: int = MAX_DRAFT,
        copy: bool = True,
    ):
        check_draft_len(max_draft)
        self.max_draft, self.copy = max_draft, copy
        self.drafted, self.copies = Acceptance(), Acceptance(prior=0.8)
        self.costs = Costs(seconds)
        self.chosen: dict[Shape, int] = {}
        self._opening = deque([2, 2, 0])
        self._interval, self._since, self._up = 8, 0, True
        self._best = Shape(min(2, max_draft))

    def choose(self, match: bool = False) -> Shape:
        shape = self._choose(match)
        self.chosen[shape] = self.chosen.get(shape, 0) + 1
        return shape

    def _choose(self, match: bool) -> Shape:
        if self._opening:
            return Shape(min(self._opening.popleft(), self.max_draft))
        known = max((s.steps for s in self.costs.ratios), default=2)
        best = max((Shape(n) for n in range(min(self.max_draft, known + 2) + 1)), key=self._rate)
        if best != self._best:
            self._best, self._interval, self._since = best, 8, 0
        if match and self.copy:
            copies = [Shape(0, n) for n in COPIES if n <= self.max_draft]
            best = max([best, *copies], key=self._rate)
        if best.copied:
            return best
        self._since += 1
        if self._since >= self._interval:
            self._since, self._interval = 0, min(self._interval * 2, 128)
            self._up = not self._up
            steps = best.steps + (1 if self._up or best.steps == 0 else -1)
            return Shape(min(steps, self.max_draft))
        return best

    def learn(self, outcome: Outcome) -> None:
        shape = outcome.shape
        rows = list(zip(outcome.rows, outcome.copied, strict=True))
        if shape.steps:
            self.drafted.learn(row for row, copied in rows if not copied)
        if shape.copied:
            self.copies.learn(row for row, copied in rows if copied)
        if self._best.steps == 0 and shape.steps and any(accepted for _, accepted in outcome.rows):
            self._since, self._interval = 8, 8  # a probe that won is followed by another
        if outcome.seconds is not None:
            self.costs.learn(shape, outcome.seconds)

    def describe(self) -> dict[str, Any]:
        """What was chosen and why, for --json."""

        def name(shape: Shape) -> str:
            return f"{shape.steps}+{shape.copied}" if shape.copied else str(shape.steps)

        level = self.costs.level or 0.0
        return {
            "chosen": {name(s): n for s, n in sorted(self.chosen.items())},
            "acceptance": [round(rate, 3) for rate in self.drafted.rates()[: self.max_draft]],
            "seconds": {name(s): level * self.costs.ratio(s) for s in sorted(self.costs.ratios)},
        }

    def _rate(self, shape: Shape) -> float:
        acceptance = self.copies if shape.copied else self.drafted
        return acceptance.tokens(shape.draft_len) / self.costs.ratio(shape)


def check_draft_len(length: int) -> None:
    if not 0 <= length <= MAX_DRAFT:
        raise UsageError(f"draft length is {length}; it must be 0 to {MAX_DRAFT} drafted tokens")
