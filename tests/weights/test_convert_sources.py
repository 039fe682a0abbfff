"""Sources that are packed already, broken or not ours: used for what they are, or refused in a line
with nothing left behind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mtp.errors import LoadError
from mlx_mtp.weights.checkpoint import INDEX
from mlx_mtp.weights.convert import How, plan
from mlx_mtp.weights.load import load_target
from tests.checkpoints import target_config, write, write_quantized, write_vlm_quantized
from tests.weights.conversions import (
    array,
    arrays,
    config_of,
    convert,
    headers,
    leftovers,
    raw,
    target,
)

LEAVES = ("weight", "scales", "biases")


def refused(source: Path, out: Path, error: type[Exception] = LoadError, **options: Any) -> str:
    with pytest.raises(error) as caught:
        convert(source, out, **options)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    assert leftovers(out) == []
    return str(caught.value)


def test_case_g13_packed_already(tmp_path: Path) -> None:
    source = target(tmp_path / "a", "26b")
    packed = convert(source, tmp_path / "b", 8)
    told = "is quantised already, and unpacking it to pack it again loses more"
    assert told in refused(packed, tmp_path / "c", bits=4)
    assert told in refused(packed, tmp_path / "c", dtype="float32")
    again = convert(packed, tmp_path / "c", 4, requantize=True)
    at = "language_model.model.layers.0.mlp.up_proj"
    leaves = [array(packed, f"{at}.{leaf}") for leaf in LEAVES]
    floats = mx.dequantize(*leaves, group_size=64, bits=8)
    for leaf, wanted in zip(LEAVES, mx.quantize(floats, group_size=64, bits=4), strict=True):
        assert mx.array_equal(array(again, f"{at}.{leaf}"), wanted)
    assert config_of(again)["quantization"]["bits"] == 4
    load_target(again)


@pytest.mark.parametrize("asked", [{"bits": 8}, {"dtype": "float32"}], ids=str)
def test_towers_that_are_packed_stay_as_they_were(tmp_path: Path, asked: dict[str, Any]) -> None:
    plain = target(tmp_path / "a", vision=True)
    source = write_vlm_quantized(plain, tmp_path / "b", bits=4, group_size=32)
    config, tensors, at = config_of(source), arrays(source), "vision_tower.blocks.0"
    packed = mx.quantize(mx.ones((4, 64)), group_size=64, bits=6)
    tensors |= {f"{at}.{leaf}": part for leaf, part in zip(LEAVES, packed, strict=True)}
    packed = mx.quantize(mx.ones((4, 64)), group_size=32, bits=4)
    other = "embed_vision.proj"
    tensors.pop(f"model.{other}.weight")
    tensors |= {f"{other}.{leaf}": part for leaf, part in zip(LEAVES, packed, strict=True)}
    config["quantization"][at] = {"group_size": 64, "bits": 6}
    write(source, config, tensors)
    out = convert(source, tmp_path / "c", requantize=True, **asked)
    block = config_of(out)["quantization"]
    assert block[at] == {"group_size": 64, "bits": 6}
    assert block[other] == {"group_size": 32, "bits": 4, "mode": "affine"}
    for name in (f"{stem}.{leaf}" for stem in (at, other) for leaf in LEAVES):
        assert mx.array_equal(array(out, name), tensors[name])
    load_target(out)


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4"])
def test_packed_weights_are_copied_or_unpacked(tmp_path: Path, mode: str) -> None:
    plain = target(tmp_path / "a", "26b")
    source = write_quantized(plain, tmp_path / "b", mode=mode)
    (source / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    copy = convert(source, tmp_path / "c")
    assert raw(copy) == raw(source)
    bits = json.loads((copy / "mlx_mtp.json").read_text())["bits"]
    found = headers(source)
    assert bits.keys() == {n.removesuffix(".scales") for n in found if n.endswith(".scales")}
    sides = plan(str(source), How(), drafter=None).sides
    own = sum(math.prod(t.shape) for t in headers(plain).values())
    assert sides[0].numbers == own
    floats = convert(source, tmp_path / "d", dtype="float32", requantize=True)
    assert not {"quantization", "quantization_config"} & config_of(floats).keys()
    assert not any(name.endswith(".scales") for name in headers(floats))
    load_target(floats)


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_case_g13_packed_by_others(tmp_path: Path, method: str) -> None:
    config = {**target_config(), "quantization_config": {"quant_method": method}}
    told = refused(target(tmp_path / "a", config=config), tmp_path / "b", bits=4)
    assert f"the weights are quantised with {method}" in told


@pytest.mark.parametrize("name", ["m.gguf", "m.litertlm", "m.task", "m.tflite"])
def test_files_of_other_programs_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_bytes(b"x")
    told = refused(tmp_path / "a", tmp_path / "b")
    assert f"a/{name}: .{name.partition('.')[2]} weights cannot be read" in told
    assert refused(tmp_path / "a" / name, tmp_path / "b") == told


def _cut(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-100])


def _pointer(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[-1]
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def _stale(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.language_model.gone"] = next(iter(index["weight_map"].values()))
    (folder / INDEX).write_text(json.dumps(index))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "is missing": lambda folder: sorted(folder.glob("*.safetensors"))[0].unlink(),
    "is cut off": _cut,
    "is a Git LFS pointer": _pointer,
    "is stale": _stale,
    "config.json is missing": lambda folder: (folder / "config.json").unlink(),
    "tokenizer.json is missing": lambda folder: (folder / "tokenizer.json").unlink(),
}


@pytest.mark.parametrize("told", DAMAGES)
@pytest.mark.parametrize("bits", [None, 4])
def test_case_g16_g17_g19_g27_a_broken_source(tmp_path: Path, told: str, bits: int | None) -> None:
    source = target(tmp_path / "a", shards=3)
    DAMAGES[told](source)
    assert told in refused(source, tmp_path / "b", bits=bits)


def test_case_g06_a_tensor_that_is_not_known(tmp_path: Path) -> None:
    def misspell(tensors: dict[str, mx.array]) -> None:
        tensors["model.language_model.layers.0.foo.weight"] = mx.ones((2, 2))

    told = refused(target(tmp_path / "a", change=misspell), tmp_path / "b")
    assert "1 not known (model.language_model.layers.0.foo.weight)" in told


def test_case_g18_no_index(tmp_path: Path) -> None:
    source = target(tmp_path / "a", shards=3)
    (source / INDEX).unlink()
    out = convert(source, tmp_path / "b")
    assert raw(out) == raw(source)
    assert (out / INDEX).is_file()


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", ["norm.weight", "layers.1.mlp.up_proj.weight"])
def test_case_g26_numbers_that_float16_cannot_hold(
    tmp_path: Path, name: str, bits: int | None
) -> None:
    def loud(tensors: dict[str, mx.array]) -> None:
        tensors[f"model.language_model.{name}"] *= 1e6

    source = target(tmp_path / "a", change=loud)
    told = refused(source, tmp_path / "b", bits=bits, dtype="float16")
    assert told == (
        f"model.language_model.{name} has numbers that float16 cannot hold; take bfloat16"
    )
