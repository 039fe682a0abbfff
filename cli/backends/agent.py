"""The small tool loop of an agent: the model calls tools, the client does what they say.

Nothing is read, written or run by this process. A path is the model's, put behind the session's
folder as text; what a file is, and whether it may be touched, the client decides, and before each
edit and each command its user. What goes wrong is told the model, which may try something else.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from mlx_mtp.cli.backends.openai import Left
from mlx_mtp.cli.backends.service import Cancelled
from mlx_mtp.errors import MtpError, UsageError

if TYPE_CHECKING:
    from mlx_mtp.cli.backends.acp import Prompt

ROUNDS = 32  # answers of the model in one turn
MOST = 32_000  # characters of a file or of a command's output that the model is told at once
LARGEST = 1_000_000  # characters of a file that is edited
ERROR = 1000  # characters of a client's error that the model is told
READ, WRITE, RUN = "fs/read_text_file", "fs/write_text_file", "terminal/create"
NOT_FOUND = -32002
MISSING = re.compile(r"\bENOENT\b|no such file or directory|\(os error 2\)", re.IGNORECASE)
CANCELLED, MAYBE = "The user cancelled this.", " It may have been done, in whole or in part."
BROKEN = "error: the call of a tool cannot be read, so nothing was done; write it again"
OPTIONS = [("allow_once", "Allow"), ("allow_always", "Allow always"), ("reject_once", "Deny")]

Message = dict[str, Any]


class ToolError(MtpError):
    """A call that came to nothing, for a reason that the model is told."""


class ClientError(ToolError):
    """The client's answer is an error."""

    def __init__(self, method: str, error: Any) -> None:
        self.error = error
        super().__init__(f"{method}: {json.dumps(error, ensure_ascii=False)[:ERROR]}")

    def says_missing(self, path: str) -> bool:
        """Whether it is that there is no such file: by ACP's code, or by the system's words, which
        clients that know no such code pass on; those of the path itself do not count."""
        if isinstance(self.error, dict) and self.error.get("code") == NOT_FOUND:
            return True
        text, inside = (json.dumps(one, ensure_ascii=False) for one in (self.error, path))
        return bool(MISSING.search(text.replace(inside[1:-1], "")))


@dataclass
class Session:
    """A conversation. `able`: the client's methods that there are; `allowed`: kinds of tools that
    its user need not be asked about any more."""

    name: str
    cwd: str
    able: frozenset[str] = frozenset()
    thinking: bool = False
    messages: list[Message] = field(default_factory=list)
    allowed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        lines = ["You are a coding assistant.", f"The working directory is {self.cwd}."]
        if self.tools:
            lines.append("Use the tools to look at files and to change them. Be brief.")
        self.messages.append({"role": "system", "content": " ".join(lines)})

    @property
    def tools(self) -> list[Tool]:
        return [tool for tool in TOOLS if tool.needs <= self.able]

    def path(self, given: str) -> str:
        return posixpath.normpath(posixpath.join(self.cwd, given))


def turn(client: Prompt) -> str:
    """Runs the model and its tools until it has said what it wants; returns ACP's stop reason.
    Raises Cancelled, MtpError."""
    messages = client.session.messages
    try:
        for _ in range(ROUNDS):
            message, full, broken = client.generate()
            messages.append(message)
            calls = message.get("tool_calls", [])
            for call in calls:
                _call(client, call)
            if full and not calls:
                return "max_tokens"
            if broken:
                messages.append({"role": "user", "content": BROKEN})
            elif not calls:
                return "end_turn"
    finally:
        for call in unanswered(messages):
            messages.append(_result(call, CANCELLED))
    return "max_turn_requests"


def unanswered(messages: list[Message]) -> list[Message]:
    """The calls that have no result yet."""
    done: set[str] = set()
    for message in reversed(messages):
        if message["role"] != "tool":
            return [call for call in message.get("tool_calls", ()) if call["id"] not in done]
        done.add(message["tool_call_id"])
    return []


def _result(call: Message, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "content": unicode(text)}


