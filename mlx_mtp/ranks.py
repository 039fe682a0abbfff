"""The processes that `mlx.launch` starts: who is who, what rank 0 tells the others, and that all
end when one does.

Arrays go through `mx.distributed`. Beside it every rank holds one TCP connection to rank 0: it
carries the journal of `engine.lockstep`, and it breaks when a process or a machine is gone.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import NoReturn, cast

import mlx.core as mx

from mlx_mtp.engine.lockstep import Entry
from mlx_mtp.errors import MtpError
from mlx_mtp.models.shards import Ranks

COLLECTIVE = ("[ring]", "[jaccl]", "[mpi]")  # how their errors begin
KEY = 32  # bytes that a rank proves to know
CALL = 256  # bytes in which rank 0 says where it listens
SILENT = 2  # seconds after which a machine that does not answer is asked, and asked again
GIVE_UP = 2 * SILENT  # seconds that what was sent may go unanswered


class Link:
    """One process's side of the connections. `leave` is called in a thread, with an exit code and
    what is to be said, when this process has to end: another one did, or rank 0 wants it. The main
    thread may then be waiting in a collective for good. WAITS until all ranks are there. Raises
    MtpError."""

    def __init__(self, leave: Callable[[int, str | None], NoReturn]) -> None:
        try:
            group = mx.distributed.init(strict=True)
        except RuntimeError as error:
            raise MtpError(f"the ranks did not find each other: {error}") from None
        self.ranks = Ranks(group.rank(), group.size(), group)
        self._leave = leave
        self._ended = False
        self.engine = -1
        self._sending = threading.Lock()
        self._differences: dict[int, int] = {}
        self._entries: queue.Queue[list[Entry]] = queue.Queue()
        self._read: deque[Entry] = deque()
        self._written: list[Entry] = []
        self._links = self._connect()
        for rank, link in self._links.items():
            threading.Thread(target=self._listen, args=(rank, link), daemon=True).start()

    @property
    def leads(self) -> bool:
        return self.ranks.rank == 0

    def _connect(self) -> dict[int, Connection]:
        if self.ranks.size == 1:
            return {}
        if not self.leads:
            host, port, key = pickle.loads(self._called(b""))
            link = Client((host, port), authkey=key)
            link.send(self.ranks.rank)
            return {0: _watched(link)}
        key = secrets.token_bytes(KEY)
        with Listener((_address(), 0), backlog=self.ranks.size, authkey=key) as listener:
            self._called(pickle.dumps((*listener.address, key)))
            links = [listener.accept() for _ in range(self.ranks.size - 1)]
        return {link.recv(): _watched(link) for link in links}

    def _called(self, message: bytes) -> bytes:
        """Rank 0's message, of CALL bytes at most, on all ranks."""
        padded = mx.array(list(message.ljust(CALL, b".")), dtype=mx.int32)
        with mx.stream(mx.cpu):
            heard = self.ranks.leaders(padded)
            return bytes(cast(list[int], heard.tolist()))

    # -- the journal ----------------------------------------------------------------------------

    def write(self, entry: Entry) -> None:
        self._written.append(entry)

    def send(self) -> None:
        if self._written:
            self._send(self._written)
            self._written = []

    def read(self) -> Entry:
        while not self._read:
            self._read.extend(self._entries.get())
        return self._read.popleft()

    def put_back(self, entry: Entry) -> None:
        self._read.appendleft(entry)

    def report(self, differences: int) -> None:
        self._send([("differences", differences)])

    def end(self, code: int) -> None:
        """This rank ends, and the others with the same exit code."""
        if not self._ended:
            self._ended = True
            self._send([("end", code)])

    def lost(self, error: RuntimeError) -> NoReturn:
        text = str(error)
        if text.startswith(COLLECTIVE):
            time.sleep(0.5)  # the connections know better which one
            text = f"another rank of {self.ranks.size} has gone"
        self._leave(1, f"{text}, and this one ends with it")

    def _send(self, entries: list[Entry]) -> None:
        packed = pickle.dumps(entries)
        # Whoever is gone is missed by the thread that listens.
        with self._sending, suppress(OSError):
            for link in self._links.values():
                link.send_bytes(packed)

    def _listen(self, rank: int, link: Connection) -> None:
        try:
            while True:
                entries: list[Entry] = pickle.loads(link.recv_bytes())
                what, given = entries[0]
                if what == "end":
                    self._ended |= not self.leads  # who leads passes it on
                    self._leave(given, None)
                elif what == "differences":
                    self._differences[rank] = given
                    self.ranks.differences = sum(self._differences.values())
                else:
                    self._entries.put(entries)
        except (EOFError, OSError):
            if not self._ended:
                time.sleep(0.2)  # MLX writes a line of its own when a peer has gone
                line = f"rank {rank} of {self.ranks.size} has gone, and this one ends with it"
                self._leave(1, line)


def _address() -> str:
    """Where rank 0 is found: the address by which the ring, or JACCL's coordinator, knows it."""
    if file := os.environ.get("MLX_HOSTFILE"):
        with open(file) as hosts:
            first = json.load(hosts)[0]
        return str(first[0] if isinstance(first, list) else first).rpartition(":")[0]
    if coordinator := os.environ.get("MLX_JACCL_COORDINATOR"):
        return coordinator.rpartition(":")[0]
    return socket.gethostbyname(socket.gethostname())


def _watched(link: Connection) -> Connection:
    """Small messages go at once, and a machine that fell silent is noticed."""
    idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", 0x10))
    waiting = getattr(socket, "TCP_USER_TIMEOUT", None)  # in ms; TCP_RXT_CONNDROPTIME in seconds
    with socket.socket(fileno=os.dup(link.fileno())) as s:
        if waiting is not None:
            s.setsockopt(socket.IPPROTO_TCP, waiting, 1000 * GIVE_UP)
        elif sys.platform == "darwin":
            s.setsockopt(socket.IPPROTO_TCP, 0x80, GIVE_UP)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        s.setsockopt(socket.IPPROTO_TCP, idle, SILENT)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    return link
