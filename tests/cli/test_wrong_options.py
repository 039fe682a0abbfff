"""Wrong options of the commands that answer others: found before anything starts, or told those who
have asked by then."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from http.client import HTTPConnection

import pytest

from tests.cli.conftest import environment
from tests.cli.editor import Process
from tests.cli.talk import Child

COMMANDS = [["acp"], ["stdio"], ["serve", "--port", "0"]]
LATE = """
import sys, time
from pathlib import Path
from mlx_mtp.errors import UsageError
from mlx_mtp.weights import load

def load_pair(*given, **more):
    while not go.exists():
        time.sleep(0.01)
    raise UsageError("that does not go together")

load.load_pair = load_pair
go, sys.argv = Path(sys.argv[1]), ["mlx-mtp", *sys.argv[2:]]
from mlx_mtp.cli.main import run
run()
"""


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-kv", "0"], "--max-kv is 0; it must be 2 tokens or more"),
        (["--kv-bits", "3"], "--kv-bits is 3; it must be one of 8, 4"),
        (["--drafter-bits", "5"], "--drafter-bits is 5; it must be one of 8, 6, 4, 0"),
        (["--revision", "x"], "a revision needs the --model"),
        (["--no-drafter", "--drafter", "x"], "--drafter needs a drafter"),
    ],
)
def test_what_needs_no_loading_is_found_before_it(inside, command, arguments, words):
    code, out, err = inside(*command, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"mlx-mtp: {words}")
    assert err.count("\n") == 1


@pytest.fixture
def late(tmp_path):
    """The command for one whose options prove wrong when that file is there."""
    go = tmp_path / "go"
    return go, lambda *command: [sys.executable, "-c", LATE, str(go), *command]


def test_acp_answers_before_it_ends(late):
    go, command = late
    editor = Process(command("acp"))
    session = editor.open()
    editor.start(1, session, "hello")
    editor.do("session/new", cwd="/work", mcpServers=[])
    go.touch()
    assert editor.answer(1)["error"] == {"code": -32603, "message": "that does not go together"}
    assert editor.process.wait(timeout=20) == 2
    assert editor.process.stderr.read() == b"mlx-mtp: that does not go together\n"


def test_stdio_answers_before_it_ends(late):
    go, command = late
    child = Child(command=command("stdio"))
    child.ask(1, "completions", prompt="x")
    child.call(2, "initialize")
    go.touch()
    assert child.answer(1)["error"]["message"] == "that does not go together"
    assert child.process.wait(timeout=20) == 2
    assert child.process.stderr.read() == b"mlx-mtp: that does not go together\n"


def test_serve_answers_before_it_ends(late):
    go, command = late
    with subprocess.Popen(
        command("serve", "--port", "0"), stderr=subprocess.PIPE, env=environment()
    ) as process:
        (port,) = re.findall(rb":(\d+)/v1", process.stderr.readline())
        asking, looking = (HTTPConnection("127.0.0.1", int(port), timeout=30) for _ in range(2))
        asking.request("POST", "/v1/completions", json.dumps({"prompt": "x"}))
        seen = b""
        while b"waiting 1" not in seen:
            looking.request("GET", "/metrics")
            seen = looking.getresponse().read()
        go.touch()
        answer = asking.getresponse()
        assert answer.status == 503
        assert json.loads(answer.read())["error"]["message"] == "that does not go together"
        assert process.wait(timeout=20) == 2
        assert process.stderr.read() == b"mlx-mtp: that does not go together\n"
