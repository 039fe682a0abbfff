"""The commands on two ranks: rank 0 answers, the other says nothing, and all end when one does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from functools import partial
from multiprocessing.connection import Client, Listener

import pytest

from mlx_mtp import ranks
from mlx_mtp.cli import terminal
from mlx_mtp.models.shards import Ranks
from tests.cli.conftest import COMMAND, environment
from tests.cli.pairs import write_pair
from tests.cli.talk import ENDLESS, Talk
from tests.ranks.launch import start

SOON = 5  # seconds after which no rank may be left


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_pair(tmp_path_factory.mktemp("ranks"), positions=60000))


@pytest.fixture
def launch(model, tmp_path):
    """Two ranks of a command; those that are left at the end of a test are killed."""
    left = []

    def run(command, *arguments, model=model, **how):
        model = ("--model", model) if command != "bench" else (model,)
        left.extend(processes := start(2, tmp_path, [*COMMAND, command, *model, *arguments], **how))
        return processes

    yield run
    for process in left:
        process.kill()
        process.wait()


def ended(processes, timeout=SOON):
    """The exit codes, and what was still written on stderr."""
    until = time.monotonic() + timeout
    codes = [process.wait(max(until - time.monotonic(), 0.01)) for process in processes]
    return codes, [process.stderr.read().decode() for process in processes]


def talk(process):
    return Talk(process.stdin.write, partial(os.read, process.stdout.fileno(), 1 << 16))


def test_stdio_answers_and_ends_on_shutdown(launch):
    """The other rank's stdin has a request of its own, which nobody reads."""
    processes = launch("stdio")
    with contextlib.suppress(BrokenPipeError):
        processes[1].stdin.write(b'{"prompt": "hi"}\n')
    client = talk(processes[0])
    assert client.complete(1)["usage"]["completion_tokens"] == 8
    refused = client.call(2, "completions", prompt="a", model="another")
    assert "another" in refused["error"]["message"]
    client.ask(3, "completions", prompt="a", max_tokens=3)
    client.ask(4, "shutdown")
    assert client.answer(3)["result"]["usage"]["completion_tokens"] == 3
    codes, said = ended(processes)
    assert codes == [0, 0]
    assert said == ["mlx-mtp: several ranks keep their weights: --idle-unload is off\n", ""]
    assert processes[1].stdout.read() == b""


@pytest.mark.parametrize("killed", [0, 1])
def test_when_one_is_killed_the_other_ends(launch, killed):
    processes = launch("stdio", "--idle-unload", "0")
    client = talk(processes[0])
    client.ask(1, "completions", prompt="def", stream=True, **ENDLESS)
    client.until(lambda m: m.get("method") == "completions.chunk", timeout=60)
    processes[killed].send_signal(signal.SIGKILL)
    codes, said = ended(processes)
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 1
    name = "mlx-mtp" if killed else "mlx-mtp (rank 1)"
    line = f"{name}: rank {killed} of 2 has gone, and this one ends with it"
    assert [own for own in said[1 - killed].splitlines() if not own.startswith("[ring]")] == [line]


@pytest.mark.parametrize(("rank", "number", "code"), [(0, 2, 130), (1, 2, 130), (0, 15, 143)])
def test_a_signal_to_one_ends_all_with_its_code(launch, rank, number, code):
    processes = launch("generate", "def", "--max-tokens", "4000", "--min-tokens", "4000", "-q")
    assert processes[0].stdout.read(1)
    processes[rank].send_signal(number)
    codes, said = ended(processes)
    assert codes == [code, code]
    assert "Traceback" not in "".join(said)


def test_serve_listens_on_rank_0_alone(launch):
    processes = launch("serve", "--port", "0")
    lines = iter(processes[0].stderr.readline, b"")
    said = [next(lines).decode() for _ in range(3)]
    port = re.search(r"http://127\.0\.0\.1:(\d+)/v1", said[1])[1]
    body = json.dumps({"prompt": "def", "max_tokens": 3}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 3
    processes[0].stdin.close()  # as when mlx.launch is killed
    codes, said = ended(processes)
    assert codes == [129, 129]
    assert said == ["mlx-mtp: mlx.launch has gone, and this ends with it\n", ""]


def test_acp_ends_with_its_stdin(launch):
    processes = launch("acp", "--idle-unload", "0")
    client = talk(processes[0])
    hello = client.call(1, "initialize", protocolVersion=1, clientCapabilities={})
    assert hello["result"]["protocolVersion"] == 1
    new = client.call(2, "session/new", cwd="/tmp", mcpServers=[])["result"]
    prompt = [{"type": "text", "text": "hi"}]
    client.ask(3, "session/prompt", sessionId=new["sessionId"], prompt=prompt)
    client.until(lambda m: m.get("method") == "session/update", timeout=60)
    processes[0].stdin.close()
    codes, said = ended(processes)
    assert codes == [0, 0]
    assert said == ["", ""]


def test_chat_reads_lines_that_mlx_launch_passes_on(launch):
    processes = launch("chat", "--max-tokens", "3")
    for line in (b"hello\n", b"/stats\n", b"/exit\n"):
        processes[0].stdin.write(line)
    codes, said = ended(processes, timeout=60)
    assert codes == [0, 0]
    assert "16 prompt tokens were in KV" in said[0]
    assert said[1] == ""


def test_bench_says_how_many_ranks_it_ran_on(launch, tmp_path, model):
    (tmp_path / "prompts.txt").write_text("def gcd(a, b):")
    report = tmp_path / "report.json"
    processes = launch(
        *("bench", "--prompts", str(tmp_path / "prompts.txt"), "--draft-lens", "2,auto"),
        *("--max-tokens", "4", "--repeats", "1", "--json", str(report)),
    )
    codes, said = ended(processes, timeout=120)
    assert codes == [0, 0], said
    found = json.loads(report.read_text())
    assert found["machine"]["ranks"] == "2"
    assert {cell["way"] for cell in found["cells"]} == {"0", "2", "auto"}
    assert b", 2 ranks, each " in processes[0].stdout.read().splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (("generate", "hi", "--exact"), 2, "--exact cannot be had on several ranks"),
        (("generate",), 2, "mlx.launch passes no end of stdin on: give PROMPT or --prompt-file"),
        (("bench", "--vs", "mlx-lm"), 2, "on several ranks bench takes one --drafter, and no --vs"),
        (("stdio", "--max-kv", "1"), 2, "--max-kv is 1; it must be 2 tokens or more"),
    ],
)
def test_what_cannot_be_had_is_refused(launch, arguments, code, line):
    processes = launch(*arguments)
    if arguments == ("generate",):  # rank 0 alone reads a prompt, and mlx.launch ends the others
        assert processes[0].wait(60) == code
        assert processes[0].stderr.read().decode() == f"mlx-mtp: {line}\n"
        return
    codes, said = ended(processes, timeout=60)
    assert codes == [code, code]
    assert line in said[0]


