"""An editor: a client of `mlx-mtp acp` that holds every message to the protocol's own schema."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mlx_mtp.cli.backends.acp import Connection
from mlx_mtp.cli.backends.service import Service
from mlx_mtp.cli.backends.stdio import Writer
from tests.cli.conftest import environment
from tests.cli.talk import Child, Message, Talk

schema = pytest.importorskip("acp.schema")

OURS = {
    "session/update": schema.SessionNotification,
    "session/request_permission": schema.RequestPermissionRequest,
    "fs/read_text_file": schema.ReadTextFileRequest,
    "fs/write_text_file": schema.WriteTextFileRequest,
    "terminal/create": schema.CreateTerminalRequest,
    "terminal/wait_for_exit": schema.WaitForTerminalExitRequest,
    "terminal/output": schema.TerminalOutputRequest,
    "terminal/release": schema.ReleaseTerminalRequest,
}
RESULTS = {
    "initialize": schema.InitializeResponse,
    "session/new": schema.NewSessionResponse,
    "session/prompt": schema.PromptResponse,
    "session/set_config_option": schema.SetSessionConfigOptionResponse,
    "session/close": schema.CloseSessionResponse,
}
ALL = {"fs": {"readTextFile": True, "writeTextFile": True}, "terminal": True}


def held_to(model: Any, value: Any) -> None:
    """Valid, and nothing in it that the schema does not know."""
    checked = model.model_validate(value)
    assert checked.model_dump(mode="json", by_alias=True, exclude_unset=True) == value


class Editor(Talk):
    """`files` are what there is to be read and written, `ran` the commands; `permit` is the option
    that its user chooses."""

    def __init__(self, write: Callable[[bytes], object], read: Callable[[], bytes]) -> None:
        super().__init__(write, read)
        self.files: dict[str, str] = {}
        self.ran: list[Message] = []
        self.permit = "allow_once"
        self.asked: list[Message] = []
        self.updates: list[Message] = []
        self.on: dict[str, Callable[[Message], Any]] = {}
        self._methods: dict[Any, str] = {}
        self._last = 0

    def ask(self, name: Any, method: str, **params: Any) -> None:
        self._methods[name] = method
        super().ask(name, method, **params)

    def next(self, timeout: float = 20) -> Message | None:
        message = super().next(timeout)
        if message is None:
            return None
        if "method" in message:
            held_to(OURS[message["method"]], message["params"])
            if "id" in message:
                self.asked.append(message)
                self._answer(message)
            else:
                self.updates.append(message["params"]["update"])
        elif "result" in message:
            held_to(RESULTS[self._methods[message["id"]]], message["result"])
        return message

    def _answer(self, request: Message) -> None:
        """None: there is no answer yet. A text, or what has an error: that."""
        method, params = request["method"], request["params"]
        known = {
            "session/request_permission": lambda: {
                "outcome": {"outcome": "selected", "optionId": self.permit}
            },
            "fs/read_text_file": lambda: (
                {"content": self.files[params["path"]]}
                if params["path"] in self.files
                else {"error": {"code": -32002, "message": "Resource not found"}}
            ),
            "fs/write_text_file": lambda: (
                self.files.update({params["path"]: params["content"]}) or {}
            ),
            "terminal/create": lambda: self.ran.append(params) or {"terminalId": "t1"},
            "terminal/wait_for_exit": lambda: {"exitCode": 3},
            "terminal/output": lambda: {"output": "so it says\n", "truncated": False},
            "terminal/release": lambda: {},
        }
        answer = self.on[method](params) if method in self.on else known[method]()
        if answer is None:
            return
        if isinstance(answer, str):
            answer = {"error": {"code": -32603, "message": answer}}
        outcome = answer if isinstance(answer, dict) and "error" in answer else {"result": answer}
        self.send({"jsonrpc": "2.0", "id": request["id"], **outcome})

    def do(self, method: str, **params: Any) -> Message:
        """The whole answer to a request with an id of its own."""
        self._last += 1
        return self.call(f"do{self._last}", method, **params)

    def open(self, able: Message = ALL, cwd: str = "/work") -> str:
        """A new session."""
        self.do("initialize", protocolVersion=1, clientCapabilities=able)
        return self.do("session/new", cwd=cwd, mcpServers=[])["result"]["sessionId"]

    def start(self, name: Any, session: str, text: str) -> None:
        self.ask(name, "session/prompt", sessionId=session, prompt=words(text))

    def prompt(self, session: str, text: str) -> Message:
        answer = self.do("session/prompt", sessionId=session, prompt=words(text))
        return answer["result"]

    def stop(self, session: str) -> None:
        params = {"sessionId": session}
        self.send({"jsonrpc": "2.0", "method": "session/cancel", "params": params})

    def said(self, kind: str = "agent_message_chunk") -> str:
        """What came since the last look."""
        found = [one["content"]["text"] for one in self.updates if one["sessionUpdate"] == kind]
        self.updates = [one for one in self.updates if one["sessionUpdate"] != kind]
        return "".join(found)

    def calls(self) -> list[tuple[str, str]]:
        """How the calls of tools that came since the last look went."""
        titles = {u["toolCallId"]: u["title"] for u in self.updates if u.get("title")}
        found = [
            (titles[u["toolCallId"]], u["status"])
            for u in self.updates
            if u.get("status") in ("completed", "failed")
        ]
        self.updates = [one for one in self.updates if "toolCallId" not in one]
        return found


def words(text: str) -> list[Message]:
    return [{"type": "text", "text": text}]


class Inside(Editor):
    """A connection in this process."""

    def __init__(self, service: Service) -> None:
        lines: queue.Queue[bytes] = queue.Queue()
        read_end, write_end = os.pipe()
        super().__init__(lines.put, lambda: os.read(read_end, 1 << 16))
        self.connection = Connection(service, Writer(write_end, lambda _: None))
        self.code: int | None = None
        self.thread = threading.Thread(target=self._serve, args=(lines.get,), daemon=True)
        self.thread.start()

    def _serve(self, read: Callable[[], bytes]) -> None:
        self.code = self.connection.serve(read)

    def end(self) -> int | None:
        self.write(b"")
        self.thread.join(20)
        return self.code


class Process(Editor):
    """`mlx-mtp acp` as a process."""

    end = Child.end

    def __init__(self, command: list[str], **how: Any) -> None:
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | how
        self.process = subprocess.Popen(command, env=environment(), bufsize=0, **streams)
        out = self.process.stdout
        read = (lambda: os.read(out.fileno(), 1 << 16)) if out else lambda: b""
        super().__init__(self.process.stdin.write, read)
