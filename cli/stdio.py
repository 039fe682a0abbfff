"""`mlx-mtp stdio`: a model for the program that started this one."""

from __future__ import annotations

import fcntl
import os
import select
import sys
from typing import NoReturn

from mlx_mtp.cli import options
from mlx_mtp.cli.terminal import leave
from mlx_mtp.errors import MtpError

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
    cache_gb: options.CacheGb = None,
    parallel: options.Parallel = 1,
    max_queue: options.MaxQueue = 8,
    idle_unload: options.IdleUnload = 15,
) -> None:
    from mlx_mtp.cli.backends.opening import service
    from mlx_mtp.cli.backends.stdio import Connection, Writer

    out = take_stdout()
    opened, length = service(
        model,
        revision,
        drafter,
        drafter_revision,
        no_drafter,
        force_fit,
        draft_len,
        kv_bits,
        max_kv,
        drafter_bits,
        no_calibrate,
        exact,
        cache_gb,
        parallel,
        max_queue,
        idle_unload,
    )
    connection = Connection(opened, Writer(out, gone), model, drafter, length)
    # Threads may be in native code, which an ordinary exit would pull the ground from under.
    leave(connection.serve(read if sys.stdin is not None else lambda: b""))


def take_stdout() -> int:
    """A descriptor that is stdout, while fd 1, where stray prints go, becomes stderr. Raises
    MtpError where stdout is closed."""
    if sys.stdout is None:
        raise MtpError("stdout is closed; there is nowhere to answer to")
    # Not below 3: where stderr is closed native code still writes to 2.
    out = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    os.dup2(os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else 2, 1)
    return out


def read() -> bytes:
    while True:
        try:
            return os.read(0, 1 << 20)
        except BlockingIOError:  # whoever shares the other end made it so
            select.select([0], [], [])


def gone(error: OSError | None) -> NoReturn:
    if error is None:
        leave(0)
    leave(1, f"the answers cannot be written to stdout: {error.strerror}")
