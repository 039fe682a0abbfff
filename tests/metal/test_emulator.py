"""The emulator on small kernels of its own: it computes what they say, and finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.kernels.launch import Kernel, Launch

from . import addresses
from .emulator import (
    FIRST_AHEAD,
    LAST_AHEAD,
    SEEDS,
    BuildError,
    EmulationError,
    compiler,
    emulate,
    emulate_all,
    flags,
    prepare,
)
from .runner import run

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (CXX, g++, c++)")
needs_clang = pytest.mark.skipif(addresses.missing() is not None, reason=str(addresses.missing()))


def launch(
    source: str,
    x: mx.array | Sequence[mx.array],
    shape: tuple[int, ...],
    dtype: mx.Dtype = mx.float32,
    *,
    threads: int = 32,
    groups: int = 1,
    header: str = "",
    **template: Any,
) -> Launch:
    """One output y; inputs x, or x0, x1, ...; in the source, i is the thread."""
    inputs = [x] if isinstance(x, mx.array) else list(x)
    names = ("x",) if isinstance(x, mx.array) else tuple(f"x{i}" for i in range(len(inputs)))
    return Launch(
        kernel=Kernel(
            "probe",
            names,
            ("y",),
            f"const uint i = thread_position_in_grid.x; {source}",  # on one line: lines count
            header,
        ),
        inputs=inputs,
        grid=(threads * groups, 1, 1),
        threadgroup=(threads, 1, 1),
        shapes=[shape],
        dtypes=[dtype],
        template=template,
    )


def values(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


ROW_SUMS = """
    const uint row = threadgroup_position_in_grid.x;
    float sum = 0.0f;
    for (uint i = thread_index_in_simdgroup; i < N; i += 32) sum += float(x[row * N + i]);
    sum = simd_sum(sum);
    if (thread_index_in_simdgroup == 0) y[row] = T(sum);
