"""What to draft in the next round. Pure objects: no clock, no randomness, no arrays.

`AutoLength` chooses every round the shape with the most expected tokens per expected second. It
is told each round's result one round late, and learns across requests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple, Protocol

from mlx_mtp.errors import UsageError

MAX_DRAFT = 8  # more rows than this cost more in the verify pass than they bring


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

    Moving averages over the last passage, which lean on averages over the last few pages, and
    those, where a position is seldom reached, on the position before it.
    """

    def __init__(self) -> None:
        self.counts = [[(0.0, 0.0)] * MAX_DRAFT for _ in DECAYS]  # tried, accepted
        self.rates = self._rates()

    def learn(self, rows: Iterable[tuple[int, int]]) -> None:
        """rows: (drafts that could be accepted, drafts that were)."""
        new = [(0, 0)] * MAX_DRAFT
        for offered, accepted in rows:
            for i in range(min(offered, accepted + 1)):
                new[i] = new[i][0] + 1, new[i][1] + (i < accepted)
        self.counts = [
            [(decay * a + n, decay * b + m) for (a, b), (n, m) in zip(counts, new, strict=True)]
            for counts, decay in zip(self.counts, DECAYS, strict=True)
        ]
        self.rates = self._rates()

    def _rates(self) -> list[float]:
        before, rates = PRIOR, []
        for slow, fast in zip(*self.counts, strict=True):
            before = (slow[1] + WEIGHTS[0] * before) / (slow[0] + WEIGHTS[0])
            rates.append((fast[1] + WEIGHTS[1] * before) / (fast[0] + WEIGHTS[1]))
        return rates

    @property
    def tokens(self) -> list[float]:
        """Expected tokens of a row's round with 0 to 8 drafts, its bonus token included."""
        return list(accumulate(accumulate(self.rates, mul, initial=1.0)))


DECAYS, WEIGHTS = (0.995, 0.96), (2.0, 12.0)
PRIOR, MATCHED = 0.7, 0.9


class Costs:
    """Seconds of a round in any shape: verify[drafts] + step * (drafter steps).

    A Kalman filter over these ten numbers, so that one shape's rounds tell of its neighbours', of
    lengths never tried and of a machine that became slower. Its unit is the first round's.
    """

    def __init__(self) -> None:
        self.mean = [1 + 0.1 * n for n in range(MAX_DRAFT + 1)] + [0.06]
        places = range(MAX_DRAFT + 1)
        self.spread = [
            [0.02 + 0.04 * i * j + 0.01 * min(i, j) for j in places] + [0.0] for i in places
        ] + [[0.0] * (MAX_DRAFT + 1) + [0.002]]
        self.scale: float | None = None
        self.measured: set[Shape] = set()

    def __getitem__(self, shape: Shape) -> float:
        """In plain rounds, about."""
        return max(self.mean[shape.draft_len] + shape.steps * self.mean[-1], 0.05)

    def doubt(self, shape: Shape) -> float:
        n, steps = shape.draft_len, shape.steps
        spread = self.spread
        v= spread[n][n] + 2 * steps * spread[n][-1] + steps**2 * spread[-1][-1]
        return v**.5 if shape in self.measured else 0.0

    def learn(self, shape: Shape, seconds: float) -> None:
        expected = self[shape]
        if self.scale is None:
            self.scale = seconds / expected
        self.measured.add(shape)
        # The machine drifts as a whole, and each number a little.
        spread = [
            [s + DRIFT * a * b for s, b in zip(row, self.mean, strict=True)]
            for row, a in zip(self.spread, self.mean, strict=True)
        ]
        n = shape.draft_len
        for i in range(len(spread)):
            spread[i][i] += AGEING
        reach = [row[n] + shape.steps * row[-1] for row in spread]
        total = reach[n] + shape.steps * reach[-1] + (NOISE * expected) ** 2
        # Hiccups only make rounds longer.
        error = min(seconds / self.scale - expected, CLIP * total**0.5)
        self.mean = [m + r * error / total for m, r in zip(self.mean, reach, strict=True)]
        self.spread = [
            [s - a * b / total for s, b in zip(row, reach, strict=True)]
            for row, a in zip(spread, reach, strict=True)
        ]


NOISE, DRIFT, AGEING, CLIP, KAPPA = 0.1, 0.02**2, 0.002**2, 2.0, 0.5


class Pause:
    """Rounds between two trials: twice as many after each, until what is tried wins."""

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last
        self.restart()

    def restart(self) -> None:
        self.length, self.waited, self.cut = self.first, 0, False

    def over(self) -> bool:
        self.waited += 1
        if not self.cut and self.waited < self.length:
            return False
        if not self.cut:
            self.length = min(2 * self.length, self.last)
        self.waited, self.cut = 0, False
        return True


