"""A conversion against its source: the numbers, and that neither model is ever in memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.engine.kv import KVLayout
from mlx_mtp.engine.processors import ProcessorState
from mlx_mtp.engine.round import RoundShape, RoundState, draft
from mlx_mtp.engine.sampling import SamplerState, Sampling
from mlx_mtp.errors import LoadError
from mlx_mtp.models.layers import on_cpu
from mlx_mtp.models.target import Target
from mlx_mtp.text.tokenizer import Tokenizer
from mlx_mtp.weights import planned, streamed
from mlx_mtp.weights.find import Found, find_pair
from mlx_mtp.weights.load import load_drafter, load_pair, load_target
from mlx_mtp.weights.proof import TEXT, TOKENS, Proof, prove, read_text
from tests.checkpoints import (
    PREFIXES,
    SHAPES,
    VOCAB,
    add_tokenizer,
    drafter_config,
    target_config,
    write_drafter,
    write_quantized,
    write_target,
    write_vlm_quantized,
)
from tests.weights.fake_hub import FakeHub
from tests.weights.logits import difference

IDS = [2, 9, 77, 130, 200, 31, 8, 99, 14, 251, 3, 64, 5, 5, 19, 240, 71, 7, 112, 60]
CLOSE = 1e-5 if on_cpu() else 5e-4


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "SLICE", 100)


@pytest.fixture
def as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """References without the CPU's own order of additions, which random weights amplify."""
    monkeypatch.setattr(planned, "lay_out_for_cpu", lambda _: None)


def convert(source: Path, folder: Path, how: str) -> Path:
    """`source` as it is, as mlx-vlm packs it, or as mlx-lm does."""
    if how == "as stored":
        return source
    if how == "4 bits":
        return add_tokenizer(write_vlm_quantized(source, folder, self_attn=8))
    return add_tokenizer(write_quantized(source, folder, bits=4, group_size=32, mode=how))


def ordinary(folder: Path) -> Target:
    """The target in float32 as a whole. MLX unpacks a table in a mode of bytes to bfloat16 only,
    so tables are made float32 by hand."""
    target = load_target(folder, float32=True)
    for name in ("embed_tokens", "embed_tokens_per_layer"):
        if isinstance(table := target.get(name), nn.QuantizedEmbedding):
            plain = nn.Embedding(1, 1)
            packed = table.weight, table.scales, table.get("biases")
            plain.weight = mx.dequantize(
                *packed, table.group_size, table.bits, table.mode, dtype=mx.float32
            )
            target[name] = plain
    return target


def whole_pass(target: Target, ids: list[int]) -> tuple[mx.array, Any, KVLayout]:
    """Hidden states [1, T, H], KV and its layout after all of `ids` at once."""
    layout = KVLayout(target.config.text, mx.float32)
    view = layout.view(layout.allocate(1, 256), mx.array([0]), len(ids), 0)
    hidden = target(mx.array([ids]), view)
    return hidden, view.buffers, layout


def by_rounds(folder: Path, drafter_folder: Path, ids: list[int]) -> list[int]:
    """The first draft of every round, each by the engine after a prefill of its own."""
    target, drafter = ordinary(folder), load_drafter(drafter_folder, float32=True)
    drafts = []
    for length in range(1, len(ids)):
        hidden, kv, layout = whole_pass(target, ids[:length])
        state = RoundState(
            kv=kv,
            bonus=mx.array([ids[length]]),
            hidden=hidden[:, -1],
            length=mx.array([length]),
            budget=mx.array([8]),
            active=mx.array([1]),
            sampler=SamplerState.of([Sampling()]),
            processors=ProcessorState(),
        )
        shape = RoundShape(steps=1, bound=length, sampler="greedy")
        drafts.append(int(draft(target, drafter, layout, state, shape)))
    return drafts


def found_pair(tmp_path: Path, shape: str = "e2b", **config: Any) -> Found:
    target = add_tokenizer(write_target(tmp_path / "target", shape, **config))
    return find_pair(str(target), str(write_drafter(tmp_path / "drafter", shape)))