"""


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_sums_rows(dtype: mx.Dtype, order: int) -> None:
    x = mx.random.normal((4, 96), key=mx.random.key(1)).astype(dtype)
    emulated = emulate(launch(ROW_SUMS, x, (4,), dtype, groups=4, T=dtype, N=96), order=order)
    expected = values(x).astype(np.float64).sum(axis=1)
    tolerance = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 8e-2}[dtype]
    np.testing.assert_allclose(values(emulated.outputs[0]), expected, atol=tolerance)
    assert emulated.outputs[0].dtype == dtype
    assert (emulated.loads["x"] == 1).all()
    assert emulated.loads["x"].shape == (4, 96)
    assert (emulated.stores["y"] == 1).all()
    assert emulated.collectives == 4


def test_counts_every_load() -> None:
    x = mx.arange(64, dtype=mx.float32)
    source = "y[i] = x[0] + *(x + 1) + x[i];"
    loads = emulate(launch(source, x, (32,))).loads["x"]
    assert loads[:3].tolist() == [33, 33, 1]
    assert (loads[2:32] == 1).all()
    assert not loads[32:].any()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_rounds_and_widens_as_mlx_does(dtype: mx.Dtype) -> None:
    every = mx.arange(1 << 16, dtype=mx.uint32).astype(mx.uint16).view(dtype)
    wide = emulate(launch("y[i] = float(x[i]);", every, (1 << 16,), threads=1024, groups=64))
    np.testing.assert_array_equal(values(wide.outputs[0]), values(every))

    # Between neighbours, at their middles and one bit beside the middles.
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    bits[::2] = (bits[::2] & 0xFFFF0000) + 0x7FFF + np.arange(1 << 15, dtype=np.uint32) % 3
    bits[1::4] = (bits[1::4] & 0xFFFFE000) + 0xFFF + np.arange(1 << 14, dtype=np.uint32) % 3
    floats = mx.array(bits).view(mx.float32)
    narrow = emulate(
        launch("y[i] = T(x[i]);", floats, (1 << 16,), dtype, threads=1024, groups=64, T=dtype)
    )
    np.testing.assert_array_equal(values(narrow.outputs[0]), values(floats.astype(dtype)))


def test_two_byte_arithmetic_rounds_each_step() -> None:
    x = mx.array([1.0] * 8 + [0.00390625] * 8, mx.bfloat16)
    source = """
        T a = x[0]; T b = x[8];
        y[i] = i == 0 ? float(a + b) : float(a) + b;
    """
    y = emulate(launch(source, x, (32,), T=mx.bfloat16)).outputs[0]
    assert y[:2].tolist() == [1.0, 1.00390625]


def test_mlx_names_the_address_spaces() -> None:
    source = """
        y[i] = x0[3] + x1 + x2_shape[1] + x2_ndim + x2_strides[0] + N;
    """
    inputs = [mx.arange(4, dtype=mx.float32), mx.array(10.0), mx.zeros((4, 5))]
    emulated = emulate(launch(source, inputs, (32,), N=-7))
    assert (values(emulated.outputs[0]) == 3 + 10 + 5 + 2 + 5 - 7).all()


def test_positions() -> None:
    source = """
        const uint3 at = thread_position_in_grid;
        const uint i = (at.z * 4 + at.y) * 64 + at.x;
        y[i] = thread_index_in_threadgroup + 1000 * threadgroup_position_in_grid.x
             + 10000 * threadgroup_position_in_grid.y + 100000 * threadgroup_position_in_grid.z
             + 1000000 * simdgroup_index_in_threadgroup;
    """
    kernel = Kernel("positions", ("x",), ("y",), source)
    emulated = emulate(
        Launch(kernel, [mx.zeros(8)], (64, 4, 2), (32, 2, 1), [(2, 4, 64)], [mx.uint32]), seed=3
    )
    z, y, x = np.indices((2, 4, 64))
    index = x % 32 + y % 2 * 32
    expected = index + 1000 * (x // 32) + 10000 * (y // 2) + 100000 * z + 1000000 * (index // 32)
    np.testing.assert_array_equal(np.array(emulated.outputs[0]), expected)


SIMDGROUP_OPERATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "simd_shuffle(v, 5)": lambda i: np.full(32, 5),
    "simd_shuffle(v, 31 - lane)": lambda i: 31 - i,
    "simd_shuffle_xor(v, 6)": lambda i: i ^ 6,
    "simd_shuffle_down(v, 3)": lambda i: np.where(i + 3 < 32, i + 3, i),
    "simd_shuffle_up(v, 3)": lambda i: np.where(i >= 3, i - 3, i),
    "simd_broadcast(v, 7)": lambda i: np.full(32, 7),
    "simd_broadcast_first(v)": lambda i: np.zeros(32),
    "simd_max(v)": lambda i: np.full(32, 31),
    "simd_min(v)": lambda i: np.zeros(32),
    "simd_shuffle_xor(float2(v, 1.0f), 1).x": lambda i: i ^ 1,
    "float(simd_all(v < 32) && !simd_any(v > 31))": lambda i: np.ones(32),
}
LIBRARY = {
    "as_type<float>(0x40490fdbu)": 3.14159274,
    "float(as_type<half2>(0x3c00c000u).y)": 1.0,
    "float(popcount(0xf0f0u) + extract_bits(0xabcdu, 4, 8))": 8 + 0xBC,
    "metal::precise::tanh(0.5f) + tanh(0.5f)": 2 * np.tanh(0.5),
    "exp(1.0f) + fast::exp(1.0f) + metal::exp(1.0f)": 3 * np.e,
    "rsqrt(4.0f) + sqrt(4.0f) + fma(2.0f, 3.0f, 1.0f)": 9.5,
    "clamp(7.0f, 0.0f, 2.0f) + max(-INFINITY, 1.0f) + select(1.0f, 2.0f, true)": 5.0,
    "isnan(NAN) && isfinite(1.0f) && !isfinite(INFINITY) ? 1.0f : 0.0f": 1.0,
    "dot(float4(1, 2, 3, 4), float4(2)) + float3(1, 2, 3).z": 23.0,
    "float(max(half(2), half(3)) + half(1.0f)) + bfloat(1.0f)": 5.0,
    "float(uchar(0x1ff) + (int(-7) >> 1))": 255 - 4,
    "metal::numeric_limits<float>::max() > 3e38f ? 1.0f : 0.0f": 1.0,
}


def simdgroup_operation(call: str) -> Launch:
    where = "const uint lane = thread_index_in_simdgroup;\nfloat v = float(lane);\n"
    return launch(f"{where}y[lane] = {call};", mx.zeros(8), (32,))


def everywhere(expression: str) -> Launch:
    return launch(f"y[i] = {expression};", mx.zeros(8), (32,))


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Most of the kernels, in few builds."""
    prepare(
        [*map(simdgroup_operation, SIMDGROUP_OPERATIONS), *map(everywhere, LIBRARY)]
        + [fault_launch(fault) for fault in FAULTS]
    )


