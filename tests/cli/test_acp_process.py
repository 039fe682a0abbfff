"""`mlx-mtp acp` as a process: the embedded pair, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from tests.cli.conftest import COMMAND
from tests.cli.editor import Process


@pytest.fixture
def process():
    running = []

    def start(command, **how):
        running.append(Process(command, **how))
        return running[-1]

    yield start
    for one in running:
        one.process.kill()
        one.process.wait()


@pytest.fixture
def endless(tmp_path):
    """The command for one that says words without end."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"say": "word ", "endless": True}]))
    return [sys.executable, "-m", "tests.clients.scripted", str(script), "acp"]


def busy(editor):
    session = editor.open()
    editor.start("live", session, "go on")
    editor.until(lambda m: m.get("method") == "session/update", timeout=60)
    return editor


def test_a_session_of_the_embedded_pair(process):
    editor = process([*COMMAND, "acp", "--no-calibrate"])
    session = editor.open()
    editor.send(b'[{"jsonrpc": "2.0", "id": 1, "method": "initialize"}]\n')
    assert editor.next()["error"]["code"] == -32600
    editor.start("first", session, "def gcd(a, b):")
    first = editor.answer("first", timeout=60)["result"]
    assert first["stopReason"] == "end_turn"
    assert "return a" in editor.said()
    second = editor.prompt(session, "and now lcm")
    # All that went before is in the cache: what was asked, what was said, the tools.
    assert second["usage"]["cachedReadTokens"] >= first["usage"]["totalTokens"] - 1
    assert second["usage"]["cachedReadTokens"] >= 0.9 * second["usage"]["inputTokens"]
    editor.do("session/set_config_option", sessionId=session, configId="thought_level", value="on")
    assert editor.prompt(session, "and now")["stopReason"] == "end_turn"
    code, rest = editor.end()
    assert (code, rest) == (0, [])
    assert editor.process.stderr.read() == b""


def test_h11_the_end_of_stdin_ends_it_in_the_middle_of_an_answer(process, endless):
    editor = busy(process(endless))
    code, rest = editor.end()
    assert code == 0
    assert rest[-1]["result"]["stopReason"] == "cancelled"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_h19_signals(process, endless, number):
    editor = busy(process(endless))
    editor.process.send_signal(number)
    assert editor.process.wait(timeout=10) == 128 + number
    assert b"Traceback" not in editor.process.stderr.read()


def test_h11_nobody_reads_any_more(process, endless):
    read_end, write_end = os.pipe()
    editor = process(endless, stdout=write_end)
    os.close(write_end)
    os.close(read_end)
    assert editor.process.wait(timeout=60) == 0


def test_wrong_usage_is_one_line(process):
    editor = process([*COMMAND, "acp", "--draft-len", "9"])
    assert editor.process.wait(timeout=60) == 2
    assert editor.process.stderr.read().count(b"\n") == 1
