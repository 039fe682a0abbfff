"""Processes as `mlx.launch` starts them, but without it: it spins on its pipes, which takes a core,
and exits 0 whatever its ranks do."""

from __future__ import annotations

import json
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.cli.conftest import environment


def start(size: int, folder: Path, command: list[str], **how: Any) -> list[subprocess.Popen[bytes]]:
    """`size` ranks of `command` on this machine, rank 0 first; `how` goes to Popen. Other ranks get
    a stdin that nobody writes to, as mlx.launch's would have rank 0's text in it."""
    hosts = folder / f"hosts{size}.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]))
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return [
        subprocess.Popen(
            command,
            bufsize=0,
            env=environment(MLX_RANK=str(rank), MLX_HOSTFILE=str(hosts)),
            **pipes | how,
        )
        for rank in range(size)
    ]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
