"""docs/clients.md, as far as no client is needed."""

import json
import re

import pytest
import yaml

from tests.clients.conftest import ADDRESS, FENCE, PAGE, section

CLIENTS = ["OpenCode", "pi", "Continue", "aider", "llm"]


@pytest.mark.parametrize("client", CLIENTS)
def test_clients_have_files_and_a_command(client):
    said = section(client)
    assert said.command
    assert sum(text.count(ADDRESS) for text in said.files.values()) == 1


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
