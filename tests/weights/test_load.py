"""A pair from folders: what comes out, how its drafter is found, and every refusal in one line."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.config import DRAFTER_TYPES
from mlx_mtp.errors import FitError, LoadError, PairError, UsageError
from mlx_mtp.models.layers import on_cpu
from mlx_mtp.weights import fit, planned
from mlx_mtp.weights.checkpoint import Checkpoint, Folder
from mlx_mtp.weights.load import NO_BOS, load_pair, load_target
from tests.checkpoints import (
    SHAPES,
    add_tokenizer,
    drafter_config,
    target_config,
    write_drafter,
    write_target,
    write_vlm_quantized,
)

cpu_only = pytest.mark.skipif(not on_cpu(), reason="the float32 copy is made on the CPU alone")


@pytest.fixture(autouse=True)
def empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return add_tokenizer(write_target(tmp_path / "target"))


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "drafter")


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading fails this test if it gets as far as the weights."""
    monkeypatch.setattr(mx, "load", lambda *_: pytest.fail("weights were read"))


def test_a_pair_from_two_folders(target: Path, drafter: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    pair = load_pair(str(target), drafter=str(drafter), progress=lambda *step: seen.append(step))
    assert pair.drafter is not None
    assert (pair.name, pair.drafter_name) == (str(target), str(drafter))
    assert (pair.revision, pair.drafter_revision, pair.notices) == (None, None, [])
    assert pair.defaults.eos_token_ids == (1, 106)
    assert pair.tokenizer.decode(pair.tokenizer.encode("abc", bos=False)) == "abc"
    assert pair.template is None
    assert pair.weights_bytes > 0
    assert pair.load_s > 0
    assert [(what, done / total) for what, done, total in seen] == [
        (f"load {folder}", part) for folder in (target, drafter) for part in (0, 1)
    ]


@cpu_only
def test_bfloat16_becomes_float32_on_the_cpu_while_it_is_small(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_target(target).norm.weight.dtype == mx.float32
    monkeypatch.setattr(fit, "FLOAT32_LIMIT", 1000)
    assert load_target(target).norm.weight.dtype == mx.bfloat16
    assert load_target(target, float32=True).norm.weight.dtype == mx.float32


@cpu_only
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_in_memory_are_known_beforehand(tmp_path: Path, shape: str) -> None:
    plain = write_target(tmp_path / "plain", shape)
    for folder in (plain, write_vlm_quantized(plain, tmp_path / "packed")):
        for float32 in (True, False):
            plan = planned.plan_target(Checkpoint.open(Folder.at(folder)))
            before = plan.nbytes(float32)
            plan.read(float32=float32)
            # Norms of heads are stored once a head.
            assert before <= plan.loaded_bytes() < 1.05 * before


def test_weights_come_in_pieces(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "PIECE", 20_000)
    pieces: list[int] = []
    pair = load_pair(str(target), progress=lambda _, done, total: pieces.append(done))
    assert len(pieces) > 5
    assert pieces == sorted(pieces)
    whole = load_target(target)
    assert mx.array_equal(pair.target.embed_tokens.weight, whole.embed_tokens.weight)


@pytest.mark.parametrize("float32", [False, True])
def test_memory_peaks_at_the_weights_and_a_few_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, float32: bool
) -> None:
    folder = write_target(tmp_path, config=target_config("31b", intermediate_size=2048))
    monkeypatch.setattr(planned, "PIECE", 1)  # one tensor at a time, the largest two 1 MB
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    target = load_target(folder, float32=float32)
    weights = sum(array.nbytes for _, array in tree_flatten(target.parameters()))
    assert weights > 4_000_000
    assert mx.get_peak_memory() - before < weights + 2_500_000


def test_no_network_library_for_a_folder(target: Path, drafter: Path) -> None:
    code = (
        "import sys; from mlx_mtp.weights.load import load_pair;"
        f"load_pair({str(target)!r}, drafter={str(drafter)!r}); load_pair({str(target)!r});"
        "bad = {'huggingface_hub', 'transformers', 'mlx_lm', 'torch', 'requests', 'httpx'};"
        "print(sorted(bad & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"


# --- finding the drafter ---


def test_a_drafter_beside_the_model_is_found(tmp_path: Path) -> None:
    target = add_tokenizer(write_target(tmp_path / "mine"))
    write_drafter(tmp_path / "mine-assistant")
    pair = load_pair(str(target))
    assert pair.drafter_name == str(tmp_path / "mine-assistant")


def test_a_drafter_beside_the_model_is_found_by_its_published_name(tmp_path: Path) -> None:
    target = add_tokenizer(write_target(tmp_path / "gemma-4-e2b-it-4bit"))
    write_drafter(tmp_path / "gemma-4-E2B-it-assistant")
    assert str(load_pair(str(target)).drafter_name).endswith("gemma-4-E2B-it-assistant")


def test_a_drafter_is_found_in_the_hub_cache(tmp_path: Path, empty_hub_cache: Path) -> None:
    repo = empty_hub_cache / "models--google--gemma-4-E2B-it-assistant"
    write_drafter(repo / "snapshots" / "abc123")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc123")
    target = add_tokenizer(write_target(tmp_path / "gemma-4-E2B-it"))
    pair = load_pair(str(target))
    assert (pair.drafter_name, pair.drafter_revision) == (
        "google/gemma-4-E2B-it-assistant",
        "abc123",
    )


def test_case_d07_no_drafter_is_plain_decoding_and_one_notice(target: Path) -> None:
    pair = load_pair(str(target))
    assert pair.drafter is None
    (notice,) = pair.notices
    assert "no drafter found, plain decoding" in notice


def test_case_d07_a_found_drafter_that_does_not_fit_is_said(tmp_path: Path) -> None:
    target = add_tokenizer(write_target(tmp_path / "mine"))
    write_drafter(tmp_path / "mine-assistant", config=drafter_config(sliding_window=16))
    (notice,) = load_pair(str(target)).notices
    assert "sliding window is 8 in the target, 16 in the drafter" in notice


def test_no_drafter_wanted_is_no_notice(target: Path) -> None:
    assert load_pair(str(target), drafter=None).notices == []
    with pytest.raises(UsageError, match="no drafter"):
        load_pair(str(target), drafter=None, drafter_revision="v1")


# --- pairs that do not fit: refused before any weight ---


@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize(
    ("config", "told"),
    [
        (drafter_config(backbone=96), "hidden size is 64 in the target, 96 in the drafter"),
        (drafter_config(vocab_size=512), "vocabulary is 256 in the target, 512 in the drafter"),
        (drafter_config(head_dim=16), "head dim is 32 in the target, 16 in the drafter"),
        (drafter_config(global_head_dim=32), "head dim is 64 in the target, 32 in the drafter"),
        (drafter_config("e4b"), "kv heads is 1 in the target, 2 in the drafter"),
        (drafter_config(sliding_window=16), "window is 8 in the target, 16 in the drafter"),
    ],
)
def test_case_d01_drafters_of_another_size(
    tmp_path: Path, target: Path, config: dict[str, object], told: str
) -> None:
    folder = write_drafter(tmp_path / "other", config=config)
    with pytest.raises(PairError) as error:
        load_pair(str(target), drafter=str(folder))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("no_reading")
def test_case_d03_a_plain_model_as_drafter(target: Path) -> None:
    with pytest.raises(LoadError, match="not an assistant checkpoint"):
        load_pair(str(target), drafter=str(target))


@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize("kind", DRAFTER_TYPES)
def test_case_d04_a_drafter_as_the_model(drafter: Path, kind: str) -> None:
    add_tokenizer(drafter)
    (drafter / "config.json").write_text(json.dumps({**drafter_config(), "model_type": kind}))
    with pytest.raises(LoadError, match=f"{kind} is an MTP drafter"):
        load_pair(str(drafter))


@pytest.mark.usefixtures("no_reading")
def test_case_d13_a_target_without_a_layer_type_of_the_drafter(tmp_path: Path) -> None:
    config = target_config(
        num_hidden_layers=2, num_kv_shared_layers=0, layer_types=["sliding_attention"] * 2
    )
    target = add_tokenizer(write_target(tmp_path / "short", config=config))
    with pytest.raises(PairError, match="full_attention"):
        load_pair(str(target), drafter=str(write_drafter(tmp_path / "drafter")))


@pytest.mark.usefixtures("no_reading")
def test_a_named_drafter_that_cannot_be_loaded_is_an_error(target: Path, drafter: Path) -> None:
    (drafter / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"drafter/model\.safetensors is missing"):
        load_pair(str(target), drafter=str(drafter))


@pytest.mark.usefixtures("no_reading")
def test_settings_out_of_range_are_said_before_reading(target: Path) -> None:
    (target / "generation_config.json").write_text('{"do_sample": true, "temperature": 1e9}')
    with pytest.raises(LoadError, match=r"target/generation_config\.json: temperature is 10+\.0"):
        load_pair(str(target))


@pytest.mark.usefixtures("no_reading")
def test_too_little_memory_is_said_before_reading(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "device_bytes", lambda: 1000)
    with pytest.raises(FitError, match="--force-fit"):
        load_pair(str(target))


def test_force_fit_loads_anyway(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "device_bytes", lambda: 1000)
    assert load_pair(str(target), force_fit=True).drafter is None


# --- the tokenizer, which loads in a thread beside the weights ---


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    config = target_config(vocab_size=64, vocab_size_per_layer_input=64)
    target = add_tokenizer(write_target(tmp_path, config=config))
    before = threading.enumerate()
    with pytest.raises(LoadError, match=r"tokenizer\.json has 100 tokens"):
        load_pair(str(target))
    assert set(threading.enumerate()) <= set(before)


def test_a_broken_tokenizer_ends_the_reading(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (target / "tokenizer.json").write_text("{")
    monkeypatch.setattr(planned, "PIECE", 1)
    pieces: list[int] = []

    def slow(_: str, done: int, __: int) -> None:
        pieces.append(done)
        time.sleep(0.02)

    with pytest.raises(LoadError, match=r"tokenizer\.json: not a readable tokenizer"):
        load_pair(str(target), progress=slow)
    assert (
        len(pieces) < 80 < len(planned.plan_target(Checkpoint.open(Folder.at(target))).plan.parts)
    )


def test_a_tokenizer_without_bos_is_said(target: Path) -> None:
    text = (target / "tokenizer.json").read_text().replace("<bos>", "<other>")
    (target / "tokenizer.json").write_text(text)
    pair = load_pair(str(target), drafter=None)
    assert pair.notices == [f"{target}: {NO_BOS}"]
    assert pair.tokenizer.encode("ab", bos=True) == pair.tokenizer.encode("ab", bos=False)


def test_a_failed_read_leaves_no_thread(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(mx, "eval", broken)
    before = threading.enumerate()
    with pytest.raises(LoadError, match="a weight file cannot be read: the disk is gone"):
        load_pair(str(target))
    assert set(threading.enumerate()) <= set(before)


def test_a_name_that_is_nothing() -> None:
    with pytest.raises(LoadError, match="no such folder, and neither a hub id"):
        load_pair("./nowhere")


def test_the_embedded_pair_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("network was used"))
    pair = load_pair()
    assert pair.drafter is not None
    assert pair.template is not None
    assert pair.notices == []
    assert pair.defaults.eos_token_ids
