"""The draft-length controller against every fixed length, with no model: how fast is it on which
text and which machine.

    python -m benchmarks.simulate [--tokens 2000] [--seeds 6] [--machine "M3 Max"] [--text prose]

A trace says at every position of a text how many drafts would be right there. A machine says what
a round costs in each shape, plain decoding being 1. The controller starts with nothing learnt,
sees each round's cost one round late and with noise (7 %; one round in 50 takes three times as
long, two in a row as a rule), and is judged by the costs without it. The oracle knows costs,
acceptance and matches of each passage beforehand.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import mul

from mlx_mtp.engine.draft_length import COPIES, MAX_DRAFT, AutoLength, Outcome, Shape

Rates = tuple[float, ...]  # of each draft, once those before it were accepted
Choose = Callable[[int, bool], Shape]  # place in the text, match one round ago -> shape
LENGTHS = range(MAX_DRAFT + 1)


@dataclass(frozen=True)
class Machine:
    """verify: a pass over 1 to 9 rows; step: one draft step; trace: extra, a shape's first time."""

    verify: Rates
    step: float
    trace: float = 0.5

    def cost(self, shape: Shape) -> float:
        return self.verify[shape.draft_len] + self.step * shape.steps


# 4-bit weights. M3 to M5: public measurements, gaps filled in. M1 and M2: as MLX's source has it,
# weights read once a row and a tile of 32 rows from the sixth on. Draft steps are guessed.
MACHINES = {
    "M1": Machine((1, 1.75, 2.5, 3.25, 4.0, 4.4, 4.4, 4.4, 4.4), 0.06),
    "M2": Machine((1, 1.65, 2.3, 2.95, 3.6, 4.0, 4.0, 4.0, 4.0), 0.06),
    "M3 Max": Machine((1, 1.08, 1.18, 1.28, 1.45, 2.04, 2.27, 2.5, 2.7), 0.05),
    "M3 Ultra": Machine((1, 1.0, 1.0, 1.0, 1.05, 1.3, 1.43, 1.57, 1.7), 0.1),
    "M4 Pro": Machine((1, 1.12, 1.27, 1.43, 1.75, 2.3, 2.55, 2.84, 3.05), 0.06),
    "M5 Max": Machine((1, 1.08, 1.18, 1.29, 1.45, 2.0, 2.25, 2.46, 2.65), 0.08),
    "CPU": Machine((1, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0), 0.08, 0.0),
}


def falling(first: float, by: float = 0.98) -> Rates:
    return tuple(first * by**i for i in range(MAX_DRAFT))


@dataclass(frozen=True)
class Passage:
    """length: its mean; drafted, copied: rates; match: how often there is something to copy."""

    length: int
    drafted: Rates
    copied: Rates = (0.0,) * MAX_DRAFT
    match: float = 0.0


EASY, CODE, PROSE, HARD = falling(0.95), falling(0.8), falling(0.62, 0.95), falling(0.5, 0.95)
UNCHANGED, MISLED = (falling(0.97, 1.0), 1.0), (falling(0.3), 0.3)
TEXTS = {
    "code": [Passage(40, EASY), Passage(50, CODE)],
    "prose": [Passage(60, PROSE), Passage(30, falling(0.7, 0.95)), Passage(30, HARD)],
    "JSON": [Passage(12, falling(0.98, 1.0)), Passage(8, falling(0.45))],
    "edits": [Passage(70, CODE, *UNCHANGED), Passage(15, CODE), Passage(15, HARD, *MISLED)],
    "code, then prose": [Passage(500, falling(0.9)), Passage(500, PROSE)],
    "prose, then code": [Passage(500, PROSE), Passage(500, falling(0.9))],
    "false matches": [Passage(30, PROSE), Passage(20, PROSE, *MISLED)],
    "never right": [Passage(100, falling(0.0))],
}


@dataclass(frozen=True)
class Trace:
    """By position: drafts that would be right, of 8 by the drafter and of 8 copied ones; whether
    there is a match to copy from; the rates behind them."""

    drafted: list[int]
    copied: list[int]
    match: list[bool]
    rates: list[tuple[Rates, Rates]]