@pytest.mark.parametrize("call", SIMDGROUP_OPERATIONS)
def test_simdgroup_operations(call: str) -> None:
    for seed in (FIRST_AHEAD, LAST_AHEAD, 1):
        y = emulate(simdgroup_operation(call), seed=seed).outputs[0]
        np.testing.assert_array_equal(values(y), SIMDGROUP_OPERATIONS[call](np.arange(32)))


@pytest.mark.parametrize("expression", LIBRARY)
def test_library(expression: str) -> None:
    y = emulate(everywhere(expression)).outputs[0]
    np.testing.assert_allclose(values(y), LIBRARY[expression], rtol=1e-6)


MATRICES = """
    simdgroup_matrix<float, 8, 8> a, b, c = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
    simdgroup_load(a, x, 8);
    simdgroup_load(b, x + 64, 8, ulong2(0, 0), TRANSPOSED);
    simdgroup_multiply_accumulate(c, a, b, c);
    simdgroup_store(c, y, 8);
"""
MATRICES_BY_LANE = """
    const uint lane = thread_index_in_simdgroup;
    const uint row = (lane / 4 & 4) + lane / 2 % 4;
    const uint column = (lane / 4 & 2) * 2 + lane % 2 * 2;
    simdgroup_float8x8 a, b, c(0.0f);
    for (uint i = 0; i < 2; i++) {
      a.thread_elements()[i] = x[row * 8 + column + i];
      b.thread_elements()[i] = x[64 + (TRANSPOSED ? (column + i) * 8 + row : row * 8 + column + i)];
      c.thread_elements()[i] = 0.5f;
    }
    simdgroup_multiply_accumulate(c, a, b, c);
    for (uint i = 0; i < 2; i++) y[row * 8 + column + i] = c.thread_elements()[i];
"""


@pytest.mark.parametrize("source", [MATRICES, MATRICES_BY_LANE])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices(source: str, transposed: bool) -> None:
    x = mx.random.normal((2, 8, 8), key=mx.random.key(2))
    a, b = values(x)
    y = emulate(launch(source, x, (8, 8), TRANSPOSED=transposed)).outputs[0]
    np.testing.assert_allclose(
        values(y), a @ (b.T if transposed else b) + 0.5, rtol=1e-5, atol=1e-5
    )


# Threadgroup memory: sums over simdgroups, through an array and a function that takes a pointer.
TOTAL_HEADER = """
    template <typename P> float fold(P values, int n) {
      float sum = 0.0f;
      for (int i = 0; i < n; i++) sum += values[i];
      return sum;
    }
    inline void put(threadgroup float* to, thread const float& value) { *to = value; }
"""
TOTAL = """
    threadgroup float part[SIMDGROUPS];  // a row's share of each simdgroup
    const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
    const uint row = threadgroup_position_in_grid.x;
    float sum = simd_sum(x[row * SIMDGROUPS * 32 + thread_index_in_threadgroup]);
    if (lane == 0) put(part + sg, sum);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index_in_threadgroup == 0) y[row] = fold(part, SIMDGROUPS);
"""


def total(source: str = TOTAL, header: str = TOTAL_HEADER, simdgroups: int = 16) -> Launch:
    x = mx.arange(3 * simdgroups * 32, dtype=mx.float32)
    return launch(
        source, x, (3,), threads=32 * simdgroups, groups=3, header=header, SIMDGROUPS=simdgroups
    )


def test_threadgroup_memory() -> None:
    emulated = emulate_all(total())
    expected = np.arange(3 * 512, dtype=np.float32).reshape(3, 512).sum(axis=1)
    np.testing.assert_array_equal(values(emulated.outputs[0]), expected)
    assert emulated.barriers == 3


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@pytest.mark.parametrize("seed", SEEDS)
def test_missing_barrier(seed: int) -> None:
    with pytest.raises(EmulationError, match=r"race|before any thread wrote"):
        emulate(total(TOTAL.replace(BARRIER, "")), seed=seed)


def test_barrier_that_does_not_order_threadgroup_memory() -> None:
    weak = TOTAL.replace("mem_flags::mem_threadgroup", "mem_flags::mem_device")
    with pytest.raises(EmulationError, match="race: thread 0 reads"):
        emulate(total(weak))


