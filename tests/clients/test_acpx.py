"""acpx on `mlx-mtp acp`. It starts an agent for each prompt, also of one session, so that here a
session's second turn knows nothing of its first."""

import os
import signal
import subprocess
import tempfile

import pytest

from tests.clients.conftest import folder, search_path
from tests.clients.test_acp_sdk import command, edit

DENIED = 5  # acpx's exit code
RULES = [
    {"when": "hello\nmodel\n", "say": "Hello there."},
    {"when": "edit please\nmodel\n", "say": edit("two", "2")},
    {"when": "done}", "say": "Edited."},
    {"when": "denied", "say": "As you like."},
    {
        "when": "run please\nmodel\n",
        "say": '<|tool_call>call:run_command{command:<|"|>x=2; echo 4$x | cat<|"|>}<tool_call|>',
    },
    {"when": "on and on\nmodel\n", "say": "word ", "endless": True},
]


@pytest.fixture
def acpx(tmp_path):
    if not (folder() / "node/node_modules/.bin/acpx").exists():
        pytest.skip("acpx is not there; .ci/clients installs it")
    (agent,) = command(tmp_path, *RULES)
    # Not below tmp_path, for which a socket's name would be too long.
    home, work = tempfile.TemporaryDirectory(prefix="acpx"), tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("one\ntwo\n")
    # One that waits for work as long as any test runs; closing the session ends it.
    program = ["acpx", "--ttl", "90", "--agent", agent]

    def start(*arguments):
        return subprocess.Popen(
            [*program, *arguments],
            cwd=work,
            env=os.environ | {"PATH": search_path(), "HOME": home.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(*arguments, code=0):
        process = start(*arguments)
        out, err = process.communicate(timeout=90)
        assert process.returncode == code, out + err
        return out + err

    run.start, run.file = start, work / "a.txt"
    run.prompts = lambda: (tmp_path / "script.json.prompts").read_text()
    with home:
        yield run


def begun(process):
    """Waits for words, or the end."""
    said = ""
    while (more := process.stdout.read(1)) and "word" not in said:
        said += more
    assert more, said + process.stderr.read()


def test_exec(acpx):
    assert acpx("--format", "quiet", "exec", "hello").strip() == "Hello there."


def test_an_edit_is_approved(acpx):
    assert "Edited." in acpx("--approve-all", "exec", "edit please")
    assert acpx.file.read_text() == "one\n2\n"


def test_an_edit_is_denied(acpx):
    assert "As you like." in acpx("exec", "edit please", code=DENIED)
    assert acpx.file.read_text() == "one\ntwo\n"


def test_a_command_runs(acpx):
    acpx("--approve-all", "exec", "run please")
    assert "42\\n\\n[exit code 0]" in acpx.prompts()


def test_a_session_its_options_and_cancel(acpx):
    acpx("sessions", "new")
    assert "Hello there." in acpx("hello")
    assert "Hello there." in acpx("hello")
    assert "thought_level=off" in acpx("set", "thought_level", "off")
    assert "must be one of off, on" in acpx("set", "thought_level", "perhaps", code=1)
    assert "no method" in acpx("set-mode", "plan", code=1)
    endless = acpx.start("on and on")
    begun(endless)
    assert "cancel" in acpx("cancel")
    out, _ = endless.communicate(timeout=60)
    assert "[done] cancelled" in out
    acpx("sessions", "close")


def test_sigint(acpx):
    endless = acpx.start("exec", "on and on")
    begun(endless)
    endless.send_signal(signal.SIGINT)
    out, _ = endless.communicate(timeout=60)
    assert "[done] cancelled" in out
