"""OpenAI's API over HTTP, of one service: `mlx-mtp serve`.

The event loop never waits for the model: a request is a job of the service, and what the model's
thread brings is put down where the loop takes it. Who may ask at all is decided first: by Host and
Origin, because a page in a browser reaches loopback too, and by the key.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from mlx_mtp.cli.backends import metrics, openai, openapi
from mlx_mtp.cli.backends.service import Busy, Job, Service, report
from mlx_mtp.cli.backends.stdio import failure_of, parse
from mlx_mtp.errors import ContextError, UsageError

if TYPE_CHECKING:
    from mlx_mtp.conversation import Conversations
    from mlx_mtp.engine.session import Engine
    from mlx_mtp.generation import Answer, Piece

Message = dict[str, Any]
Work = Callable[[Request], Awaitable[Response]]
Check = Callable[[Mapping[str, Any], int | None], openai.Body]
# By the codes of `failure_of`, as far as they are not 500.
STATUS = {-32700: 400, -32602: 400, -32001: 429, -32002: 503, -32003: 507}
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
KEEP_ALIVE = 75  # seconds, more than clients keep a connection that they may use again


@dataclass(frozen=True)
class Settings:
    """asked: the model that was asked for. draft_len: that of requests which name none. host: where
    it is bound to loopback, by which name; else None. origins: the web pages that may ask.
    max_body: bytes. silence_s: after so many seconds a stream says that it is alive. body_s: that a
    body may take to come."""

    asked: str | None = None
    draft_len: int | None = None
    host: str | None = "127.0.0.1"
    key: str | None = None
    origins: tuple[str, ...] = ()
    max_body: int = 8_000_000
    silence_s: float = 5.0
    body_s: float = 60.0


def app(service: Service, settings: Settings) -> Starlette:
    """Its endpoints answer in OpenAI's form, whatever goes wrong."""
    statuses: Counter[int] = Counter()
    api = _Api(service, settings, statuses)
    works: dict[str, Work] = {
        "/health": api.health,
        "/metrics": api.metrics,
        "/openapi.json": api.openapi,
        "/v1/models": api.models,
        "/v1/models/{name:path}": api.model,
        "/v1/chat/completions": partial(api.generate, openai.chat),
        "/v1/completions": partial(api.generate, openai.completion),
    }
    routes = [
        Route(
            path,
            api.endpoint(work, free=path == "/health"),
            methods=["POST" if path.endswith("completions") else "GET"],
        )
        for path, work in works.items()
    ]
    guards = [
        Middleware(_Guard, settings, statuses),
        Middleware(
            _Cors,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,
        ),
    ]
    found = Starlette(
        routes=routes, middleware=guards, exception_handlers={HTTPException: _no_route}
    )
    found.router.redirect_slashes = False
    return found


def is_loopback(host: str) -> bool:
    """Of a name or an address, in brackets or not."""
    name = host.strip("[]").lower()
    with suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost"


def known_host(header: str, host: str | None) -> bool:
    """Whether a Host header names this server: a page whose name was made to lead to loopback
    sends its own. None: it is not bound to loopback, and has a key."""
    name = re.sub(r":\d*\Z", "", header)
    return host is None or is_loopback(name) or name.lower() == host.lower()


def origin(url: str) -> str:
    """As browsers send it. Raises UsageError for what is none."""
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s*?#@]+", url.lower()):
        raise UsageError(f"--allow-origin is {url!r}; it must be as https://example.org, no path")
    scheme, _, rest = url.lower().partition("://")
    return f"{scheme}://{rest.removesuffix({'http': ':80', 'https': ':443'}.get(scheme, ''))}"


def listen(host: str, port: int, key: str | None) -> tuple[socket.socket, bool]:
    """A socket on which connections wait, and whether it is loopback's. Raises UsageError, also for
    another where there is no key."""
    where = f"{host}:{port}"
    try:
        # Of several addresses one, of IPv4 if there is one.
        family, *_, to = min(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        local = is_loopback(str(to[0]))
        if not local and key is None:
            raise UsageError(
                f"--host {host} is not loopback: a key is needed (MLX_MTP_API_KEY, --api-key-file)"
            )
        return socket.create_server(to[:2], family=family, backlog=128), local
    except (OSError, UnicodeError) as error:
        why = (getattr(error, "strerror", None) or str(error)).partition(" (")[0].lower()
        raise UsageError(f"{where}: {why}; see --host and --port") from None


def start(app: Starlette, listening: socket.socket) -> tuple[uvicorn.Server, threading.Thread]:
    """Answers in a thread, so that signals stay the main one's."""
    how: Message = {"log_config": None, "log_level": "critical", "timeout_keep_alive": KEEP_ALIVE}
    config = uvicorn.Config(app, http="h11", ws="none", lifespan="off", **how)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), name="http", daemon=True)
    thread.start()
    return server, thread


