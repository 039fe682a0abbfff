"""A client of `mlx-mtp stdio`: of a process, or of a connection in this one."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mlx_mtp.cli.backends.service import Service
from mlx_mtp.cli.backends.stdio import Connection, Writer
from tests.cli.conftest import COMMAND, environment

Message = dict[str, Any]
ENDLESS = {"max_tokens": 4000, "min_tokens": 4000, "temperature": 0}


class Talk:
    """Sends messages, and keeps what comes back: every line must be JSON-RPC."""

    def __init__(self, write: Callable[[bytes], object], read: Callable[[], bytes]) -> None:
        self.write = write
        self.seen: list[Message] = []
        self._skipped: list[Message] = []
        self._read = read
        self._came: queue.Queue[Message | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        left = b""
        while chunk := self._read():
            *whole, left = (left + chunk).split(b"\n")
            for line in whole:
                self._came.put(json.loads(line))
        assert left == b""
        self._came.put(None)

    def send(self, message: Message | bytes) -> None:
        line = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
        self.write(line)

    def ask(self, name: Any, method: str, **params: Any) -> None:
        self.send({"jsonrpc": "2.0", "id": name, "method": method, "params": params})

    def cancel(self, name: Any) -> None:
        params = {"requestId": name}
        self.send({"jsonrpc": "2.0", "method": "$/cancel_request", "params": params})

    def next(self, timeout: float = 20) -> Message | None:
        message = self._came.get(timeout=timeout)
        if message is not None:
            assert message["jsonrpc"] == "2.0"
            self.seen.append(message)
        return message

    def until(self, wanted: Callable[[Message], object], timeout: float = 20) -> Message:
        ends = time.monotonic() + timeout
        while True:
            message = self.next(max(0.01, ends - time.monotonic()))
            assert message is not None, "the other side has ended"
            if wanted(message):
                return message
            if "method" not in message:
                self._skipped.append(message)

    def answer(self, name: Any, timeout: float = 20) -> Message:
        """The answer to a request, whatever comes before it."""
        for message in [m for m in self._skipped if m.get("id") == name]:
            self._skipped.remove(message)
            return message
        return self.until(lambda m: m.get("id") == name and "method" not in m, timeout)

    def call(self, name: Any, method: str, **params: Any) -> Message:
        self.ask(name, method, **params)
        return self.answer(name)

    def complete(self, name: Any, prompt: str = "def gcd(a, b):", **more: Any) -> Message:
        return self.call(name, "completions", prompt=prompt, **{"max_tokens": 8} | more)["result"]

    def rest(self) -> Iterator[Message]:
        while (message := self.next()) is not None:
            yield message


class Child(Talk):
    """`mlx-mtp stdio` as a process."""

    def __init__(self, *arguments: str, **how: Any) -> None:
        pipe = subprocess.PIPE
        streams = {"stdin": pipe, "stdout": pipe, "stderr": pipe} | how
        command = how.pop("command", [*COMMAND, "stdio", *arguments])
        streams.pop("command", None)
        self.process = subprocess.Popen(command, env=environment(), bufsize=0, **streams)
        out = self.process.stdout
        read = (lambda: os.read(out.fileno(), 1 << 16)) if out else lambda: b""
        super().__init__(self.process.stdin.write, read)

    def end(self) -> tuple[int, list[Message]]:
        """Closes stdin; the exit code and what still came."""
        self.process.stdin.close()
        rest = list(self.rest())
        return self.process.wait(timeout=10), rest


class Inside(Talk):
    """A connection in this process, to a service of its own or to one given."""

    def __init__(self, service: Service, **how: Any) -> None:
        lines: queue.Queue[bytes] = queue.Queue()
        read_end, write_end = os.pipe()
        super().__init__(lines.put, lambda: os.read(read_end, 1 << 16))
        self.service, self.code = service, None
        self.connection = Connection(service, Writer(write_end, lambda _: None), **how)
        self.thread = threading.Thread(target=self._serve, args=(lines.get,), daemon=True)
        self.thread.start()

    def _serve(self, read: Callable[[], bytes]) -> None:
        self.code = self.connection.serve(read)

    def end(self) -> int | None:
        self.write(b"")
        self.thread.join(20)
        return self.code
