"""What to draft in the next round. Pure objects: no clock, no randomness, no arrays.

`AutoLength` chooses every round the shape with the most expected tokens per expected second. It
is told each round's result one round late, and learns across requests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from operator import mul
from typing import Any, NamedTuple, Protocol

from mlx_mtp.errors import UsageError

MAX_DRAFT = 8  # more rows than this cost more in the verify pass than they bring
COPIES = (4, 8)  # lengths of a copied block: few, as each is a graph of its own

# Acceptance, of the long and the short average: decay per round, rounds' worth of what it leans on.
DECAYS, LEAN = (0.995, 0.96), (2.0, 12.0)
PRIOR, MATCHED = 0.7, 0.9
LEAN_MEASURED = 8.0  # the long average, on rates that were measured before
# Costs, relative to a round's: noise of one measurement, drift of the machine and of one length a
# round, the deviations that a long round counts for; HOPE: deviations in favour of a shape.
NOISE, DRIFT, AGEING, CLIP, HOPE = 0.1, 0.01, 0.002, 0.7, 0.4
# Rounds to the first trial of a neighbour or a copy, and most rounds between two.
PAUSE, COPY_PAUSE = (8, 128), (8, 128)
# A measured cost, the median of many rounds: rounds that it counts for, and the first pause.
MEASURED, PAUSE_MEASURED = 8, 32


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

    Averages over the last passage, which lean on averages over the last few pages, and those,
    where a position is seldom reached, on the position before it. tokens: expected of a row's
    round with 0 to 8 drafts, its bonus token included. measured: rates of another text, by
    position, which are leant on instead.
    """

    def __init__(self, measured: Sequence[float] | None = None) -> None:
        rates = measured or [PRIOR] * MAX_DRAFT
        self._lean = LEAN_MEASURED if measured else LEAN[0]
        # What a position's rate is expected to be of the one's before it.
        steps = (b / max(a, 0.01) for a, b in pairwise(rates))
        self._steps = [rates[0], *(min(max(step, 0.7), 1.3) for step in steps)]
        # by average and position: [drafts tried, drafts accepted]
        self.counts = [[[0.0, 0.0] for _ in range(MAX_DRAFT)] for _ in DECAYS]
        self._sum_up()

    def learn(self, rows: Iterable[tuple[int, int]]) -> None:
        """rows: (drafts that could be accepted, drafts that were)."""
        for counts, decay in zip(self.counts, DECAYS, strict=True):
            counts[:] = [[tried * decay, accepted * decay] for tried, accepted in counts]
        for offered, accepted in rows:
            for i in range(min(offered, accepted + 1)):
                for counts in self.counts:
                    counts[i][0] += 1
                    counts[i][1] += i < accepted
        self._sum_up()

    def _sum_up(self) -> None:
        before, lean, self.rates = 1.0, self._lean, list[float]()
        for step, (tried, accepted), (last, last_accepted) in zip(
            self._steps, *self.counts, strict=True
        ):
            before = (accepted + lean * min(step * before, 1.0)) / (tried + lean)
            self.rates.append((last_accepted + LEAN[1] * before) / (last + LEAN[1]))
        self.tokens = list(accumulate(accumulate(self.rates, mul, initial=1.0)))