@cache
def synthetic(kind: str, tokens: int, seed: int) -> Trace:
    chance = random.Random(f"{kind} {seed}")
    match: list[bool] = []
    rates: list[tuple[Rates, Rates]] = []
    turn = 0
    while len(rates) < tokens + MAX_DRAFT:
        passage = TEXTS[kind][turn % len(TEXTS[kind])]
        turn += 1
        jitter = passage.length / 3 if passage.length < 100 else 0
        for _ in range(max(3, round(chance.gauss(passage.length, jitter)))):
            rates.append((passage.drafted, passage.copied))
            match.append(chance.random() < passage.match)
    # One number a token: it is easy or hard at whatever depth it is drafted.
    luck = [(chance.random(), chance.random()) for _ in rates]

    def right(way: int, place: int) -> int:
        for i in range(MAX_DRAFT):
            if luck[place + i][way] >= rates[place + i][way][i]:
                return i
        return MAX_DRAFT

    drafted, copied = ([right(way, place) for place in range(tokens)] for way in range(2))
    return Trace(drafted, copied, match, rates)


def fixed(length: int) -> Choose:
    return lambda place, match: Shape(length)


def oracle(trace: Trace, machine: Machine) -> Choose:
    """The best shape for the passage; a copy where the round before saw a match."""
    found: dict[tuple[Rates, Rates, bool], Shape] = {}

    def tokens(rates: Rates, length: int) -> float:
        return sum(accumulate(rates[:length], mul, initial=1.0))

    def choose(place: int, match: bool) -> Shape:
        key = (*trace.rates[place], match and trace.match[place])
        if key not in found:
            speeds = {Shape(n): tokens(key[0], n) / machine.cost(Shape(n)) for n in LENGTHS}
            if key[2]:
                copies = [Shape(0, n) for n in COPIES]
                speeds |= {s: tokens(key[1], s.copied) / machine.cost(s) for s in copies}
            found[key] = max(speeds, key=speeds.__getitem__)
        return found[key]

    return choose


def play(
    choose: Choose,
    trace: Trace,
    machine: Machine,
    learn: Callable[[Outcome], None] | None = None,
    seed: int = 0,
) -> float:
    """Tokens in the time of a plain round."""
    chance = random.Random(seed)
    place, time, matched = 0, 0.0, False
    unread: Outcome | None = None
    seen: set[Shape] = set()
    hiccup = False
    while place < len(trace.drafted):
        shape = choose(place, matched)
        if learn and unread:
            learn(unread)
        matched = trace.match[place]
        copied = matched and shape.copied > 0
        right = trace.copied[place] if copied else trace.drafted[place]
        offered = shape.draft_len if copied else shape.steps
        accepted = min(right, offered)
        cost = machine.cost(shape)
        time += cost if shape in seen else cost + machine.trace
        if learn:
            hiccup = chance.random() < (0.5 if hiccup else 0.01)
            noise = chance.lognormvariate(0, 0.07) * (3 if hiccup else 1)
            known = shape in seen or not machine.trace
            seconds = 0.02 * cost * noise if known else None
            unread = Outcome(shape, ((offered, accepted),), (copied,), seconds)
        seen.add(shape)
        place += accepted + 1
    return len(trace.drafted) / time


def speeds(trace: Trace, machine: Machine, seed: int = 0) -> list[float]:
    """Of the nine fixed lengths, of a new `AutoLength` and of the oracle."""
    auto = AutoLength()
    return [
        *(play(fixed(n), trace, machine) for n in LENGTHS),
        play(lambda place, match: auto.choose(match), trace, machine, auto.learn, seed),
        play(oracle(trace, machine), trace, machine),
    ]


def means(kind: str, machine: Machine, tokens: int, seeds: int) -> list[float]:
    runs = [speeds(synthetic(kind, tokens, seed), machine, seed) for seed in range(seeds)]
    return [sum(column) / seeds for column in zip(*runs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2000, help="of a text (default: 2000)")
    parser.add_argument("--seeds", type=int, default=6, help="texts of each kind (default: 6)")
    parser.add_argument("--machine", choices=MACHINES, help="one machine (default: all)")
    parser.add_argument("--text", choices=TEXTS, help="one kind of text (default: all)")
    options = parser.parse_args()
    lengths = "".join(f"{n:6}" for n in LENGTHS)
    print(f"{'tokens a plain round':27}{lengths}  auto oracle | auto/best /plain /oracle")
    for name in [options.machine] if options.machine else MACHINES:
        for kind in [options.text] if options.text else TEXTS:
            *row, auto, known = means(kind, MACHINES[name], options.tokens, options.seeds)
            print(
                f"{name:9}{kind:18}" + "".join(f"{speed:6.2f}" for speed in row),
                f"{auto:5.2f} {known:6.2f} | {auto / max(row):9.3f}",
                f"{auto / row[0]:6.3f} {auto / known:7.3f}",
            )


if __name__ == "__main__":
    main()
