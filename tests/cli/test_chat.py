"""`mlx-mtp chat`: on a terminal that is a pty, through pipes, and its parts alone."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import stat
import subprocess
import sys
import time

import pytest

from mlx_mtp.cli import chat
from mlx_mtp.errors import UsageError
from tests.cli.conftest import COMMAND, environment

GREEDY = ("--temp", "0", "--max-tokens", "12")


class Terminal:
    """A chat on a pty of its own; `data` is the folder that XDG_DATA_HOME names."""

    def __init__(self, data, *arguments):
        self.data = data
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, "chat", *arguments],
            preexec_fn=lambda: os.login_tty(slave),  # so that ^C is a signal
            env=environment(XDG_DATA_HOME=str(data), INPUTRC="/dev/null"),
        )
        os.close(slave)
        self.rest = b""

    def until(self, text, seconds=20):
        """What comes before that text; it is taken."""
        end = time.monotonic() + seconds
        while text.encode() not in self.rest:
            ready, _, _ = select.select([self.master], [], [], max(end - time.monotonic(), 0))
            assert ready, f"no {text!r} in {self.rest.decode(errors='replace')!r}"
            self.rest += os.read(self.master, 65536)
        before, _, self.rest = self.rest.partition(text.encode())
        return before.decode()

    def type(self, text):
        """Wait for the prompt, then type it and Enter."""
        before = self.until("> ")
        os.write(self.master, text.encode() + b"\r")
        return before

    def end(self):
        try:
            while os.read(self.master, 65536):
                pass
        except OSError:  # the other end has gone
            pass
        code = self.process.wait(timeout=10)
        os.close(self.master)
        return code

    def saved(self, name):
        return json.loads((self.data / "mlx-mtp" / "chats" / f"{name}.json").read_text())


@pytest.fixture
def terminal(tmp_path):
    started = []

    def start(*arguments):
        started.append(Terminal(tmp_path, *arguments))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def test_a_conversation(terminal):
    """On the embedded pair: what is said, what is sent, what is kept, and KV that goes on."""
    here = terminal(*GREEDY)
    here.type("/stats")
    here.until("nothing was answered yet")
    here.type("def gcd(a, b):\\")
    here.until("... ")
    os.write(here.master, b"    # Euclid\r")
    here.until("tokens/round")
    here.type('"""')
    here.until("... ")
    os.write(here.master, b'/one\r\\\r"""\r')
    here.type("//two")
    here.type("/stats")
    here.until("mlx-mtp: accepted by position")
    cached, prompt = here.until(" prompt tokens were in KV").rsplit("mlx-mtp: ")[-1].split(" of ")
    assert int(prompt) - int(cached) < 20  # the turns' ends and the new question
    here.type("/no such")
    here.until("/no such is no command; /help lists them")
    here.type("/save first")
    here.until("saved as ")
    here.type("/system Speak.")
    here.type("/think on")
    here.type("/draft 9")
    here.until("it must be 0 to 8")
    here.type("/draft 2")
    here.type("three")
    here.type("/save first")
    here.until("write over it? [y/N] ")
    os.write(here.master, b"n\r")
    here.until("not saved")
    here.type("/save second.json")
    here.type("/clear")
    here.type("/save third")
    here.until("nothing to save")
    here.type("/load first")
    here.until("6 messages")
    here.type(f"/save {here.data}/third")
    here.until("saved as ")
    here.until("> ")
    os.write(here.master, b"\x04")
    assert here.end() == 0

    first, second = here.saved("first"), here.saved("second")
    asked = [m["content"] for m in first["messages"] if m["role"] == "user"]
    assert asked == ["def gcd(a, b):\n    # Euclid", "/one\n\\", "/two"]
    assert (first["system"], first["thinking"]) == (None, False)
    assert second["messages"][:6] == first["messages"]
    assert (second["system"], second["thinking"]) == ("Speak.", True)
    assert json.loads((here.data / "third").read_text()) == first
    folder = here.data / "mlx-mtp" / "chats"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(f.stat().st_mode) for f in folder.iterdir()} == {0o600}
    assert {f.name for f in folder.iterdir()} == {"first.json", "second.json"}