def test_missing_barrier_before_memory_is_used_again() -> None:
    again = """
        threadgroup float part[SIMDGROUPS];
        const uint sg = simdgroup_index_in_threadgroup;
        float sum = 0.0f;
        for (int i = 0; i < 2; i++) {
          if (thread_index_in_simdgroup == 0) part[sg] = float(i + sg);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          sum += part[(sg + 1) % SIMDGROUPS];
          SECOND
        }
        if (thread_index_in_threadgroup == 0) y[threadgroup_position_in_grid.x] = sum;
    """
    emulate_all(total(again.replace("SECOND", BARRIER)))
    with pytest.raises(EmulationError, match=r"race: thread .* writes"):
        emulate(total(again.replace("SECOND", "")))


def test_lanes_of_a_simdgroup_need_a_barrier_too() -> None:
    source = """
        threadgroup float part[32];
        const uint lane = thread_index_in_simdgroup;
        part[lane] = float(lane);
        simdgroup_barrier(mem_flags::FLAG);
        y[lane] = part[31 - lane];
    """
    y = emulate_all(launch(source.replace("FLAG", "mem_threadgroup"), mx.zeros(8), (32,)))
    np.testing.assert_array_equal(values(y.outputs[0]), 31 - np.arange(32))
    with pytest.raises(EmulationError, match="race"):
        emulate(launch(source.replace("FLAG", "mem_none"), mx.zeros(8), (32,)))


def test_a_value_read_by_auto_stays() -> None:
    source = """
        threadgroup float part[32], other[2][32];
        const uint lane = thread_index_in_simdgroup;
        part[lane] = 1.0f;
        other[1][lane] = 2.0f;
        auto kept = part[lane];
        part[lane] = 3.0f;
        part[lane] += other[1][lane];
        threadgroup float* row = other[0];
        threadgroup float lone;
        if (lane == 0) lone = 0.0f;
        simdgroup_barrier(mem_flags::mem_threadgroup);
        row[lane] = part[lane] * 10.0f;
        y[lane] = kept + other[0][lane] + max(other[0][lane], lone);
    """
    assert (values(emulate(launch(source, mx.zeros(8), (32,))).outputs[0]) == 101).all()


FAULTS = {
    "input out of bounds": (
        "y[i] = x[i + 1];",
        r"x is used at 32, it has 32 elements",
    ),
    "input before its start": (
        "y[i] = *(x - 1);",
        r"x is used at -1",
    ),
    "output out of bounds": (
        "y[i * 2] = x[0];",
        r"y is used at 32, it has 32 elements \(threadgroup 0, 0, 0\)",
    ),
    "threadgroup memory out of bounds": (
        "threadgroup float part[8]; part[i] = x[0];",
        r"part is used at 8, it has 8 elements",
    ),
    "unwritten threadgroup memory": (
        "threadgroup float part[64]; y[i] = part[40];",
        r"part\[40\] is read before any thread wrote it",
    ),
    "too much threadgroup memory": (
        "threadgroup float part[8193]; part[0] = 1.0f;",
        r"32772 bytes of threadgroup memory, there are 32768",
    ),
    "simdgroup operation in one branch": (
        "float v = x[0];\nif (i < 16)\nv = simd_sum(v);\nv = simd_max(v);",
        r"divergent: .* source:3 \(lane 0\) and at source:4",
    ),
    "barrier in one branch": (
        "if (i < 16)\nthreadgroup_barrier(mem_flags::mem_none);\nsimd_sum(1);",
        r"divergent: .* source:2 \(lane 0\) and at source:3",
    ),
    "return before a barrier": (
        "if (i > 15) return;\nthreadgroup_barrier(mem_flags::mem_none);",
        r"source:2: threadgroup_barrier, but 16 of 32 threads have returned",
    ),
    "value of a lane that returned": (
        "if (i > 15) return;\nsimd_shuffle_xor(1.0f, 16);",
        r"source:2: lane 0 takes a value from lane 16, which is not active",
    ),
    "matrices without all lanes": (
        "if (i > 15) return;\n"
        "simdgroup_float8x8 a(1.0f); simdgroup_multiply_accumulate(a, a, a, a);",
        r"source:2: needs all 32 lanes",
    ),
    "too many variables": (
        "float big[1 << 15];\n"
        "for (int k = 0; k < 1 << 15; k++) big[k] = x[k % 32];\n"
        "y[0] = simd_sum(big[int(x[1])]);",
        r"thread 0 has variables of more than \d+ bytes",
    ),
}


