"""Tensors of every layout in the wild end up in the right parameters, packed as they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.errors import LoadError
from mlx_mtp.models.target import Target
from mlx_mtp.weights.checkpoint import Checkpoint, Folder
from mlx_mtp.weights.load import load_drafter, load_target
from mlx_mtp.weights.planned import plan_drafter, plan_target
from tests.checkpoints import (
    SHAPES,
    drafter_config,
    target_config,
    write_drafter,
    write_quantized,
    write_target,
    write_vlm_quantized,
)
from tests.weights.logits import difference, mlx_lm_logits, our_logits

AT = "model.language_model."
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")


def parameters(module: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(module.parameters()))


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = parameters(a), parameters(b)
    return left.keys() == right.keys() and all(mx.array_equal(left[k], right[k]) for k in left)


def refused(folder: Path, load: Callable[[Path], object] = load_target) -> str:
    with pytest.raises(LoadError) as error:
        load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def notices(folder: Path) -> list[str]:
    planned = plan_target(Checkpoint.open(Folder.at(folder)))
    planned.read(float32=True)
    return planned.notices


@pytest.mark.parametrize("shape", ["e2b", "e4b", "26b", "31b"])
def test_plain_weights_give_mlx_lms_logits(tmp_path: Path, shape: str) -> None:
    folder = write_target(tmp_path, shape, dtype=mx.float32)
    assert difference(our_logits(load_target(folder)), mlx_lm_logits(folder)) < 1e-4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", ["e2b", "26b"])
def test_case_g02_g11_mlx_lms_conversions_give_its_logits(
    tmp_path: Path, shape: str, mode: str
) -> None:
    source = write_target(tmp_path / "source", shape, dtype=mx.float32)
    packed = write_quantized(source, tmp_path / mode, mode=mode)
    assert any("scales" in name for name in parameters(load_target(packed)))
    assert difference(our_logits(load_target(packed)), mlx_lm_logits(packed)) < 1e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_case_g10_mlx_vlms_names_and_bits_per_tensor(tmp_path: Path, shape: str) -> None:
    source = write_target(tmp_path / "source", shape, vision=True)
    packed = write_vlm_quantized(source, tmp_path / "vlm", down_proj=8, router=8)
    planned = plan_target(Checkpoint.open(Folder.at(packed)))
    assert planned.quantized["layers.0.mlp.down_proj"]["bits"] == 8
    assert planned.quantized["layers.0.mlp.up_proj"]["bits"] == 4
    if shape == "26b":
        assert planned.quantized["layers.0.experts.down_proj"]["bits"] == 8
        assert planned.quantized["layers.0.experts.gate_proj"]["bits"] == 4
    planned.read(float32=True)
    weight = planned.module.layers[0].mlp.down_proj
    unpacked = mx.dequantize(weight.weight, weight.scales, weight.biases, 32, 8)
    original = mx.load(str(source / "model.safetensors"))
    assert isinstance(original, dict)
    plain = original[f"{AT}layers.0.mlp.down_proj.weight"].astype(mx.float32)
    assert mx.abs(unpacked - plain).max() < 0.01


def test_case_g10_bits_that_contradict_the_tensor(tmp_path: Path) -> None:
    source = write_target(tmp_path / "source")
    packed = write_vlm_quantized(source, tmp_path / "vlm", down_proj=8)
    config = json.loads((packed / "config.json").read_text())
    path = "language_model.model.layers.1.mlp.down_proj"
    config["quantization"][path]["bits"] = 6
    (packed / "config.json").write_text(json.dumps(config))
    line = refused(packed)
    assert "bits 6" in line
    assert "packed as 8" in line
    assert "layers.1.mlp.down_proj" in line


def test_case_g10_a_wrong_default_does_not_mislead(tmp_path: Path) -> None:
    source = write_target(tmp_path / "source")
    packed = write_vlm_quantized(source, tmp_path / "vlm", bits=8)
    before = load_target(packed)
    config = json.loads((packed / "config.json").read_text())
    config["quantization"]["bits"] = 4
    (packed / "config.json").write_text(json.dumps(config))
    assert same(before, load_target(packed))


@pytest.mark.parametrize("make", [lambda s: mx.repeat(s, 3, axis=-1), lambda s: s[0, 0]])
def test_case_g10_scales_of_an_impossible_shape(tmp_path: Path, make) -> None:
    def halve(tensors: dict[str, mx.array]) -> None:
        name = f"{AT}layers.0.mlp.up_proj"
        tensors[f"{name}.weight"], scales, biases = mx.quantize(
            tensors[f"{name}.weight"].astype(mx.float32), 64, 4
        )
        tensors[f"{name}.scales"] = make(scales)
        tensors[f"{name}.biases"] = biases

    line = refused(write_target(tmp_path, change=halve))
    assert "layers.0.mlp.up_proj.weight" in line
    assert "no quantisation" in line


def test_case_g01_g02_kv_of_shared_layers_absent_and_present(tmp_path: Path) -> None:
    absent = write_target(tmp_path / "absent", seed=5)
    tensors = mx.load(str(absent / "model.safetensors"))
    assert isinstance(tensors, dict)

    def keep_common(named: dict[str, mx.array]) -> None:
        named.update(tensors)

    present = write_target(tmp_path / "present", kv_of_shared=True, change=keep_common)
    names = Checkpoint.open(Folder.at(present)).tensors
    assert f"{AT}layers.5.self_attn.k_proj.weight" in names
    assert same(load_target(absent), load_target(present))


def test_case_g02_packed_kv_of_shared_layers_is_dropped(tmp_path: Path) -> None:
    source = write_target(tmp_path / "source", kv_of_shared=True)
    packed = write_vlm_quantized(source, tmp_path / "packed")
    names = Checkpoint.open(Folder.at(packed)).tensors
    assert "language_model.model.layers.5.self_attn.k_proj.scales" in names
    loaded = parameters(load_target(packed))
    assert not any(name.startswith("layers.5.self_attn.k_") for name in loaded)


@pytest.mark.parametrize("shape", ["12b", "26b", "31b"])
def test_case_g03_full_layers_without_v_proj(tmp_path: Path, shape: str) -> None:
    config = {**target_config(shape), "model_type": "gemma4"}  # mlx-lm knows no gemma4_unified
    source = write_target(tmp_path / "source", shape, config=config, dtype=mx.float32)
    assert f"{AT}layers.2.self_attn.v_proj.weight" not in Checkpoint.open(Folder.at(source)).tensors
    packed = write_quantized(source, tmp_path / "packed")
    for folder in (source, packed):
        target = load_target(folder)
        for layer, parts in ((2, 1), (0, 2)):  # keys alone, or keys and values
            attention = target.layers[layer].self_attn
            heads = attention.heads + parts * attention.kv_heads
            assert attention.qkv_proj(mx.zeros((1, 64))).size == heads * attention.head_dim
        assert difference(our_logits(target), mlx_lm_logits(folder)) < 1e-4


def test_case_g04_towers_are_skipped_and_said_once(tmp_path: Path) -> None:
    def towers(tensors: dict[str, mx.array]) -> None:
        for name in ("vision_embedder.proj.weight", "embed_audio.a.weight", "embed_audio.b.weight"):
            tensors[f"model.{name}"] = mx.ones((4,))

    folder = write_target(tmp_path, "12b", change=towers)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "gemma4_unified"
    (said,) = notices(folder)
    assert said.count("vision_embedder") == said.count("embed_audio") == 1


def test_case_g06_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    def misspell(tensors: dict[str, mx.array]) -> None:
        tensors[f"{AT}layers.1.mlp.gat_proj.weight"] = tensors.pop(
            f"{AT}layers.1.mlp.gate_proj.weight"
        )

    line = refused(write_target(tmp_path / "a", change=misspell))
    assert "layers.1.mlp.gate_proj.weight" in line
    assert "layers.1.mlp.gat_proj.weight" in line

    def add(tensors: dict[str, mx.array]) -> None:
        tensors[f"{AT}layers.0.foo.weight"] = mx.ones((2, 2))

    line = refused(write_target(tmp_path / "b", change=add))
    assert f"1 not known ({AT}layers.0.foo.weight)" in line


def test_case_g07_a_tied_model_that_ships_its_head(tmp_path: Path) -> None:
    def same_head(tensors: dict[str, mx.array]) -> None:
        tensors["lm_head.weight"] = tensors[f"{AT}embed_tokens.weight"]

    def other_head(tensors: dict[str, mx.array]) -> None:
        tensors["lm_head.weight"] = tensors[f"{AT}embed_tokens.weight"] * 2

    plain = load_target(write_target(tmp_path / "plain"))
    folder = write_target(tmp_path / "same", change=same_head)
    assert notices(folder) == []
    assert same(load_target(folder), plain)
    folder = write_target(tmp_path / "other", change=other_head)
    (said,) = notices(folder)
    assert "lm_head that differs" in said
    assert "the table is used" in said
    assert same(load_target(folder), plain)


def test_an_untied_model_uses_its_head(tmp_path: Path) -> None:
    config = target_config(tie_word_embeddings=False)

    def head(tensors: dict[str, mx.array]) -> None:
        tensors["lm_head.weight"] = tensors[f"{AT}embed_tokens.weight"] * 2

    untied = load_target(write_target(tmp_path / "a", config=config, change=head))
    tied = load_target(write_target(tmp_path / "b"))
    assert difference(our_logits(untied), our_logits(tied)) > 0.1


def test_shapes_are_checked_by_header_with_tensor_shapes_and_file(tmp_path: Path) -> None:
    folder = write_target(tmp_path, config=target_config())
    (folder / "config.json").write_text(json.dumps(target_config(intermediate_size=96)))
    weights = folder / "model.safetensors"
    line = refused(folder)
    assert str(weights) in line
    assert "layers.0.mlp.gate_proj.weight" in line
    assert "[128, 64]" in line
    assert "[96, 64]" in line


def test_dtypes_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    def integers(tensors: dict[str, mx.array]) -> None:
        name = f"{AT}layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].astype(mx.int8)

    assert "stored as I8" in refused(write_target(tmp_path, change=integers))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_case_g26_dtypes(tmp_path: Path, dtype: mx.Dtype) -> None:
    folder = write_target(tmp_path, dtype=dtype)
    said = notices(folder)
    assert bool(said) == (dtype == mx.float16)
    if said:
        assert "overflow" in said[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_case_d04_d08_drafters_of_both_heads_and_spellings(tmp_path: Path, shape: str) -> None:
    folder = write_drafter(tmp_path / "plain", shape)
    drafter = load_drafter(folder)
    centroids = shape in ("e2b", "e4b")
    assert ("masked_embedding" in drafter) == centroids
    packed = load_drafter(write_vlm_quantized(folder, tmp_path / "packed"))
    assert "scales" in packed.layers[0].mlp.down_proj
    if centroids:
        assert drafter.masked_embedding.token_ordering.dtype == mx.int32


def test_case_d08_token_ordering_may_be_int32(tmp_path: Path) -> None:
    def narrow(tensors: dict[str, mx.array]) -> None:
        name = "masked_embedding.token_ordering"
        tensors[name] = tensors[name].astype(mx.int32)

    wide = load_drafter(write_drafter(tmp_path / "wide"))
    assert same(wide, load_drafter(write_drafter(tmp_path / "narrow", change=narrow)))


@pytest.mark.parametrize("wrong", [10**9, -1, 0])
def test_ids_that_index_a_table_are_checked(tmp_path: Path, wrong: int) -> None:
    """MLX would read out of bounds: every id has to be there once."""

    def damage(tensors: dict[str, mx.array]) -> None:
        order = tensors["masked_embedding.token_ordering"]
        tensors["masked_embedding.token_ordering"] = mx.full(order.shape, wrong, order.dtype)

    assert "must hold every id from 0 to" in refused(
        write_drafter(tmp_path, change=damage), load_drafter
    )


def test_case_d11_intermediate_size_of_a_drafter(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path)
    config = drafter_config()
    config["text_config"]["intermediate_size"] = 96
    (folder / "config.json").write_text(json.dumps(config))
    line = refused(folder, load_drafter)
    assert "mlp" in line
    assert "[64, 32]" in line
    assert "[96, 32]" in line
    del config["text_config"]["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "intermediate_size is missing" in refused(folder, load_drafter)


@pytest.mark.parametrize("shape", ["E2B", "E4B", "12B", "26B-A4B", "31B"])
def test_case_d12_published_configs_give_a_load_plan(tmp_path: Path, shape: str) -> None:
    """Config and headers alone: the modules are built but never evaluated."""
    configs = Path(__file__).parents[3] / "shared" / "configs"
    if not configs.is_dir():
        pytest.skip("the published configs are not at hand")
    for suffix, plan in (("", plan_target), ("-assistant", plan_drafter)):
        raw = json.loads((configs / f"gemma-4-{shape}-it{suffix}.json").read_text())
        folder = tmp_path / f"m{suffix}"
        _write_headers(folder, raw, drafter=bool(suffix))
        planned = plan(Checkpoint.open(Folder.at(folder)))
        assert planned.plan.nbytes > 1e8


def _write_headers(folder: Path, config: dict[str, Any], *, drafter: bool) -> None:
    """A sparse file with the right header and no data."""
    from mlx_mtp.config import DrafterConfig, TargetConfig
    from mlx_mtp.models.drafter import Drafter

    module = (
        Drafter(DrafterConfig.from_dict(config))
        if drafter
        else Target(TargetConfig.from_dict(config))
    )
    header: dict[str, Any] = {}
    at = 0
    for name, array in parameters(module).items():
        size = array.size * 2
        kind = "I64" if "ordering" in name else "BF16"
        size *= 4 if kind == "I64" else 1
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        f.truncate(8 + len(raw) + at)
