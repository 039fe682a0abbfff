"""The real mlx.launch: what docs/ranks.md has runs, and no process outlives it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, environment
from tests.ranks.launch import free_ports

PAGE = (Path(__file__).parents[2] / "docs/ranks.md").read_text()
LAUNCH = [sys.executable, "-c", "from mlx._distributed_utils.launch import main; main()"]
TWO = "mlx.launch -n 2 --backend ring -- mlx-mtp"
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def launch():
    """mlx.launch in a process group of its own, its stdin held open."""
    started = []

    def run(line: str) -> subprocess.Popen[str]:
        words = shlex.split(line)
        assert words[0] == "mlx.launch"
        at = words.index("mlx-mtp")
        port = f"--starting-port={free_ports(1)[0]}"
        command = [*LAUNCH, port, *words[1:at], *COMMAND, *words[at + 1 :]]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(
            subprocess.Popen(command, env=environment(), text=True, start_new_session=True, **pipes)
        )
        return started[-1]

    yield run
    for process in started:
        if left(process):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def left(process) -> list[str]:
    """The processes of its group that still run."""
    command = ["ps", "-A", "-o", "pgid=,stat=,command="]
    shown = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return [line for line in shown if re.match(rf"\s*{process.pid}\s+[^Z]", line)]


def gone(process, within: float = 5) -> bool:
    until = time.monotonic() + within
    while left(process) and time.monotonic() < until:
        time.sleep(0.1)
    return not left(process)


@pytest.mark.parametrize("command", [line for block in BLOCKS for line in block.splitlines()])
def test_the_documented_command_runs(launch, command):
    process = launch(command)
    # mlx.launch reads its stdin until all ranks have ended, and it is open.
    said = process.stdout.read()
    assert process.wait(60) == 0
    assert "return" in said or "while" in said
    assert process.stderr.read().count("tokens a round") == 1


def test_ctrl_c_leaves_no_process(launch):
    process = launch(f"{TWO} generate def --raw --max-tokens 400 --min-tokens 400")
    assert process.stdout.read(1)
    os.killpg(process.pid, signal.SIGINT)
    assert gone(process), left(process)


def test_serve_does_not_outlive_mlx_launch(launch):
    process = launch(f"{TWO} serve --port 0")
    assert any("is ready" in line for line in iter(process.stderr.readline, ""))
    process.kill()
    assert gone(process), left(process)


def test_a_prompt_that_rank_0_refuses_ends_all(launch):
    """The other one waits for it in native code, which heard no signal."""
    process = launch(f"{TWO} generate ' '")
    assert process.stderr.readline().startswith("mlx-mtp: the prompt is empty")
    assert gone(process, within=15), left(process)