class AutoLength:
    """Chooses by what it has seen; the same outcomes give the same choices.

    seconds: a calibration, steps -> seconds of a round. copy: whether copied drafts are made.
    """

    def __init__(
        self,
        seconds: Mapping[int, float] | None = None,
        max_draft: int = MAX_DRAFT,
        copy: bool = True,
    ):
        check_draft_len(max_draft)
        self.max_draft = max_draft
        self.copies = [n for n in COPIES if copy and n <= max_draft]
        self.drafted, self.copied = Acceptance(), Acceptance()
        self.costs = Costs()
        self.chosen: Counter[Shape] = Counter()
        for steps, value in (seconds or {}).items():
            self.costs.learn(Shape(steps), value)
        self._best = Shape(min(2, max_draft))
        # What is tried next whatever it brings: at first a short draft and plain decoding.
        self._trials = deque([self._best, self._best, Shape(0)])
        self._tried = set[Shape]()
        self._neighbour, self._copy = Pause(*PAUSE), Pause(*COPY_PAUSE)
        self._turn = 0
        self._rows, self._matched = 1, MATCHED

    def choose(self, match: bool = False) -> Shape:
        shape = self._choose(match)
        self.chosen[shape] += 1
        return shape

    def _choose(self, match: bool) -> Shape:
        if self._trials:
            return self._trials.popleft()
        # Costs beyond the longest draft measured are a guess: two drafts further at a time.
        known = max((s.draft_len for s in self.costs.measured), default=2)
        lengths = range(min(self.max_draft, known + 2) + 1)
        best = max((Shape(n) for n in lengths), key=self._rate)
        if best != self._best:
            self._best = best
            self._neighbour.restart()
        if match and self.copies:
            # In a batch the drafter serves the rows without a match.
            steps = {0, best.steps} if self._rows > 1 else {0}
            shapes = [Shape(n, copied) for copied in self.copies for n in steps if n < copied]
            copying = max(shapes, key=self._rate)
            if self._rate(copying) > self._rate(best):
                self._copy.restart()
                return copying
            if self._copy.over():
                return copying
        if not self._neighbour.over():
            return best
        self._turn += 1
        around = [best.steps + 1, best.steps - 1, 0]
        near = [n for n in around if 0 <= n <= self.max_draft and n != best.steps]
        return Shape(near[self._turn % len(near)])

    def learn(self, outcome: Outcome) -> None:
        shape = outcome.shape
        rows = list(zip(outcome.rows, outcome.copied, strict=True))
        self._rows = len(rows)
        if shape.steps:
            self.drafted.learn(row for row, copied in rows if not copied)
        if shape.copied:
            matched = [row for row, copied in rows if copied]
            self.copied.learn(matched)
            self._copy.cut = any(offered == accepted for offered, accepted in matched)
            self._matched += 0.1 * (sum(outcome.copied) / len(rows) - self._matched)
        if outcome.seconds is not None:
            self.costs.learn(shape, outcome.seconds)
        elif shape not in self.costs.measured | self._tried:
            self._trials.append(shape)  # once more: its first round had a trace to make
        if self._best == Shape(0) and shape.steps and any(n for _, n in outcome.rows):
            self._neighbour.cut = True  # a trial that won is followed by another
        self._tried.add(shape)

    def describe(self) -> dict[str, Any]:
        """What was chosen and why, for --json."""
        scale = self.costs.scale or 0.0
        return {
            "chosen": {_name(s): n for s, n in sorted(self.chosen.items())},
            "acceptance": [round(rate, 3) for rate in self.drafted.rates[: self.max_draft]],
            "seconds": {_name(s): scale * self.costs[s] for s in sorted(self.costs.measured)},
        }

    def _rate(self, shape: Shape) -> float:
        tokens = self.drafted.tokens[shape.steps]
        if shape.copied:
            tokens += self._matched * (self.copied.tokens[shape.draft_len] - tokens)
        return tokens / (self.costs[shape] - KAPPA * self.costs.doubt(shape))


COPIES = (4, 8)  # lengths of a copied block: few, as each is a graph of its own
PAUSE, COPY_PAUSE = (8, 128), (4, 64)


def _name(shape: Shape) -> str:
    return f"{shape.steps}+{shape.copied}" if shape.copied else str(shape.steps)


def check_draft_len(length: int) -> None:
    if not 0 <= length <= MAX_DRAFT:
        raise UsageError(f"draft length is {length}; it must be 0 to {MAX_DRAFT} drafted tokens")