@pytest.mark.usefixtures("as_stored")
@pytest.mark.parametrize("how", ["as stored", "4 bits", "mxfp4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_at_a_time_gives_the_whole_models_logits(
    tmp_path: Path, shape: str, how: str
) -> None:
    source = add_tokenizer(write_target(tmp_path / "source", shape, shards=3))
    folder = convert(source, tmp_path / "converted", how)
    target = ordinary(folder)
    expected = target.logits(whole_pass(target, IDS)[0])[0]
    reading = read_text(find_pair(str(folder), None), IDS)
    assert reading.logits.dtype == mx.float32
    # MLX adds up products with packed weights in another order.
    assert difference(reading.logits, expected) < (2e-4 if how == "mxfp4" else CLOSE)
    assert reading.drafts is None
    assert reading.accepted is None


@pytest.mark.usefixtures("as_stored")
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_layout_and_a_head_of_its_own(tmp_path: Path, prefix: str, dtype: mx.Dtype) -> None:
    flat = prefix == "model."
    config = target_config("e4b", flat=flat, tie_word_embeddings=False, sliding_window=512)
    head = "language_model." if prefix == PREFIXES[1] else ""

    def add_head(tensors: dict[str, mx.array]) -> None:
        table = tensors[f"{prefix}embed_tokens.weight"]
        tensors[f"{head}lm_head.weight"] = table[::-1] * 0.5

    folder = write_target(
        tmp_path / "target", prefix=prefix, dtype=dtype, config=config, change=add_head
    )
    target = load_target(add_tokenizer(folder), float32=True)
    expected = target.logits(whole_pass(target, IDS)[0])[0]
    assert difference(read_text(find_pair(str(folder), None), IDS).logits, expected) < CLOSE


@pytest.mark.usefixtures("as_stored")
@pytest.mark.parametrize("how", ["as stored", "4 bits"])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_first_drafts_are_those_of_the_engines_rounds(
    tmp_path: Path, shape: str, ordered: bool, how: str
) -> None:
    target = add_tokenizer(write_target(tmp_path / "target", shape))
    config = drafter_config(shape, ordered=ordered)
    drafter = write_drafter(tmp_path / "drafter", shape, config=config)
    if how == "4 bits":
        target = convert(target, tmp_path / "packed", how)
        drafter = write_vlm_quantized(drafter, tmp_path / "packed-drafter")
    reading = read_text(find_pair(str(target), str(drafter)), IDS)
    assert reading.drafts is not None
    assert reading.drafts.tolist() == by_rounds(target, drafter, IDS)


def test_the_embedded_pairs_acceptance_is_the_engines() -> None:
    """Its drafter is right most of the time, so that its acceptance says something."""
    found, pair = find_pair(None), load_pair(drafter_bits=0)
    assert pair.drafter is not None
    ids = pair.tokenizer.encode("The wolf said: come with me to the river.\n", bos=True)[:TOKENS]
    reading = read_text(found, ids)
    folders = [str(p.checkpoint.source.disk) for p in (found.target, found.drafter) if p]
    drafts = by_rounds(Path(folders[0]), Path(folders[1]), ids)
    chosen = pair.target.logits(whole_pass(pair.target, ids)[0])[0, 1:].argmax(-1)
    right = [a == b for a, b in zip(drafts, chosen.tolist(), strict=True)]
    assert reading.accepted == sum(right) / len(right)
    assert reading.accepted > 0.3


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_lies_between_a_model_and_itself(tmp_path: Path, shape: str) -> None:
    found = found_pair(tmp_path, shape)
    proof = prove(found, found_again(found))
    assert proof.positions == TOKENS
    assert (proof.kl_mean, proof.kl_max, proof.agreement) == (0, 0, 1)
    assert proof.accepted_before is not None
    assert proof.accepted_before == proof.accepted_after


def found_again(found: Found) -> Found:
    assert found.drafter is not None
    return find_pair(found.target.source.name, found.drafter.source.name)


def test_fewer_bits_are_farther_away(tmp_path: Path) -> None:
    source = found_pair(tmp_path)
    folder = Path(source.target.source.name)
    proofs = []
    for bits in (8, 4, 2):
        packed = write_vlm_quantized(folder, tmp_path / f"q{bits}", bits=bits)
        proofs.append(prove(source, find_pair(str(packed), None)))
    means = [proof.kl_mean for proof in proofs]
    assert 0 < means[0] < means[1] < means[2]
    assert proofs[0].agreement > proofs[2].agreement
    for proof in proofs:
        assert proof.kl_mean < proof.kl_max
        assert proof.accepted_before is not None
        assert proof.accepted_after is None


def test_divergence_and_agreement_are_those_of_the_logits(tmp_path: Path) -> None:
    source = found_pair(tmp_path)
    packed = write_vlm_quantized(Path(source.target.source.name), tmp_path / "q")
    written = find_pair(str(packed), None)
    proof = prove(source, written)
    ids = Tokenizer.from_folder(packed).encode(TEXT, bos=True)[:TOKENS]
    p, q = (mx.softmax(read_text(found, ids).logits, -1) for found in (source, written))
    kl = nn.losses.kl_div_loss(mx.log(q), mx.log(p), axis=-1)
    assert proof.kl_mean == pytest.approx(kl.mean().item(), rel=1e-4)
    assert proof.kl_max == pytest.approx(kl.max().item(), rel=1e-4)
    assert proof.agreement == (p.argmax(-1) == q.argmax(-1)).astype(mx.float32).mean().item()


def test_progress_is_told_by_bytes(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    found = found_pair(tmp_path)
    prove(found, found_again(found), lambda *step: seen.append(step))
    names = [f"prove {p.source.name}" for p in (found.target, found.drafter) if p]
    for name in names:
        steps = [step[1:] for step in seen if step[0] == name]
        half = len(steps) // 2  # source and written are one folder here
        assert steps[:half] == steps[half:]
        assert [done for done, _ in steps[:half]] == sorted(done for done, _ in steps[:half])
        assert steps[-1][0] == steps[-1][1] > 0
        assert all(0 < done <= total for done, total in steps)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    server = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    yield server
    server.close()


def test_a_source_on_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    """Its headers came before its files, and do not say where in a file data begin."""
    folder = add_tokenizer(write_target(tmp_path / "target", shards=2))
    hub.add("owner/model", folder)
    proof = prove(find_pair("owner/model", None), find_pair(str(folder), None))
    assert (proof.kl_max, proof.agreement) == (0, 1)


@pytest.mark.parametrize("how", ["as stored", "4 bits"])
def test_memory_holds_two_layers_at_the_most(tmp_path: Path, how: str) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 1024, "vocab_size": 4096}
    config = target_config(
        "12b",
        num_hidden_layers=16,
        layer_types=["sliding_attention", "full_attention"] * 8,
        **shape,
    )
    source = add_tokenizer(write_target(tmp_path / "source", config=config))
    found = find_pair(str(convert(source, tmp_path / "converted", how)), None)
    layer = 4 * max(
        sum(array.size for name, array in tree_flatten(layer.parameters()))
        for layer in Target(found.config).layers
    )
    logits = 4 * len(IDS) * shape["vocab_size"]
    whole = 16 * layer + 4 * shape["vocab_size"] * shape["hidden_size"]
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    read_text(found, IDS)
    peak = mx.get_peak_memory() - before
    print(peak / layer, (peak - logits) / layer, whole / layer, peak, layer, logits)
    assert peak < 2 * layer + 2 * logits
    assert peak < whole / 6


def test_models_of_two_vocabularies_are_refused(tmp_path: Path) -> None:
    config = target_config(vocab_size=2 * VOCAB)
    other = add_tokenizer(write_target(tmp_path / "other", config=config))
    with pytest.raises(LoadError, match=r"a vocabulary of 512 tokens .* which has 256"):
        prove(found_pair(tmp_path), find_pair(str(other), None))


def test_ids_stay_inside_the_per_layer_table(tmp_path: Path) -> None:
    config = target_config(vocab_size_per_layer_input=64)
    folder = add_tokenizer(write_target(tmp_path / "target", config=config))
    found = find_pair(str(folder), None)
    assert 2 <= prove(found, found).positions <= TOKENS


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, mx.array]) -> None:
        name = f"{PREFIXES[0]}layers.2.layer_scalar"
        tensors[name] = tensors[name] * float("nan")

    found = found_pair(tmp_path)
    broken = add_tokenizer(write_target(tmp_path / "broken", change=spoil))
    with pytest.raises(LoadError, match=r"broken is broken: its logits are not finite"):
        prove(found, find_pair(str(broken), None))


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    found = found_pair(tmp_path)
    assert found.target.plan.parts  # the headers have been read
    write_target(tmp_path / "target", config=target_config(intermediate_size=64))
    with pytest.raises(LoadError, match="changed while it was being read"):
        prove(found, found)


def test_ids_that_no_vocabulary_has_are_refused(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, mx.array]) -> None:
        tensors["masked_embedding.token_ordering"][0] = 1 << 30

    target = add_tokenizer(write_target(tmp_path / "target"))
    drafter = write_drafter(tmp_path / "drafter", change=spoil)
    found = find_pair(str(target), str(drafter))
    with pytest.raises(LoadError, match="must hold every id from 0 to 255 once"):
        prove(found, found)


def test_rows_for_a_table() -> None:
    proof = Proof(32, 0.0123456, 1.5, 0.96875, 0.71, None)
    assert proof.rows() == [
        ("KL to the source, mean", "0.01235 nats"),
        ("KL to the source, max", "1.5 nats"),
        ("same next token", "96.9%"),
        ("first drafts accepted before", "71.0%"),
    ]
    assert Proof(32, 0, 0, 1, 0.5, 0.25).rows()[-1] == ("first drafts accepted after", "25.0%")
