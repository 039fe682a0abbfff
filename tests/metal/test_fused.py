"""The fused kernels against the stock operations that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_mtp.engine.kv import KVLayout
from mlx_mtp.kernels import fused
from mlx_mtp.kernels.launch import Launch
from mlx_mtp.models import layers

from ..engine.pairs import VOCAB, make_target
from . import addresses
from .emulator import ORDERS, EmulationError, compiler, emulate, emulate_all, prepare
from .runner import run

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (CXX, g++, c++)")

EPS = 1e-6
# Of E2B's drafter and the other drafters, E2B, E4B, 26B, 12B, 31B.
WIDTHS = (256, 1024, 1536, 2560, 2816, 3840, 5376)
# Query heads, kv heads, values of their own, head dim: sliding and full layers.
HEADS = {
    "e2b": ((8, 1, True, 256), (8, 1, True, 512)),
    "e4b": ((8, 2, True, 256), (8, 2, True, 512)),
    "12b": ((16, 8, True, 256), (16, 1, False, 512)),
    "26b": ((16, 8, True, 256), (16, 2, False, 512)),
    "31b": ((32, 16, True, 256), (32, 4, False, 512)),
    # Drafters, and target layers that share the KV of others.
    "shared": ((4, 0, False, 256), (4, 0, False, 512)),
}
# Sequences and tokens of a pass, with all numbers of rows to 9.
PASSES = ((1, 1), (1, 2), (3, 1), (2, 2), (1, 5), (2, 3), (7, 1), (4, 2), (1, 9), (16, 1))
# What a rounding moves a number by at most, as a part of it.
ROUNDINGS = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}


def numbers(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def weights(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.uniform(0.3, 1.7, shape, key=mx.random.key(seed)).astype(dtype)


def rows_to_add(
    width: int, dtype: mx.Dtype = mx.float32, *, scaled: bool, then: bool
) -> tuple[mx.array | None, ...]:
    """x, a, weight, scale, next_weight, of 9 rows, some of them large and some small."""
    sizes = mx.array([[10.0 ** (row % 5 - 2)] for row in range(9)])
    return (
        (numbers(1, 9, width) * sizes).astype(dtype),
        (numbers(2, 9, width) * sizes[::-1]).astype(dtype),
        weights(3, width, dtype=dtype),
        weights(4, 1, dtype=dtype) if scaled else None,
        weights(5, width, dtype=dtype) if then else None,
    )


def heads_of(
    shape: tuple[int, int, bool, int], sequences: int, tokens: int, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, mx.array, mx.array, mx.array, float, int, int]:
    """raw, weight, periods, offset, eps, heads, kv_heads, as attention gives them."""
    heads, kv_heads, own_values, D = shape
    turning, theta = (D // 2, 1e4) if D == 256 else (D // 8, 1e6)
    count = heads + kv_heads * (1 + own_values)
    weight = weights(6, count, 1, D, dtype=dtype)
    periods = [theta ** (2 * i / D) for i in range(turning)]
    return (
        numbers(7, sequences * tokens, count * D, dtype=dtype) * 3,
        weight if kv_heads else weight[0, 0],
        mx.array(periods + [float("inf")] * (D // 2 - turning)),
        mx.array([(i * 977 + 11) % 4001 for i in range(sequences)], dtype=mx.int32),
        EPS,
        heads,
        kv_heads,
    )


def error(got: list[mx.array], wanted: list[mx.array]) -> float:
    """The largest difference, by the largest number of its row."""
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        a, b = a.astype(mx.float32), b.astype(mx.float32)
        differences = mx.abs(a - b).max(-1) / mx.abs(b).max(-1)
        assert not mx.isnan(differences).any()
        worst = max(worst, differences.max().item())
    return worst


def same(a: list[mx.array], b: list[mx.array]) -> bool:
    return all(mx.array_equal(one, other) for one, other in zip(a, b, strict=True))


def unequal(a: list[mx.array], b: list[mx.array]) -> float:
    """The share of numbers that differ."""
    differ = [mx.mean(one != other).item() for one, other in zip(a, b, strict=True)]
    return max(differ)


def add(given: tuple[mx.array | None, ...]) -> Launch:
    return fused.launch_add(*given, eps=EPS)


KINDS = ({"scaled": False, "then": True}, {"scaled": True, "then": False})
LAYERS = [(name, i) for name in HEADS for i in range(2)]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Several kernels a build, which takes longer to start than to go on."""
    launches = [add(rows_to_add(width, **kind)) for width in WIDTHS for kind in KINDS]
    launches += [fused.launch_heads(*heads_of(HEADS[name][i], 1, 1)) for name, i in LAYERS]
    for dtype in ROUNDINGS:
        launches += [add(rows_to_add(2816, dtype, **kind)) for kind in KINDS]
        launches += [
            fused.launch_heads(*heads_of(HEADS[name][i], 1, 1, dtype))
            for name, i in (("e4b", 0), ("26b", 1), ("shared", 1))
        ]
    prepare(launches)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS, ids=("then", "scaled"))
