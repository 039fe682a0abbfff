"""How many bits a matrix gets: the default, a file of patterns, narrow matrices, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_mtp.errors import UsageError
from mlx_mtp.weights.recipe import AFFINE_BITS, Recipe, Scheme, make


def made(bits: int | None, mode: str = "affine", group_size: int | None = None) -> Recipe:
    recipe = make(bits, mode, group_size)
    assert recipe is not None
    return recipe


def from_file(tmp_path: Path, text: str, bits: int = 4) -> Recipe:
    (tmp_path / "recipe.toml").write_text(text)
    recipe = make(bits, file=tmp_path / "recipe.toml")
    assert recipe is not None
    return recipe


def bits_of(recipe: Recipe, path: str, width: int = 256) -> int:
    scheme = recipe.scheme(path, width)
    return scheme.bits if scheme else 0


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize(
    ("path", "least"),
    [
        ("layers.3.mlp.up_proj", 0),
        ("layers.3.self_attn.q_proj", 0),
        ("layers.3.experts.gate_proj", 0),
        ("embed_tokens", 6),
        ("lm_head", 6),
        ("embed_tokens_per_layer", 8),
        ("per_layer_model_projection", 8),
        ("layers.3.per_layer_input_gate", 8),
        ("layers.3.per_layer_projection", 8),
        ("layers.3.router.proj", 8),
        ("drafter.embed_tokens", 8),
        ("drafter.layers.0.mlp.up_proj", 8),
        ("drafter.pre_projection", 8),
    ],
)
def test_case_g08_g11_the_default(bits: int, path: str, least: int) -> None:
    assert bits_of(made(bits), path) == max(bits, least)


def test_the_drafters_head_of_centroids_stays_floats() -> None:
    assert made(4).scheme("drafter.masked_embedding.centroids", 256) is None


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("nvfp4", 4, 16)])
def test_modes_of_floats_leave_affine_where_more_bits_are_due(
    mode: str, bits: int, group: int
) -> None:
    recipe = made(None, mode)
    assert recipe.scheme("layers.0.mlp.up_proj", 256) == Scheme(bits, group, mode)
    assert recipe.scheme("embed_tokens", 256) == Scheme(6)
    assert recipe.scheme("layers.0.router.proj", 256) == Scheme(8)


def test_the_first_pattern_that_matches_counts(tmp_path: Path) -> None:
    text = '"layers.0.mlp.*" = 8\n"layers.*.mlp.*" = 2\n"*.router.*" = 0\nembed_tokens = 3\n'
    recipe = from_file(tmp_path, text)
    paths = ["layers.0.mlp.up_proj", "layers.1.mlp.up_proj", "layers.1.router.proj"]
    paths += ["embed_tokens", "layers.0.self_attn.q_proj", "lm_head"]
    assert [bits_of(recipe, path) for path in paths] == [8, 2, 0, 3, 4, 6]
    recipe.check_used()
    assert recipe.as_dict()["rules"][:4] == [
        ["layers.0.mlp.*", 8],
        ["layers.*.mlp.*", 2],
        ["*.router.*", 0],
        ["embed_tokens", 3],
    ]


@pytest.mark.parametrize("text", ['"layers.0.mpl.*" = 8', '"layers.*" = 4\n"layers.0.mlp.*" = 8'])
def test_a_pattern_that_decides_nothing_is_refused(tmp_path: Path, text: str) -> None:
    recipe = from_file(tmp_path, text)
    recipe.scheme("layers.0.mlp.up_proj", 256)
    with pytest.raises(UsageError, match=r"'layers\.0\.mp?lp?\.\*' matches no matrix"):
        recipe.check_used()


@pytest.mark.parametrize(
    ("group", "width", "found"),
    [(64, 96, 32), (128, 64, 64), (128, 192, 64), (128, 256, 128), (64, 48, None), (32, 16, None)],
)
def test_narrow_matrices_take_the_largest_group_that_divides_them(
    group: int, width: int, found: int | None
) -> None:
    scheme = made(4, group_size=group).scheme("layers.0.mlp.up_proj", width)
    assert (scheme and scheme.group_size) == found


@pytest.mark.parametrize(("mode", "width"), [("mxfp4", 48), ("mxfp8", 16), ("nvfp4", 24)])
def test_modes_of_floats_have_one_group(mode: str, width: int) -> None:
    assert made(None, mode).scheme("layers.0.mlp.up_proj", width) is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((7,), "bits are 7; they must be one of"),
        ((0,), "bits are 0; they must be one of"),
        ((4, "affine", 0), "group size is 0; it must be one of"),
        ((4, "affine", 16), "group size is 16; it must be one of"),
        ((8, "mxfp4"), "mxfp4 has 4 bits in groups of 32, nothing else"),
        ((None, "mxfp8", 64), "mxfp8 has 8 bits in groups of 32, nothing else"),
        ((4, "fp4"), "mode is fp4; it must be affine, mxfp4, mxfp8, nvfp4"),
        ((None, "fp4"), "mode is fp4; it must be affine, mxfp4, mxfp8, nvfp4"),
        ((None, "affine", 64), "a group size says how to quantise: give the bits, too"),
        ((None, "affine", None, Path("r")), "a recipe says how to quantise: give the bits, too"),
    ],
)
def test_options_that_cannot_be(options: tuple[int, ...], told: str) -> None:
    with pytest.raises(UsageError) as error:
        make(*options)  # type: ignore[arg-type]
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('"layers.*" = 7', "'layers.*' is 7; it must be 0 or"),
        ('"layers.*" = "4"', "'layers.*' is '4'; it must be 0 or"),
        ('"layers.*" = false', "'layers.*' is False; it must be 0 or"),
        ("layers.* = 4", 'is no recipe, lines of "pattern" = bits'),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "r.toml").write_text(text)
    with pytest.raises(UsageError) as error:
        make(4, file=tmp_path / "r.toml")
    assert told in str(error.value)
    assert "\n" not in str(error.value)
