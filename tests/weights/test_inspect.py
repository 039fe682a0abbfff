"""`inspect_model` describes a pair from configs and headers."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mtp.weights.inspect import inspect_model
from tests.checkpoints import add_tokenizer, write_drafter, write_target, write_vlm_quantized


@pytest.fixture(autouse=True)
def weights_stay_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def test_parts_add_up_to_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = add_tokenizer(write_target(tmp_path / "target", "26b", vision=True))
    drafter = write_drafter(tmp_path / "drafter", "26b")
    stored = mx.load(str(target / "model.safetensors"))
    assert isinstance(stored, dict)
    ours = [a for name, a in stored.items() if "vision" not in name]
    monkeypatch.setattr(mx, "load", lambda *_: pytest.fail("weights were read"))
    found = inspect_model(str(target), drafter=str(drafter))
    assert found.parameters == sum(a.size for a in ours)
    assert found.bytes == sum(a.nbytes for a in ours)
    assert list(found.parts) == [
        "embeddings",
        "attention",
        "mlp",
        "experts",
        "norms and others",
        "drafter",
    ]
    assert found.parts["embeddings"].parameters == 256 * 64
    assert found.quantization == {}
    assert (found.drafter, found.drafter_why) == (str(drafter), "named by the user")
    assert "vision_tower" in found.notices[0]
    json.dumps(found.to_dict())


def test_packed_weights_count_unpacked(tmp_path: Path) -> None:
    plain = add_tokenizer(write_target(tmp_path / "plain"))
    packed = write_vlm_quantized(plain, tmp_path / "packed", down_proj=8)
    before, after = inspect_model(str(plain)), inspect_model(str(packed))
    assert before.parameters == after.parameters
    assert after.bytes < before.bytes / 2
    assert after.quantization["8 bits affine, groups of 32"] == 6
    assert after.quantization["4 bits affine, groups of 32"] > 6
    assert "per-layer embeddings" in after.parts
    assert after.drafter is None
    assert "no drafter found" in after.notices[-1]
