"""What the command line does to the outside: lines on stderr, text on stdout, signals, exits."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn, TextIO

from mlx_mtp.errors import MtpError


class OutputClosed(BaseException):
    """Whoever read our stdout has gone: time to end, and nothing to complain about."""


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP came; not a KeyboardInterrupt, which typer answers by itself."""

    def __init__(self, code: int) -> None:
        self.code = code


def say(line: str) -> None:
    """A line on stderr; without effect where stderr is closed or full. What is no printable
    character is spelt out: a folder's name must neither break the line nor steer the terminal."""
    spelt = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    rank = launched()
    write_stderr(f"mlx-mtp{f' (rank {rank})' if rank else ''}: {spelt}\n")


def write_stderr(text: str) -> None:
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = None  # as Python has it when it starts with a closed one


def emit(text: str) -> None:
    """Text on stdout, at once. Raises OutputClosed for a closed pipe, else MtpError."""
    if sys.stdout is None:
        raise MtpError("stdout is closed; there is nowhere to write the text to")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        raise MtpError(f"the text cannot be written to stdout: {error.strerror}") from None


# What is to be done before the process ends, with its exit code.
farewells: list[Callable[[int], None]] = []
LAST_WORDS = 2  # seconds
_leaving = threading.Lock()


def leave(code: int, line: str | None = None) -> NoReturn:
    """Ends the process, after a line, without waiting for the device or for a reader that has
    gone. Of several threads that want to the first one does."""
    if _leaving.acquire(timeout=LAST_WORDS):
        if line is not None:
            say(line)
        for farewell in farewells:
            farewell(code)
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
    os._exit(code)


# Where mlx.launch's backends look for the other ranks.
OTHERS = ("MLX_HOSTFILE", "MLX_JACCL_COORDINATOR", "MLX_IBV_DEVICES", "NCCL_HOST_IP")


def launched() -> int | None:
    """The rank of this process, where mlx.launch started several; None: it runs alone. A rank that
    stands in the environment without the others' places means nothing."""
    rank, hosts = os.environ.get("MLX_RANK"), os.environ.get("MLX_HOSTFILE")
    if hosts and os.path.exists(hosts) and os.path.getsize(hosts) < 3:
        return None  # mlx.launch -n 1
    if not any(name in os.environ for name in OTHERS):
        rank = os.environ.get("OMPI_COMM_WORLD_RANK")
    return int(rank) if rank and rank.isdecimal() else None


def follow_quietly() -> None:
    """Another rank than 0 asks nothing and says nothing but errors."""
    for number, how in ((0, os.O_RDONLY), (1, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, how), number)


def end_with_launcher() -> None:
    """Have rank 0 end when mlx.launch does, which holds its stdin open, where nothing else reads
    that."""

    def read() -> None:
        with suppress(OSError):
            while os.read(0, 1 << 16):
                pass
        leave(128 + signal.SIGHUP, "mlx.launch has gone, and this ends with it")

    if launched() is not None and stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=read, daemon=True).start()


def speaks_ansi(stream: TextIO | None) -> bool:
    """Whether colours and cursor movements are welcome: a terminal, not dumb, NO_COLOR unset."""
    if stream is None or os.environ.get("NO_COLOR"):
        return False
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """The signals of ENDING raise Interrupted, or in `deferred` only set `caught` to the exit code.
    From the first `asking` on SIGINT is none of them: it only sets `interrupted`.

    Python runs a signal's handler when native code returns, which a long prefill chunk or a weight
    file may take seconds for. So a thread watches too, and ends the process when the program has
    not ended by itself in `grace` seconds, or at once when a second signal comes.
    """

    grace = 0.8

    def __init__(self) -> None:
        self.caught: int | None = None
        self.interrupted = self._installed = False
        self._ending = set(ENDING)
        self._asking = self._deferred = False
        self._last_words: Callable[[], None] = lambda: None

    def install(self) -> None:
        """In the main thread. A signal that the parent had us ignore stays ignored."""
        if self._installed:
            return
        self._installed = True
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """The body waits for a line of the user's: here SIGINT raises KeyboardInterrupt."""
        self._ending.discard(signal.SIGINT)
        self.interrupted, self._asking = False, True
        try:
            yield
        finally:
            self._asking = False

    @contextmanager
    def deferred(self, last_words: Callable[[], None]) -> Iterator[None]:
        """The body looks at `caught` and `interrupted` by itself; `last_words` runs if the watching
        thread ends the process."""
        self._deferred, self._last_words = True, last_words
        try:
            yield
        finally:
            self._deferred, self._last_words = False, lambda: None

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """The body may wait in native code that holds Python's lock, so that no thread of ours
        runs: signals end the process at once. In the main thread."""
        before = {n: h for n in ENDING if (h := signal.getsignal(n)) is not signal.SIG_IGN}
        for number in before:
            signal.signal(number, signal.SIG_DFL)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number not in self._ending:
            self.interrupted = True
            if self._asking:
                raise KeyboardInterrupt
        elif self.caught is None:
            self.caught = 128 + number
            if not self._deferred:
                raise Interrupted(self.caught)

    def _watch(self, reader: int) -> None:
        number = 0
        while number not in self._ending:
            number = os.read(reader, 1)[0]
        select.select([reader], [], [], self.grace)
        with suppress(Exception):
            self._last_words()
        leave(128 + number)


signals = Signals()
