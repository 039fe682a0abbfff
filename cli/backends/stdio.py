"""JSON-RPC 2.0 over two file descriptors, one message a line: `mlx-mtp stdio`.

The reader (the main thread) never waits for the model: what it can answer it answers at once, the
rest is a job of the service. A writer thread takes at most 64 lines; when it is full, the model
waits for it, and text is added to the line that waits already. A third thread says how far live
requests are, a fourth counts tokens.
"""

from __future__ import annotations

import json
import math
import os
import queue
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mlx_mtp.cli.backends import openai
from mlx_mtp.cli.backends.service import (
    Busy,
    Cancelled,
    Job,
    NotLoaded,
    Service,
    one_line,
    report,
)
from mlx_mtp.cli.terminal import launched, leave, say
from mlx_mtp.errors import ContextError, FitError, MtpError, UsageError

if TYPE_CHECKING:
    from mlx_mtp.conversation import Conversations
    from mlx_mtp.engine.session import Engine
    from mlx_mtp.generation import Answer, Piece

PROTOCOL = "mlx-mtp/1"
MAX_LINE = 64 << 20  # bytes
LINES, ANSWERS = 64, 4096  # that wait for stdout: of the model's, and of the reader's beside them
JOINED = 1024  # characters that a waiting line may grow to
TICK, SILENCE = 1.0, 4.0  # seconds between looks at live requests; after which one must be said
LAST_WORDS = 1.5  # seconds that `exit` waits for cancelled requests and for stdout

Message = dict[str, Any]
BODIES = {
    "chat.completions": openai.chat,
    "completions": openai.completion,
    "tokens.count": openai.chat,  # or with a prompt the other
}


