"""What a conversion writes: every byte of a copy, every packed matrix, every name and statement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mtp.errors import UsageError
from mlx_mtp.weights import convert as conversion
from mlx_mtp.weights import jobs
from mlx_mtp.weights.checkpoint import INDEX
from mlx_mtp.weights.convert import How, plan
from mlx_mtp.weights.load import load_pair, load_target
from tests.checkpoints import (
    SHAPES,
    target_config,
    vlm_names,
    write_drafter,
)
from tests.text import folders
from tests.weights.conversions import (
    array,
    arrays,
    config_of,
    convert,
    hashes,
    headers,
    raw,
    target,
)

TEXT = "model.language_model."
LEAVES = ("weight", "scales", "biases")


def towers(tensors: dict[str, mx.array]) -> None:
    """Of every kind: floats of two sizes, whole numbers, a scalar, nothing at all."""
    tensors["model.vision_tower.blocks.0.weight"] = mx.ones((4, 4), dtype=mx.bfloat16)
    tensors["model.vision_tower.blocks.0.input_max"] = mx.array(3.5)
    tensors["model.vision_embedder.pos"] = mx.arange(6, dtype=mx.int64).reshape(2, 3)
    tensors["model.embed_audio.proj.weight"] = mx.full((3, 5, 2), mx.nan)
    tensors["model.audio_tower.mask"] = mx.array([True, False])
    tensors["model.audio_tower.none.weight"] = mx.zeros((0, 5))


@pytest.mark.parametrize("shape", SHAPES)
def test_case_g04_without_bits_all_is_copied_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    monkeypatch.setattr(jobs, "BLOCK", 1000)
    monkeypatch.setattr(conversion, "SHARD", 100_000)
    source = target(tmp_path / "a", shape, shards=2, kv_of_shared=True, change=towers)
    before = hashes(source)
    out = convert(source, tmp_path / "b")
    assert raw(out) == raw(source)
    assert config_of(out) == config_of(source)
    assert hashes(out)["config.json"] == before["config.json"]
    assert hashes(source) == before
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert mx.array_equal(load_target(out).norm.weight, load_target(source).norm.weight)


@pytest.mark.parametrize("bits", [None, 4])
def test_case_g22_index_and_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int | None
) -> None:
    monkeypatch.setattr(conversion, "SHARD", 50_000)
    out = convert(target(tmp_path / "a"), tmp_path / "b", bits)
    found, index = headers(out), json.loads((out / INDEX).read_text())
    assert index["weight_map"] == {name: tensor.file for name, tensor in found.items()}
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in found.values())}
    for file in out.glob("*.safetensors"):
        start = file.read_bytes()
        length = int.from_bytes(start[:8], "little")
        header = json.loads(start[8 : 8 + length])
        assert header["__metadata__"] == {"format": "mlx" if bits else "pt"}
        assert (8 + length) % 8 == 0
        assert len(start) == 8 + length + sum(
            t["data_offsets"][1] - t["data_offsets"][0] for t in header.values() if "shape" in t
        )
        mx.load(str(file))


@pytest.mark.parametrize("bits", [None, 4])
def test_case_g20_g21_files_beside_the_weights_are_byte_equal(
    tmp_path: Path, bits: int | None
) -> None:
    config = target_config(vocab_size=512, vocab_size_per_layer_input=512)
    source = target(tmp_path / "a", config=config)
    folders.gemma_like(source, chat_template=folders.TEMPLATE)
    (source / "chat_template.jinja").write_bytes(b"{{ bos_token }}\r\n")
    (source / "generation_config.json").write_text('{"eos_token_id":  [1, 106, 50]}')
    (source / "processor_config.json").write_text("{}")
    (source / "special_tokens_map.json").write_text('{"b": 1}\n')
    others = ("README.md", "model.gguf", "pytorch_model.bin", ".gitattributes", "mlx_mtp.json")
    for name in others:
        (source / name).write_text("of the source")
    out = convert(source, tmp_path / "b", bits)
    before, after = hashes(source), hashes(out)
    kept = [name for name in before if not name.startswith(("model", "config", *others))]
    assert len(kept) >= 6
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    own = {"config.json", "README.md", "mlx_mtp.json", INDEX, "model-00001-of-00001.safetensors"}
    assert after.keys() == {*kept, *own}
    assert after["README.md"] != before["README.md"]
    pair = load_pair(str(out), drafter=None)
    assert set(pair.defaults.eos_token_ids) == {1, 106, 50}


@pytest.mark.parametrize("options", [{}, {"bits": 4}, {"dtype": "float32"}], ids=str)
def test_case_g28_converting_twice_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(jobs, "BLOCK", 2000)
    source = target(tmp_path / "a", "26b")
    drafter = str(write_drafter(tmp_path / "d", "26b"))
    found = [
        hashes(convert(source, tmp_path / name / "out", drafter=drafter, **options))
        for name in ("one", "two")
    ]
    assert found[0] == found[1]
    listed = json.loads((tmp_path / "one" / "out" / "mlx_mtp.json").read_text())["files"]
    assert listed == {k: v for k, v in found[0].items() if k != "mlx_mtp.json"}
    assert "drafter/config.json" in listed


AFFINE = [(2, 32), (3, 64), (5, 32), (6, 128), (8, 64), (4, 128), (4, 32)]
SCHEMES = [
    *({"group_size": g, "bits": b, "mode": "affine"} for b, g in AFFINE),
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    {"group_size": 16, "bits": 4, "mode": "nvfp4"},
]


@pytest.mark.parametrize(
    ("shape", "scheme"),
    [("e2b", scheme) for scheme in SCHEMES] + [("26b", scheme) for scheme in SCHEMES[-4:]],
    ids=str,
)
def test_case_g11_matrices_are_what_mlx_makes_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, scheme: dict[str, Any]
) -> None:
    """Blocks of a few rows change nothing, at their borders neither, and experts are split right;
    what is not packed stays as it was."""
    monkeypatch.setattr(jobs, "BLOCK", 2000)
    source = target(tmp_path / "a", shape, kv_of_shared=True)
    out = convert(
        source, tmp_path / "b", scheme["bits"], mode=scheme["mode"], group_size=scheme["group_size"]
    )
    config = config_of(out)
    block = config["quantization"]
    assert block == config["quantization_config"]
    assert {key: block[key] for key in scheme} == scheme
    found, seen = arrays(out), set()
    for name, tensor in arrays(source).items():
        for own, part in vlm_names(name, tensor).items():
            if own not in found:
                assert "layers." in own  # keys and values of layers that share
                assert ".self_attn.k" in own or ".self_attn.v" in own
                continue
            stem = own.removesuffix(".weight")
            seen.add(own)
            if f"{stem}.scales" not in found:
                assert mx.array_equal(found[own], part), own
                assert part.ndim == 1 or part.shape[-1] % 32
                continue
            packed = mx.quantize(part, **block.get(stem, scheme))
            for leaf, wanted in zip(LEAVES, packed, strict=False):
                assert mx.array_equal(found[f"{stem}.{leaf}"], wanted), f"{stem}.{leaf}"
                seen.add(f"{stem}.{leaf}")
    assert seen == found.keys()


@pytest.mark.parametrize("shape", ["e2b", "26b"])
def test_case_g08_g11_bits_of_every_matrix(tmp_path: Path, shape: str) -> None:
    drafter = str(write_drafter(tmp_path / "d", shape))
    out = convert(target(tmp_path / "a", shape), tmp_path / "b", 4, drafter=drafter)
    bits = json.loads((out / "mlx_mtp.json").read_text())["bits"]
    at = "language_model.model."
    sensitive = {n: b for n, b in bits.items() if "per_layer" in n or "router" in n}
    assert len(sensitive) == (2 + 2 * 6 if shape == "e2b" else 6)
    assert set(sensitive.values()) == {8}
    assert bits[f"{at}embed_tokens"] == 6
    assert {b for n, b in bits.items() if n.startswith("drafter/")} == {8}
    rest = {n: b for n, b in bits.items() if "layers." in n and n not in sensitive}
    assert {b for n, b in rest.items() if not n.startswith("drafter/")} == {4}
    for folder, place in ((out, ""), (out / "drafter", "drafter/")):
        found = headers(folder)
        packed = {f"{place}{n.removesuffix('.scales')}" for n in found if n.endswith(".scales")}
        assert packed == {n for n in bits if n.startswith("drafter/") == bool(place)}
        leaves = tuple(f"{n.removeprefix(place)}.{leaf}" for n in packed for leaf in LEAVES)
        floats = [n for n in found.keys() - set(leaves) if "token_ordering" not in n]
        plain = ("scale", "scalar", "centroids.weight")
        assert all("norm" in n or n.endswith(plain) for n in floats), floats
        assert {found[n].dtype for n in floats} == {"BF16"}
    pair = load_pair(str(out))
    assert pair.drafter is not None
    assert pair.drafter_bits == 8


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        '"layers.0.mlp.up_proj" = 3\n"layers.?.mlp.*" = 2\n"layers.1.*" = 0\n"drafter.*" = 4\n'
    )
    source, drafter = target(tmp_path / "a"), str(write_drafter(tmp_path / "d"))
    out = convert(source, tmp_path / "b", 4, recipe=tmp_path / "r.toml", drafter=drafter)
    listed = json.loads((out / "mlx_mtp.json").read_text())
    bits, at = listed["bits"], "language_model.model.layers."
    assert bits[f"{at}0.mlp.up_proj"] == 3
    assert bits[f"{at}1.mlp.up_proj"] == bits[f"{at}0.mlp.gate_proj"] == 2
    assert f"{at}1.self_attn.q_proj" not in bits
    assert bits["drafter/masked_embedding.centroids"] == 4
    assert listed["recipe"]["rules"][1] == ["layers.?.mlp.*", 2]
    assert mx.array_equal(
        array(out, f"{at}1.self_attn.q_proj.weight"),
        array(source, f"{TEXT}layers.1.self_attn.q_proj.weight"),
    )
    assert load_pair(str(out)).drafter is not None
    (tmp_path / "r.toml").write_text('"layers.*.mpl.*" = 3')
    with pytest.raises(UsageError, match=r"'layers\.\*\.mpl\.\*' matches no matrix"):
        convert(source, tmp_path / "c", 4, recipe=tmp_path / "r.toml")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("bits", [None, 4])
def test_case_g01_g02_kv_of_shared_layers(tmp_path: Path, bits: int | None) -> None:
    outs = [
        convert(target(tmp_path / f"a{there}", kv_of_shared=there), tmp_path / f"b{there}", bits)
        for there in (False, True)
    ]
    shared = f"{TEXT}layers.5.self_attn.k_proj.weight"
    assert [shared in headers(out) for out in outs] == [False, bits is None]
    if bits:  # the random keys differ, but the names of what is left are the same
        assert headers(outs[0]).keys() == headers(outs[1]).keys()


@pytest.mark.parametrize("same", [True, False])
def test_case_g07_a_tied_model_that_ships_its_head(tmp_path: Path, same: bool) -> None:
    def add_head(tensors: dict[str, mx.array]) -> None:
        table = tensors[f"{TEXT}embed_tokens.weight"]
        tensors["lm_head.weight"] = table if same else table + 1

    source = target(tmp_path / "a", change=add_head)
    assert raw(convert(source, tmp_path / "b"))["lm_head.weight"]
    how = How(conversion.Recipe(jobs.Scheme(4)))
    ready = plan(str(source), how, drafter=None).fetch(None)
    told = "ships an lm_head that differs from its embedding table"
    assert any(told in notice for notice in ready.notices) == (not same)
    conversion.write(ready, tmp_path / "c")
    assert "lm_head" not in " ".join(headers(tmp_path / "c"))


def test_an_untied_head_is_packed_as_a_table(tmp_path: Path) -> None:
    def add_head(tensors: dict[str, mx.array]) -> None:
        tensors["lm_head.weight"] = -tensors[f"{TEXT}embed_tokens.weight"]

    config = target_config("31b", tie_word_embeddings=False)
    config["tie_word_embeddings"] = False
    out = convert(target(tmp_path / "a", config=config, change=add_head), tmp_path / "b", 4)
    assert json.loads((out / "mlx_mtp.json").read_text())["bits"]["language_model.lm_head"] == 6
    load_target(out)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("bits", [None, 4])
def test_case_g26_dtypes(tmp_path: Path, dtype: str, bits: int | None) -> None:
    source = target(tmp_path / "a", "26b", vision=True)
    out = convert(source, tmp_path / "b", bits, dtype=dtype)
    name = jobs.DTYPES[dtype]
    at = TEXT if bits is None else "language_model.model."
    norm = array(out, f"{at}norm.weight")
    wanted = array(source, f"{TEXT}norm.weight").astype(jobs.MLX_TYPES[name])
    assert norm.dtype == wanted.dtype
    assert mx.array_equal(norm, wanted)
    floats = {n: t.dtype for n, t in headers(out).items() if t.dtype not in ("U32", "I64")}
    assert {d for n, d in floats.items() if "vision" not in n} == {name}
    assert floats["model.vision_tower.blocks.0.weight"] == "BF16"  # towers are left alone
    assert config_of(out)["dtype"] == dtype
    if bits is None:
        assert headers(out).keys() == headers(source).keys()
    if dtype != "float16":
        load_target(out)
    how = How(None, dtype)
    told = "Gemma 4's activations can overflow float16; bfloat16 is as small and safer"
    notices = plan(str(source), how, drafter=None).notices
    assert (told in notices) == (dtype == "float16")


def test_case_g26_a_float16_source_is_said(tmp_path: Path) -> None:
    source = target(tmp_path / "a", dtype=mx.float16)
    told = plan(str(source), How(), drafter=None).notices
    assert any("is stored in float16" in notice for notice in told)
    assert array(convert(source, tmp_path / "b", 4), "language_model.model.norm.weight").dtype == (
        mx.float16
    )
    with pytest.raises(UsageError, match="dtype is int8; it must be bfloat16, float16, float32"):
        How(dtype="int8")
