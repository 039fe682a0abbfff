"""Case H19: Ctrl-C and SIGTERM end the command promptly, keep the text, and print no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

from tests.cli.conftest import COMMAND, environment
from tests.cli.pairs import write_pair

# A second is what a user would take for prompt; the rest is for a machine with other work.
PROMPT_EXIT = 2.5


def start(model, *arguments, prompt="hi"):
    return subprocess.Popen(
        [*COMMAND, "generate", prompt, "--model", str(model), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )


def work(process, seconds):
    """Waits until it has computed for so many whole seconds, however busy the machine is."""
    shown = "0"
    while sum(60**i * float(part) for i, part in enumerate(shown.split(":")[::-1])) < seconds:
        time.sleep(0.05)
        assert process.poll() is None
        command = ["ps", "-o", "time=", "-p", str(process.pid)]
        shown = subprocess.run(command, capture_output=True, text=True).stdout


def stop(process, *signals):
    """Sends the signals; returns (exit code, rest of stdout, stderr) if that ends it promptly."""
    sent = time.perf_counter()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.05)
    out, err = process.communicate(timeout=30)
    assert time.perf_counter() - sent < PROMPT_EXIT
    assert b"Traceback" not in err
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGINT], 130),
        ([signal.SIGTERM], 143),
        ([signal.SIGHUP], 129),
        ([signal.SIGINT, signal.SIGINT], 130),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGHUP", "Ctrl-C twice"],
)
def test_h19_while_decoding_the_text_is_kept(model, signals, code):
    process = start(model, "--max-tokens", "20000")
    first = os.read(process.stdout.fileno(), 1)
    ended, rest, _ = stop(process, *signals)
    assert ended == code
    assert first + rest


def test_h19_json_of_a_part(tmp_path):
    endless = write_pair(tmp_path, positions=60000)
    config = json.loads((endless / "config.json").read_text())
    for level in (config, config.get("text_config", {})):
        level["eos_token_id"] = None
    (endless / "config.json").write_text(json.dumps(config))
    process = start(endless, "--max-tokens", "20000", "--json")
    work(process, 3)
    code, out, _ = stop(process, signal.SIGINT)
    found = json.loads(out)
    assert (code, found["finish_reason"]) == (130, "cancelled")
    assert found["token_ids"]


def test_h19_while_the_prompt_is_read(model):
    process = start(model, prompt="hello there " * 4000)
    work(process, 2)
    assert stop(process, signal.SIGINT)[:2] == (130, b"")


WAYS_TO_LOAD = {
    "in Python": "__import__('time').sleep(60)",
    "in native code": "__import__('hashlib').pbkdf2_hmac('sha256', b'', b'', 1 << 27)",
}


@pytest.mark.parametrize("way", WAYS_TO_LOAD)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_h19_while_loading(way, number, code):
    program = f"""
from mlx_mtp.weights import load
def load_pair(*_, **__):
    print("loading", flush=True)
    {WAYS_TO_LOAD[way]}
load.load_pair = load_pair
from mlx_mtp.cli.main import run
run()
"""
    command = [COMMAND[0], "-c", program, "generate", "hi"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"loading\n"
    assert stop(process, number) == (code, b"", b"")


def test_h19_while_it_waits_for_stdin(model):
    process = subprocess.Popen(
        [*COMMAND, "generate", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    time.sleep(0.6)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PROMPT_EXIT) == 130
    assert process.stderr.read() == b""
