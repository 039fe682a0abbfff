"""`mlx-mtp serve` inside of this process, and a client that knows nothing but HTTP."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from mlx_mtp.cli.backends import http
from mlx_mtp.cli.backends.service import Service
from mlx_mtp.weights.load import load_pair

USER = [{"role": "user", "content": "def gcd(a, b):"}]
ENDLESS = {"prompt": "x", "max_tokens": 4000, "min_tokens": 4000, "temperature": 0}


def service(load: Any = load_pair, make: Any = None, rows: int = 4, **how: Any) -> Service:
    """With the embedded pair."""

    def engine(pair: Any) -> Any:
        return make(pair) if make else pair.engine(rows=rows, cache_bytes=1 << 26)

    return Service(lambda progress: load(progress=progress), engine, rows=rows, **how)


def until(true: Any, what: str = "") -> None:
    ends = time.monotonic() + 20
    while not true():
        assert time.monotonic() < ends, what or "it did not come to that"
        time.sleep(0.005)


class Web:
    """A server on a port of its own; `buffer`: bytes on the way to a client."""

    def __init__(self, service: Service, buffer: int | None = None, **settings: Any) -> None:
        self.service, self._buffer = service, buffer
        listening, _ = http.listen("127.0.0.1", 0, None)
        if buffer is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        self.port = listening.getsockname()[1]
        app = http.app(service, http.Settings(**settings))
        self._server, self._thread = http.start(app, listening)

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def open(self, path: str, body: Any = None, method: str = "", **headers: str) -> HTTPResponse:
        """The answer as far as its headers; its connection is `response.connection`."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        content = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        if self._buffer is not None:
            connection.sock = socket.socket()
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
            connection.sock.settimeout(30)
            connection.sock.connect(("127.0.0.1", self.port))
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        method = method or ("GET" if body is None else "POST")
        connection.request(method, path, content, sent)
        response = connection.getresponse()
        response.connection = connection  # type: ignore[attr-defined]
        return response

    def ask(self, path: str, body: Any = None, **how: Any) -> tuple[int, Any]:
        """The status and what was in the JSON."""
        response = self.open(path, body, **how)
        content = response.read()
        response.connection.close()  # type: ignore[attr-defined]
        return response.status, json.loads(content)

    def complete(self, **body: Any) -> Any:
        status, found = self.ask("/v1/completions", {"prompt": "x = ", "max_tokens": 8} | body)
        assert status == 200, found
        return found

    def chat(self, **body: Any) -> Any:
        status, found = self.ask("/v1/chat/completions", {"messages": USER, "max_tokens": 8} | body)
        assert status == 200, found
        return found

    def refused(self, body: Any, path: str = "/v1/chat/completions") -> tuple[int, Any]:
        status, found = self.ask(path, body)
        assert set(found) == {"error"}
        return status, found["error"]

    @contextmanager
    def held(self) -> Any:
        """The model does nothing in here; yields what lets it go on."""
        here, go = threading.Event(), threading.Event()
        self.service.between_steps(lambda engine: here.set() or go.wait(30))
        assert here.wait(30)
        try:
            yield go
        finally:
            go.set()


def events(response: HTTPResponse) -> list[str]:
    """Server-sent events to their end; comments with their colon, data without its name."""
    found = response.read().decode().split("\n\n")
    assert found.pop() == ""
    return [one.removeprefix("data: ") for one in found]


def hang_up(response: HTTPResponse) -> None:
    raw: socket.socket = response.connection.sock or response.fp.raw._sock  # type: ignore
    raw.shutdown(socket.SHUT_RDWR)
    response.close()
    response.connection.close()  # type: ignore[attr-defined]
