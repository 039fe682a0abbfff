"""Which part each rank holds: all of a target once, whole groups and heads, donors' keys whole."""

from __future__ import annotations

import io

import mlx.core as mx
import pytest

from mlx_mtp.config import TargetConfig
from mlx_mtp.errors import UsageError
from mlx_mtp.models.shards import Cut, Ranks, Shards
from tests import checkpoints


def text_of(shape: str, **changes):
    return TargetConfig.from_dict(checkpoints.target_config(shape, **changes)).text


def shards_of(text, size: int, groups=None) -> list[Shards]:
    return [Shards(text, Ranks(rank, size), groups or {}) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", checkpoints.SHAPES)
def test_every_query_head_is_one_ranks_beside_the_keys_that_it_attends_to(shape, size):
    text = text_of(shape)
    for kind in set(text.layer_types):
        each, alike = shards_of(text, size), text.num_attention_heads // text.kv_heads_of(kind)
        assert [q for s in each for q in s.queries(kind)] == [*range(text.num_attention_heads)]
        for s in each:
            assert {q // alike for q in s.queries(kind)} == {*s.seen(kind)}


@pytest.mark.parametrize("shape", checkpoints.SHAPES)
def test_the_donor_layers_keep_all_keys(shape):
    text = text_of(shape)
    for s in shards_of(text, 2):
        for layer, kind in enumerate(text.layer_types):
            donor = layer in text.donors.values()
            assert s.held(layer) == (range(text.kv_heads_of(kind)) if donor else s.seen(kind))


@pytest.mark.parametrize(("heads", "kv", "size"), [(4, 1, 3), (6, 3, 2), (12, 6, 4)])
def test_heads_that_cannot_be_divided_are_refused(heads, kv, size):
    text = text_of("e2b", num_attention_heads=heads, num_key_value_heads=kv)
    with pytest.raises(UsageError, match=f"{heads} query heads and {kv} kv heads"):
        Shards(text, Ranks(0, size))


@pytest.mark.parametrize("groups", [11, 3, 2])
def test_a_width_is_divided_between_groups(groups):
    path = "layers.0.mlp.down_proj"
    parts = [s.inner(path, groups * 64) for s in shards_of(text_of("e2b"), 2, groups={path: 64})]
    assert [i for part in parts for i in part] == [*range(groups * 64)]
    assert all(part.start % 64 == part.stop % 64 == 0 and part for part in parts)


def test_fewer_groups_than_ranks_are_refused():
    path = "layers.0.mlp.down_proj"
    with pytest.raises(UsageError, match="1 groups of inputs are too few for 2 ranks"):
        shards_of(text_of("e2b"), 2, groups={path: 64})[0].inner(path, 64)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", checkpoints.SHAPES)
def test_the_parts_of_a_parameter_make_it_up(shape, size):
    config = checkpoints.target_config(shape)
    text, each = text_of(shape), shards_of(text_of(shape), size)
    for name, array in checkpoints.text_tensors(config["text_config"]).items():
        if "gate_up_proj" in name:
            continue  # the loader reads its halves as gate_proj and up_proj
        cuts = [s.cut(name if "experts" not in name else f"{name}.weight") for s in each]
        if cuts[0] is None:
            assert not any(cuts)
            assert ".self_attn." not in name or "norm" in name
        elif cuts[0].share == 1 or "k_proj" in name or "v_proj" in name:
            layer, kind = int(name.split(".")[1]), text.layer_types[int(name.split(".")[1])]
            dim = text.head_dim_of(kind)
            for s, cut in zip(each, cuts, strict=True):
                held = s.held(layer)
                assert (cut.start, cut.stop) == (held.start * dim, held.stop * dim)
        else:
            whole = mx.concatenate([cut.of(array) for cut in cuts], cuts[0].axis)
            assert mx.array_equal(whole, array)


def test_packed_weights_and_their_scales_are_cut_alike():
    array = mx.random.normal((8, 128))
    leaves = mx.quantize(array, group_size=32, bits=4)
    cut = Cut(-1, 32, 128, 128)
    part = mx.dequantize(*map(cut.of, leaves), group_size=32, bits=4)
    whole = mx.dequantize(*leaves, group_size=32, bits=4)
    assert mx.array_equal(part, whole[:, 32:])


def test_what_rank_0_tells_is_computed_everywhere():
    """Or its collective would not wait for those that it follows, and meet another one."""

    class Alone(Ranks):
        def total(self, x: mx.array) -> mx.array:
            return x

    for rank, expected in ((0, [1, 1]), (1, [0, 0])):
        graph, heard = io.StringIO(), Alone(rank, 2).leaders(mx.zeros(2, mx.int32) + 1)
        mx.export_to_dot(graph, heard)
        assert "Add" in graph.getvalue()
        assert heard.tolist() == expected
