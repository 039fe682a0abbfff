"""How `mlx-mtp serve` starts and ends as a process."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest

from mlx_mtp.cli.serve import api_key
from mlx_mtp.errors import UsageError
from tests.cli.conftest import COMMAND, environment
from tests.cli.web import ENDLESS

PROMPT_EXIT = 2.5  # seconds, on a machine with other work


@pytest.fixture
def serve():
    """Starts it on a free port and waits until it listens; the process and a connection."""
    started = []

    def run(*arguments, **env):
        command = [*COMMAND, "serve", "--port", "0", *arguments]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(**env)
        )
        started.append(process)
        line = process.stderr.readline().decode()
        (port,) = re.findall(r"listening on http://[\w.:\[\]]+:(\d+)/v1\n", line)
        return process, HTTPConnection("127.0.0.1", int(port), timeout=30)

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_it_whatever_runs(serve, number, code):
    process, connection = serve(MLX_MTP_API_KEY="k3y")
    key = {"Authorization": "Bearer k3y"}
    connection.request("POST", "/v1/completions", json.dumps(ENDLESS | {"stream": True}), key)
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline()
    assert b"embedded target is ready, drafts by" in process.stderr.readline()
    sent = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - sent < PROMPT_EXIT
    assert (process.returncode, out, err) == (code, b"", b"")
    assert b"[DONE]" not in rest(response)


def rest(response):
    try:
        return response.read()
    except Exception:
        return b""


def test_a_model_that_cannot_be_loaded_ends_it(serve, tmp_path):
    process, _ = serve("--model", str(tmp_path))
    _, err = process.communicate(timeout=30)
    assert process.returncode == 3
    assert len(err.splitlines()) == 1
    assert str(tmp_path) in err.decode()


def test_an_address_in_brackets(serve):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    _, connection = serve("--host", "[::1]")
    assert socket.create_connection(("::1", connection.port))


def test_a_port_that_is_taken(inside):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, out, err = inside("serve", "--port", str(port))
    assert (code, out) == (2, "")
    assert err == f"mlx-mtp: 127.0.0.1:{port}: address already in use; see --host and --port\n"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_hosts_need_a_key(inside, monkeypatch, host):
    monkeypatch.delenv("MLX_MTP_API_KEY", raising=False)
    code, _, err = inside("serve", "--port", "0", "--host", host)
    assert code == 2
    assert "is not loopback: a key is needed (MLX_MTP_API_KEY, --api-key-file)" in err


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["--host", "no such host"], "no such host:8765: "),
        (["--host", "192.0.2.1", "--api-key-file", "KEY"], "192.0.2.1:8765: "),
        (["--port", "65536"], "--port"),
        (["--allow-origin", "*"], "--allow-origin is '*'"),
        (["--api-key-file", "/nowhere/key"], "/nowhere/key: No such file"),
        (["--api-key-file", "/"], "--api-key-file /: Is a directory"),
        (["--max-body", "0"], "--max-body"),
        (["--draft-len", "9", "--port", "0"], "draft"),
        (["--parallel", "17"], "--parallel"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_options_are_one_line(inside, tmp_path, arguments, about):
    key = tmp_path / "key"
    key.write_text("secret\n")
    code, out, err = inside("serve", *(str(key) if a == "KEY" else a for a in arguments))
    assert (code, out) == (2, "")
    assert about in err
    assert len(err.splitlines()) == 1
    assert "secret" not in err


def test_where_the_key_is_from(tmp_path, monkeypatch):
    monkeypatch.delenv("MLX_MTP_API_KEY", raising=False)
    assert api_key(None) is None
    for wrong in ("", "\n", "a b"):
        monkeypatch.setenv("MLX_MTP_API_KEY", wrong)
        with pytest.raises(UsageError, match="MLX_MTP_API_KEY must hold a key"):
            api_key(None)
    monkeypatch.setenv("MLX_MTP_API_KEY", "one\n")
    assert api_key(None) == "one"
    file = tmp_path / "key"
    file.write_text("two\n")
    assert api_key(file) == "two"
    for wrong in ("", "\n", "a b", "a\nb", "\x00"):
        file.write_text(wrong)
        with pytest.raises(UsageError, match="must hold a key"):
            api_key(file)
    with pytest.raises(UsageError, match="at most 4096"):
        api_key(Path("/dev/zero"))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="no text"):
        api_key(file)
