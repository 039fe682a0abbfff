"""The model behind every protocol: one thread loads the pair and answers jobs, several at once
where its engine has rows, the others in the order in which they came.

MLX's arrays belong to the thread that made them, so pair, engine and conversations are made here
and used nowhere else; what is in `Model` is free for all. A pair that nobody asks is let go after a
while and loaded again for the next request. No protocol is known here.
"""

from __future__ import annotations

import gc
import os
import threading
import traceback
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlx_mtp.cli.terminal import say, write_stderr
from mlx_mtp.errors import MtpError

if TYPE_CHECKING:
    from mlx_mtp.conversation import Conversations
    from mlx_mtp.engine.draft_length import AutoLength
    from mlx_mtp.engine.requests import Event, Request, Stats
    from mlx_mtp.engine.session import Engine
    from mlx_mtp.generation import Answer, Piece
    from mlx_mtp.pair import Pair
    from mlx_mtp.text.chat import ChatTemplate
    from mlx_mtp.text.tokenizer import Tokenizer
    from mlx_mtp.text.turns import TurnMemory
    from mlx_mtp.weights.checkpoint import Progress


class Cancelled(MtpError):
    """Whoever asked does not want to know any more."""


class Busy(MtpError):
    """As many jobs wait as may."""


class NotLoaded(MtpError):
    """The model could not be loaded, for a reason with this exit code."""

    def __init__(self, error: Exception) -> None:
        super().__init__(one_line(error))
        self.exit_code = error.exit_code if isinstance(error, MtpError) else 3


@dataclass(frozen=True)
class Model:
    """What is known of the pair once it was loaded, also while it is let go. context: the most
    tokens of a prompt and its answer."""

    name: str
    drafter: str | None
    context: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    turns: TurnMemory


@dataclass
class Totals:
    """Of the requests that ended, by how they ended: the engine's finish reasons, "cancelled" also
    of those that only waited, and "refused". Counts are as in `Stats`, by position from the first
    draft on; seconds are summed over requests."""

    requests: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    drafted_by_position: Counter[int] = field(default_factory=Counter)
    accepted_by_position: Counter[int] = field(default_factory=Counter)
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def add(self, stats: Stats, reason: str) -> None:
        self.requests[reason] += 1
        for name in COUNTED:
            self.tokens[name] += getattr(stats, name)
        for i, (drafted, accepted) in enumerate(
            zip(stats.drafted_by_position, stats.accepted_by_position, strict=True)
        ):
            self.drafted_by_position[i] += drafted
            self.accepted_by_position[i] += accepted
        self.prefill_s += stats.first_token_s
        self.decode_s += stats.decode_s


COUNTED = ("prompt_tokens", "cached_tokens", "completion_tokens", "rounds", "drafted", "accepted")


class Job(ABC):
    """One request to the model. A front end fills in the three methods; `end` is called once, and
    all of them in the service's thread, but for `end` of a job that was cancelled while it waited.
    """

    answer: Answer | None = None
    prefilled = 0
    cancelled = False

    @abstractmethod
    def begin(self, conversations: Conversations, engine: Engine) -> Answer:
        """Queue it in the engine. Raises MtpError."""

    @abstractmethod
    def show(self, piece: Piece) -> None:
        """What a step brought; the model waits until it returns."""

    @abstractmethod
    def end(self, error: Exception | None) -> None:
        """Over: `answer` is complete, or `error` says why not."""


