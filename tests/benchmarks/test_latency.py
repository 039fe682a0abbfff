"""The pair with a large vocabulary says what the embedded pair says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import latency
from mlx_mtp.generation import Options, generate
from mlx_mtp.weights.load import load_pair


def test_new_tokens_never_occur(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "VOCABULARY", 8192)
    latency.write_large(tmp_path)
    model = json.loads((tmp_path / "target" / "tokenizer.json").read_text())["model"]
    assert len(model["vocab"]) == 8192
    large = load_pair(str(tmp_path / "target"), drafter=str(tmp_path / "drafter"))
    results = [
        generate(pair, latency.PROMPT, Options(max_tokens=32, temperature=0.0, draft_len=2))
        for pair in (load_pair(), large)
    ]
    assert results[0].token_ids == results[1].token_ids
    assert results[0].stats.accepted == results[1].stats.accepted > 0
    chinese = "\u4e00\u4e01\u4e02"
    assert large.tokenizer.decode(large.tokenizer.encode(chinese, bos=False)) == chinese
    assert len(large.tokenizer.encode(chinese, bos=False)) == 1
