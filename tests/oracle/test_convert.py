"""A pair that was written without packing runs in transformers' assisted generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import add_tokenizer
from tests.oracle.shapes import DRAFTERS, TARGETS, VOCAB, WINDOW
from tests.weights.conversions import convert, raw

torch = pytest.importorskip("torch", reason="needs the extra 'oracle'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'oracle'")
reference = pytest.importorskip("tests.oracle.reference")

pytestmark = pytest.mark.oracle

TOKENS = 20


def load(folder: Path) -> Any:
    """By what its config.json says it is."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.mark.parametrize("name", ["e2b", "12b", "26b"])
def test_assisted_generation_writes_the_sources_text(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    theirs = reference.build(TARGETS[name], 11)
    reference.save(theirs, tmp_path / "target")
    reference.save(reference.build(DRAFTERS[name], 12), tmp_path / "drafter")
    add_tokenizer(tmp_path / "target", VOCAB)
    out = convert(tmp_path / "target", tmp_path / "out", drafter=str(tmp_path / "drafter"))
    assert raw(out / "drafter") == raw(tmp_path / "drafter")
    prompt = reference.random_ids(WINDOW + 3, VOCAB, seed=3)
    wanted = reference.greedy(theirs, prompt, TOKENS)
    target, drafter = load(out), load(out / "drafter")
    drafter.generation_config.num_assistant_tokens = 4
    calls: list[object] = []
    drafter.register_forward_hook(lambda *given: calls.append(given))
    assert reference.greedy(target, prompt, TOKENS, assistant_model=drafter) == wanted
    assert calls