def test_add_norm_is_the_stock_operations(width, kind):
    given = rows_to_add(width, **kind)
    assert fused.fits_add(*given)
    nine = run(add(given))
    assert error(nine, fused.reference_add(*given, eps=EPS)) < 1e-5
    for rows in range(1, 9):
        fewer = run(add((given[0][-rows:], given[1][-rows:], *given[2:])))
        assert same(fewer, [part[-rows:] for part in nine])


@pytest.mark.parametrize("width", [36, 132, 2052])
def test_threads_may_be_left_over(width):
    """No width of the targets leaves any; with a scale and a second norm at once, which only turns
    where the scale does."""
    x, a, weight, scale, next_weight = rows_to_add(width, scaled=True, then=True)
    given = x, a, weight, -scale, next_weight
    assert fused.fits_add(*given)
    assert error(run(add(given)), fused.reference_add(*given, eps=EPS)) < 1e-5


@pytest.mark.parametrize(("name", "layer"), [("e2b", 0), ("shared", 0)])
def test_eps_counts_where_heads_are_small(name, layer):
    raw, *rest = heads_of(HEADS[name][layer], 1, 2)
    given = (raw * 1e-3, *rest)
    assert error(run(fused.launch_heads(*given)), fused.reference_heads(*given)) < 1e-5


def test_sizes_that_no_thread_has_room_for_are_refused():
    def taken(width: int) -> bool:
        return fused.fits_add(mx.zeros((1, width)), mx.zeros((1, width)), mx.zeros((width,)))

    assert taken(fused.READ * fused.MOST_READS * fused.MOST_THREADS)
    assert not taken(fused.READ * fused.MOST_READS * fused.MOST_THREADS + fused.READ)
    assert not taken(258)
    assert not fused.fits_add(mx.zeros((1, 1, 64)), mx.zeros((1, 1, 64)), mx.zeros((64,)))
    for pairs, fits in ((32, True), (256, True), (48, False), (288, False)):
        raw, weight = mx.zeros((1, 2 * pairs)), mx.zeros((2 * pairs,))
        assert fused.fits_heads(raw, weight, mx.zeros((pairs,))) is fits


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_heads_are_the_stock_operations(name, layer):
    for sequences, tokens in PASSES:
        given = heads_of(HEADS[name][layer], sequences, tokens)
        assert fused.fits_heads(*given[:3])
        got = run(fused.launch_heads(*given))
        assert error(got, fused.reference_heads(*given)) < 1e-5


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_a_row_of_heads_is_what_it_is_alone(name, layer):
    raw, weight, periods, offset, *rest = heads_of(HEADS[name][layer], 2, 3)
    together = run(fused.launch_heads(raw, weight, periods, offset, *rest))
    for row in range(6):
        b, t = divmod(row, 3)
        at = offset[b : b + 1] + t
        alone = run(fused.launch_heads(raw[row : row + 1], weight, periods, at, *rest))
        assert same(alone, [part[b : b + 1, :, t : t + 1] for part in together])


@pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=("then", "scaled"))
def test_add_norm_rounds_half_precision_as_the_stock_operations_do(dtype, kind):
    given = rows_to_add(2816, dtype, **kind)
    got = run(add(given))
    assert all(part.dtype == dtype for part in got)
    assert unequal(got, fused.reference_add(*given, eps=EPS)) < 1e-2
    whole = [part if part is None else part.astype(mx.float32) for part in given]
    # Of the norm, the product and the sum, and of the scale or the second norm and product.
    assert error(got, fused.reference_add(*whole, eps=EPS)) < 5 * ROUNDINGS[dtype]


@pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)
@pytest.mark.parametrize(("name", "layer"), [("e4b", 0), ("26b", 1), ("shared", 1)])
def test_heads_round_half_precision_as_the_stock_operations_do(dtype, name, layer):
    given = heads_of(HEADS[name][layer], 2, 3, dtype)
    got = run(fused.launch_heads(*given))
    assert all(part.dtype == dtype for part in got)
    assert unequal(got, fused.reference_heads(*given)) < 1e-2
    whole = [part.astype(mx.float32) if i < 2 else part for i, part in enumerate(given)]
    # Of the norm and the product, in both of a pair, and of what RoPE gives.
    assert error(got, fused.reference_heads(*whole)) < 4 * ROUNDINGS[dtype]