def unicode(text: str) -> str:
    """Half a surrogate pair, which JSON can spell out, is no text."""
    return text.encode(errors="replace").decode()


def _call(client: Prompt, call: Message) -> None:
    """Does it, and puts what came of it among the messages."""
    name, given = call["function"]["name"], json.loads(call["function"]["arguments"])
    tool = next((tool for tool in client.session.tools if tool.name == name), None)
    what = given.get("path", given.get("command", ""))
    about: Message = {"toolCallId": call["id"], "kind": tool.kind if tool else "other"}
    about |= {"title": f"{name} {what}".strip(), "rawInput": given}
    client.update("tool_call", status="pending", **about)
    asked, text, status = Call(client, about), CANCELLED, "failed"
    try:
        if tool is None:
            known = ", ".join(tool.name for tool in client.session.tools) or "none"
            raise ToolError(f"there is no tool {name}; the tools are: {known}")
        text, status = tool.run(asked, Left(given)), "completed"
    except (ToolError, UsageError) as error:
        text = f"error: {error}"
    finally:
        if text == CANCELLED and asked.begun:
            text += MAYBE
        said = {"type": "content", "content": {"type": "text", "text": text}}
        more = {"content": [said]} if status == "failed" else {}
        client.update("tool_call_update", toolCallId=call["id"], status=status, **more)
        client.session.messages.append(_result(call, text))


@dataclass
class Call:
    """A call of a tool that is being done; `about` is what the client was told of it. `begun`: the
    client was told to do what cannot be taken back."""

    client: Prompt
    about: Message
    begun: bool = False

    def show(self, *content: Message, **more: Any) -> None:
        name = self.about["toolCallId"]
        self.client.update("tool_call_update", toolCallId=name, content=list(content), **more)

    def permit(self, *content: Message) -> None:
        """WAITS until the user allows it. Raises ToolError where that is denied."""
        allowed, kind = self.client.session.allowed, self.about["kind"]
        if kind in allowed:
            return
        options = [{"optionId": name, "kind": name, "name": said} for name, said in OPTIONS]
        about = {**self.about, "content": list(content)}
        answer = self.client.ask("session/request_permission", toolCall=about, options=options)
        outcome = Left(answer.take("outcome", dict, default={}))
        how = outcome.take("outcome")
        if how == "cancelled":
            raise Cancelled("Request cancelled")
        choice = outcome.take("optionId") if how == "selected" else None
        if choice == "allow_always":
            allowed.add(kind)
        elif choice != "allow_once":
            raise ToolError("the user denied this; do not try it again, ask what to do instead")


def need(left: Left, name: str, kind: type = str) -> Any:
    """Raises UsageError where it is missing."""
    value = left.take(name, kind)
    if value is None:
        raise UsageError(f"{left.where}{name} is missing")
    return value


def _read(call: Call, left: Left) -> str:
    path = call.client.session.path(need(left, "path"))
    part = {name: left.take(name, int, 1, 1 << 31) for name in ("line", "limit")}
    call.show(status="in_progress", locations=[{"path": path}])
    part = {name: value for name, value in part.items() if value is not None}
    skip, line = left.take("skip", int, 0, 1 << 31, 0), part.get("line", 1)
    text = need(call.client.ask(READ, path=path, **part), "content")[skip:]
    if len(text) <= MOST:
        return text
    kept, ended, _ = text[:MOST].rpartition("\n")
    if not ended:
        kept = text[:MOST]
        return f"{kept}\n[cut off inside line {line}; go on with line {line}, skip {skip + MOST}]"
    return f"{kept}\n[cut off here; line {line + kept.count(ended) + 1} is the next]"


