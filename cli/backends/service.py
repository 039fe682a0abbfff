"""The model behind every protocol: one thread loads the pair and answers jobs, several at once
where its engine has rows, the others in the order in which they came.

MLX's arrays belong to the thread that made them, so pair, engine and conversations are made here
and used nowhere else; the tokenizer and the template are free for all. No protocol is known here.
"""

from __future__ import annotations

import os
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from mlx_mtp.cli.terminal import say, write_stderr
from mlx_mtp.errors import MtpError

if TYPE_CHECKING:
    from mlx_mtp.conversation import Conversations
    from mlx_mtp.engine.requests import Event, Request
    from mlx_mtp.engine.session import Engine
    from mlx_mtp.generation import Answer, Piece
    from mlx_mtp.pair import Pair
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
    `most_waiting` more are taken; then `submit` raises Busy."""

    def __init__(
        self,
        load: Callable[[Progress], Pair],
        make: Callable[[Pair], Engine],
        *,
        rows: int = 1,
        most_waiting: int = 8,
    ) -> None:
        self._load, self._make = load, make
        self._rows, self.most_waiting = rows, most_waiting
        self.pair: Pair | None = None
        self.engine: Engine | None = None
        self.failed: NotLoaded | None = None
        self.loaded = threading.Event()  # or failed to
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
        return "ready" if self.loaded.is_set() else "loading"

    def submit(self, job: Job) -> None:
        """Raises NotLoaded, Busy."""
        with self._changed:
            if self.failed is not None:
                raise self.failed
            if self.ahead(job) >= self._rows + self.most_waiting:
                raise Busy(f"the queue is full: {self.most_waiting} requests wait")
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """End it before the engine's next step, or at once where it has not begun."""
        with self._changed:
            job.cancelled = True
            queued = job in self._waiting
            if queued:
                self._waiting.remove(job)
        if queued:
            job.end(Cancelled("Request cancelled"))

    def ahead(self, job: Job) -> int:
        """How many jobs run or wait before this one."""
        with suppress(ValueError, RuntimeError):  # it may move meanwhile
            return len(self._running) + self._waiting.index(job)
        return len(self._running) + len(self._waiting)

    def between_steps(self, errand: Callable[[Engine], None]) -> None:
        """Have something done to the engine, soon. Raises NotLoaded."""
        with self._changed:
            if self.failed is not None:
                raise self.failed
            self._errands.append(errand)
            self._changed.notify()

    # -- the service's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.pair = self._load(self._progress)
            self.engine = self._make(self.pair)
            from mlx_mtp.conversation import Conversations

            conversations = Conversations(self.pair)
            self.loaded.set()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._running or self._errands)
                self._turn(conversations)
        except Exception as error:
            report(error)
            say(one_line(error))
            with self._changed:
                self.failed = NotLoaded(error)
                jobs = [*self._running.values(), *self._waiting]
                self._running.clear()
                self._waiting.clear()
            self.loaded.set()
            for job in jobs:
                job.end(self.failed)

    def _progress(self, what: str, done: int, total: int) -> None:
        self.loading = (done, total)

    def _turn(self, conversations: Conversations) -> None:
        assert self.engine is not None
        assert self.pair is not None
        while self._errands:
            self._errands.popleft()(self.engine)
        for request, job in list(self._running.items()):
            if job.cancelled:
                self._end(request, Cancelled("Request cancelled"))
        while (next_one := self._next()) is not None:
            try:
                next_one.answer = next_one.begin(conversations, self.engine)
                self._running[next_one.answer.request] = next_one
            except Exception as error:
                report(error)
                next_one.end(error)
        if not self._running:
            return
        try:
            events = self.engine.step()
        except Exception as error:
            # What the engine holds is not to be trusted any more.
            report(error)
            for request in list(self._running):
                self._end(request, error)
            with suppress(Exception):
                self.engine.close()
            self.engine = self._make(self.pair)
            return
        for event in events:
            self._hand_out(event)

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
        try:
            job.end(error)
        except Exception as worse:
            report(worse)
            job.end(worse)


def report(error: Exception) -> None:
    """A traceback on stderr, of what is a bug of ours and where it was asked for."""
    if not isinstance(error, MtpError) and os.environ.get("MLX_MTP_TRACEBACK"):
        write_stderr("".join(traceback.format_exception(error)))


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, MtpError) else f"{type(error).__name__}: {text}"