def example(kernel: str) -> tuple[Launch, list[mx.array]]:
    """A launch of that kernel, and what it should give. `add` has threads left over."""
    if kernel == "heads":
        given = heads_of(HEADS["26b"][1], 2, 3)
        return fused.launch_heads(*given), fused.reference_heads(*given)
    given = rows_to_add(3844, **KINDS[0])
    return add(given), fused.reference_add(*given, eps=EPS)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", ["add", "heads"])
def test_no_order_of_simdgroups_changes_a_bit(kernel, order):
    launch, wanted = example(kernel)
    assert error(emulate_all(launch, order=order).outputs, wanted) < 1e-5


@pytest.mark.skipif(addresses.missing() is not None, reason=str(addresses.missing()))
@pytest.mark.parametrize("dtype", [mx.float32, *ROUNDINGS], ids=str)
def test_address_spaces(dtype):
    for kind in KINDS:
        assert addresses.check(add(rows_to_add(5376, dtype, **kind))) == []
    for name, sequences in (("26b", 2), ("26b", 16), ("shared", 2), ("shared", 16)):
        launch = fused.launch_heads(*heads_of(HEADS[name][1], sequences, 1, dtype))
        assert addresses.check(launch) == []


def test_what_comes_in_is_read_once_a_row():
    loads = emulate(example("add")[0]).loads
    for name, times in {"x": 1, "a": 1, "weight": 9, "next_weight": 9}.items():
        assert (loads[name] == times).all()
    for name, layer in LAYERS:
        loads = emulate(fused.launch_heads(*heads_of(HEADS[name][layer], 1, 4))).loads
        assert (loads["raw"] == 1).all()


def test_what_the_stock_operations_would_promote_is_left_to_them():
    x, a, weight, *_ = rows_to_add(256, **KINDS[0])
    assert fused.fits_add(x, a, weight)
    assert not fused.fits_add(x.astype(mx.bfloat16), a, weight)
    assert not fused.fits_add(x, a, weight.astype(mx.bfloat16))
    raw, weight, periods, *_ = heads_of(HEADS["e2b"][0], 1, 1)
    assert not fused.fits_heads(raw.astype(mx.bfloat16), weight, periods)


BARRIER = "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        ("add", BARRIER, ""),
        ("add", "(square, next_parts", "(square, parts"),
        ("add", "float(next_weight[at + i])", "float(next_weight[first + i])"),
        ("add", "if (at >= H) continue;", ""),  # chosen by a second reader
        ("heads", "offset[b] + t", "offset[0] + t"),
        ("heads", "value || (SHARED && !query)", "value || SHARED"),
        ("heads", "weight[at + i + D / 2]", "weight[at + i]"),
    ],
)
def test_a_planted_fault_is_found(kernel, old, new):
    launch, wanted = example(kernel)
    assert old in launch.kernel.source + launch.kernel.header
    faulty = replace(
        launch.kernel,
        source=launch.kernel.source.replace(old, new),
        header=launch.kernel.header.replace(old, new),
    )
    try:
        outputs = emulate_all(replace(launch, kernel=faulty)).outputs
    except EmulationError:
        return
    assert error(outputs, wanted) > 1e-3


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The names of the kernels that layers launch, which here need no Metal."""
    names: list[str] = []

    def planner(plan: Callable[..., Launch]) -> Callable[..., SimpleNamespace]:
        def planned(*args: Any, **named: Any) -> SimpleNamespace:
            launch = plan(*args, **named)
            names.append(launch.kernel.name)
            return SimpleNamespace(run=partial(run, launch))

        return planned

    for plan in ("launch_add", "launch_heads"):
        monkeypatch.setattr(fused, plan, planner(getattr(fused, plan)))
    monkeypatch.setattr(fused, "on_metal", lambda: True)
    monkeypatch.setattr(layers, "on_cpu", lambda: False)
    return names


MOE = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
}


@pytest.mark.parametrize("changes", [{}, MOE], ids=["e-like", "moe"])
def test_layers_with_the_kernels_are_the_layers_without(changes, launched):
    """Two passes of two rows over four layers, of which the last two share KV."""
    target = make_target(head_dim=256, global_head_dim=512, **changes)
    ids = mx.array([[(7 * i + 3 * row) % VOCAB for i in range(4)] for row in range(2)])

    def hidden() -> list[mx.array]:
        layout = KVLayout(target.config.text, mx.float32)
        view = layout.view(layout.allocate(2, 256), mx.array([0, 0]), 4, 0)
        first = target(ids, view)
        view = layout.view(view.buffers, mx.array([4, 2]), 4, 4)
        return [first, target(ids, view)]

    plain = hidden()
    assert not launched
    for layer in target.layers:
        layer.fused = layer.self_attn.fused = frozenset({8})
    assert error(hidden(), plain) < 1e-4
    norms = ["add_norm_twice", "add_norm", "add_norm"]
    assert launched == 2 * (2 * ["queries_keys_values", *norms] + 2 * ["queries", *norms])