def fault_launch(fault: str) -> Launch:
    return launch(FAULTS[fault][0], mx.zeros(32), (32,))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str) -> None:
    for _ in range(2):  # after an error the runtime is as before
        with pytest.raises(EmulationError, match=FAULTS[fault][1]):
            emulate(fault_launch(fault))


def test_runs_on_after_a_fault() -> None:
    source = "y[i] = x[i + N] + simd_sum(1.0f);"
    with pytest.raises(EmulationError):
        emulate(launch(source, mx.zeros(32), (32,), N=1))
    y = emulate(launch(source, mx.zeros(33), (32,), N=1)).outputs[0]
    assert (values(y) == 32).all()


def test_a_threadgroup_of_half_a_simdgroup_more() -> None:
    y = emulate_all(launch("y[i] = simd_sum(1.0f);", mx.zeros(8), (96,), threads=48, groups=2))
    assert values(y.outputs[0]).tolist() == 2 * ([32.0] * 32 + [16.0] * 16)


def test_threadgroup_memory_of_two_bytes() -> None:
    source = """
        threadgroup T part[2][32];
        part[1][i] = T(i);
        const T own = part[1][i];
        part[0][i] = float(part[1][i]) + 0.5f;
        part[0][i] += T(1.0f);
        y[i] = float(part[0][i]) + float(own) + simd_max(part[1][i]);
    """
    for dtype in (mx.float16, mx.bfloat16):
        y = emulate(launch(source, mx.zeros(8), (32,), T=dtype)).outputs[0]
        np.testing.assert_array_equal(values(y), np.arange(32) * 2 + 1.5 + 31)


def test_barriers_of_two_simdgroups_must_be_one() -> None:
    source = f"if (simdgroup_index_in_threadgroup == 0)\n{BARRIER}\nelse\n{BARRIER}"
    with pytest.raises(
        EmulationError, match=r"divergent: simdgroups 0 and 1 .* source:2 and source:4"
    ):
        emulate(launch(source, mx.zeros(8), (1,), threads=64))


RAW = [
    "const device float* p = x;",
    "auto p = (const device float*)x;",
    "auto p = (const device uint4*)x;",
    "auto p = reinterpret_cast<const device uint*>(x);",
    "auto p = static_cast<const device float*>(x + 1);",
    "auto p = &x[1];",
    "auto p = (const device float*)(size_t)x;",
    "auto p = as_type<ulong2>(x);",
    "auto p = x.buffer;",
    "x[0] = 1.0f;",
    "device float* p = y;",
    "auto p = (device uint*)y;",
]


@pytest.mark.parametrize("cast", RAW)
def test_nothing_gets_round_the_counting_pointers(cast: str) -> None:
    with pytest.raises(BuildError):
        emulate(launch(f"{cast} y[0] = 1.0f;", mx.zeros(32), (32,)))


def test_what_is_not_stored_shows() -> None:
    source = "y[i * 2] = T(1);"
    floats = emulate(launch(source, mx.zeros(8), (64,), mx.bfloat16, T=mx.bfloat16))
    assert np.isnan(values(floats.outputs[0])[1::2]).all()
    whole = emulate(launch(source, mx.zeros(8), (64,), mx.uint32, T=mx.uint32))
    assert (np.array(whole.outputs[0])[1::2] == 0xA5A5A5A5).all()
    assert whole.stores["y"].tolist() == [1, 0] * 32


def test_a_variable_without_a_value_shows() -> None:
    if not any("auto-var-init" in flag for flag in flags()):
        pytest.skip("this compiler leaves such variables as they are")
    source = "float v[4]; for (int i = 1; i < 4; i++) v[i] = 0; y[i] = v[x[0]];"
    x = mx.zeros(8, dtype=mx.int32)
    y = values(emulate(launch(source, x, (32,))).outputs[0])
    assert not (np.abs(y) < 1e30).any()


def test_orders_differ() -> None:
    """Which simdgroup, lane and threadgroup comes last at an element that all of them store to."""
    source = """
        for (int k = 0; k < 2; k++) {
          simd_sum(1);
          y[k] = float(i);
        }
    """
    probe = launch(source, mx.zeros(8), (2,), threads=64, groups=4)
    last = [values(emulate(probe, seed=seed).outputs[0]).tolist() for seed in SEEDS]
    assert last[SEEDS.index(FIRST_AHEAD)] == [255.0, 255.0]
    assert last[SEEDS.index(LAST_AHEAD)] == [0.0, 0.0]
    assert len({tuple(pair) for pair in last}) > 10
    with pytest.raises(EmulationError, match="depends on the order"):
        emulate_all(probe)


