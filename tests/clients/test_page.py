"""docs/clients.md, as far as no client is needed."""

import json
import re
import subprocess

import pytest
import yaml

from tests.clients.conftest import ADDRESS, FENCE, NO_KEY, PAGE, ROOT, section

CLIENTS = ["OpenCode", "pi", "Continue", "aider", "llm"]


@pytest.mark.parametrize("client", CLIENTS)
def test_clients_have_files_and_a_command(client):
    said = section(client)
    assert said.command
    assert sum(text.count(ADDRESS) for text in said.files.values()) == 1


@pytest.mark.parametrize("client", CLIENTS)
def test_clients_have_a_place_for_a_key(client):
    said = section(client)
    places = sum(len(NO_KEY.findall(text)) for text in said.files.values())
    assert places == (client != "llm")


def test_a_relative_folder_of_clients_is_below_the_callers(tmp_path):
    script = (ROOT / ".ci" / "clients").read_text()
    versions = re.findall(r'^(?:py|aider|node)="(.*?)"', script, re.M | re.S)
    folder, python = tmp_path / "clients", tmp_path / "bin" / "python"
    folder.mkdir()
    (folder / "installed").write_text(" ".join(versions) + "\n")
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$MLX_MTP_CLIENTS"\n')
    python.chmod(0o755)
    (python.parent / "python3.12").symlink_to(python)  # which would install them
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "VIRTUAL_ENV": "x", "HOME": "/nowhere"}
    command = [str(ROOT / ".ci" / "clients"), "clients"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.stdout == f"{folder}\n", ran.stderr


def test_every_block_is_of_its_kind():
    blocks = [(language, block) for _, language, block in FENCE.findall(PAGE.read_text())]
    assert len(blocks) > 2 * len(CLIENTS)
    for language, block in blocks:
        {"json": json.loads, "yaml": yaml.safe_load, "sh": str}[language](block)


def test_addresses_are_the_default():
    assert set(re.findall(r"127\.0\.0\.1:\d+\S*?(?=[`\"\s])", PAGE.read_text())) == {
        "127.0.0.1:8765/v1"
    }


def test_a_page_that_says_less_is_found_out():
    with pytest.raises(ValueError, match="not enough values"):
        section("OpenCode", "# Nothing\n")
