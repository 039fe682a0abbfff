"""The ACP TypeScript SDK on `mlx-mtp acp`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import ROOT, folder, search_path

Q = '<|"|>'


def edit(old: str, new: str) -> str:
    given = f"path:{Q}a.txt{Q},old_text:{Q}{old}{Q},new_text:{Q}{new}{Q}"
    return f"<|tool_call>call:edit_file{{{given}}}<tool_call|>"


def command(tmp_path: Path, *rules: dict[str, object]) -> list[str]:
    """`mlx-mtp acp` with that script, from any folder."""
    script, program = tmp_path / "script.json", tmp_path / "agent"
    script.write_text(json.dumps(rules))
    run = f'cd {ROOT} && exec {sys.executable} -m tests.clients.scripted {script} acp "$@"'
    program.write_text(f"#!/bin/sh\n{run}\n")
    program.chmod(0o755)
    return [str(program)]


def test_what_a_user_does_in_an_editor(tmp_path):
    sdk = folder() / "node/node_modules/@agentclientprotocol/sdk/dist/v1/stable/acp.js"
    if not sdk.exists():
        pytest.skip(f"{sdk} is not there; .ci/clients installs it")
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("one\ntwo\n")
    agent = command(
        tmp_path,
        {"when": "hello\nmodel\n", "say": "Hello there."},
        {"when": "again\nmodel\n", "say": "Once more."},
        {"when": "edit please\nmodel\n", "say": edit("two", "2")},
        {"when": "edit again\nmodel\n", "say": edit("one", "1")},
        {"when": "on and on\nmodel\n", "say": "word ", "endless": True},
        {"when": "about it\nmodel\n", "say": "<|channel>thought\nHm.<channel|>So it is."},
    )
    script = Path(__file__).with_name("acp_editor.mjs")
    ran = subprocess.run(
        ["node", str(script), sdk.as_uri(), str(work), *agent],
        env=os.environ | {"PATH": search_path()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "exec": ["end_turn", "Hello there."],
        "second": ["end_turn", "Once more."],
        "wrong": [-32601, -32601, -32601, -32002],
        "approved": ["completed", "one\n2\n"],
        "denied": ["failed", "one\n2\n"],
        "busy": -32600,
        "cancelled": "cancelled",
        "aborted": "cancelled",
        "options": ["on", "off"],
        "thoughts": ["Hm.", "So it is."],
        "closed": [0, -32002],
        "end": 0,
        "interrupted": 130,
    }
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "script.json.prompts").open()]
    # The second turn holds the first.
    assert prompts[1].endswith("user\nhello\nmodel\nHello there.\nuser\nagain\nmodel\n")
    assert "denied this" in "".join(prompts)
