"""`mlx-mtp stdio`: a model for the program that started this one."""

from __future__ import annotations

import fcntl
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from mlx_mtp.cli import options
from mlx_mtp.cli.terminal import say
from mlx_mtp.errors import MtpError, UsageError

if TYPE_CHECKING:
    from mlx_mtp.engine.session import Engine
    from mlx_mtp.pair import Pair
    from mlx_mtp.weights.checkpoint import Progress

HELP = """Answer JSON-RPC 2.0 requests on stdin, one a line, with lines on stdout.

Methods: chat.completions and completions with OpenAI's bodies, "stream": true for chunks as they
come; initialize, models.list, tokens.count, session.close, shutdown, exit; and the notification
$/cancel_request. A line that is only a body, {"prompt": "..."} or {"messages": [...]}, is answered
with its id, or else its line number, as id. Whatever else would be printed goes to stderr, prompts
never. At the end of stdin what was asked is finished. Exit codes: 0, 1 stdout cannot be written, 2
usage, 3 loading, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP."""


def stdio(
    model: options.Model = None,
    revision: options.Revision = None,
    drafter: options.DrafterId = None,
    drafter_revision: options.DrafterRevision = None,
    no_drafter: options.NoDrafter = False,
    force_fit: options.ForceFit = False,
    draft_len: options.DraftLen = None,
    kv_bits: options.KvBits = None,
    max_kv: options.MaxKv = None,
    drafter_bits: options.DrafterBits = None,
    no_calibrate: options.NoCalibrate = False,
    exact: options.Exact = False,
    cache_gb: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1 << 20,
            help="GB for the KV of conversations that may go on. [default: a quarter of what the "
            "weights leave]",
        ),
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, max=16, help="Requests at once.")] = 1,
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that may wait beside them.")] = 8,
) -> None:
    from mlx_mtp.cli.backends.service import Service
    from mlx_mtp.cli.backends.stdio import Connection, Writer
    from mlx_mtp.engine.draft_length import check_draft_len

    length = options.draft_length(draft_len)
    check_draft_len(length or 0)
    out = take_stdout()

    def load(progress: Progress) -> Pair:
        with wrong_options_end_it():
            pair = options.load(
                model,
                drafter,
                no_drafter,
                draft_len if no_drafter else None,  # a request may draft where others do not
                revision,
                drafter_revision,
                drafter_bits,
                quiet=True,
                progress=progress,
                force_fit=force_fit,
                calibrate=not no_calibrate,
                exact=exact,
            )
        for notice in pair.notices:
            say(notice)
        return pair

    def make(pair: Pair) -> Engine:
        cache = pair.cache_bytes() if cache_gb is None else int(cache_gb * 1e9)
        with wrong_options_end_it():
            return pair.engine(kv_bits=kv_bits, max_kv=max_kv, rows=parallel, cache_bytes=cache)

    service = Service(load, make, rows=parallel, most_waiting=max_queue)
    connection = Connection(service, Writer(out, _gone), model, drafter, length)
    # Threads may be in native code, which an ordinary exit would pull the ground from under.
    os._exit(connection.serve(_read if sys.stdin is not None else lambda: b""))


@contextmanager
def wrong_options_end_it() -> Iterator[None]:
    """Not so what cannot be loaded, which only its requests are told."""
    try:
        yield
    except UsageError as error:
        say(str(error))
        os._exit(error.exit_code)


def take_stdout() -> int:
    """A descriptor that is stdout, while fd 1, where stray prints go, becomes stderr. Raises
    MtpError where stdout is closed."""
    if sys.stdout is None:
        raise MtpError("stdout is closed; there is nowhere to answer to")
    # Not below 3: where stderr is closed native code still writes to 2.
    out = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    os.dup2(os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else 2, 1)
    return out


def _read() -> bytes:
    while True:
        try:
            return os.read(0, 1 << 20)
        except BlockingIOError:  # whoever shares the other end made it so
            select.select([0], [], [])


def _gone(error: OSError | None) -> NoReturn:
    if error is not None:
        say(f"the answers cannot be written to stdout: {error.strerror}")
    os._exit(0 if error is None else 1)