def test_ctrl_c_ends_an_answer_then_a_line_then_the_chat(terminal, model):
    here = terminal("--model", model, "--history")
    here.type("hi")
    here.until("tokens/round")
    os.write(here.master, b"\x03")
    here.type("/save part")
    here.until("saved as ")
    here.until("> ")
    for typed in (b"never", b"nor this"):
        os.write(here.master, typed)
        here.until(typed.decode())
        time.sleep(0.2)  # Python's readline hears a signal while it waits, not while it draws
        os.write(here.master, b"\x03")
        here.until("Ctrl-C again, Ctrl-D or /exit leaves")
        here.until("> ")
    os.write(here.master, b"\x03")
    assert here.end() == 0
    question, part = here.saved("part")["messages"]
    assert question == {"role": "user", "content": "hi"}
    assert part["content"]
    file = here.data / "mlx-mtp" / "chats" / "history"
    assert file.read_text().splitlines()[-2:] == ["hi", "/save part"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("answering", [False, True])
def test_sigterm(terminal, model, answering):
    here = terminal("--model", model)
    if answering:
        here.type("hi")
        here.until("tokens/round")
    else:
        here.until("> ")
    here.process.send_signal(signal.SIGTERM)
    assert here.end() == 143
    assert not (here.data / "mlx-mtp").exists()


def piped(*arguments, stdin):
    return subprocess.run(
        [*COMMAND, "chat", *arguments],
        input=stdin,
        capture_output=True,
        env=environment(),
        timeout=60,
        check=False,
    )


def test_h16_piped_stdin_is_one_prompt(model, generate):
    text = "/stats\nhi\n"
    done = piped("--model", model, *GREEDY, stdin=text.encode())
    assert done.returncode == 0
    assert done.stdout == generate(text[:-1], *GREEDY).stdout
    assert done.stderr.splitlines()[-1] == b"mlx-mtp: the answer was cut off after 12 tokens"


@pytest.mark.parametrize(
    ("stdin", "line"), [(b"", "no prompt"), (b" \n", "no prompt"), (b"\xff", "not valid UTF-8")]
)
def test_h16_stdin_without_a_prompt(inside, stdin, line):
    code, out, err = inside("chat", stdin=stdin)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert line in err


def test_input_that_is_no_terminals_line_is_told(monkeypatch, capsys):
    """Without readline a terminal that is not set to UTF-8 can send anything."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\udcff\n"))
    chat.converse(None)
    assert "mlx-mtp: that is not valid UTF-8" in capsys.readouterr().err


def test_a_history_that_cannot_be_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "readline", None)
    with pytest.raises(UsageError, match="built without"), chat.kept_lines():
        pass


@pytest.fixture
def talk(tmp_path, monkeypatch):
    """A chat with something in it, and no model."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    return chat.Chat(None, None, None, "be", messages=said)


GOOD = {"system": None, "thinking": False, "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"{", "is no saved chat: it is not JSON"),
        (b"[" * 100_000, "is no saved chat: it is not JSON"),
        (b"\xff", "is no saved chat: it is not JSON"),
        (json.dumps(GOOD | {"system": "\ud800"}), "is no saved chat: it is not JSON"),
        (json.dumps([GOOD]), "system, thinking or messages is wrong"),
        (json.dumps(GOOD | {"thinking": 1}), "system, thinking or messages is wrong"),
        (json.dumps(GOOD | {"messages": "x"}), "system, thinking or messages is wrong"),
        (json.dumps(GOOD | {"messages": [{"role": "x"}]}), "messages[0]"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_bad_file_is_not_loaded(talk, tmp_path, content, line):
    before = (talk.system, talk.thinking, list(talk.messages))
    if content is not None:
        raw = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "bad").write_bytes(raw)
    with pytest.raises(UsageError, match=line.replace("[", r"\[")) as told:
        talk.command(f"/load {tmp_path}/bad")
    assert "\n" not in str(told.value)
    assert (talk.system, talk.thinking, talk.messages) == before


def full(*_):
    raise OSError(28, "No space left")


def test_saving_over_a_file_is_asked_for_and_whole_or_not_at_all(talk, tmp_path, monkeypatch):
    path = tmp_path / "kept"
    path.write_text("before")
    path.chmod(0o644)
    monkeypatch.setattr("builtins.input", lambda _="": "y")
    with monkeypatch.context() as broken:
        broken.setattr(chat.Path, "replace", full)
        with pytest.raises(UsageError, match="cannot be written: No space left"):
            talk.save(path)
    assert path.read_text() == "before"
    talk.save(path)
    assert json.loads(path.read_text())["messages"] == talk.messages
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [f.name for f in tmp_path.iterdir()] == ["kept"]
    with pytest.raises(UsageError, match="cannot be written: No such file or directory"):
        talk.command(f"/save {tmp_path}/nowhere/x")
