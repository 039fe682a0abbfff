"""Tokens/s by draft length, drafter, batch, kind of prompt and temperature, beside plain decoding.

All ways to decode take turns on every prompt, and in every turn another one comes first, so that a
busy or a hot machine slows all alike. A lap is a turn on each prompt; what counts is the ratio to
plain decoding in the same turn, its quartiles over laps, and of these the geometric mean over
prompts, which repeats better than any one prompt's. Tokens are counted from the first one on,
prefill left out, up to EOS; prompts with an answer that is too short to time are left out. Sampled
answers have a seed, so texts can be compared there, too.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from functools import partial
from importlib import metadata
from itertools import pairwise, takewhile, zip_longest
from typing import Any, TypeVar

import mlx.core as mx

from mlx_mtp.engine.batch import Batch
from mlx_mtp.engine.draft_length import MAX_DRAFT, FixedLength, check_draft_len
from mlx_mtp.engine.prefill import Prefill
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.round import Proposed, RoundShape, accept, draft, verify
from mlx_mtp.engine.sampling import Sampling
from mlx_mtp.engine.session import MAX_ROWS, Engine
from mlx_mtp.errors import MtpError, UsageError
from mlx_mtp.generation import Options, prompt_ids
from mlx_mtp.measure.peers import Ollama, Worker
from mlx_mtp.pair import Pair

FORMAT = 1
PLAIN, ALL = "0", "all"  # a way; the kind that is all of them
LEAST = 16  # tokens of an answer that can be timed
ROUNDS = 25  # of every length that are timed part by part
Spread = tuple[float, float, float]  # lower quartile, median, upper quartile
Progress = Callable[[int, int], None]  # turns done, of


@dataclass(frozen=True)
class Plan:
    """What is measured. draft_lens: None is auto. prompts: by kind. repeats: laps. cool_down:
    seconds before each turn. Raises UsageError."""

    prompts: Mapping[str, Sequence[str]]
    draft_lens: tuple[int | None, ...] = (0, 1, 2, 4, 6, 8, None)
    batches: tuple[int, ...] = (1,)
    temps: tuple[float, ...] = (0.0,)
    max_tokens: int = 48
    repeats: int = 5
    cool_down: float = 0.0

    def __post_init__(self) -> None:
        for length in self.draft_lens:
            check_draft_len(length or 0)
        for temp in self.temps:
            Sampling(temp)
        if not all(1 <= batch <= MAX_ROWS for batch in self.batches):
            raise UsageError(f"a batch is {self.batches}; it must have 1 to {MAX_ROWS} rows")
        if self.max_tokens < 2 or self.repeats < 1 or not 0 <= self.cool_down <= 3600:
            raise UsageError(
                f"max-tokens is {self.max_tokens}, repeats {self.repeats}, cool-down "
                f"{self.cool_down:g}; they must be 2 or more, 1 or more, and 0 to 3600 seconds"
            )
        if not any(self.prompts.values()):
            raise UsageError("there is no prompt to measure with")


@dataclass(frozen=True)
class Question:
    """alone: what plain decoding answers to it alone."""

    text: str
    ids: list[int]
    raw: bool
    alone: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One way's answers to a turn's questions: `counted` tokens in `seconds`. texts: token ids,
    where they are known; by position: drafted, accepted."""

    counted: int
    seconds: float
    emitted: int = 0  # tokens that `rounds` brought
    rounds: int = 0
    texts: tuple[list[int], ...] = ()
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def tps(self) -> float:
        return max(self.counted, 1e-9) / max(self.seconds, 1e-9)


Runner = Callable[[list[Question]], Run]
Part = TypeVar("Part", "Cell", "RoundCost")
T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """One figure's place and what was measured there. way: a draft length, "auto", or another
    program. ratio: to plain decoding in the same turn. acceptance: by position. agreement: the
    share of leading tokens that are those of the prompt alone, plainly decoded; identical: for
    each answer, whether all are. None where the program does not say."""

    drafter: str
    batch: int
    temp: float
    kind: str
    way: str
    laps: int
    tps: Spread
    ratio: Spread
    tokens_per_round: float | None
    acceptance: tuple[float, ...]
    agreement: float | None
    identical: tuple[bool, ...]

    @property
    def key(self) -> tuple[str, int, float, str, str]:
        return self.drafter, self.batch, self.temp, self.kind, self.way


