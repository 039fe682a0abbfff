"""Launches and bytes of small graphs are those that can be counted by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from benchmarks import launches
from benchmarks.graphs import Graph, bytes_read, fused
from mlx_mtp.config import TargetConfig
from mlx_mtp.kernels import attention, experts, head
from mlx_mtp.kernels.quantized import Packed
from tests import checkpoints

KINDS = ("e2b", "12b", "26b")


def traced(function: Callable[..., object], *arrays: mx.array) -> Graph:
    graph = Graph()
    mx.export_function(graph.tell, function, *arrays)
    return graph


def launched(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.launches]


def test_views_launch_nothing_and_copies_do() -> None:
    x = mx.zeros((1, 3, 8))

    def views(x: mx.array) -> list[mx.array]:
        heads = x.reshape(1, 3, 2, 4).swapaxes(1, 2)
        return [heads[:, 1:], *mx.split(heads, 2, 1), heads[:, :, :1].reshape(1, 8), heads[None]]

    assert launched(traced(views, x)) == []
    assert launched(traced(lambda x: x.swapaxes(1, 2).reshape(-1), x)) == ["Reshape"]
    assert launched(traced(lambda x: x[:, :1].reshape(-1), x)) == []
    assert [n.launches for n in traced(lambda x: mx.concatenate([x, x, x]), x).nodes] == [3]


def test_an_elementwise_tree_is_one_launch() -> None:
    x, y = mx.zeros((4, 8)), mx.zeros((4, 1))

    def tree(x: mx.array, y: mx.array) -> mx.array:
        return (mx.sigmoid(x * y + 1.0) * x).sum(-1)

    graph = traced(tree, x, y)
    assert launched(graph) == ["Multiply", "Add", "Sigmoid", "Multiply", "Reduce"]
    sums, product = (group for group in fused(graph, {*graph.outputs}) if group[0].launches)
    assert (sums[0].name, len(sums)) == ("Reduce", 1)
    assert sum(node.name != "Broadcast" for node in product) == 4
    assert bytes_read(graph, product, {}) == dict.fromkeys(launches.CHIPS, 4 * (4 * 8 + 4 + 1))


def test_what_others_need_is_not_fused_away() -> None:
    def shared(x: mx.array) -> list[mx.array]:
        doubled = x * 2
        return [doubled.sum(-1), mx.exp(doubled), mx.exp(x * 2).sum()]

    graph = traced(shared, mx.zeros((4, 8)))
    groups = [group[0].name for group in fused(graph, {*graph.outputs}) if group[0].launches]
    assert sorted(groups) == ["Exp", "Multiply", "Reduce", "Reduce"]


def test_fused_as_by_mlx(tmp_path: Path) -> None:
    def long(x: mx.array, y: mx.array, z: mx.array) -> list[mx.array]:
        gated = x * mx.sigmoid(x * (1.6 + 0.1 * mx.square(x))) * y
        for i in range(14):
            gated = gated * z + i
        masked = mx.where(y < z, gated, -mx.inf).sum(-1)
        return [gated, masked, mx.tanh(x / 30) * 30, y + 1, y + 1]

    arrays = [mx.zeros((4, 8)), mx.zeros((4, 8)), mx.zeros((4, 1))]
    graph = traced(long, *arrays)
    file = tmp_path / "graph.dot"
    mx.export_to_dot(str(file), *mx.compile(long)(*arrays))

    def sizes(groups: list[list[str]]) -> list[int]:
        numbers = (sum(name != "Broadcast" for name in group) for group in groups)
        return sorted(number for number in numbers if number > 1)

    groups = [[node.name for node in group] for group in fused(graph, {*graph.outputs})]
    compiled = re.findall('label ?= ?"Compiled([A-Za-z]+)"', file.read_text())
    assert sizes(groups) == sizes([re.findall("[A-Z][a-z]+", name) for name in compiled])


@pytest.mark.parametrize(("rows", "m1", "m3"), [(1, 1, 1), (5, 5, 1), (6, 6, 2), (20, 1, 1)])
def test_readings_of_a_packed_matrix(rows: int, m1: int, m3: int) -> None:
    packed = mx.quantize(mx.zeros((128, 64)), 64, 4)
    x = mx.zeros((rows, 64))
    graph = traced(lambda x, *w: mx.quantized_matmul(x, *w, True, 64, 4), x, *packed)
    size = sum(part.nbytes for part in packed)
    read = bytes_read(graph, graph.nodes, {})
    assert read == {"M1/M2": x.nbytes + m1 * size, "M3+": x.nbytes + m3 * size}


def test_heads_that_share_keys_read_them_again_unless_all_do() -> None:
    queries = mx.zeros((1, 2, 4, 3, 16))
    for kv_heads, readings in ((2, 4), (1, 1)):
        keys = mx.zeros((1, kv_heads, 1, 50, 16))
        graph = traced(lambda q, k: q[:, : k.shape[1]] @ k.swapaxes(-1, -2), queries, keys)
        taken = queries.nbytes * kv_heads // 2
        assert bytes_read(graph, graph.nodes[-1:], {})["M3+"] == taken + readings * keys.nbytes


def test_own_kernels_read_a_part_of_what_they_are_given() -> None:
    text = TargetConfig.from_dict(checkpoints.target_config("26b")).text  # 2 experts of 8 a row

    def shares(function: Callable[..., object], *arrays: mx.array) -> list[float]:
        graph = traced(function, *arrays)
        (node,) = (node for node in graph.nodes if node.key.startswith("CustomKernel"))
        share = launches.share_read(graph, node, text, 100)
        return [share.get(name, 1) for name in node.inputs]

    def attend(q: mx.array, *kv: mx.array) -> list[mx.array]:
        return attention.launch_chunks(q, attention.LongKV(kv, 512), mx.array([91])).run()

    kv = mx.zeros((1, 1, 256, 512), mx.bfloat16)
    queries = mx.zeros((1, 8, 9, 512), mx.bfloat16)  # 72 rows: two blocks
    assert shares(attend, queries, kv, kv) == [1, *[2 * 100 / 256] * 6, 1]

    packed = mx.quantize(mx.zeros((8, 64, 64)), 64, 4)
    pairs = mx.zeros((6,), dtype=mx.int32)

    def multiply(x: mx.array, *given: mx.array) -> list[mx.array]:
        return experts.launch(x, Packed(*given[:3], 4, 64, "affine"), *given[3:]).run()

    expected = 1 - (6 / 8) ** 3
    assert shares(multiply, mx.zeros((3, 64)), *packed, pairs, pairs) == [1, *[expected] * 3, 1, 1]

    def score(x: mx.array, chosen: mx.array, names: mx.array, *given: mx.array) -> list[mx.array]:
        table = Packed(*given, 4, 64, "affine")
        found = head.score(x, table, sequences=1, chosen=chosen, names=names)
        return found.run()

    chosen, names = mx.zeros((1, 2), dtype=mx.int32), mx.arange(8 * 64)
    quarter = shares(score, mx.zeros((1, 64)), chosen, names, *packed)
    assert quarter[:6] == [1, *[2 / 8] * 3, 1, 2 / 8]


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    for kind in KINDS:
        shape = {"hidden_size": 64, "head_dim": 64, "vocab_size": 1 << 18}
        pair = {
            "it": checkpoints.target_config(
                kind, **shape, hidden_size_per_layer_input=64 if kind == "e2b" else 0
            ),
            "it-assistant": checkpoints.drafter_config(kind, **shape),
        }
        for name, config in pair.items():
            (tmp_path / f"gemma-4-{kind}-{name}.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_is_counted_and_not_run(configs: Path, kind: str) -> None:
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    none, two, four = launches.measure(configs, kind, (0, 2, 4), 300)
    assert mx.get_peak_memory() - before < 1 << 20
    assert set(none["stock_fused"]["draft"].values()) == {0}
    for what in ("launches", "M3+"):
        steps = [result["stock_eager"]["draft"][what] for result in (two, four)]
        assert 1.8 < steps[1] / steps[0] < 2.1
    table = (1 << 18) * (64 // 2 + 4)
    for result, rows in ((none, 1), (two, 3), (four, 5)):
        eager, fused_ = result["stock_eager"], result["stock_fused"]
        assert all(fused_[part]["launches"] <= eager[part]["launches"] for part in launches.PARTS)
        assert 0 <= fused_["head and accept"]["M1/M2"] - rows * table < rows * (8 << 20)
        assert fused_["verify"]["M3+"] < 10 << 20
    assert launches.row(four).startswith(f"| {kind} | 4 | ")
