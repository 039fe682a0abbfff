"""One engine on several ranks: rank 0 leads, the others do what it did.

Every rank has an engine of its own, and all of them take the same steps, or a collective would wait
forever. What an engine does follows from its requests, from the tokens of its rounds, which
are rank 0's everywhere, and from a few things that only one machine knows: seconds, free memory,
what a stop string or a grammar says. Rank 0 writes all of these into a journal as they come up; the
others read them there, in the same order, and wait for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NoReturn, Protocol, TypeVar
from weakref import WeakKeyDictionary

from mlx_mtp.engine.requests import Event, Grammar, Request
from mlx_mtp.engine.session import Engine, Flight
from mlx_mtp.errors import MtpError

T = TypeVar("T")
Entry = tuple[str, Any]
# What rank 0 sends of a request: what its maker gives, without what lives in one process.
SENT = (
    "prompt",
    "max_tokens",
    "sampling",
    "processing",
    "eos",
    "draft_len",
    "logprobs",
    "snapshots",
    "session",
)
# Of an engine's arguments those that every rank needs to be the same.
ALIKE = ("rows", "prefill_chunk", "kv_bits", "cache_bytes", "max_kv", "compile", "pipeline")
_numbers = count()


class Journal(Protocol):
    """From rank 0 to the others, in order. engine: the number of the one whose entries follow."""

    engine: int

    def write(self, entry: Entry) -> None: ...

    def send(self) -> None:
        """Let go of what was written."""

    def read(self) -> Entry:
        """WAITS for the next entry."""

    def put_back(self, entry: Entry) -> None: ...

    def report(self, differences: int) -> None:
        """Tell rank 0 in how many rounds this rank would have gone on otherwise."""

    def lost(self, error: RuntimeError) -> NoReturn:
        """The device failed, or a collective did: which of them the others are in is not known."""


@contextmanager
def _together(journal: Journal) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        journal.lost(error)


class Leader(Engine):
    """Rank 0's engine; arguments as `Engine`, and the journal that it writes."""

    def __init__(self, *models: Any, journal: Journal, **how: Any) -> None:
        super().__init__(*models, **how)
        self._journal = journal
        self._names: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._named = 0
        self._number = journal.engine = next(_numbers)
        alike = {name: how[name] for name in ALIKE if name in how}
        self._tell("make", (self._number, alike))

    def add(self, request: Request) -> None:
        super().add(request)
        name = self._names[request] = self._named
        self._named += 1
        watched = request.stop is not None, request.grammar is not None
        self._tell("add", (name, {n: getattr(request, n) for n in SENT}, *watched))
        if request.stop is not None:
            request.stop = self._written(request.stop)
        if request.grammar is not None:
            request.grammar = WrittenGrammar(request.grammar, self._journal)

    def step(self) -> list[Event]:
        self._tell("step")
        try:
            with _together(self._journal):
                return super().step()
        finally:
            self._journal.send()

    def cancel(self, request: Request) -> None:
        if request.finish_reason is None and request in self._names:
            self._tell("cancel", self._names[request])
        super().cancel(request)

    def forget(self, session: str) -> None:
        self._tell("forget", session)
        super().forget(session)

    def close(self) -> None:
        """An engine that others were made beside is not used again."""
        super().close()
        self._tell("close")

    def calibrate(self, rounds: int = 4) -> None:
        self._tell("calibrate", rounds)
        super().calibrate(rounds)

    def describe(self) -> dict[str, Any]:
        ranks = self.target.ranks
        shared = {"size": ranks.size, "messages": ranks.messages, "bytes": ranks.bytes}
        return super().describe() | {"ranks": shared | {"differences": ranks.differences}}

    def _tell(self, what: str, given: Any = None) -> None:
        if self._journal.engine != self._number:
            self._journal.engine = self._number
            self._journal.write(("engine", self._number))
        self._journal.write((what, given))
        self._journal.send()

    def _agree(self, value: T) -> T:
        self._tell("agreed", value)
        return value

    def _written(self, stop: Callable[[int], bool]) -> Callable[[int], bool]:
        def stops(token: int) -> bool:
            found = stop(token)
            self._journal.write(("agreed", found))
            return found

        return stops


class WrittenGrammar:
    """A grammar whose refusals the others are told. What it allows they need not know: tokens are
    chosen by rank 0."""

    def __init__(self, grammar: Grammar, journal: Journal) -> None:
        self._grammar, self._journal = grammar, journal
        self.masks = grammar.masks

    def accept(self, token: int) -> None:
        error = None
        try:
            self._grammar.accept(token)
        except MtpError as raised:
            error = str(raised)
            raise
        finally:
            self._journal.write(("agreed", error))


class Abandoned(Exception):
    """Rank 0's step ended by an error, and it goes on with something else."""


class Follower(Engine):
    """Another rank's engine, whose open questions the journal answers."""

    def __init__(self, *models: Any, journal: Journal, **how: Any) -> None:
        super().__init__(*models, **how)
        self._journal = journal

    def _agree(self, value: T) -> T:
        entry = self._journal.read()
        if entry[0] != "agreed":
            self._journal.put_back(entry)
            raise Abandoned
        found: T = entry[1]
        return found

    def step(self) -> list[Event]:
        with _together(self._journal):
            return super().step()

    def take_over(self, request: Request, stops: bool, grammar: bool) -> None:
        """Queue what rank 0's engine found room for."""
        if stops:
            request.stop = lambda _: self._agree(False)
        if grammar:
            request.grammar = ReadGrammar(self._agree)
        self._queue(request)

    def _read(self, flight: Flight) -> list[Event]:
        events = super()._read(flight)
        # Under a grammar, which only rank 0 knows, choosing otherwise means nothing.
        narrowed = any(request.grammar for _, _, request in flight.rows)
        differs = flight.result.differs
        if differs is not None and not narrowed and differs.item():
            self.target.ranks.differences += 1
            self._journal.report(self.target.ranks.differences)
        return events


class ReadGrammar:
    """A grammar on another rank: allows everything, for tokens come from rank 0."""

    def __init__(self, agree: Callable[[str | None], str | None]) -> None:
        self._agree = agree

    def masks(self, drafts: Sequence[int]) -> None:
        return None

    def accept(self, token: int) -> None:
        if (error := self._agree(None)) is not None:
            raise MtpError(error)


def follow(journal: Journal, make: Callable[..., Follower]) -> NoReturn:
    """Do what the journal says, until the process ends. `make` makes an engine of rank 0's
    arguments."""
    engines: dict[int, tuple[Follower, dict[int, Request]]] = {}
    engine: Follower | None = None
    number, requests = -1, dict[int, Request]()
    while True:
        what, given = journal.read()
        if what == "make":
            number, how = given
            engine, requests = engines[number] = make(**how), {}
            continue
        if what == "engine":
            number = given
            engine, requests = engines[number]
            continue
        if what == "agreed":
            continue  # of a step that rank 0 and this one gave up
        assert engine is not None
        if what == "add":
            name, sent, stops, grammar = given
            requests[name] = Request(**sent)
            engine.take_over(requests[name], stops, grammar)
        elif what == "cancel":
            engine.cancel(requests[given])
        elif what == "forget":
            engine.forget(given)
        elif what == "close":
            engine.close()
            engines.pop(number, None)
        elif what == "calibrate":
            engine.calibrate(given)
        elif what == "step":
            try:
                engine.step()
            except Abandoned:
                continue
            for name in [n for n, r in requests.items() if r.finish_reason is not None]:
                del requests[name]