class Refused(MtpError):
    """A line that asks for nothing that there is, by what JSON-RPC or we ourselves say."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


PARSE, INVALID, UNKNOWN, INTERNAL = -32700, -32600, -32601, -32603
MEMORY, CLOSING = -32003, -32004
CODES: list[tuple[type[Exception], int]] = [
    (Cancelled, -32800),
    (Busy, -32001),
    (NotLoaded, -32002),
    (FitError, MEMORY),
    (MemoryError, MEMORY),
    (UsageError, -32602),
]


def failure_of(error: Exception) -> Message:
    """The error object of a response."""
    code = next((code for kind, code in CODES if isinstance(error, kind)), INTERNAL)
    if isinstance(error, RuntimeError) and "alloc" in str(error):  # as MLX runs out of memory
        code = MEMORY
    failure: Message = {"code": getattr(error, "code", code), "message": one_line(error)}
    if isinstance(error, ContextError):
        failure["data"] = {"tokens": error.tokens, "limit": error.limit}
    elif isinstance(error, Busy):
        failure["data"] = {"retry_after_ms": 1000}
    return failure


def lines(read: Callable[[], bytes], most: int = MAX_LINE) -> Iterator[bytes | None]:
    """Lines without their ends, the last one with or without; None stands for one that was longer
    than `most`, of which no more than that is ever held."""
    held, size, chunk = bytearray(), 0, read()
    while chunk:
        for i, piece in enumerate(chunk.split(b"\n")):
            if i:
                yield bytes(held) if size <= most else None
                held, size = bytearray(), 0
            size += len(piece)
            if size <= most:
                held += piece
            else:
                held = bytearray()
        chunk = read()
    if size:
        yield bytes(held) if size <= most else None


def parse(line: bytes) -> Any:
    """Raises Refused for what is no JSON, as NaN is none."""
    try:
        text = line.decode("utf-8-sig")
        return json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_whole)
    except RecursionError:
        raise Refused(PARSE, "the JSON is nested more than some hundred levels deep") from None
    except ValueError as error:
        raise Refused(PARSE, f"no JSON: {error}") from None


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    raise ValueError(f"{text} is no number")


def _whole(text: str) -> int:
    if len(text) <= 4000:
        return int(text)
    raise ValueError(f"a number of {len(text)} digits")


def encode(message: Message) -> bytes:
    whole = {"jsonrpc": "2.0", **message}
    try:
        return json.dumps(whole, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can only spell out
        return json.dumps(whole, allow_nan=False).encode() + b"\n"


@dataclass(eq=False)
class Line:
    """A message to be written; `owner` is the request it is of, which knows whether it is
    `answered`, `delta` the part of it that more text can be added to."""

    message: Message
    owner: Any = None
    delta: Message | None = None

    def join(self, more: Line) -> bool:
        """Whether the text of `more` was added to this one."""
        if not self.delta or not more.delta or self.delta.keys() != more.delta.keys():
            return False
        ((kind, text),) = more.delta.items()
        fits = isinstance(text, str) and len(self.delta[kind]) + len(text) <= JOINED
        if fits:
            self.delta[kind] += text
        return fits


class Writer:
    """Writes lines in a thread of its own. `gone` is called there when nobody reads them any more
    (None), also while there is nothing to write, or when they cannot be written (why)."""

    def __init__(self, fd: int, gone: Callable[[OSError | None], None]) -> None:
        self._fd, self._gone = fd, gone
        self._lines: deque[Line] = deque()  # the first one is being written
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="writer", daemon=True).start()

    def put(
        self, line: Line, most: int = LINES, *, last: Callable[[], object] | None = None
    ) -> None:
        """WAITS while `most` lines wait, unless the line can be joined to one of them. `last`: it
        is the last line of its owner, no other is taken, and this is called before it is read."""
        with self._changed:
            while len(self._lines) >= most:
                before = (one for one in reversed(self._lines) if one.owner is line.owner)
                if (one := next(before, None)) is not None and one.join(line):
                    return
                self._changed.wait()
            if line.owner is not None:
                if line.owner.answered:
                    return
                if last is not None:
                    line.owner.answered = True
                    last()
            self._lines.append(line)
            self._changed.notify_all()

    @property
    def full(self) -> bool:
        return len(self._lines) >= LINES

    def flush(self, timeout: float | None = None) -> None:
        """WAITS until all is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, timeout)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._fd, 0)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._lines, TICK)
                    line = self._lines[0] if self._lines else None
                    if line is not None:
                        line.delta = None  # too late for more
                if line is not None:
                    self._write(memoryview(encode(line.message)))
                    with self._changed:
                        self._lines.popleft()
                        self._changed.notify_all()
                elif any(what & (select.POLLERR | select.POLLHUP) for _, what in poll.poll(0)):
                    raise BrokenPipeError
        except BrokenPipeError:
            self._gone(None)
        except OSError as error:
            self._gone(error)

    def _write(self, rest: memoryview) -> None:
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # whoever shares the other end made it so
                select.select([], [self._fd], [])


