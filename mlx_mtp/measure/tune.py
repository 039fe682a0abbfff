"""What a model's rounds take on this machine, measured as the engine runs them, and what pays best.

Ways of running take turns, prompt by prompt, and the lengths of drafts round by round, so that a
busy machine slows all alike. A change from what a device does by default must save 3 %.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import accumulate
from math import inf
from operator import mul
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from mlx_mtp.engine.draft_length import MAX_DRAFT, PRIOR, Outcome, Shape
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.sampling import Sampling
from mlx_mtp.engine.session import Engine
from mlx_mtp.errors import MtpError, UsageError
from mlx_mtp.folders import data_folder
from mlx_mtp.generation import Options, prompt_ids
from mlx_mtp.kernels.launch import on_metal
from mlx_mtp.measure.bench import RoundCost, rotated, round_costs
from mlx_mtp.measure.prompts import prompts
from mlx_mtp.models.layers import on_cpu
from mlx_mtp.pair import Pair
from mlx_mtp.weights import tuned
from mlx_mtp.weights.checkpoint import Progress
from mlx_mtp.weights.find import find_pair
from mlx_mtp.weights.load import load_pair, read_drafter
from mlx_mtp.weights.tuned import BUFFERS, Tuned

LENGTHS = range(MAX_DRAFT + 1)
ROUNDS, TRIALS = 40, 12  # timed rounds a length: of what is kept, and of ways that are compared
TRIED = (0, 2, 4)  # lengths that ways are compared by
ANSWER = 96  # tokens
SAVES = 0.97  # of the usual way's seconds
BITS = (0, 4, 8)
SIZES = ((100, 100), (200, 200))  # of command buffers: operations, MB
GROWS = 1.01  # of the peak memory: as much as two runs may differ by
Seconds = dict[int, float]  # drafts -> of a round
W = TypeVar("W")


class Recorder:
    """As a controller of draft lengths: all of `lengths` in turn, whatever they bring. cycles:
    seconds of a round of each, which ran one soon after the other."""

    def __init__(self, lengths: Sequence[int]):
        self.lengths, self.turn = lengths, 0
        self.cycles: list[Seconds] = []
        self._cycle: Seconds = {}
        self.rows: list[tuple[int, int]] = []

    def choose(self, match: bool = False) -> Shape:
        self.turn += 1
        return Shape(self.lengths[self.turn % len(self.lengths)])

    def learn(self, outcome: Outcome) -> None:
        self.rows += outcome.rows
        if outcome.seconds is not None:
            self._cycle[outcome.shape.draft_len] = outcome.seconds
            if len(self._cycle) == len(self.lengths):
                self.cycles.append(self._cycle)
                self._cycle = {}

    def medians(self) -> Seconds:
        """Of each length's share of its cycle, so that a machine that slows down for a while
        changes none of the ratios; times that of the cycles."""
        whole = statistics.median(sum(cycle.values()) for cycle in self.cycles)
        shares = {
            n: statistics.median(cycle[n] / sum(cycle.values()) for cycle in self.cycles)
            for n in self.lengths
        }
        return {n: whole * share for n, share in shares.items()}


@dataclass
class Report:
    """What was measured. ways, bits: relative to the usual one: seconds of a round, tokens/s.
    parts: draft, verify and host, nothing run ahead or compiled. context: tokens behind which."""

    tuned: Tuned
    path: Path | None
    parts: list[RoundCost]
    context: tuple[int, int]
    ways: dict[str, float] = field(default_factory=dict)
    bits: dict[int, float] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def take_turns(
    pair: Pair,
    ways: Mapping[W, tuple[Engine, Recorder]],
    asked: Sequence[list[int]],
    rounds: int,
    tell: Callable[[int], None] = lambda done: None,
) -> None:
    """Answer on all engines in turn until every length of theirs has so many timed rounds."""
    eos, processing = frozenset(pair.defaults.eos_token_ids), Options().processing(pair.defaults)
    number = before = 0
    while (least := min(len(recorder.cycles) for _, recorder in ways.values())) < rounds:
        tell(least)
        if number and number % len(asked) == 0:
            if least == before and not eos:
                raise MtpError("rounds cannot be timed here: something runs beside them")
            # Answers that end at once say nothing: go on behind their end.
            eos = eos if least > before else frozenset()
            before = least
        for way in rotated(list(ways), number):
            engine, _ = ways[way]
            prompt = asked[number % len(asked)]
            request = Request(prompt, ANSWER, Sampling(), processing, eos=eos)
            engine.add(request)
            while engine.busy:
                engine.step()
            if request.error:
                raise MtpError(request.error)
        number += 1


def timed(
    pair: Pair,
    ways: Mapping[W, tuple[Pair, dict[str, Any]]],
    lengths: Sequence[int],
    asked: Sequence[list[int]],
    rounds: int,
    tell: Callable[[int], None] = lambda done: None,
) -> dict[W, Recorder]:
    """The same for engines of these pairs and settings."""
    made = {}
    for way, (of, how) in ways.items():
        recorder = Recorder(lengths)
        made[way] = of.engine(draft_length=recorder, **how), recorder
    take_turns(pair, made, asked, rounds, tell)
    for engine, _ in made.values():
        engine.close()
    return {way: recorder for way, (_, recorder) in made.items()}


def rates(rows: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """By position: how often a draft was accepted once those before it were; leaning on the
    position before where it was seldom reached."""
    found: list[float] = []
    for i in range(MAX_DRAFT):
        reached = [accepted > i for offered, accepted in rows if min(offered, accepted + 1) > i]
        before = found[-1] if found else PRIOR
        found.append((sum(reached) + 2 * before) / (len(reached) + 2))
    return tuple(found)


def tokens_per_second(seconds: Seconds, acceptance: Sequence[float]) -> float:
    """At the best draft length."""
    tokens = list(accumulate(accumulate(acceptance, mul, initial=1.0)))
    return max(tokens[n] / s for n, s in seconds.items())


def faster(costs: Mapping[W, float], usual: W) -> W:
    """The way that takes least, if it saves enough."""
    best = min(costs, key=lambda way: costs[way])
    return best if costs[best] < SAVES * costs[usual] else usual


def relative(cycles: Mapping[W, Sequence[Seconds]], usual: W) -> dict[W, float]:
    """Seconds of each way's rounds in the usual one's, a median of cycles close in time."""
    return {
        way: statistics.median(
            sum(cycle.values()) / sum(other.values())
            for cycle, other in zip(its, cycles[usual], strict=False)
        )
        for way, its in cycles.items()
    }


def tune(
    model: str | None,
    drafter: str = "auto",
    revision: str | None = None,
    *,
    compile: bool | None = None,
    force_fit: bool = False,
    rounds: int = ROUNDS,
    progress: Progress = lambda what, done, total: None,
    loading: Progress | None = None,
) -> Report:
    """Measures and keeps it; WAITS. compile: race compiled rounds on the CPU, too. progress: told
    what is measured, steps done and in all; loading: as `load_pair`'s. Raises what that does, and
    UsageError without a drafter, and MtpError before anything is measured where it cannot be
    kept."""
    folder = data_folder() / "tuned"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise MtpError(f"{folder} cannot be written: {error.strerror}") from None
    how: dict[str, Any] = {"drafter": drafter, "revision": revision, "force_fit": force_fit}
    buffer, notices = _buffers(model, how, progress)
    pair = load_pair(model, profile=False, progress=loading, **how)
    if pair.drafter is None:
        raise UsageError(f"{pair.name} has no drafter here, so there is nothing to tune")
    notices += pair.notices
    if pair.calibration is not None:
        before = len(pair.calibration.notices)
        pair.calibration.seconds = inf
        pair.calibration.prepare(pair.target, pair.drafter)
        notices += pair.calibration.notices[before:]
    raw = pair.template is None
    asked = [prompt_ids(pair, text, Options(raw=raw)) for text in prompts()["code"]]
    usual, ways = _ways(compile, notices)
    costs: dict[tuple[bool, bool], float] = {}
    if len(ways) > 1:
        raced = timed(
            pair,
            {way: (pair, {"compile": way[0], "pipeline": way[1]}) for way in ways},
            TRIED,
            asked,
            min(TRIALS, rounds),
            lambda done: progress("ways to run rounds", done, TRIALS),
        )
        costs = relative({way: recorder.cycles for way, recorder in raced.items()}, usual)
    compiled, pipelined = faster(costs, usual) if costs else usual
    setting = {"compile": compiled, "pipeline": pipelined}
    found = find_pair(model, drafter, revision)
    assert found.drafter is not None
    pair, bits = _drafter_bits(pair, model, how, setting, asked, rounds, progress, notices)
    (recorder,) = timed(
        pair,
        {0: (pair, setting)},
        LENGTHS,
        asked,
        rounds,
        lambda done: progress("rounds by draft length", done, rounds),
    ).values()
    assert pair.drafter_bits is not None
    made = Tuned(
        recorder.medians(),
        rates(recorder.rows),
        compiled,
        pipelined,
        pair.drafter_bits,
        buffer,
        date.today().isoformat(),
    )
    key = tuned.key_of(
        found, pair.target.dtype == mx.float32 and on_cpu(), mx.default_device().type.name
    )
    pair.compiled, pair.pipelined = compiled, pipelined
    parts, path = round_costs(pair, pair.drafter_name or "", asked[0]), None
    try:
        path = tuned.save(data_folder(), pair.name, key, made)
    except OSError as error:
        notices.append(f"the profile is not kept: {error.strerror} in {folder}")
    return Report(
        made,
        path,
        parts,
        (min(map(len, asked)), max(map(len, asked)) + ANSWER),
        {_name(way): cost for way, cost in costs.items()},
        bits,
        notices,
    )


def _name(way: tuple[bool, bool]) -> str:
    return f"{'compiled' if way[0] else 'eager'}{', pipelined' * way[1]}"


def _ways(compile: bool | None, notices: list[str]) -> tuple[tuple[bool, bool], list[Any]]:
    """The usual way, (compiled, pipelined), and all that are raced."""
    cpu = on_cpu()
    if cpu and compile and shutil.which("g++") is None:
        raise UsageError("--compile needs g++ on a CPU, and there is none here")
    if cpu and not compile:
        notices.append("compiled rounds are not measured on a CPU without --compile: it takes g++")
    able = (False, True) if compile or (compile is None and not cpu) else (False,)
    # A CPU runs nothing ahead, so that pipelining only makes stops late there.
    return (not cpu, not cpu), [(c, p) for c in able for p in ((False,) if cpu else (False, True))]


def _drafter_bits(
    pair: Pair,
    model: str | None,
    how: dict[str, Any],
    setting: dict[str, Any],
    asked: Sequence[list[int]],
    rounds: int,
    progress: Progress,
    notices: list[str],
) -> tuple[Pair, dict[int, float]]:
    """The pair with the drafter that is fastest in all, and what each brings."""
    found = find_pair(model, how["drafter"], how["revision"])
    assert found.drafter is not None
    if on_cpu() or found.drafter.quantized:
        why = "packed weights are slower on a CPU" if on_cpu() else "it is stored quantised"
        notices.append(f"drafter bits are not measured: {why}")
        return pair, {}
    assert pair.drafter_bits is not None
    pairs = {pair.drafter_bits: pair}
    for bits in BITS:
        if bits not in pairs:
            again = find_pair(model, how["drafter"], how["revision"])
            pairs[bits] = replace(pair, drafter=read_drafter(again, bits), drafter_bits=bits)
            if pair.calibration is not None:
                pair.calibration.prepare(pair.target, pairs[bits].drafter)
    recorders = timed(
        pair,
        {bits: (its, setting) for bits, its in pairs.items()},
        LENGTHS,
        asked,
        rounds,
        lambda done: progress("drafter bits", done, rounds),
    )
    speeds = {n: tokens_per_second(r.medians(), rates(r.rows)) for n, r in recorders.items()}
    best = faster({bits: 1 / speed for bits, speed in speeds.items()}, pair.drafter_bits)
    return pairs[best], {n: speed / speeds[pair.drafter_bits] for n, speed in speeds.items()}


def _buffers(
    model: str | None, how: dict[str, Any], progress: Progress
) -> tuple[tuple[int, int] | None, list[str]]:
    """Sizes of command buffers, measured in processes of their own, as MLX takes them once; before
    this one loads the model, which two would not fit with. None: MLX's own."""
    if not on_metal():
        return None, ["command buffers are Metal's: their settings do not apply here"]
    if any(name in os.environ for name in BUFFERS):
        return None, [f"command buffers are not measured: {' or '.join(BUFFERS)} is set"]
    turns: list[dict[tuple[int, int] | None, tuple[float, int]]] = []
    for turn in range(3):
        progress("command buffers", turn, 3)
        turns.append({})
        for sizes in (None, *SIZES):
            names = zip(BUFFERS, map(str, sizes or ()), strict=False)
            code = "from mlx_mtp.measure.tune import child; child()"
            ended = subprocess.run(
                [sys.executable, "-c", code, json.dumps([model, how])],
                env=os.environ | dict(names),
                capture_output=True,
                text=True,
            )
            if ended.returncode:
                *_, last = ended.stderr.strip().splitlines() or ["it was killed"]
                return None, [f"command buffers are not measured: {last}"]
            took, peak = json.loads(ended.stdout.splitlines()[-1])
            turns[-1][sizes] = took, peak
            progress("command buffers", turn, 3)
    return choose_buffers(turns), []


def choose_buffers(
    turns: Sequence[Mapping[tuple[int, int] | None, tuple[float, int]]],
) -> tuple[int, int] | None:
    """turns: sizes -> (seconds of a round, peak bytes). Larger ones hold their inputs for longer,
    so only where the peak does not grow."""
    costs = {
        sizes: statistics.median(turn[sizes][0] / turn[None][0] for turn in turns)
        for sizes in turns[0]
        if all(turn[sizes][1] <= GROWS * turn[None][1] for turn in turns)
    }
    return faster(costs, None)


def child() -> None:
    """In a process whose environment sets the command buffers: prints seconds of a round of TRIED
    drafts, all together, and the peak of memory."""
    model, how = json.loads(sys.argv[1])
    pair = load_pair(model, profile=False, calibrate=False, **how)
    raw = pair.template is None
    asked = [prompt_ids(pair, text, Options(raw=raw)) for text in prompts()["code"]]
    mx.reset_peak_memory()
    # The length without drafts needs no drafter.
    lengths = TRIED if pair.drafter else TRIED[:1]
    (recorder,) = timed(pair, {0: (pair, {"compile": True})}, lengths, asked, TRIALS).values()
    print(json.dumps([sum(recorder.medians().values()), mx.get_peak_memory()]))