class Service:
    """`load` and `make` run in the service's thread. Up to `rows` jobs run at once, and
    `most_waiting` more are taken; then `submit` raises Busy. After `idle_s` seconds without a job
    the pair is let go. `failed` is for good: the first load went wrong, or nothing can be made of
    what was loaded; a later load that fails fails those who wait for it, and the next request tries
    again."""

    def __init__(
        self,
        load: Callable[[Progress], Pair],
        make: Callable[[Pair], Engine],
        *,
        rows: int = 1,
        most_waiting: int = 8,
        idle_s: float | None = None,
    ) -> None:
        self._load, self._make = load, make
        self._rows, self.most_waiting, self._idle_s = rows, most_waiting, idle_s
        self.model: Model | None = None
        self.totals = Totals()
        self.failed: NotLoaded | None = None
        self.loaded = threading.Event()  # or failed to
        self._pair: Pair | None = None
        self._engine: Engine | None = None
        self._kv_bytes = 0
        self._lost = False  # the last load failed, not for good
        # What outlives a pair: the ids of earlier turns, and which draft length paid.
        self._memory: TurnMemory | None = None
        self._draft_length: AutoLength | None = None
        self.loading = (0, 0)  # bytes done, and in all
        self._waiting: deque[Job] = deque()
        self._running: dict[Request, Job] = {}
        self._errands: deque[Callable[[Engine], None]] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="mlx", daemon=True).start()

    @property
    def state(self) -> str:
        if self.failed is not None:
            return "failed"
        if self.loaded.is_set():
            return "ready"
        if self.model is None or self._waiting:
            return "loading"
        return "failed" if self._lost else "unloaded"

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def memory(self) -> dict[str, int]:
        """Bytes that MLX holds in arrays, has held at most, and keeps for new ones; and those of
        keys and values, parked ones among them."""
        import mlx.core as mx

        return {
            "active": mx.get_active_memory(),
            "peak": mx.get_peak_memory(),
            "cache": mx.get_cache_memory(),
            "kv": self._kv_bytes,
        }

    def submit(self, job: Job) -> None:
        """Raises NotLoaded, Busy."""
        with self._changed:
            self.check_room()
            self._waiting.append(job)
            self._changed.notify()

    def check_room(self) -> None:
        """Raises what `submit` would now, for whoever has work to do before that."""
        if self.failed is not None:
            raise self.failed.with_traceback(None)  # which would grow with every time
        if len(self._running) + len(self._waiting) >= self._rows + self.most_waiting:
            raise Busy(f"the queue is full: {self.most_waiting} requests wait")

    def cancel(self, job: Job) -> None:
        """End it before the engine's next step, or at once where it has not begun."""
        with self._changed:
            job.cancelled = True
            queued = job in self._waiting
            if queued:
                self._waiting.remove(job)
        if queued:
            self.totals.requests["cancelled"] += 1
            job.end(Cancelled("Request cancelled"))

    def ahead(self, job: Job) -> int:
        """How many jobs run or wait before this one."""
        with suppress(ValueError, RuntimeError):  # it may move meanwhile
            return len(self._running) + self._waiting.index(job)
        return len(self._running) + len(self._waiting)

    def between_steps(self, errand: Callable[[Engine], None]) -> None:
        """Have something done to the engine, soon; to none that was let go. Raises NotLoaded."""
        with self._changed:
            if self.failed is not None:
                raise self.failed.with_traceback(None)
            if self.state in ("loading", "ready"):
                self._errands.append(errand)
                self._changed.notify()

    # -- the service's thread -------------------------------------------------------------------

    def _run(self) -> None:
        while self.failed is None:
            again = self.model is not None
            try:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self.model is None)
                conversations = self._open()
                again = False
                while self._wait():
                    self._turn(conversations)
                del conversations
                self._let_go()
            except Exception as error:
                report(error)
                self._fail(NotLoaded(error), for_good=not again)

    def _open(self) -> Conversations:
        from mlx_mtp.conversation import Conversations

        pair = self._pair = self._load(self._progress)
        pair.draft_length = self._draft_length or pair.draft_length
        engine = self._engine = self._make(pair)
        conversations = Conversations(pair)
        conversations.memory = self._memory or conversations.memory
        self._memory, self._draft_length = conversations.memory, pair.draft_length
        self.model = Model(
            pair.name,
            pair.drafter_name,
            engine.context,
            pair.tokenizer,
            pair.template,
            self._memory,
        )
        self._lost = False
        self.loaded.set()
        return conversations

    def _wait(self) -> bool:
        """Until there is something to do; False: there was nothing for too long."""
        with self._changed:
            if self._changed.wait_for(
                lambda: self._waiting or self._running or self._errands, self._idle_s
            ):
                return True
            self.loaded.clear()
            return False

    def _let_go(self) -> None:
        assert self._engine is not None
        assert self._pair is not None
        self._engine.close()
        self._pair.restore_limits()
        self._engine = self._pair = None
        self._kv_bytes, self.loading = 0, (0, 0)
        gc.collect()
        import mlx.core as mx

        mx.clear_cache()
        say("idle: the weights are let go, and loaded again for the next request")

    def _fail(self, error: NotLoaded, *, for_good: bool) -> None:
        say(str(error))
        with self._changed:
            if for_good:
                self.failed = error
                self.loaded.set()
            self._lost = True
            self._engine = self._pair = None
            jobs = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
        self.totals.requests["error"] += len(jobs)
        for job in jobs:
            job.end(error)

    def _progress(self, what: str, done: int, total: int) -> None:
        self.loading = (done, total)

    def _turn(self, conversations: Conversations) -> None:
        assert self._engine is not None
        assert self._pair is not None
        while self._errands:
            self._errands.popleft()(self._engine)
        for request, job in list(self._running.items()):
            if job.cancelled:
                self._end(request, Cancelled("Request cancelled"))
        while (next_one := self._next()) is not None:
            try:
                next_one.answer = next_one.begin(conversations, self._engine)
                self._running[next_one.answer.request] = next_one
            except Exception as error:
                self.totals.requests["refused"] += 1
                report(error)
                next_one.end(error)
        if not self._running:
            return
        try:
            events = self._engine.step()
        except Exception as error:
            # What the engine holds is not to be trusted any more.
            report(error)
            for request in list(self._running):
                self._end(request, error)
            with suppress(Exception):
                self._engine.close()
            self._engine = self._make(self._pair)
            return
        for event in events:
            self._hand_out(event)
        self._kv_bytes = self._engine.kv_bytes

    def _next(self) -> Job | None:
        with self._changed:
            room = self._waiting and len(self._running) < self._rows
            return self._waiting.popleft() if room else None

    def _hand_out(self, event: Event) -> None:
        job = self._running.get(event.request)
        if job is None:
            return
        assert job.answer is not None
        try:
            piece = job.answer.take(event)
            job.prefilled = piece.prefilled
            job.show(piece)
        except Exception as error:
            report(error)
            self._end(event.request, error)
        else:
            if event.finish_reason is not None:
                self._end(event.request, None)

    def _end(self, request: Request, error: Exception | None) -> None:
        job = self._running.pop(request)
        assert job.answer is not None
        try:
            if error is not None:
                job.show(job.answer.cancel())
        except Exception as worse:
            report(worse)
        self.totals.add(request.stats, request.finish_reason or "error")
        try:
            job.end(error)
        except Exception as worse:
            report(worse)
            job.end(worse)


def report(error: Exception) -> None:
    """A traceback on stderr, of what is a bug of ours and where it was asked for. Then the error
    has none any more: its frames hold the request, and the request its error, until Python looks
    for such circles."""
    if not isinstance(error, MtpError) and os.environ.get("MLX_MTP_TRACEBACK"):
        write_stderr("".join(traceback.format_exception(error)))
    error.__traceback__ = error.__context__ = error.__cause__ = None


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, MtpError) else f"{type(error).__name__}: {text}"