class Rpc(Job):
    """A request that takes time. `answered`: its last line waits to be written, or was."""

    def __init__(self, connection: Connection, name: Any, method: str, body: openai.Body) -> None:
        self.name, self.method, self.body = name, method, body
        self._connection = connection
        self.answered = False
        self.said = time.monotonic()
        self.seen: tuple[str, int, int] | None = None

    def begin(self, conversations: Conversations, engine: Engine) -> Answer:
        openai.check_model(self.body.model, self._connection.names())
        answer = self.body.start(conversations, engine)
        if self.body.stream and self.body.ask is not None:
            self._chunk(self.body.chunk(answer, {"role": "assistant", "content": ""}))
        return answer

    def show(self, piece: Piece) -> None:
        if self.body.stream and self.answer is not None:
            for delta in self.body.deltas(self.answer, piece):
                self._chunk(self.body.chunk(self.answer, delta), delta)

    def end(self, error: Exception | None) -> None:
        if error is None and self.answer is not None:
            result = self.body.result(self.answer, self._connection.tokenizer)
            for chunk in self.body.last_chunks(self.answer) if self.body.stream else ():
                self._chunk(chunk)
            self._connection.answer(self, {"result": result})
        elif error is not None:
            failure = failure_of(error)
            if isinstance(error, Cancelled):
                said = self.body.message(self.answer) if self.answer else {"content": ""}
                failure["data"] = said | {"usage": openai.usage(self.answer)}
            self._connection.answer(self, {"error": failure})

    def progress(self) -> tuple[str, int, int]:
        """(phase, done, total): in bytes, in requests before this one, or in tokens."""
        service = self._connection.service
        if not service.loaded.is_set():
            return ("load", *service.loading)
        if self.answer is None:
            return ("queue", 0, service.ahead(self))
        request = self.answer.request
        if not request.tokens:
            return ("prefill", self.prefilled, len(request.prompt))
        return ("generate", len(request.tokens), request.max_tokens)

    def _chunk(self, chunk: Message, delta: Message | None = None) -> None:
        self.said = time.monotonic()
        params = {"id": self.name, "chunk": chunk}
        message = {"method": f"{self.method}.chunk", "params": params}
        self._connection.writer.put(Line(message, self, delta))


class Endpoint(ABC):
    """What every front end makes of a line. `_live`: requests that were not answered yet, by id;
    `_methods` are answered at once."""

    def __init__(self, writer: Writer, methods: Mapping[str, Callable[[Message], Any]]) -> None:
        self.writer, self._methods = writer, methods
        self._live: dict[Any, Any] = {}

    @abstractmethod
    def _submit(self, name: Any, method: str, params: Message) -> None:
        """A request for another method."""

    @abstractmethod
    def _notified(self, method: str, params: Any) -> None:
        """A message that nobody waits for an answer to."""

    def _understood(self, message: Any, number: int) -> Any:
        return message

    def _answered(self, name: Any, message: Message) -> bool:
        """Whether a message without a method is the answer to a request of ours."""
        return False

    def failure(self, error: Exception) -> Message:
        return failure_of(error)

    def _last_words(self) -> None:
        """WAITS a little for the live requests and for stdout."""
        until = time.monotonic() + LAST_WORDS
        while self._live and time.monotonic() < until:
            time.sleep(0.01)
        self.writer.flush(max(until - time.monotonic(), 0))

    def _end_for_wrong_options(self, service: Service) -> None:
        """WAITS for the model. Where loading it found the options wrong the process ends, its
        requests answered; what cannot be loaded only they are told."""
        service.loaded.wait()
        failed = service.failed
        if failed is not None and failed.exit_code == UsageError.exit_code:
            self._last_words()
            leave(failed.exit_code)

    def _say(self, message: Message, rpc: Rpc | None = None) -> None:
        self.writer.put(Line(message, rpc), LINES + ANSWERS)

    def _receive(self, line: bytes | None, number: int) -> None:
        name = None
        try:
            if line is None:
                raise Refused(PARSE, f"the line is longer than {MAX_LINE} bytes")
            if not line.strip():
                return
            message = self._understood(parse(line), number)
            if isinstance(message, list):
                raise Refused(INVALID, "batches are not taken: send one request a line")
            if not isinstance(message, dict):
                raise Refused(INVALID, "a message is an object")
            given = message.get("id")
            if isinstance(given, bool) or not isinstance(given, (str, int, float, type(None))):
                raise Refused(INVALID, "id must be a string, a number or null")
            if "method" not in message and self._answered(given, message):
                return
            if "id" in message and given in self._live:
                # Not with that id, or the first request would take it for its answer.
                raise Refused(INVALID, f"the id {given!r} is that of a request not answered yet")
            name = given
            method, params = message.get("method"), message.get("params", {})
            if message.get("jsonrpc") != "2.0" or not isinstance(method, str):
                raise Refused(INVALID, 'a request has "jsonrpc": "2.0" and a method')
            if "id" not in message:
                self._notified(method, params)
                return
            if not isinstance(params, dict):
                raise UsageError("params must be an object")
            if method in self._methods:
                self._say({"id": name, "result": self._methods[method](params)})
            else:
                self._submit(name, method, params)
        except Exception as error:
            report(error)
            self._say({"id": name, "error": self.failure(error)})


