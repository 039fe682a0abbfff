"""The drafter quantised as it is read: what is packed, what it takes, and that drafts stay good."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.engine.draft_length import FixedLength
from mlx_mtp.engine.session import Engine, Request
from mlx_mtp.errors import UsageError
from mlx_mtp.models.layers import on_cpu
from mlx_mtp.weights import fit, load, planned
from mlx_mtp.weights.checkpoint import Checkpoint, Folder
from mlx_mtp.weights.find import TINY
from mlx_mtp.weights.load import load_pair
from tests.checkpoints import (
    add_tokenizer,
    drafter_config,
    write_drafter,
    write_target,
    write_vlm_quantized,
)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return add_tokenizer(write_target(tmp_path / "target"))


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "drafter")


def test_eight_bits_keep_the_acceptance_and_the_text() -> None:
    prompts = [p["prompt"] for p in json.loads((TINY / "prompts.json").read_text())["real"][:8]]
    acceptance, texts = [], []
    for bits in (0, 8):
        pair = load_pair(drafter_bits=bits)
        engine = Engine(pair.target, pair.drafter, draft_length=FixedLength(3))
        done = [Request(pair.tokenizer.encode(prompt, bos=True), 32) for prompt in prompts]
        for request in done:
            engine.add(request)
            while engine.busy:
                engine.step()
        drafted = sum(request.stats.drafted for request in done)
        assert drafted > 200
        acceptance.append(sum(request.stats.accepted for request in done) / drafted)
        texts.append([request.tokens for request in done])
    assert abs(acceptance[0] - acceptance[1]) < 0.02
    assert texts[0] == texts[1]


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("ordered", [True, False])
def test_every_matrix_is_packed_and_its_bytes_are_known(
    tmp_path: Path, bits: int, ordered: bool
) -> None:
    folder = write_drafter(tmp_path, config=drafter_config(ordered=ordered))
    for float32 in (True, False):
        plan = planned.plan_drafter(Checkpoint.open(Folder.at(folder)))
        as_stored = plan.nbytes(float32)
        plan.pack(bits)
        before = plan.nbytes(float32)
        plan.read(float32=float32)
        assert before == plan.loaded_bytes() < as_stored
        arrays: dict[str, mx.array] = dict(tree_flatten(plan.module.parameters()))
        matrices = {n: a for n, a in arrays.items() if n.endswith(".weight") and a.ndim > 1}
        assert ("clusters.weight" if ordered else "embed_tokens.weight") in matrices
        assert {array.dtype for array in matrices.values()} == {mx.uint32}


def test_as_stored_on_the_cpu_and_eight_bits_on_a_gpu(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(fit, "check", lambda weights, *_, **__: counted.append(weights[-1]))
    for cpu, bits in ((True, 0), (False, 8)):
        monkeypatch.setattr(load, "on_cpu", lambda cpu=cpu: cpu)
        pair = load_pair(str(target), drafter=str(drafter))
        assert (pair.drafter_bits, pair.notices) == (bits, [])
        assert pair.drafter is not None
        assert ("scales" in pair.drafter.clusters) == bool(bits)
        arrays: dict[str, mx.array] = dict(tree_flatten(pair.drafter.parameters()))
        assert counted.pop() == sum(array.nbytes for array in arrays.values())
    assert load_pair(str(target), drafter=None).drafter_bits is None


def test_a_drafter_stored_quantised_stays_as_it_is(target: Path, drafter: Path) -> None:
    packed = str(write_vlm_quantized(drafter, drafter.parent / "packed", bits=4))
    for asked in (None, 0, 4):
        assert load_pair(str(target), drafter=packed, drafter_bits=asked).drafter_bits == 4
    with pytest.raises(UsageError, match="packed is stored in 4 bits and is not quantised again"):
        load_pair(str(target), drafter=packed, drafter_bits=8)


def test_bits_that_cannot_be_honoured(target: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"drafter bits are 5; they must be one of \(0, 4, 6, 8\)"):
        load_pair(str(target), drafter_bits=5)
    with pytest.raises(UsageError, match="but no drafter"):
        load_pair(str(target), drafter=None, drafter_bits=8)
    odd = write_drafter(tmp_path / "odd", config=drafter_config(intermediate_size=40))
    (notice,) = load_pair(str(target), drafter=str(odd), drafter_bits=8).notices
    assert "4 matrices stay as stored, layers.0.mlp.down_proj for one" in notice


def test_the_device_of_the_drafter(target: Path, drafter: Path) -> None:
    pair = load_pair(str(target), drafter=str(drafter), drafter_device="cpu")
    assert pair.drafter_device == "cpu"
    with pytest.raises(UsageError, match="the drafter device is npu; it must be cpu or gpu"):
        load_pair(str(target), drafter_device="npu")
    with pytest.raises(UsageError, match="but no drafter"):
        load_pair(str(target), drafter=None, drafter_device="cpu")
    if not mx.is_available(mx.gpu):
        with pytest.raises(UsageError, match="gpu, but MLX finds no GPU here"):
            load_pair(str(target), drafter=str(drafter), drafter_device="gpu")


def test_memory_peaks_at_the_packed_weights_and_a_few_tensors(
    drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "PIECE", 1)
    folder = write_drafter(drafter, config=drafter_config(intermediate_size=4096))
    plan = planned.plan_drafter(Checkpoint.open(Folder.at(folder)))
    plan.pack(8)
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    plan.read(float32=on_cpu())
    largest = 4096 * 32 * 4
    assert plan.loaded_bytes() > 4 * largest / 2
    assert mx.get_peak_memory() - before < plan.loaded_bytes() + 3 * largest
