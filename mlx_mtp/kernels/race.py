"""Which way of computing something is used on this machine: those that are right race, and one
that is not clearly faster than stock MLX loses to it.

Contests are pure descriptions; nothing here knows what they compute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

BUDGET = 4.5  # seconds; the race that is running when they are over is finished
STOCK = "stock"
CLEARLY = 0.97  # of stock's time
# Measurements of each way, and calls in one: more where stock's are too short to be told from the
# wait for the device.
TURNS, CALLS, MOST_CALLS = 3, 8, 64
ENOUGH = 0.002  # seconds of stock's calls


class Way(Protocol):
    """sample: its number, so that weights come from memory. after: a result that this one must
    depend on, or a GPU would run several at once, which it cannot do with the layers of a model."""

    def __call__(self, sample: int, after: mx.array | None = None, /) -> mx.array: ...


@dataclass(frozen=True)
class Contest:
    """One operation at one number of rows. ways: by name, what competes with `stock`. bound: how
    far a right result may be from stock's, relative to its largest value."""

    key: str
    rows: int
    stock: Way
    ways: Mapping[str, Way]
    bound: float


@dataclass
class Outcome:
    """wins: key -> rows -> the way to use, 'stock' included. wrong: a line for each way that
    failed. left: contests that there was no time for."""

    wins: dict[str, dict[int, str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    left: int = 0


def race(
    contests: Iterable[Callable[[], Contest]],
    budget: float = BUDGET,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """Makes and runs contests in their order until `budget` seconds are over. WAITS for the
    device."""
    outcome, end = Outcome(), clock() + budget
    for make in contests:
        if clock() >= end:
            outcome.left += 1
            continue
        contest = make()
        right = _check(contest, outcome)
        winner = _fastest(contest, right, clock) if right else STOCK
        outcome.wins.setdefault(contest.key, {})[contest.rows] = winner
    return outcome


def _check(contest: Contest, outcome: Outcome) -> list[str]:
    """The ways that give what stock gives."""
    wanted = contest.stock(0).astype(mx.float32)
    scale = max(float(mx.abs(wanted).max()), 1e-30)
    right = []
    for name, way in contest.ways.items():
        where = f"{name} at {contest.key}, {contest.rows} rows"
        try:
            found = way(0)
            error = float(mx.abs(found.astype(mx.float32) - wanted).max()) / scale
        except (RuntimeError, ValueError) as fault:  # as Metal's compiler refuses a source
            outcome.wrong.append(f"{where}: {str(fault).strip().splitlines()[0]}")
            continue
        if not error <= contest.bound:
            outcome.wrong.append(f"{where}: off by {error:.1e}, {contest.bound:.0e} is allowed")
            continue
        right.append(name)
    return right


def _fastest(contest: Contest, right: list[str], clock: Callable[[], float]) -> str:
    ways = {STOCK: contest.stock} | {name: contest.ways[name] for name in right}
    seconds: dict[str, list[float]] = {name: [] for name in ways}

    def measure(way: Way, calls: int) -> float:
        last = None
        for i in range(calls):
            last = way(i, last)
        started = clock()
        mx.eval(last)
        return clock() - started

    for way in ways.values():
        measure(way, CALLS)  # compiles and warms up
    once = max(measure(contest.stock, CALLS) / CALLS, 1e-9)
    calls = min(max(CALLS, round(ENOUGH / once)), MOST_CALLS)
    for _ in range(TURNS):
        for name, way in ways.items():
            seconds[name].append(measure(way, calls))
    median = {name: statistics.median(times) for name, times in seconds.items()}
    best = min(median, key=lambda name: median[name])
    return best if median[best] < CLEARLY * median[STOCK] else STOCK