class Connection(Endpoint):
    """One client. `model` and `drafter` are what was asked for, until what was loaded is known;
    `draft_len` is that of requests which name none."""

    def __init__(
        self,
        service: Service,
        writer: Writer,
        model: str | None = None,
        drafter: str | None = None,
        draft_len: int | None = None,
    ) -> None:
        methods = {
            "initialize": self._initialize,
            "models.list": self._models,
            "session.close": self._close_session,
            "shutdown": self._shutdown,
            "exit": self._exit,
            "$/cancel_request": self._cancel,
        }
        super().__init__(writer, methods)
        self.service = service
        self._model, self._drafter = model, drafter
        self._draft_len = draft_len
        self._started = int(time.time())
        self._counts: queue.Queue[Rpc | None] = queue.Queue(LINES)
        self._ended = threading.Event()
        self._closing = self._over = self._refused = False
        for work in (self._tick, self._count, partial(self._end_for_wrong_options, service)):
            threading.Thread(target=work, daemon=True).start()

    @property
    def tokenizer(self) -> Any:
        assert self.service.model is not None
        return self.service.model.tokenizer

    def names(self) -> list[str]:
        return openai.names(self._model, self.service.model)

    def serve(self, read: Callable[[], bytes]) -> int:
        """Answers what is read until EOF or `exit`, on several ranks, which hear of no EOF, until
        `shutdown`; returns the exit code. WAITS for the requests then live; `exit` cancels them and
        waits for no reader."""
        for number, line in enumerate(lines(read), 1):
            self._receive(line, number)
            if self._over or (self._closing and launched() is not None):
                break
        until = time.monotonic() + (LAST_WORDS if self._over else math.inf)
        while self._live and time.monotonic() < until:
            for name in list(self._live) if self._over else ():
                self._cancel({"requestId": name})
            time.sleep(0.01)
        self.writer.flush(max(until - time.monotonic(), 0) if self._over else None)
        self._ended.set()
        with suppress(queue.Full):
            self._counts.put_nowait(None)
        failed = self.service.failed
        return failed.exit_code if failed is not None and self._refused else 0

    def answer(self, rpc: Rpc, outcome: Message) -> None:
        """The one answer to a request, and its last line; that of one that never ran may come from
        the reader, who has more room."""
        self._refused |= self.service.failed is not None
        most = LINES if rpc.answer else LINES + ANSWERS
        line = Line({"id": rpc.name, **outcome}, rpc)
        self.writer.put(line, most, last=partial(self._live.pop, rpc.name))

    # -- the reader -----------------------------------------------------------------------------

    def _understood(self, message: Any, number: int) -> Any:
        bare = isinstance(message, dict) and "jsonrpc" not in message
        return _bare(message, number) if bare else message

    def failure(self, error: Exception) -> Message:
        self._refused |= isinstance(error, NotLoaded)
        return failure_of(error)

    def _notified(self, method: str, params: Any) -> None:
        """Nobody is told what comes of a notification, so a prompt in one is not answered."""
        if method in self._methods and isinstance(params, dict):
            with suppress(MtpError):
                self._methods[method](params)
        elif method in BODIES:
            say(f"{method} came without an id, so nobody would get the answer: it is ignored")

    def _submit(self, name: Any, method: str, params: Message) -> None:
        if method not in BODIES:
            raise Refused(UNKNOWN, f"there is no method {openai.shown(method)}")
        if self._closing:
            raise Refused(CLOSING, "shutting down: no more requests are taken")
        counted = method == "tokens.count"
        if counted and {"messages", "prompt"} <= params.keys():
            raise UsageError("messages and prompt were both given; leave one out")
        check = openai.completion if counted and "prompt" in params else BODIES[method]
        rpc = Rpc(self, name, method, check(params, self._draft_len))
        if self.service.model is not None:
            openai.check_model(rpc.body.model, self.names())
        self._live[name] = rpc
        try:
            if counted:
                self._counts.put_nowait(rpc)
            else:
                self.service.submit(rpc)
        except (MtpError, queue.Full) as error:
            del self._live[name]
            raise error if isinstance(error, MtpError) else Busy("too many tokens.count") from None

    # -- methods that are answered at once ------------------------------------------------------

    def _initialize(self, params: Message) -> Message:
        if params.get("protocol") not in (None, PROTOCOL):
            asked = openai.shown(params["protocol"])
            raise UsageError(f"protocol is {asked}; it must be {PROTOCOL}")
        service, known = self.service, self.service.model
        model = {
            "id": self.names()[-1],
            "state": service.state,
            "context": None if known is None else known.context,
            "drafter": self._drafter if known is None else known.drafter,
        }
        if service.failed is not None:
            model["error"] = str(service.failed)
        capabilities = {
            "tools": True,
            "thinking": True,
            "response_format": openai.FORMATS if find_spec("llguidance") else (),
            "sessions": True,
            "max_queue": service.most_waiting,
        }
        return {"protocol": PROTOCOL, "model": model, "capabilities": capabilities}

    def _models(self, params: Message) -> Message:
        model = {"id": self.names()[-1], "object": "model", "created": self._started}
        return {"object": "list", "data": [model | {"owned_by": "mlx-mtp"}]}

    def _close_session(self, params: Message) -> None:
        session = openai.session_name(openai.Left(params))
        if session is None:
            raise UsageError("session is missing; it must be the name of one")
        self.service.between_steps(lambda engine: engine.forget(session))

    def _shutdown(self, params: Message) -> None:
        self._closing = True

    def _exit(self, params: Message) -> None:
        self._closing = self._over = True

    def _cancel(self, params: Message) -> None:
        name = params.get("requestId", ())
        if isinstance(name, (list, dict, tuple)):
            raise UsageError("requestId is missing, or is none that an id can be")
        rpc = self._live.get(name)
        if rpc is not None:
            self.service.cancel(rpc)
            if rpc.method == "tokens.count":
                rpc.end(Cancelled("Request cancelled"))

    # -- threads --------------------------------------------------------------------------------

    def _count(self) -> None:
        while (rpc := self._counts.get()) is not None:
            if self.service.model is None:
                self.service.loaded.wait()
            try:
                if self.service.failed is not None:
                    raise self.service.failed
                assert self.service.model is not None
                self.answer(rpc, {"result": {"tokens": rpc.body.count(self.service.model)}})
            except Exception as error:
                report(error)
                rpc.end(error)

    def _tick(self) -> None:
        while not self._ended.wait(TICK):
            now = time.monotonic()
            for rpc in list(self._live.values()):
                seen, silent = rpc.progress(), now - rpc.said
                if silent < (TICK if seen != rpc.seen else SILENCE) or self.writer.full:
                    continue
                rpc.seen, rpc.said = seen, now
                params = {"id": rpc.name, "phase": seen[0], "done": seen[1], "total": seen[2]}
                self._say({"method": "progress", "params": params}, rpc)


def _bare(body: Message, number: int) -> Message:
    """A body alone on a line as the request that it stands for."""
    for key, method in (("messages", "chat.completions"), ("prompt", "completions")):
        if key in body and "method" not in body:
            params = {name: value for name, value in body.items() if name != "id"}
            name = body.get("id", number)
            return {"jsonrpc": "2.0", "id": name, "method": method, "params": params}
    return body