def _edit(call: Call, left: Left) -> str:
    path = call.client.session.path(need(left, "path"))
    old, new = left.take("old_text", str, default=""), need(left, "new_text")

    def content() -> str | None:
        try:
            text = need(call.client.ask(READ, path=path), "content")
        except ClientError as error:
            if old or not error.says_missing(path):
                raise
            return None  # a file that is to be made
        if len(text) > LARGEST:
            raise ToolError(f"the file has {len(text)} characters; {LARGEST} are the most to edit")
        return text

    before = content()
    if before and not old:
        raise ToolError("the file exists; old_text must be the piece of it to replace")
    after = replaced(before or "", old, new) if old else new
    if after == before:
        raise ToolError("that changes nothing")
    diff = {"type": "diff", "path": path, "oldText": before, "newText": after}
    call.show(diff, locations=[{"path": path}])
    call.permit(diff)
    if content() != before:
        raise ToolError("the file has changed meanwhile; read it again")
    call.begun = True
    call.client.ask(WRITE, path=path, content=after)
    return "done"


def replaced(text: str, old: str, new: str) -> str:
    """With `new` for the one `old`, whatever ends their lines; what comes in has the text's line
    ends. Raises ToolError."""
    lines = r"(?:\r\n|(?<!\r)\n)".join(map(re.escape, re.split(r"\r?\n", old)))
    found = list(islice(re.finditer(f"(?=({lines}))", text), 2))
    if len(found) != 1:
        times = "more than once" if found else "not once"
        raise ToolError(f"old_text is in the file {times}; it must be there once")
    ends = "\r\n" if 2 * text.count("\r\n") > text.count("\n") else "\n"
    start, end = found[0].span(1)
    return text[:start] + re.sub(r"\r?\n", ends, new) + text[end:]


def _run(call: Call, left: Left) -> str:
    command, client = need(left, "command"), call.client
    if not command.strip():
        raise UsageError("command is empty")
    call.permit()
    call.begun = True
    shell = {"command": "/bin/sh", "args": ["-c", command], "cwd": client.session.cwd}
    terminal = need(client.ask(RUN, outputByteLimit=MOST, **shell), "terminalId")
    try:
        call.show({"type": "terminal", "terminalId": terminal}, status="in_progress")
        ended = client.ask("terminal/wait_for_exit", terminalId=terminal)
        output = need(client.ask("terminal/output", terminalId=terminal), "output")
    finally:
        client.tell("terminal/release", terminalId=terminal)  # which ends it, if it still runs
    code, signal = ended.take("exitCode"), ended.take("signal")
    code = "unknown" if code is None else code
    how = f"exit code {code}" if signal is None else f"signal {signal}"
    return f"{output[-MOST:]}\n[{how}]"


@dataclass(frozen=True)
class Tool:
    """`needs`: the client's methods without which it is not offered."""

    name: str
    kind: str
    needs: frozenset[str]
    run: Callable[[Call, Left], str]
    description: str
    properties: Message
    optional: tuple[str, ...] = ()

    def declaration(self) -> Message:
        required = [name for name in self.properties if name not in self.optional]
        schema = {"type": "object", "properties": self.properties, "required": required}
        about = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": about}


def _text(description: str, kind: str = "string") -> Message:
    return {"type": kind, "description": description}


PATH = _text("Absolute, or below the working directory.")
FIRST = _text("The first line to read, from 1.", "integer")
LIMIT = _text("How many lines to read.", "integer")
SKIP = _text("How many characters to leave out at the start, of a line too long.", "integer")
OLD = _text("The piece as it is in the file; empty for a new file.")
READING = "Read a text file."
EDITING = "Replace a piece of a text file, which must be in it once, or make a new file."
RUNNING = "Run a shell command in the working directory; gives its output and exit code."
TOOLS = [
    Tool(
        *("read_file", "read", frozenset({READ}), _read, READING),
        {"path": PATH, "line": FIRST, "limit": LIMIT, "skip": SKIP},
        optional=("line", "limit", "skip"),
    ),
    Tool(
        *("edit_file", "edit", frozenset({READ, WRITE}), _edit, EDITING),
        {"path": PATH, "old_text": OLD, "new_text": _text("What stands there then.")},
    ),
    Tool(
        *("run_command", "execute", frozenset({RUN}), _run, RUNNING),
        {"command": _text("The command line.")},
    ),
]