class Costs:
    """Seconds of a round in any shape: verify[drafts] + step * (drafter steps).

    A Kalman filter over these ten numbers, so that one shape's rounds tell of its neighbours', of
    lengths never tried and of a machine that became slower. Its unit is about a plain round.
    """

    def __init__(self) -> None:
        places = range(MAX_DRAFT + 1)
        self.mean = [1 + 0.1 * n for n in places] + [0.06]
        self.spread = [
            [0.02 + 0.04 * i * j + 0.01 * min(i, j) for j in places] + [0.0] for i in places
        ] + [[0.0] * (MAX_DRAFT + 1) + [0.002]]
        self.scale: float | None = None  # seconds of the unit
        self.measured: Counter[Shape] = Counter()

    def __getitem__(self, shape: Shape) -> float:
        return max(self.mean[shape.draft_len] + shape.steps * self.mean[-1], 0.05)

    def learn(self, shape: Shape, seconds: float, clip: float = CLIP) -> None:
        expected, mean = self[shape], self.mean
        if self.scale is None:
            self.scale = seconds / expected
        self.measured[shape] += 1
        if self.measured[shape] > 64 and self.measured[shape] % 4:
            return  # well known: not worth the time of every round
        # Since the last round the machine drifted as a whole, and each number a little.
        drift, n, steps = DRIFT**2, shape.draft_len, shape.steps
        for i, row in enumerate(self.spread):
            row[i] += AGEING**2
        # covariance of each number with this shape's cost
        reach = [
            row[n] + steps * row[-1] + drift * m * expected
            for row, m in zip(self.spread, mean, strict=True)
        ]
        own, noise = reach[n] + steps * reach[-1], (NOISE * expected) ** 2
        error = seconds / self.scale - expected
        # Hiccups only make rounds longer: a long round moves the mean no more than this, and
        # makes it no surer than it deserves.
        limit = clip * (own + noise) ** 0.5
        sure = own + noise * max(error / limit, 1.0)
        self.spread = [
            [s + drift * a * b - r * q / sure for s, b, q in zip(row, mean, reach, strict=True)]
            for row, a, r in zip(self.spread, mean, reach, strict=True)
        ]
        gain = min(error, limit) / (own + noise)
        self.mean = [m + r * gain for m, r in zip(mean, reach, strict=True)]


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

    seconds: as measured here before, steps -> seconds of a round; acceptance: by position. What is
    known by these is not tried. copy: whether copied drafts are made.
    """

    def __init__(
        self,
        seconds: Mapping[int, float] | None = None,
        max_draft: int = MAX_DRAFT,
        copy: bool = True,
        acceptance: Sequence[float] | None = None,
    ):
        check_draft_len(max_draft)
        self.max_draft = max_draft
        self.copies = [n for n in COPIES if copy and n <= max_draft]
        self.drafted, self.copied = Acceptance(acceptance), Acceptance()
        self.costs = Costs()  # with as many rows as now
        self._costs_by_rows = {1: self.costs}  # rows rounded up to a power of two
        self.chosen: Counter[Shape] = Counter()
        self.tuned = bool(seconds)
        for steps, value in MEASURED * sorted((seconds or {}).items()):
            self.costs.learn(Shape(steps), value, clip=inf)
        self._best = Shape(min(2, max_draft))
        # What is tried next whatever it brings: at first a short draft and plain decoding.
        self._trials = deque([] if seconds else [self._best, self._best, Shape(0), Shape(0)])
        pause = PAUSE_MEASURED if seconds else PAUSE[0]
        self._neighbour, self._copy = Pause(pause, PAUSE[1]), Pause(*COPY_PAUSE)
        self._turn = 0
        self._rows, self._matched = 1, MATCHED

    def limit(self, most: int) -> None:
        """Never choose more drafts than this from now on."""
        self.max_draft = min(self.max_draft, most)
        self.copies = [n for n in self.copies if n <= most]
        self._trials = deque(shape for shape in self._trials if shape.draft_len <= most)

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
        if self.max_draft == 0 or not self._neighbour.over():
            return best
        self._turn += 1
        around = [best.steps - 1, 0, best.steps + 1]
        near = [n for n in around if 0 <= n <= self.max_draft and n != best.steps]
        return Shape(near[self._turn % len(near)])

    def learn(self, outcome: Outcome) -> None:
        shape = outcome.shape
        rows = list(zip(outcome.rows, outcome.copied, strict=True))
        self._rows = max(len(rows), 1)
        size = 1 << (self._rows - 1).bit_length()
        if size not in self._costs_by_rows:
            self._costs_by_rows[size] = Costs()
            self._trials += [Shape(0), Shape(0)]
        self.costs = self._costs_by_rows[size]
        if shape.steps:
            drafted = [row for row, copied in rows if not copied]
            if self._best == Shape(0):
                # A trial that went much better than was expected is followed by another.
                won = sum(accepted > 0 for _, accepted in drafted)
                self._neighbour.cut = won > (self.drafted.rates[0] + 0.2) * len(drafted)
            self.drafted.learn(drafted)
        if shape.copied:
            matched = [row for row, copied in rows if copied]
            self.copied.learn(matched)
            self._copy.cut = all(offered == accepted for offered, accepted in matched or [(1, 0)])
            self._matched += 0.1 * (sum(outcome.copied) / len(rows) - self._matched)
        if outcome.seconds is not None:
            self.costs.learn(shape, outcome.seconds)
        elif shape not in self.costs.measured and self.chosen[shape] == 1:
            self._trials.append(shape)  # once more: its first round had a trace to make

    def describe(self) -> dict[str, Any]:
        """What was chosen and why, for --json."""
        scale = self.costs.scale or 0.0
        return {
            "tuned": self.tuned,
            "chosen": {_name(s): n for s, n in sorted(self.chosen.items())},
            "acceptance": [round(rate, 3) for rate in self.drafted.rates[: self.max_draft]],
            "seconds": {_name(s): scale * self.costs[s] for s in sorted(self.costs.measured)},
        }

    def _rate(self, shape: Shape) -> float:
        tokens = self.drafted.tokens[shape.steps]
        if shape.copied:
            tokens += self._matched * (self.copied.tokens[shape.draft_len] - tokens)
        hope = 1 + HOPE * NOISE / max(self.costs.measured[shape], 1) ** 0.5
        return hope * tokens / self.costs[shape]


def _name(shape: Shape) -> str:
    return f"{shape.steps}+{shape.copied}" if shape.copied else str(shape.steps)


def check_draft_len(length: int) -> None:
    if not 0 <= length <= MAX_DRAFT:
        raise UsageError(f"draft length is {length}; it must be 0 to {MAX_DRAFT} drafted tokens")
