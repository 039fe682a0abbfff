"""Agent Client Protocol v1 over two file descriptors, one message a line: `mlx-mtp acp`.

The loop is our own, on stdio's reader, parser and writer, because the Python SDK's (0.12.1) leaves
a malformed line unanswered, dies of a JSON array and runs two prompts of a session at once: to
guard it takes more code than to do without it. Its schema takes 0.8 s to import, more than the
answer to `initialize` may; the tests hold every message to it. The reader (the main thread) never
waits; a turn has a thread of its own, which waits for the model and for the client.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from itertools import count
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

from mlx_mtp.cli.backends import agent, openai, stdio
from mlx_mtp.cli.backends.agent import need
from mlx_mtp.cli.backends.openai import Left
from mlx_mtp.cli.backends.service import Cancelled, Job, NotLoaded, Service, report
from mlx_mtp.cli.backends.stdio import Refused
from mlx_mtp.cli.terminal import say
from mlx_mtp.errors import ContextError, UsageError

if TYPE_CHECKING:
    from mlx_mtp.conversation import Conversations, Turn
    from mlx_mtp.engine.session import Engine
    from mlx_mtp.generation import Piece

USAGE = ("inputTokens", "outputTokens", "cachedReadTokens")
THOUGHTS = {"off": False, "on": True}

Message = dict[str, Any]


class Step(Job):
    """One answer of the model in a turn; `ended` is set then, to what it ended in."""

    def __init__(self, prompt: Prompt, draft_len: int | None) -> None:
        self._prompt, self._draft_len = prompt, draft_len
        self.broken = False  # whether there was a call of a tool that cannot be read
        self.ended: Future[None] = Future()

    def begin(self, conversations: Conversations, engine: Engine) -> Turn:
        from mlx_mtp.conversation import Ask
        from mlx_mtp.generation import Options

        session = self._prompt.session
        tools = [tool.declaration() for tool in session.tools]
        ask = Ask(session.messages, tools, thinking=session.thinking, session=session.name)
        options = Options(max_tokens=None, draft_len=self._draft_len)
        return conversations.start(engine, ask, options)

    def show(self, piece: Piece) -> None:
        thoughts, text = "".join(text for text, _ in piece.thoughts), piece.text
        for broken in piece.broken:  # which is no text for the user
            self.broken = True
            thoughts, text = thoughts.replace(broken, "", 1), text.replace(broken, "", 1)
        self._prompt.say("agent_thought_chunk", thoughts)
        self._prompt.say("agent_message_chunk", text)

    def end(self, error: Exception | None) -> None:
        self.ended.set_exception(error) if error else self.ended.set_result(None)


class Prompt:
    """A request `session/prompt` that is being answered, in a thread of its own."""

    def __init__(self, connection: Connection, name: Any, session: agent.Session) -> None:
        self.name, self.session = name, session
        self.answered = False
        self._connection = connection
        self._lock = threading.Lock()
        self._cancelled = False
        self._step: Step | None = None
        self._asked: set[Future[Any]] = set()
        self._used: Counter[str] = Counter()

    def run(self, text: str) -> None:
        messages = self.session.messages
        messages.append({"role": "user", "content": text})
        before = len(messages)
        outcome: Message
        try:
            outcome = self._stopped(agent.turn(self))
        except Cancelled:
            outcome = self._stopped("cancelled")
        except Exception as error:
            report(error)
            outcome = {"error": self._connection.failure(error)}
            if len(messages) == before:
                messages.pop()  # so that a shorter one may be tried
            elif isinstance(error, ContextError):
                self.full(str(error))
                outcome = self._stopped("max_tokens")
        self._connection.answer(self, outcome)

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            asked, step = list(self._asked), self._step
        for future in asked:
            if not future.done():
                future.set_exception(Cancelled("Request cancelled"))
        if step is not None:
            self._connection.service.cancel(step)

    def generate(self) -> tuple[Message, bool, bool]:
        """WAITS for the model's answer to the session's messages, whether the context is full,
        which the client is told, and whether a call of a tool cannot be read; what there is of a
        cancelled one is among the messages. Raises Cancelled, MtpError."""
        step = Step(self, self._connection.draft_len)
        with self._lock:
            self._check()
            self._step = step
        cancelled = None
        try:
            self._connection.service.submit(step)
            step.ended.result()
        except Cancelled as error:
            cancelled = error
        finally:
            self._step = None
        turn = cast("Turn | None", step.answer)
        message = turn.message() if turn else {"role": "assistant", "content": ""}
        if turn is not None:
            stats = turn.request.stats
            counts = (stats.prompt_tokens, stats.completion_tokens, stats.cached_tokens)
            self._used.update(dict(zip(USAGE, counts, strict=True)))
        if cancelled is not None:
            self.session.messages.append(message)
            raise cancelled
        full = turn is not None and turn.request.finish_reason == "length"
        if full and not message.get("tool_calls"):
            model = self._connection.service.model
            self.full(f"the context, or max-kv, of {model.context if model else 0} tokens is full")
        return message, full, step.broken

    def full(self, why: str) -> None:
        self.say("agent_message_chunk", f"\n\n[{why}; go on in a new session]")

    def ask(self, method: str, /, **params: Any) -> Left:
        """WAITS for what the client answers. Raises ToolError, Cancelled."""
        future: Future[Any] = Future()
        with self._lock:
            self._check()
            self._asked.add(future)
        try:
            self._connection.ask(method, {"sessionId": self.session.name, **params}, future)
            answer = future.result()
        finally:
            self._asked.discard(future)
        return Left(answer if isinstance(answer, dict) else {}, f"{method}: ")

    def tell(self, method: str, /, **params: Any) -> None:
        """The same, but nobody waits for the answer."""
        self._connection.ask(method, {"sessionId": self.session.name, **params}, Future())

    def update(self, kind: str, /, **update: Any) -> None:
        params = {"sessionId": self.session.name, "update": {"sessionUpdate": kind, **update}}
        self._connection.put({"method": "session/update", "params": params})

    def say(self, kind: str, text: str) -> None:
        if text:
            self.update(kind, content={"type": "text", "text": text})

    def _check(self) -> None:
        if self._cancelled:
            raise Cancelled("Request cancelled")

    def _stopped(self, reason: str) -> Message:
        usage = {name: self._used[name] for name in USAGE}
        usage["totalTokens"] = self._used["inputTokens"] + self._used["outputTokens"]
        return {"result": {"stopReason": reason, "usage": usage}}


class Connection(stdio.Endpoint):
    """One client."""

    def __init__(
        self, service: Service, writer: stdio.Writer, draft_len: int | None = None
    ) -> None:
        methods = {
            "initialize": self._initialize,
            "session/new": self._new,
            "session/set_config_option": self._configure,
            "session/close": self._close,
        }
        super().__init__(writer, methods)
        self.service, self.draft_len = service, draft_len
        self._able: frozenset[str] | None = None
        self._sessions: dict[str, agent.Session] = {}
        self._asked: dict[Any, tuple[str, Message, Future[Any]]] = {}
        self._names = count()
        self._refused = False

    def serve(self, read: Callable[[], bytes]) -> int:
        """Answers what is read until EOF, which cancels what is live then; the exit code."""
        watch = partial(self._end_for_wrong_options, self.service)
        threading.Thread(target=watch, daemon=True).start()
        for number, line in enumerate(stdio.lines(read), 1):
            if line is None:
                self._lost()
            self._receive(line, number)
        self._cancel(lambda prompt: True)
        self._last_words()
        failed = self.service.failed
        return failed.exit_code if failed is not None and self._refused else 0

    def put(self, message: Message) -> None:
        """WAITS while the client does not read."""
        self.writer.put(stdio.Line(message))

    def answer(self, prompt: Prompt, outcome: Message) -> None:
        line = stdio.Line({"id": prompt.name, **outcome}, prompt)
        self.writer.put(line, last=partial(self._live.pop, prompt.name))

    def ask(self, method: str, params: Message, answer: Future[Any]) -> None:
        self.put(self._request(method, params, answer))

    def _request(self, method: str, params: Message, answer: Future[Any]) -> Message:
        name = next(self._names)
        self._asked[name] = method, params, answer
        return {"id": name, "method": method, "params": params}

    # -- the reader -----------------------------------------------------------------------------

    def _answered(self, name: Any, message: Message) -> bool:
        given = message.keys() & {"result", "error"}
        if name not in self._asked:
            if not given:
                raise Refused(stdio.INVALID, "a request has a method")
            return True
        method, params, future = self._asked.pop(name)
        whole = message.get("jsonrpc") == "2.0" and len(given) == 1
        if whole and "result" in message:
            if not future.done():
                future.set_result(message["result"])
            elif method == agent.RUN:  # nobody waits any more, and the terminal would be nobody's
                self._release(params["sessionId"], message["result"])
        elif not future.done():
            why = message["error"] if whole else "the client's answer is no JSON-RPC 2.0 response"
            future.set_exception(agent.ClientError(method, why))
        return True

    def _release(self, session: str, made: Any) -> None:
        terminal = made.get("terminalId") if isinstance(made, dict) else None
        if isinstance(terminal, str):
            params = {"sessionId": session, "terminalId": terminal}
            self._say(self._request("terminal/release", params, Future()))

    def _lost(self) -> None:
        """A line that was too long to be read may be the answer to any request of ours."""
        for method, _, future in list(self._asked.values()):
            if not future.done():
                why = f"the client sent a line of more than {stdio.MAX_LINE} bytes: it is not read"
                future.set_exception(agent.ClientError(method, why))

    def _notified(self, method: str, params: Any) -> None:
        named = params if isinstance(params, dict) else {}
        if method == "session/cancel":
            self._cancel(lambda prompt: prompt.session.name == named.get("sessionId"))
        elif method == "$/cancel_request":
            self._cancel(lambda prompt: prompt.name == named.get("requestId"))

    def _cancel(self, which: Callable[[Prompt], bool]) -> None:
        for prompt in filter(which, list(self._live.values())):
            prompt.cancel()

    def failure(self, error: Exception) -> Message:
        """As of stdio, but for a code that is another thing here."""
        found = super().failure(error)
        if not isinstance(error, NotLoaded):
            return found
        self._refused = True
        return found | {"code": stdio.INTERNAL}

    def _session(self, left: Left) -> agent.Session:
        name = need(left, "sessionId")
        if name not in self._sessions:
            raise Refused(agent.NOT_FOUND, f"there is no session {openai.shown(name)}")
        return self._sessions[name]

    def _initialize(self, params: Message) -> Message:
        left = Left(params)
        need(left, "protocolVersion", int)
        able = Left(left.take("clientCapabilities", dict, default={}), "clientCapabilities.")
        files = Left(able.take("fs", dict, default={}), "clientCapabilities.fs.")
        found = {
            agent.READ: files.take("readTextFile", bool),
            agent.WRITE: files.take("writeTextFile", bool),
            agent.RUN: able.take("terminal", bool),
        }
        self._able = frozenset(method for method, given in found.items() if given)
        return {
            "protocolVersion": 1,
            "agentCapabilities": {
                "loadSession": False,
                "promptCapabilities": {"image": False, "audio": False, "embeddedContext": True},
                "mcpCapabilities": {"http": False, "sse": False},
                "sessionCapabilities": {"close": {}},
            },
            "agentInfo": {"name": "mlx-mtp", "version": version("mlx-mtp")},
            "authMethods": [],
        }

    def _new(self, params: Message) -> Message:
        if self._able is None:
            raise Refused(stdio.INVALID, "initialize comes before session/new")
        left = Left(params)
        cwd = need(left, "cwd")
        if not cwd.startswith("/"):
            raise UsageError(f"cwd is {openai.shown(cwd)}; it must be an absolute path")
        if left.take("mcpServers", list):
            say("MCP servers are not used")
        name = f"sess_{secrets.token_hex(12)}"
        session = self._sessions[name] = agent.Session(name, agent.unicode(cwd), self._able)
        return {"sessionId": name, "configOptions": options_of(session)}

    def _configure(self, params: Message) -> Message:
        left = Left(params)
        session = self._session(left)
        left.choice("configId", ["thought_level"])
        session.thinking = THOUGHTS[left.choice("value", THOUGHTS)]
        return {"configOptions": options_of(session)}

    def _close(self, params: Message) -> Message:
        session = self._session(Left(params))
        del self._sessions[session.name]
        self._cancel(lambda prompt: prompt.session is session)
        with suppress(NotLoaded):
            self.service.between_steps(lambda engine: engine.forget(session.name))
        return {}

    def _submit(self, name: Any, method: str, params: Message) -> None:
        if method != "session/prompt":
            raise Refused(stdio.UNKNOWN, f"there is no method {openai.shown(method)}")
        left = Left(params)
        session, text = self._session(left), text_of(need(left, "prompt", list))
        if any(prompt.session is session for prompt in list(self._live.values())):
            raise Refused(stdio.INVALID, "the session is busy: cancel its turn, or wait for it")
        prompt = self._live[name] = Prompt(self, name, session)
        threading.Thread(target=prompt.run, args=(text,), daemon=True).start()


def options_of(session: agent.Session) -> list[Message]:
    known = [{"value": value, "name": value.capitalize()} for value in THOUGHTS]
    option = {"id": "thought_level", "name": "Thinking", "category": "thought_level"}
    now = "on" if session.thinking else "off"
    return [{**option, "type": "select", "currentValue": now, "options": known}]


def text_of(blocks: list[Any]) -> str:
    """A prompt as one text. Raises UsageError for what is no text, or none."""
    text = "".join(_block(block, f"prompt[{i}]") for i, block in enumerate(blocks))
    if not text.strip():
        raise UsageError("prompt has no text")
    return agent.unicode(text)


def _block(block: Any, where: str) -> str:
    if not isinstance(block, dict):
        raise UsageError(f"{where} must be an object")
    left = Left(block, f"{where}.")
    kind = left.choice("type", ("text", "resource_link", "resource"))
    if kind == "text":
        return cast("str", need(left, "text"))
    if kind == "resource_link":
        return _place(need(left, "uri"))
    inner = Left(need(left, "resource", dict), f"{where}.resource.")
    return f"\n{_place(need(inner, 'uri'))}:\n```\n{need(inner, 'text')}\n```\n"


def _place(uri: str) -> str:
    """What a tool takes for a file: its path."""
    return unquote(uri.removeprefix("file://")) if uri.startswith("file://") else uri