@dataclass(frozen=True)
class RoundCost:
    """Seconds of one row's round with so many drafts: the device's for draft and verify, and all
    that the host does beside them. Part by part, nothing run ahead or compiled: the sum is more
    than a round takes where that is done."""

    drafter: str
    drafts: int
    draft: float
    verify: float
    host: float


@dataclass(frozen=True)
class Report:
    machine: dict[str, str]
    model: str
    made: str
    settings: dict[str, Any]
    cells: list[Cell]
    rounds: list[RoundCost]
    notices: list[str] = field(default_factory=list)

    def groups(self) -> dict[tuple[str, int, float], list[Cell]]:
        """Cells by drafter, batch and temperature; of several kinds, all of them come first."""
        found: dict[tuple[str, int, float], list[Cell]] = {}
        for cell in sorted(self.cells, key=lambda cell: cell.kind != ALL):
            found.setdefault((cell.drafter, cell.batch, cell.temp), []).append(cell)
        return found

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, raw: Any, where: str) -> Report:
        """Raises UsageError for what `to_dict` cannot have made."""
        try:
            if raw["format"] != FORMAT:
                raise ValueError
            return cls(
                {str(k): str(v) for k, v in raw["machine"].items()},
                str(raw["model"]),
                str(raw["made"]),
                dict(raw["settings"]),
                [_checked(Cell, cell) for cell in raw["cells"]],
                [_checked(RoundCost, cost) for cost in raw["rounds"]],
                [str(line) for line in raw["notices"]],
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UsageError(
                f"{where} is no report of mlx-mtp bench in format {FORMAT}, or it is damaged"
            ) from None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e300


_CHECKS: dict[str, Callable[[Any], bool]] = {  # by a field's annotation
    "str": lambda value: isinstance(value, str),
    "int": lambda value: isinstance(value, int),
    "float": _number,
    "float | None": lambda value: value is None or _number(value),
    "Spread": lambda value: len(value) == 3 and all(_number(n) and n > 0 for n in value),
    "tuple[float, ...]": lambda value: all(map(_number, value)),
    "tuple[bool, ...]": lambda value: all(isinstance(one, bool) for one in value),
}


def _checked(kind: type[Part], raw: dict[str, Any]) -> Part:
    """Raises TypeError or ValueError."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    made = kind(**values)
    for its in fields(made):
        if not _CHECKS[str(its.type)](getattr(made, its.name)):
            raise ValueError
    return made


def machine() -> dict[str, str]:
    """What a report says of this machine: no name of it or of its user."""
    from mlx_mtp.measure.machine import this_machine

    here, info = this_machine(), mx.device_info()
    chip = here.chip.name if here.chip else str(info.get("device_name", platform.machine()))
    return {
        "chip": chip,
        "memory": f"{here.memory / (1 << 30):.0f} GB",
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.mac_ver()[0] or platform.release()}",
        "device": mx.default_device().type.name,
        "mlx": metadata.version("mlx"),
        "mlx-mtp": metadata.version("mlx-mtp"),
    }


def measure(
    pairs: Iterable[Pair],
    plan: Plan,
    others: Callable[[Pair], Mapping[str, Runner]] = lambda pair: {},
    progress: Progress = lambda done, total: None,
    say: Callable[[str], None] = lambda line: None,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """The whole sweep; WAITS. pairs: of one target, one in memory at a time. others: programs to
    compare with, which take part at batch 1, temperature 0. `say`: notices, at once, that the
    report holds, too. `keep` gets what is known after every lap."""
    notices: list[str] = []
    cells: list[Cell] = []
    costs: list[RoundCost] = []
    model, here, made = "", machine(), date.today().isoformat()
    settings = {
        "prompts": {kind: len(asked) for kind, asked in plan.prompts.items()},
        "max_tokens": plan.max_tokens,
        "repeats": plan.repeats,
        "cool_down": plan.cool_down,
    }

    def so_far(group: Sequence[Cell] = ()) -> Report:
        return Report(here, model, made, settings, [*cells, *group], [*costs], [*notices])

    def tell(line: str) -> None:
        if line not in notices:
            notices.append(line)
            say(line)

    for pair in pairs:
        model, drafter = pair.name, pair.drafter_name or "none"
        if pair.drafter is None and any(length != 0 for length in plan.draft_lens):
            raise UsageError(
                f"{model} has no drafter here: --drafter names one, --draft-lens 0 measures "
                "plain decoding"
            )
        for notice in pair.notices:
            tell(notice)
        if pair.journal is not None:
            here["ranks"] = str(pair.target.ranks.size)
            tell("on several ranks the parts of a round are not timed")
        for temp in plan.temps:
            kept = questions(pair, plan, temp, tell)
            if temp == plan.temps[0] and pair.journal is None:
                costs += round_costs(pair, drafter, next(iter(kept.values()))[0].ids)
            for batch in plan.batches:
                beside = others(pair) if batch == 1 and temp == 0 else {}
                group: list[Cell] = []
                for group in _group(pair, drafter, plan, kept, batch, temp, beside, progress, tell):
                    keep(so_far(group))
                cells += group
        pair.restore_limits()
        del pair  # before the next one is loaded
    return so_far()


def questions(
    pair: Pair, plan: Plan, temp: float, tell: Callable[[str], None]
) -> dict[str, list[Question]]:
    """The plan's prompts whose plain answers are long enough, by kind."""
    raw, least = pair.template is None, min(LEAST, plan.max_tokens)
    if raw:
        tell(f"{pair.name} has no chat template: prompts are completed as they are")
    engine, kept = pair.engine(draft_length=FixedLength(0)), dict[str, list[Question]]()
    for kind, prompts in plan.prompts.items():
        for text in prompts:
            asked = Question(text, prompt_ids(pair, text, Options(raw=raw)), raw)
            (alone,) = decode(pair, engine, 0, temp, plan.max_tokens, [asked]).texts
            if len(alone) >= least:
                kept.setdefault(kind, []).append(replace(asked, alone=alone))
        if short := len(prompts) - len(kept.get(kind, [])):
            tell(
                f"{kind}, temperature {temp:g}: {short} of {len(prompts)} prompts are left out, "
                f"their answers have under {least} tokens"
            )
    engine.close()
    if not kept:
        raise UsageError(f"no prompt has an answer of {least} tokens, which is too little to time")
    return kept


def decode(
    pair: Pair,
    engine: Engine,
    draft_len: int | None,
    temp: float,
    max_tokens: int,
    asked: list[Question],
) -> Run:
    """One turn of this engine, again where a graph had to be traced in it; WAITS."""
    options, traces = Options(temperature=temp, seed=0), -1
    how = options.sampling(pair.defaults), options.processing(pair.defaults)
    eos = frozenset(pair.defaults.eos_token_ids)
    while traces != engine.rounds.traces:
        traces = engine.rounds.traces
        requests = [Request(q.ids, max_tokens, *how, eos=eos, draft_len=draft_len) for q in asked]
        for request in requests:
            engine.add(request)
        while any(not r.tokens and r.finish_reason is None for r in requests):
            engine.step()
        before, started = sum(len(r.tokens) for r in requests), time.perf_counter()
        while engine.busy:
            engine.step()
        seconds = time.perf_counter() - started
    if failed := next((r.error for r in requests if r.error), None):
        raise MtpError(failed)
    stats = [r.stats for r in requests]
    return Run(
        sum(len(r.tokens) for r in requests) - before,
        seconds,
        sum(s.completion_tokens - 1 for s in stats),
        sum(s.rounds for s in stats),
        tuple(r.tokens for r in requests),
        tuple(map(sum, zip(*(s.drafted_by_position for s in stats), strict=True))),
        tuple(map(sum, zip(*(s.accepted_by_position for s in stats), strict=True))),
    )


def _group(
    pair: Pair,
    drafter: str,
    plan: Plan,
    kept: Mapping[str, list[Question]],
    batch: int,
    temp: float,
    others: Mapping[str, Runner],
    progress: Progress,
    tell: Callable[[str], None],
) -> Iterator[list[Cell]]:
    """The cells of one drafter, batch and temperature after each lap, turn by turn. One of the
    others that fails is left out from then on."""
    # Only `auto` learns, as a user's does: from its own rounds, and from those before.
    auto = pair.engine(rows=batch)
    fixed = pair.engine(rows=batch, draft_length=FixedLength(0))
    ways: dict[str, Runner] = {}
    for length in dict.fromkeys((0, *plan.draft_lens)):
        engine = auto if length is None else fixed
        name = "auto" if length is None else str(length)
        ways[name] = partial(decode, pair, engine, length, temp, plan.max_tokens)
    ways |= others
    turns = [
        (kind, [asked[(i + j) % len(asked)] for j in range(batch)])
        for kind, asked in kept.items()
        for i in range(len(asked))
    ]
    laps: list[dict[str, list[Run]]] = [{way: [] for way in ways} for _ in range(plan.repeats)]

    def turn(name: str, asked: list[Question], runs: list[Run]) -> None:
        try:
            runs.append(ways[name](asked))
        except MtpError as error:
            if name not in others:
                raise
            tell(f"left out: {name}: {error}")
            del ways[name]

    for name in list(ways):
        turn(name, turns[0][1], [])  # warms up
    total = plan.repeats * len(turns)
    for number in range(total):
        progress(number, total)
        time.sleep(plan.cool_down)
        lap, place = divmod(number, len(turns))
        for name in rotated(list(ways), lap + place):
            turn(name, turns[place][1], laps[lap][name])
        if place == len(turns) - 1:
            yield _cells((drafter, batch, temp), list(ways), laps[: lap + 1], turns)
    progress(total, total)
    auto.close()
    fixed.close()


def _cells(
    group: tuple[str, int, float],
    ways: list[str],
    laps: list[dict[str, list[Run]]],
    turns: list[tuple[str, list[Question]]],
) -> list[Cell]:
    """By kind, and of several kinds for all of them."""
    kinds = list(dict.fromkeys(kind for kind, _ in turns))
    cells: list[Cell] = []
    for kind in (*kinds, ALL) if len(kinds) > 1 else kinds:
        places = [i for i, (its, _) in enumerate(turns) if kind in (its, ALL)]
        alone = [[question.alone for question in turns[i][1]] for i in places]
        of_kind = [{way: [lap[way][i] for i in places] for way in ways} for lap in laps]
        cells += [cell_of((*group, kind, way), of_kind, alone) for way in ways]
    return cells


def rotated(items: Sequence[T], number: int) -> list[T]:
    at = number % len(items)
    return [*items[at:], *items[:at]]


def cell_of(
    key: tuple[str, int, float, str, str],
    laps: Sequence[Mapping[str, Sequence[Run]]],
    alone: Sequence[Sequence[list[int]]],
) -> Cell:
    """laps: by way its runs of every turn; alone: by turn the texts of its prompts alone."""
    way = key[-1]
    runs = [run for lap in laps for run in lap[way]]
    speeds = [[run.tps for run in lap[way]] for lap in laps]
    plain = [[run.tps for run in lap[PLAIN]] for lap in laps]
    ratios = [
        [a / b for a, b in zip(*both, strict=True)] for both in zip(speeds, plain, strict=True)
    ]
    shares = [
        [
            leading(a, b)
            for run, texts in zip(lap[way], alone, strict=True)
            if run.texts
            for a, b in zip(run.texts, texts, strict=True)
        ]
        for lap in laps
    ]
    drafted, accepted = (
        [sum(counts) for counts in zip(*lists, strict=True)]
        for lists in ([run.drafted for run in runs], [run.accepted for run in runs])
    )
    rounds = sum(run.rounds for run in runs)
    return Cell(
        *key,
        laps=len(laps),
        tps=spread(speeds),
        ratio=spread(ratios),
        tokens_per_round=sum(run.emitted for run in runs) / rounds if rounds else None,
        acceptance=tuple(a / d for d, a in zip(drafted, accepted, strict=True) if d),
        agreement=statistics.mean(map(statistics.mean, shares)) if shares[0] else None,
        identical=tuple(min(answer) == 1 for answer in zip(*shares, strict=True)),
    )


def spread(laps: Sequence[Sequence[float]]) -> Spread:
    """Of each turn the quartiles over laps, which a hiccup does not move, and of these the
    geometric mean."""
    laps = laps if len(laps) > 1 else [*laps] * 2
    turns = [
        statistics.quantiles(turn, n=4, method="inclusive") for turn in zip(*laps, strict=True)
    ]
    low, middle, high = map(statistics.geometric_mean, zip(*turns, strict=True))
    return low, middle, high


def leading(text: Sequence[int], other: Sequence[int]) -> float:
    """The share of tokens before the first that differs."""
    pairs = zip_longest(text, other)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return same / max(len(text), len(other)) if same else float(text == other)


def round_costs(pair: Pair, drafter: str, prompt: list[int]) -> list[RoundCost]:
    """Draft, verify and host for 0 to MAX_DRAFT drafts behind a prompt, medians; WAITS. The first
    turn warms up."""
    engine = pair.engine(draft_length=FixedLength(0))
    batch = prefilled(engine, prompt)
    lengths = range(MAX_DRAFT + 1 if pair.drafter else 1)
    parts: dict[int, list[Spread]] = {k: [] for k in lengths}
    for turn in range(ROUNDS + 1):
        for k in rotated(lengths, turn):
            part = round_parts(engine, batch, k)
            parts[k] += [part] if turn else []
    return [
        RoundCost(drafter, k, *map(statistics.median, zip(*parts[k], strict=True))) for k in lengths
    ]


def prefilled(engine: Engine, prompt: list[int]) -> Batch:
    """A batch of one row with a prompt in its KV, its first token chosen, and room for a round."""
    batch, request = Batch(engine.layout, 1), Request(prompt, MAX_DRAFT + 1, draft_len=MAX_DRAFT)
    row, kv, done = batch.admit(request)
    fill = Prefill(engine.target, engine.layout, row, request, kv, done, engine.prefill_chunk, ())
    del kv
    while (hidden := fill.advance()) is None:
        pass
    first, _ = fill.first_token(hidden)
    kv, fill.kv = fill.kv, []
    batch.put_kv(row, kv)
    batch.join(row, request, first)
    batch.grow(batch.longest + MAX_DRAFT + 1)
    return batch


def round_parts(engine: Engine, batch: Batch, drafts: int) -> Spread:
    """Seconds of draft, verify and host in one round, which is taken back; WAITS for each part."""
    target, layout = engine.target, engine.layout
    shape = RoundShape(drafts, batch.bound, "greedy")
    state, batch.state = batch.state, batch.state._replace(kv=[])
    mx.eval(state)
    times = [time.perf_counter()]

    def lap() -> None:
        times.append(time.perf_counter())

    tokens = draft(target, engine.drafter, layout, state, shape)
    lap()
    mx.eval(tokens)
    lap()
    hidden, kv = verify(target, layout, state, tokens, shape)
    # No name may hold the old buffers when the pass runs, or it copies them.
    state = state._replace(kv=[])
    proposed = Proposed(tokens, mx.zeros_like(state.bonus), hidden, [])
    after, result = accept(target, state, proposed, None, shape)
    lap()
    mx.eval(result, after, kv)
    lap()
    result.tokens.tolist()
    lap()
    batch.state = state._replace(kv=kv)
    built, drafted, wired, verified, read = (b - a for a, b in pairwise(times))
    return drafted, verified, built + wired + read


def contestant(worker: Worker, draft_len: int, plan: Plan, pair: Pair) -> Runner:
    """Another program on the same token ids."""

    def run(asked: list[Question]) -> Run:
        answer = worker.ask(
            prompt=asked[0].ids,
            max_tokens=plan.max_tokens,
            eos=[*pair.defaults.eos_token_ids],
            draft_len=draft_len,
            compiled=False,
        )
        counted = answer["counted"]
        return Run(counted, answer["seconds"], counted, answer["rounds"], (answer["tokens"],))

    return run


def served(server: Ollama, plan: Plan) -> Runner:
    """A server's own count of its answer to the same text."""
    return lambda asked: Run(*server.run(asked[0].text, plan.max_tokens, raw=asked[0].raw))


def compare(old: Report, new: Report) -> tuple[list[str], list[tuple[Cell, Cell]]]:
    """What else differs, and the cells that both have."""
    before = old.machine | {"model": old.model} | old.settings
    now = new.machine | {"model": new.model} | new.settings
    differs = [f"{k} was {before.get(k)}, is {now[k]}" for k in now if before.get(k) != now[k]]
    known = {cell.key: cell for cell in old.cells}
    return differs, [(known[cell.key], cell) for cell in new.cells if cell.key in known]
