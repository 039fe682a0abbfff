"""What is written here gives the same logits in mlx-lm and in mlx-vlm, packed in any way."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.weights.load import load_target
from tests.checkpoints import PREFIXES, SHAPES, target_config, write_quantized
from tests.weights.conversions import arrays, convert, target
from tests.weights.logits import PROMPT, difference, mlx_lm_logits, our_logits

NEAR = 2e-3  # random models amplify the last bits of a float32
RECIPE = '"layers.0.*" = 3\n"layers.*.q_proj" = 0\n"layers.*.mlp.*" = 5\n'
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{f"{b} bits": {"bits": b, "group_size": g} for b, g in ((2, 32), (3, 64), (5, 32), (8, 128))},
    "4 bits": {"bits": 4},
    "6 bits": {"bits": 6},
    **{mode: {"mode": mode} for mode in ("mxfp4", "mxfp8", "nvfp4")},
    "recipe": {"bits": 4, "recipe": RECIPE},
}
# Every way for the shapes with most kinds of matrices; the rest as it is and in 4 bits.
CASES = [
    *((shape, way) for shape in ("e2b", "26b") for way in WAYS),
    *((shape, way) for shape in ("e4b", "12b", "31b") for way in ("plain", "4 bits")),
]


def made(tmp_path: Path, way: str, shape: str = "e2b", **options: Any) -> Path:
    """A conversion of a float32 target in one of WAYS."""
    asked = dict(WAYS[way])
    if "recipe" in asked:
        (tmp_path / "recipe.toml").write_text(asked["recipe"])
        asked["recipe"] = tmp_path / "recipe.toml"
    source = target(tmp_path / "a", shape, dtype=mx.float32, **options)
    return convert(source, tmp_path / "b", **asked)


def ours(folder: Path) -> mx.array:
    return our_logits(load_target(folder, float32=True))


def load_in_mlx_vlm(folder: Path) -> Any:
    utils = pytest.importorskip("mlx_vlm.utils")
    logging.disable(logging.WARNING)
    try:
        model = utils.load_model(folder)
    finally:
        logging.disable(logging.NOTSET)
    model.language_model.set_dtype(mx.float32)
    return model


def mlx_vlm_logits(folder: Path) -> mx.array:
    """[T, V] for PROMPT, with mlx-vlm's loader and model, in float32."""
    found: mx.array = load_in_mlx_vlm(folder).language_model(mx.array([PROMPT])).logits[0]
    return found


@pytest.mark.parametrize(("shape", "way"), CASES)
def test_ours_in_mlx_lm(tmp_path: Path, shape: str, way: str) -> None:
    out = made(tmp_path, way, shape)
    assert difference(mlx_lm_logits(out), ours(out)) < NEAR


@pytest.mark.parametrize(("shape", "way"), CASES)
def test_ours_in_mlx_vlm(tmp_path: Path, shape: str, way: str) -> None:
    pytest.importorskip("mlx_vlm")
    out = made(tmp_path, way, shape)
    assert difference(mlx_vlm_logits(out), ours(out)) < NEAR


@pytest.mark.parametrize("way", ["plain", "4 bits"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_case_g29_every_layout_of_the_source(tmp_path: Path, prefix: str, way: str) -> None:
    out = made(tmp_path, way, prefix=prefix)
    assert difference(mlx_lm_logits(out), ours(out)) < NEAR
    packed = "scales" in " ".join(arrays(out))
    assert packed == (way != "plain")
    names = [n for n in arrays(out) if n.endswith("layers.0.mlp.up_proj.weight")]
    at = prefix if way == "plain" else PREFIXES[2 if prefix == "model." else 1]
    assert names == [f"{at}layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize("way", ["plain", "4 bits"])
def test_flat_configs_in_mlx_vlm(tmp_path: Path, way: str) -> None:
    pytest.importorskip("mlx_vlm")
    out = made(tmp_path, way, prefix="model.")
    assert difference(mlx_vlm_logits(out), ours(out)) < NEAR


VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
    "default_output_length": 4,
}


@pytest.mark.parametrize("way", ["plain", "4 bits"])
def test_case_g04_a_vision_tower_is_whole_in_mlx_vlm(tmp_path: Path, way: str) -> None:
    utils = pytest.importorskip("mlx_vlm.utils")
    from mlx_vlm.models import gemma4

    config = {**target_config("e2b"), "vision_config": VISION}
    own = gemma4.ModelConfig.from_dict(dict(config))
    own = utils.update_module_configs(own, gemma4, config, ["text", "vision", "audio"])
    parts = tree_flatten(gemma4.Model(own).parameters())
    tower = {name: array for name, array in parts if not name.startswith("language_model.")}
    assert len(tower) > 10

    def add(tensors: dict[str, mx.array]) -> None:
        tensors.update({f"model.{name}": array for name, array in tower.items()})

    out = made(tmp_path, way, config=config, change=add)
    found = dict(tree_flatten(load_in_mlx_vlm(out).parameters()))
    assert all(mx.array_equal(found[name], array) for name, array in tower.items())
    assert difference(mlx_vlm_logits(out), ours(out)) < NEAR
    assert difference(mlx_lm_logits(out), ours(out)) < NEAR


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits_as_mlx_lms_own_conversion(tmp_path: Path, shape: str) -> None:
    """Where both pack a matrix the same way, they write the same numbers under the same name."""
    source = target(tmp_path / "a", shape)
    theirs = arrays(write_quantized(source, tmp_path / "b", bits=4, group_size=64))
    found = arrays(convert(source, tmp_path / "c", 4))
    same = [name for name in found if ".mlp." in name or ".switch_glu." in name]
    assert len(same) >= 3 * 3 * 6
    assert all(mx.array_equal(found[name], theirs[name]) for name in same)
    leaves = (".scales", ".biases")  # they leave matrices of 32 columns as floats
    names = [{n for n in written if not n.endswith(leaves)} for written in (found, theirs)]
    assert names[0] == names[1]


def by_layer(path: str, module: Any) -> bool | dict[str, Any]:
    if not hasattr(module, "to_quantized") or "q_proj" in path or module.weight.shape[-1] % 64:
        return False
    return {"group_size": 32, "bits": 3} if "down_proj" in path else "layers.0." in path


@pytest.mark.parametrize("shape", ["e2b", "26b"])
def test_mlx_lms_bits_per_layer_here(tmp_path: Path, shape: str) -> None:
    source = target(tmp_path / "a", shape, dtype=mx.float32)
    theirs = write_quantized(source, tmp_path / "b", bits=5, group_size=64, predicate=by_layer)
    found = load_target(theirs, float32=True)
    assert difference(our_logits(found), mlx_lm_logits(theirs)) < NEAR
    assert found.layers[0].mlp.down_proj.bits == 3
    assert found.layers[0].self_attn.o_proj.bits == 5
    assert not hasattr(found.layers[1].self_attn.o_proj, "bits")
