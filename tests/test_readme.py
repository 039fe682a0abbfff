"""README's commands and program run as they stand; those that need the hub are parsed only."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
USE = README[README.index("## Use") : README.index("## Models")]
RUN = ("stdio.md", "bench.md", "serve.md")
PAGES = [USE, *((ROOT / "docs" / name).read_text() for name in RUN)]
BLOCKS = re.findall(r"```sh\n(.*?)```", "\n".join(PAGES), re.DOTALL)
# `.ci/run` converts and verifies; nobody is to upload anything.
APART = ("mlx-mtp convert ", "mlx-mtp verify ", "hf ", "curl ")
CURLS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("curl ")]
LINES = [line for block in BLOCKS for line in block.splitlines() if not line.startswith(APART)]
COMMANDS = [line for line in dict.fromkeys(LINES) if "~" not in line]
PORT = 8765
OF_HUB = re.compile(r"(--model|bench) (?P<model>[^\s-]\S*)")
PROGRAM = re.search(r"```python\n(.*?)```", USE, re.DOTALL)[1]


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path, monkeypatch):
    """What `mlx-mtp tune` keeps is not for other tests."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def run(command: str) -> subprocess.CompletedProcess[str]:
    ours = f"{shlex.quote(sys.executable)} -m mlx_mtp.cli.main "
    return subprocess.run(
        command.replace("mlx-mtp ", ours, 1),
        shell=True,
        cwd=ROOT,
        input="Hello",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("command", [c for c in COMMANDS if not OF_HUB.search(c)])
def test_a_command_works(command):
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("command", [c for c in COMMANDS if OF_HUB.search(c)])
def test_a_command_for_the_hub_is_well_formed(command):
    """Its options parse: with a folder that is not there it ends at the model, not before."""
    given = OF_HUB.search(command)
    start, end = given.span("model")
    done = run(f"{command[:start]}/no/such/folder{command[end:]}")
    assert done.returncode == 3
    assert "/no/such/folder: no such folder" in done.stderr


@pytest.mark.parametrize("command", dict.fromkeys(CURLS))
def test_a_request_to_the_server_is_answered(command):
    server = subprocess.Popen(
        [sys.executable, "-m", "mlx_mtp.cli.main", "serve", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        port = re.search(r"http://127\.0\.0\.1:(\d+)", server.stderr.readline())[1]
        assert f":{PORT}/" in command
        done = run(command.replace(f":{PORT}/", f":{port}/"))
    finally:
        server.terminate()
        server.communicate(timeout=20)
    assert server.returncode == 143
    assert "def gcd" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_program_runs():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "return" in done.stdout


def test_every_option_named_in_readme_is_in_help():
    ours = re.sub("`(vllm|mlx.launch) [^`]*`", "", USE)
    told = set(re.findall(r"`?(--[a-z-]+)", ours)) - {"--help"}
    commands = re.findall(r"^  ([a-z]+) ", run("mlx-mtp --help").stdout, re.MULTILINE)
    assert "plan" in commands
    shown = "".join(run(f"mlx-mtp {command} --help").stdout for command in commands)
    assert [option for option in told if option not in shown] == []
