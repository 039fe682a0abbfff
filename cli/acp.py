"""`mlx-mtp acp`: a coding agent for the editor that started this one."""

from __future__ import annotations

import sys

from mlx_mtp.cli import options
from mlx_mtp.cli.terminal import leave

HELP = """Be a coding agent for an editor: Agent Client Protocol v1 on stdin and stdout.

The model reads and edits files and runs commands through the editor, which asks its user before
each edit and each command; this process touches no files. The editor's option thought_level, off
or on, lets the model think first. At the end of stdin what runs is cancelled. Whatever else would
be printed goes to stderr, prompts never. Exit codes: 0, 1 stdout cannot be written, 2 usage, 3 the
model could not be loaded, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP."""


def acp(
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
    given = dict(locals())
    from mlx_mtp.cli.backends.acp import Connection
    from mlx_mtp.cli.backends.opening import service
    from mlx_mtp.cli.backends.stdio import Writer
    from mlx_mtp.cli.stdio import gone, read, take_stdout

    out = take_stdout()
    opened, length = service(**given)
    connection = Connection(opened, Writer(out, gone), length)
    # Threads may be in native code, which an ordinary exit would pull the ground from under.
    leave(connection.serve(read if sys.stdin is not None else lambda: b""))