def test_a_folder_that_one_machine_lacks_ends_all(launch, tmp_path):
    processes = launch("generate", "hi", model=str(tmp_path / "none"))
    codes, said = ended(processes, timeout=60)
    assert codes == [3, 3]
    assert re.search(r"mlx-mtp( \(rank 1\))?: .*none: no such folder", "".join(said))


def test_ranks_that_load_something_else_are_refused(model, tmp_path):
    """What the other does without a drafter would not fit what rank 0 sends."""
    one = 'test "$MLX_RANK" = 0 && set -- "$@" --draft-len 4 || set -- "$@" --no-drafter; exec "$@"'
    command = [*COMMAND, "generate", "def", "--model", model]
    processes = start(2, tmp_path, ["sh", "-c", one, "sh", *command])
    codes, said = ended(processes, timeout=60)
    assert codes == [3, 3]
    assert "mlx-mtp (rank 1): this rank has not loaded what rank 0 has" in said[1]


def test_other_commands_run_on_rank_0_alone(model):
    """No ring is needed, for none of them is made."""
    said = []
    for rank in "01":
        command = [*COMMAND, "inspect", model]
        done = subprocess.run(
            command, env=environment(MLX_RANK=rank, NCCL_HOST_IP="-"), capture_output=True
        )
        assert (done.returncode, done.stderr) == (0, b"")
        said.append(done.stdout)
    assert said[0]
    assert said[1] == b""


def test_one_process_of_mlx_launch_is_no_rank(monkeypatch, tmp_path):
    hosts = tmp_path / "hosts"
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", str(hosts))
    hosts.write_text("\n")
    assert terminal.launched() is None
    hosts.write_text('[["127.0.0.1:1"], ["127.0.0.1:2"]]')
    assert terminal.launched() == 0


@pytest.mark.parametrize("rank", ["1", "-1", "", "abc"])
def test_a_rank_alone_in_the_environment_means_nothing(monkeypatch, rank):
    monkeypatch.setenv("MLX_RANK", rank)
    assert terminal.launched() is None


@pytest.mark.parametrize(
    ("variable", "text"),
    [("MLX_HOSTFILE", '[["10.0.0.1:32323", "10.0.1.1:32324"], ["10.0.0.2:32325"]]'), (None, "")],
)
def test_rank_0_is_found_where_the_ring_has_it(monkeypatch, tmp_path, variable, text):
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    if variable:
        (tmp_path / "hosts").write_text(text)
        monkeypatch.setenv(variable, str(tmp_path / "hosts"))
    else:
        monkeypatch.setenv("MLX_JACCL_COORDINATOR", "10.0.0.1:32323")
    assert ranks._address() == "10.0.0.1"


def test_a_machine_that_falls_silent_is_noticed():
    """Not only one that hangs up: whatever is sent must be answered, and silence is asked."""
    with (
        Listener(("127.0.0.1", 0)) as listener,
        ranks._watched(Client(listener.address)) as link,
        socket.socket(fileno=os.dup(link.fileno())) as one,
    ):
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 2
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 4000


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("[ring] connection to a peer was lost", "another rank of 2 has gone"),
        ("[METAL] out of memory", "[METAL] out of memory"),
    ],
)
def test_an_error_of_the_device_ends_it(error, line):
    said = []
    link = ranks.Link.__new__(ranks.Link)
    link.ranks, link._leave = Ranks(0, 2), lambda *given: said.append(given)
    link.lost(RuntimeError(error))
    assert said == [(1, f"{line}, and this one ends with it")]


def test_the_first_who_leaves_decides():
    program = """
import threading, time
from mlx_mtp.cli import terminal
terminal.farewells.append(lambda code: time.sleep(0.5))
threading.Thread(target=lambda: (time.sleep(0.2), terminal.leave(4, "second"))).start()
terminal.leave(3, "first")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "mlx-mtp: first\n")