def failure(error: Exception) -> tuple[int, Message]:
    """The status and OpenAI's object."""
    code, more = None, {}
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    else:
        found = failure_of(error)
        status, message = STATUS.get(found["code"], 500), found["message"]
    if isinstance(error, ContextError):
        code, more = "context_length_exceeded", found["data"]
    elif isinstance(error, openai.ModelError):
        status, code = 404, "model_not_found"
    # Messages about a parameter begin with its name.
    named = re.match(r"([a-z_]+[\w.\[\]]*)(?:: | is | has )", message) if status < 500 else None
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    object_ = {"message": message, "type": kind, "param": named and named[1], "code": code}
    return status, {"error": object_ | more}


def dumps(content: Message) -> bytes:
    # In ASCII: some clients take U+2028 for the end of a line.
    return json.dumps(content, allow_nan=False).encode()


def answer(
    content: Message, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(dumps(content), status, headers, "application/json")


def refusal(error: Exception) -> Response:
    status, content = failure(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, Busy):
        headers["Retry-After"] = "1"
    return answer(content, status, headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    error.detail = f"{request.method} {request.scope['path']}: {error.detail}"
    return refusal(error)


def stranger(headers: Headers, settings: Settings) -> str | None:
    """Why a request with these headers may not ask: it comes under another name than this server's,
    or from a web page."""
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    site = headers.get("sec-fetch-site")
    if len(hosts) > 1 or not known_host("".join(hosts), settings.host):
        return f"the Host header is {openai.shown(', '.join(hosts))}, not loopback's"
    if len(origins) > 1 or not set(origins) <= set(settings.origins):
        page = openai.shown(", ".join(origins))
        return f"web pages of {page} may not ask: see --allow-origin"
    if site in ("cross-site", "same-site") and not origins:
        return "web pages may not ask without an Origin: see --allow-origin"
    return None


class _Guard:
    """Refuses strangers, and counts all answers by their status."""

    def __init__(self, app: ASGIApp, settings: Settings, statuses: Counter[int]) -> None:
        self._app, self._settings, self._statuses = app, settings, statuses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(event: Event) -> None:
            if event["type"] == "http.response.start":
                self._statuses[event["status"]] += 1
            await send(event)

        why = stranger(Headers(scope=scope), self._settings)
        app = self._app if why is None else refusal(HTTPException(403, why))
        await app(scope, receive, counted)


class _Cors(CORSMiddleware):
    def preflight_response(self, request_headers: Headers) -> Response:
        found = super().preflight_response(request_headers)
        if found.status_code == 200:
            return found
        return refusal(HTTPException(found.status_code, bytes(found.body).decode()))


class _Api:
    def __init__(self, service: Service, settings: Settings, statuses: Counter[int]) -> None:
        self._service, self._settings, self._statuses = service, settings, statuses
        self._started = int(time.time())

    def endpoint(self, work: Work, *, free: bool) -> Work:
        async def answered(request: Request) -> Response:
            try:
                if not free:
                    self._authorize(request.headers.get("authorization", ""))
                return await work(request)
            except Exception as error:
                if not isinstance(error, HTTPException):
                    report(error)
                return refusal(error)

        return answered

    async def health(self, request: Request) -> Response:
        state = self._service.state
        return answer({"status": state}, 200 if state in ("ready", "unloaded") else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(metrics.text(self._service, self._statuses), media_type=metrics.TYPE)

    async def openapi(self, request: Request) -> Response:
        return answer(openapi.document(self._settings.key is not None))

    async def models(self, request: Request) -> Response:
        return answer({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        openai.check_model(request.path_params["name"], self._names())
        return answer(self._model())

    async def generate(self, check: Check, request: Request) -> Response:
        content = await self._read(request)
        self._service.check_room()
        body = await asyncio.to_thread(self._checked, content, check)
        job = _Asked(body, self._service, self._names)
        self._service.submit(job)
        return _Answering(self._service, job, self._settings.silence_s)

    async def _read(self, request: Request) -> bytes:
        most = self._settings.max_body
        content = bytearray()
        length = int(request.headers.get("content-length", 0))
        coding = request.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise HTTPException(415, f"the Content-Encoding is {openai.shown(coding)}: use none")
        if length <= most:
            try:
                async with asyncio.timeout(self._settings.body_s):
                    async for chunk in request.stream():
                        content += chunk
                        if len(content) > most:
                            break
            except TimeoutError:
                why = f"the body did not come within {self._settings.body_s:g} seconds"
                raise HTTPException(408, why, {"Connection": "close"}) from None
        if max(length, len(content)) > most:
            raise HTTPException(413, f"the body is longer than {most} bytes (--max-body)")
        return bytes(content)

    def _checked(self, content: bytes, check: Check) -> openai.Body:
        given = parse(content)
        if not isinstance(given, dict):
            raise UsageError("the body must be an object")
        body = check(given, self._settings.draft_len)
        model = self._service.model
        if model is None:
            return body
        openai.check_model(body.model, self._names())
        return body.prepared(model)

    def _authorize(self, given: str) -> None:
        key = self._settings.key
        scheme, _, token = given.partition(" ")
        # A header's text is Latin-1 to the byte.
        sent = token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        if key is not None and not hmac.compare_digest(sent, key.encode()):
            headers = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(401, "the key is missing or wrong (Authorization: Bearer)", headers)

    def _names(self) -> list[str]:
        return openai.names(self._settings.asked, self._service.model)

    def _model(self) -> Message:
        known = self._service.model
        return {
            "id": self._names()[-1],
            "object": "model",
            "created": self._started,
            "owned_by": "mlx-mtp",
            "context_length": known and known.context,
            "drafter": known and known.drafter and openai.own_name(known.drafter),
        }


class _Asked(Job):
    """A request. What the model brings waits here, its texts joined, until the loop takes it, so
    nobody waits for whoever reads slowly."""

    def __init__(self, body: openai.Body, service: Service, names: Callable[[], list[str]]) -> None:
        self.body = body
        self.result: Message = {}
        self.error: Exception | None = None
        self._service, self._names = service, names
        self._deltas: list[Message] = []
        self._over = False
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def begin(self, conversations: Conversations, engine: Engine) -> Answer:
        openai.check_model(self.body.model, self._names())
        return self.body.start(conversations, engine)

    def show(self, piece: Piece) -> None:
        if not self.body.stream or self.answer is None:
            return
        with self._lock:
            for delta in self.body.deltas(self.answer, piece):
                if self._deltas and self._deltas[-1].keys() == delta.keys():
                    for kind, more in delta.items():
                        self._deltas[-1][kind] += more
                else:
                    self._deltas.append(delta)
        self._tell()

    def end(self, error: Exception | None) -> None:
        if error is None and self.answer is not None and self._service.model is not None:
            self.result = self.body.result(self.answer, self._service.model.tokenizer)
        with self._lock:
            self.error, self._over = error, True
        self._tell()

    def _tell(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._news.set)

    async def news(self, within: float | None) -> tuple[list[Message], bool]:
        """What came since it was last asked, and whether that was all; nothing after so many
        seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not (self._deltas or self._over):
                    await self._news.wait()
                    self._news.clear()
        with self._lock:
            deltas, self._deltas = self._deltas, []
            return deltas, self._over


class _Answering(Response):
    """The answer to a job, which is cancelled when nobody waits for it any more. Its status is that
    of what comes first; a stream that is silent for too long begins without."""

    def __init__(self, service: Service, job: _Asked, silence_s: float) -> None:
        self._service, self._job, self._silence_s = service, job, silence_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        job = self._job
        try:
            deltas, over = await job.news(self._silence_s if job.body.stream else None)
            if job.error is not None and not deltas:
                await refusal(job.error)(scope, receive, send)
            elif not job.body.stream:
                await answer(job.result)(scope, receive, send)
            else:
                await self._stream(send, deltas, over)
        finally:
            watch.cancel()
            self._service.cancel(job)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._service.cancel(self._job)

    def _last_chunks(self) -> list[Message]:
        """What there is beside the text, as logprobs, comes with the finish reason."""
        assert self._job.answer is not None
        last, *counted = self._job.body.last_chunks(self._job.answer)
        (choice,) = self._job.result["choices"]
        last["choices"][0] |= {k: v for k, v in choice.items() if k not in ("message", "text")}
        return [last | {"mlx_mtp": self._job.result["mlx_mtp"]}, *counted]

    async def _stream(self, send: Send, deltas: list[Message], over: bool) -> None:
        job, body = self._job, self._job.body
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        if body.ask is not None:
            deltas.insert(0, {"role": "assistant", "content": ""})
        while True:
            said = b""
            if job.answer is not None:
                chunks = [body.chunk(job.answer, delta) for delta in deltas]
                chunks += self._last_chunks() if over and job.error is None else []
                said = b"".join(b"data: %b\n\n" % dumps(chunk) for chunk in chunks)
                deltas = []
            if over:
                _, error = failure(job.error) if job.error is not None else (0, None)
                said += b"data: %b\n\n" % (dumps(error) if error else b"[DONE]")
            content = said or b": ping\n\n"
            await send({"type": "http.response.body", "body": content, "more_body": not over})
            if over:
                return
            more, over = await job.news(self._silence_s)
            deltas += more