def test_what_is_not_emulated_says_so() -> None:
    x = mx.zeros(32)
    with pytest.raises(ValueError, match="grid"):
        emulate(replace(launch("y[0] = x[0];", x, (1,)), grid=(48, 1, 1)))
    with pytest.raises(ValueError, match="not emulated: threadgroup float& a"):
        emulate(launch("threadgroup float p[1]; threadgroup float& a = p[0];", x, (1,)))


def test_prepare_builds_several_at_once() -> None:
    launches = [launch(f"y[i] = x[0] * N + {n // 2};", mx.ones(8), (32,), N=n) for n in range(6)]
    prepare(launches)
    assert [emulate(probe).outputs[0][0].item() for probe in launches] == [
        n + n // 2 for n in range(6)
    ]


def test_runs_anywhere() -> None:
    """On the device where there is one."""
    probe = launch("y[i] = x[i] * 2;", mx.arange(32.0), (32,))
    assert run(probe)[0].tolist() == [2.0 * i for i in range(32)]


ADDRESS_HEADER = """
    template <typename P> float first(P p) { return float(p[0]); }
    inline float second(threadgroup const float* p) { return p[1]; }
    constant float table[2] = {1.0f, 2.0f};
    struct Pair { float a, b; };
"""
ADDRESSES = """
    threadgroup float part[64];
    float mine[4] = {};
    thread float* own = mine;
    auto from = x0 + 3;
    Pair pair = {1.0f, table[0]};
    const float2 v = float2(1.0f, pair.a);
    #pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) own[i] = T(1.0f);
    part[thread_index_in_threadgroup] = mine[0], part[thread_index_in_threadgroup + 32] = 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 a, b, c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    a.thread_elements()[0] = b.thread_elements()[1] = v.x;
    simdgroup_load(a, part, 8);
    simdgroup_multiply_accumulate(c, a, b, c);
    float sum = simd_sum(first(from) + first(x1) + first(part) + first(own) + second(part));
    y[0] = T(max(sum, metal::exp(0.5f)) + as_type<float>(x2) + as_type<half2>(7u).x);
"""
ADDRESS_FAULTS = {
    "a pointer to device in thread": ("auto from", "thread const T* from", "source:5"),
    "a pointer to constant in device": ("auto from = x0", "const device T* from = x1", "source:5"),
    "a pointer without": (
        "thread float* own",
        "float* own",
        "source:4: own names no address space",
    ),
    "a reference without": (
        "Pair pair",
        "const float& r = mine[0]; Pair pair",
        "source:6: r names no",
    ),
    "a store to an input": ("part[thread_index", "x0[0] = T(1.0f); part[thread_index", "source:10"),
    "device where threadgroup is wanted": ("second(part)", "second(x0)", "source:16"),
    "threadgroup in a function": (
        "return float(p[0]);",
        "threadgroup float q[1]; return p[0];",
        "header:2",
    ),
    "threadgroup in a block": ("own[i] = ", "{ threadgroup float q[1]; } own[i] = ", "source:9"),
    "an unknown name": ("mine[0],", "nine[0],", "source:10"),
}


def address_launch(old: str = "", new: str = "", dtype: mx.Dtype = mx.float32) -> Launch:
    inputs = [mx.zeros(64, dtype), mx.zeros(4, dtype), mx.array(1)]
    source, header = (text.replace(old, new) for text in (ADDRESSES, ADDRESS_HEADER))
    return launch(source, inputs, (1,), dtype, header=header, T=dtype, N=3)


@needs_clang
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_address_spaces(dtype: mx.Dtype) -> None:
    assert addresses.check(address_launch(dtype=dtype)) == []
    emulate(address_launch(dtype=dtype))


@needs_clang
@pytest.mark.parametrize("fault", ADDRESS_FAULTS)
def test_address_faults(fault: str) -> None:
    old, new, where = ADDRESS_FAULTS[fault]
    probe = address_launch(old, new)
    assert (probe.kernel.source, probe.kernel.header) != (ADDRESSES, ADDRESS_HEADER)
    faults = addresses.check(probe)
    assert any(found.startswith(where) for found in faults), faults
