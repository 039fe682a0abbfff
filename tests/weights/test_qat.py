"""Weights on q4_0's grid come out on that grid: the same numbers, not a new grid near them."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mtp.weights import jobs, qat
from mlx_mtp.weights.load import load_target
from mlx_mtp.weights.recipe import Scheme
from tests.checkpoints import target_config
from tests.weights.conversions import array, arrays, convert, headers, target

LEAVES = ("weight", "scales", "biases")


def q4_0(rows: int, width: int, seed: int = 0) -> tuple[mx.array, mx.array, mx.array]:
    """(values 0..15, d of either sign, bfloat16 weights) of a matrix as q4_0 quantises: the largest
    of every 32 by magnitude is -8 d; one group is all zero."""
    keys = mx.random.split(mx.random.key(seed), 3)
    q = mx.random.randint(1, 16, (rows, width // 32, 32), key=keys[0])
    at = mx.random.randint(0, 32, (rows, width // 32, 1), key=keys[1])
    q = mx.where(mx.arange(32) == at, 0, q)
    d = (0.02 * mx.random.normal((rows, width // 32), key=keys[2])).astype(mx.bfloat16)
    d[0, 0] = 0
    weights = ((q - 8) * d[..., None].astype(mx.float32)).astype(mx.bfloat16)
    return q.reshape(rows, width), d, weights.reshape(rows, width)


def unpacked(words: mx.array) -> mx.array:
    """The eight values of every word, the lowest bits first."""
    values = (words[..., None] >> (4 * mx.arange(8, dtype=mx.uint32))) & 15
    return values.flatten(-2)


def test_the_grid_is_kept_exactly() -> None:
    q, d, rows = q4_0(64, 256)
    assert qat.looks_like_it(rows)
    words, scales, biases = qat.on_grid(rows, mx.quantize(rows, group_size=32, bits=4))
    assert mx.array_equal(scales, d)
    assert mx.array_equal(biases, -8 * d)
    zero = mx.repeat(d == 0, 32, axis=-1)
    assert mx.array_equal(mx.where(zero, 8, unpacked(words)), mx.where(zero, 8, q))
    floats = [a.astype(mx.float32) for a in (scales, biases)]
    back = mx.dequantize(words, *floats, group_size=32, bits=4)
    assert mx.array_equal(back.astype(mx.bfloat16), rows)
    plain = mx.quantize(rows.astype(mx.float32), group_size=32, bits=4)
    near = mx.dequantize(*plain, group_size=32, bits=4)
    assert not mx.array_equal(near.astype(mx.bfloat16), rows)  # what MLX alone would make of it


def test_a_group_that_is_off_the_grid_is_packed_as_mlx_does() -> None:
    _, _, rows = q4_0(4, 128)
    rows[2, 32:64] = mx.random.normal((32,), key=mx.random.key(7)).astype(mx.bfloat16)
    assert not qat.looks_like_it(rows)
    plain = mx.quantize(rows, group_size=32, bits=4)
    words, scales, biases = qat.on_grid(rows, plain)
    for found, own in ((words[2, 4:8], plain[0][2, 4:8]), (scales[2, 1], plain[1][2, 1])):
        assert mx.array_equal(found, own)
    assert biases[2, 1].item() == plain[2][2, 1].item()
    assert mx.array_equal(biases[3], -8 * scales[3])


@pytest.mark.parametrize(
    "rows",
    [
        mx.random.normal((8, 64), key=mx.random.key(1)).astype(mx.bfloat16),
        mx.zeros((8, 64)),
        q4_0(8, 64)[2] * 1.02,
        q4_0(8, 64)[2][:, :48],
        mx.zeros((8, 64), dtype=mx.uint32) + 3,
    ],
    ids=["random", "zero", "near", "another width", "integers"],
)
def test_what_only_looks_like_it(rows: mx.array) -> None:
    assert not qat.looks_like_it(rows)


@pytest.mark.parametrize(
    ("scheme", "fits"),
    [(Scheme(4), True), (Scheme(5), False), (Scheme(4, 32, "mxfp4"), False)],
)
def test_only_four_affine_bits_can_hold_it(scheme: Scheme, fits: bool) -> None:
    assert qat.fits(scheme) == fits


UP, OUT = "model.language_model.layers.0.mlp.up_proj", "language_model.model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("block", [1000, jobs.BLOCK])
def test_a_checkpoint_on_the_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(jobs, "BLOCK", block)
    wanted: dict[str, tuple[mx.array, mx.array, mx.array]] = {}

    def quantised(tensors: dict[str, mx.array]) -> None:
        for seed, name in enumerate(n for n in tensors if n.endswith("_proj.weight")):
            rows, width = tensors[name].shape
            if width % 32 == 0:
                wanted[name.removesuffix(".weight")] = q4_0(rows, width, seed)
                tensors[name] = wanted[name.removesuffix(".weight")][2]

    config = target_config("31b")
    out = convert(target(tmp_path / "a", config=config, change=quantised), tmp_path / "b", 4)
    assert len(wanted) > 30
    written = arrays(out)
    for name, (q, d, rows) in wanted.items():
        stem = name.replace("model.language_model.", "language_model.model.")
        words, scales, biases = (written[f"{stem}.{leaf}"] for leaf in LEAVES)
        assert mx.array_equal(scales, d), name
        assert mx.array_equal(biases, -8 * d)
        assert mx.array_equal(mx.where(rows == 0, 8, unpacked(words)), mx.where(rows == 0, 8, q))
    # The table keeps its 6 bits in groups of 64: only 4 bits hold the grid.
    assert headers(out)["language_model.model.embed_tokens.scales"].shape[-1] == 1
    assert load_target(out, float32=True)


def test_a_checkpoint_near_the_grid_is_packed_as_any(tmp_path: Path) -> None:
    def near(tensors: dict[str, mx.array]) -> None:
        rows = q4_0(*tensors[f"{UP}.weight"].shape)[2]
        rows[5, 9] *= 1.1
        tensors[f"{UP}.weight"] = rows

    source = target(tmp_path / "a", "31b", change=near)
    out = convert(source, tmp_path / "b", 4)
    plain = mx.quantize(array(source, f"{UP}.weight"), group_size=64, bits=4)
    for leaf, own in zip(LEAVES, plain, strict=True):
        assert mx.array_equal(array(out, f"{OUT}.{leaf}"), own)


def test_halves_of_fused_experts_are_looked_at_alone(tmp_path: Path) -> None:
    def up_alone(tensors: dict[str, mx.array]) -> None:
        name = "model.language_model.layers.0.experts.gate_up_proj"
        fused = tensors[name]
        for expert in range(len(fused)):
            fused[expert, 64:] = q4_0(64, 64, expert)[2]
        tensors[name] = fused

    out = convert(target(tmp_path / "a", "26b", change=up_alone), tmp_path / "b", 4)
    at = "language_model.model.layers.0.experts.switch_glu"
    found = headers(out)
    assert found[f"{at}.gate_proj.scales"].shape == (8, 64, 1)
    assert found[f"{at}.up_proj.scales"].shape == (8, 64, 2)
    assert mx.array_equal(array(out, f"{at}.up_proj.scales")[3], q4_0(64, 64, 3)[1])
