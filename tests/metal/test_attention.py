"""Attention of a block over a long KV."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_mtp.kernels import attention
from mlx_mtp.kernels.attention import LongKV
from tests.metal.emulator import EmulationError, emulate, emulate_all, prepare
from tests.metal.runner import run
from tests.metal.shapes import BOUNDS, TARGETS, edited, error, needs_emulator, numbers

D = 512
# Packed KV is compared with what it unpacks to; weights are rounded to the dtype before V.
WIDER = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.2e-2}


def long_kv(rows: int, heads: int, slots: int, dtype: mx.Dtype, bits: int = 0) -> LongKV:
    """Random K and V, also in the slots behind the text, which must not matter."""
    halves = [numbers(rows, heads, slots, D, dtype=dtype, seed=seed) for seed in (1, 2)]
    if not bits:
        return LongKV(tuple(halves), D)
    return LongKV(tuple(part for half in halves for part in mx.quantize(half, 64, bits)), D, bits)


def block(rows: int, heads: int, tokens: int, dtype: mx.Dtype) -> mx.array:
    """Queries whose scores spread as those of real ones: a few keys take most of the weight."""
    return (numbers(rows, heads, tokens, D, seed=3) * 0.15).astype(dtype)


def attend(queries: mx.array, kv: LongKV, length: mx.array) -> mx.array:
    parts, stats = run(attention.launch_chunks(queries, kv, length))
    joined = run(attention.launch_join(parts, stats, queries.shape, queries.dtype))[0]
    return joined.swapaxes(1, 2)


def check(queries: mx.array, kv: LongKV, length: mx.array) -> None:
    exact = LongKV(tuple(kv.whole), D)
    wanted = attention.reference(queries.astype(mx.float32), exact, length)
    assert error(attend(queries, kv, length), wanted) < WIDER[queries.dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", TARGETS)
def test_the_full_layers_of_the_targets_at_every_number_of_rows(name, dtype):
    shapes = TARGETS[name]
    kv = long_kv(1, shapes.kv[1], 256, dtype)
    rows = range(1, 10) if dtype == mx.float32 else (1, 2, 5, 9)
    blocks = [block(1, shapes.heads, tokens, dtype) for tokens in rows]
    length = mx.array([150])
    prepare(attention.launch_chunks(queries, kv, length) for queries in blocks)
    for queries in blocks:
        check(queries, kv, length)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_packed_kv(bits, dtype):
    for tokens in (1, 4):
        check(block(1, 8, tokens, dtype), long_kv(1, 2, 256, dtype, bits), mx.array([99]))


def test_packed_kv_may_have_smaller_groups():
    halves = long_kv(1, 2, 64, mx.float32).parts
    parts = tuple(part for half in halves for part in mx.quantize(half, 32, 8))
    check(block(1, 8, 1, mx.float32), LongKV(parts, D, 8, 32), mx.array([50]))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("length", [0, 1, 63, 64, 119, 124, 127, 128, 247])
def test_every_place_of_the_end_within_a_chunk(length, dtype):
    check(block(1, 4, 5, dtype), long_kv(1, 1, 256, dtype), mx.array([length]))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_block_that_reaches_behind_the_last_slot_sees_the_slots_there_are(dtype):
    check(block(1, 4, 5, dtype), long_kv(1, 1, 64, dtype), mx.array([61]))


def test_scores_may_all_be_far_below_zero():
    """The maximum is that of the scores, not of the scores and zero."""
    keys, values = long_kv(1, 1, 256, mx.float32).parts
    kv, queries, length = LongKV((keys + 1, values), D), mx.full((1, 4, 2, D), -0.4), mx.array([90])
    wanted = attention.reference(queries, kv, length)
    assert error(attend(queries, kv, length), wanted) < 1e-4  # scores near -200 have fewer digits


@needs_emulator
def test_rows_of_a_batch_may_lie_further_apart_than_an_int_counts():
    launch = attention.launch_chunks(
        block(2, 1, 1, mx.float32), long_kv(2, 1, 64, mx.float32), mx.array([3, 3])
    )
    with pytest.raises(EmulationError, match=f"k is used at {2**39},"):
        emulate(edited(launch, "slots = k_shape[2]", "slots = 1 << 30"))


def test_other_head_dims_and_packings_are_left_to_mlx():
    assert [bits for bits in (0, 2, 3, 4, 5, 6, 8) if attention.fits(D, bits)] == [0, 4, 8]
    assert not any(attention.fits(dim, 0) for dim in (64, 128, 256, 1024))


def test_more_chunks_than_parts():
    """Every part then has keys to add to what it has."""
    slots = 8 * 8 * (attention.PARTS + 3)
    check(block(1, 4, 2, mx.float32), long_kv(1, 1, slots, mx.float32), mx.array([slots - 9]))


def test_rows_of_a_batch_have_their_own_lengths():
    """Fewer than eight lengths lie in other memory than more."""
    for rows in (2, 9):
        lengths = mx.array([(53 * row) % 200 for row in range(rows)])
        check(block(rows, 4, 3, mx.float32), long_kv(rows, 2, 256, mx.float32), lengths)


@needs_emulator
def test_each_key_and_value_is_read_once_for_up_to_40_rows_and_none_behind_the_text():
    for heads, tokens, bits in ((8, 5, 0), (8, 4, 0), (16, 2, 0), (8, 4, 8), (8, 3, 4)):
        kv = long_kv(1, 1, 256, mx.bfloat16, bits)
        queries = block(1, heads, tokens, mx.bfloat16)
        loads = emulate(attention.launch_chunks(queries, kv, mx.array([150]))).loads
        for name in "kv":
            assert (loads[name][:, :, : 150 + tokens] == 1).all()
            assert (loads[name][:, :, 150 + tokens :] == 0).all()


@needs_emulator
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_row_is_bit_for_bit_what_it_is_alone(dtype):
    """Whatever tokens and slots there are: a token of a block, and a block that starts there."""
    kv, queries = long_kv(1, 2, 512, dtype), block(1, 16, 5, dtype)
    together = attend(queries, kv, mx.array([300]))
    for token in (0, 2, 4):
        shorter = LongKV(tuple(part[:, :, :384] for part in kv.parts), D)
        alone = attend(queries[:, :, token : token + 1], shorter, mx.array([300 + token]))
        assert mx.array_equal(alone, together[:, :, token : token + 1])


@needs_emulator
def test_no_order_of_simdgroups_changes_a_bit():
    for dtype, bits in ((mx.bfloat16, 0), (mx.float32, 4)):
        kv, queries = long_kv(1, 1, 256, dtype, bits), block(1, 8, 3, dtype)
        length = mx.array([140])
        chunks = emulate_all(attention.launch_chunks(queries, kv, length))
        emulate_all(attention.launch_join(*chunks.outputs, queries.shape, dtype))


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
FAULTS = {
    "mask one too far": ("key + e > last", "key + e > last + 1"),
    "mask one too near": ("key + e > last", "key + e >= last"),
    "no mask": ("key + e > last", "false"),
    "tokens and heads mixed up": ("(row0 + t * 8 + row) % TOKENS", "(row0 + t * 8 + row) / TOKENS"),
    "barrier before the weights are read": (f"{BARRIER}    for (int j", "for (int j"),
    "barrier before the sums are read": (
        f"{BARRIER}  UNROLL for (int t = 0; t < TILES; t++) {{\n    const int r = row0",
        "for (int t = 0; t < TILES; t++) {\n    const int r = row0",
    ),
    "barrier before the maxima are read": (
        f"{BARRIER}    UNROLL for (int t = 0; t < TILES; t++) {{\n      const int r = t",
        "for (int t = 0; t < TILES; t++) {\n      const int r = t",
    ),
    "results not faded": ("result[t][c].thread_elements()[e] *= fade;", ";"),
    "sums not faded": ("fma(total[t], fade,", "fma(total[t], 1.0f,"),
    "one simdgroup's sum": ("s < SIMDS; s++) sum +=", "s < 1; s++) sum +="),
    "half a row's sum": ("return x + simd_shuffle_xor(x, 8);", "return x;"),
    "the neighbour's columns": ("+ 4 * (column + e) + c", "+ 4 * column + 2 * c + e"),
    "a kv head too low": ("head / heads", "head"),
}


@needs_emulator
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault):
    """Over two parts, each of which takes four turns."""
    kv, queries, length = (
        long_kv(1, 2, 512, mx.float32),
        block(1, 8, 3, mx.float32),
        mx.array([450]),
    )
    wanted = attention.reference(queries, kv, length)
    launch = edited(attention.launch_chunks(queries, kv, length, parts=2), *FAULTS[fault])
    try:
        parts = emulate_all(launch).outputs
    except EmulationError:
        return
    joined = emulate(attention.launch_join(*parts, queries.shape, mx.float32)).outputs[0]
    assert not error(joined.swapaxes(1, 2), wanted) < BOUNDS[mx.float32]
