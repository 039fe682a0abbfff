"""Products of a few rows with packed matrices, by both kernels."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mtp.kernels import matmul
from mlx_mtp.kernels.launch import Launch
from mlx_mtp.kernels.quantized import Packed
from tests.metal.emulator import emulate, emulate_all, prepare
from tests.metal.runner import run
from tests.metal.shapes import (
    BOUNDS,
    FORMATS,
    INPUTS,
    TARGETS,
    caught,
    edited,
    error,
    needs_emulator,
    numbers,
    packed,
)

OUTPUTS = 32  # of the real ones: outputs know nothing of each other
ROWS = range(1, 10)
PLANS = {"tile": matmul.tile, "matrix": matmul.matrix}
FITS = {"tile": matmul.fits_tile, "matrix": matmul.fits_matrix}


def launches(plan: str, rows: int, inputs: int, scheme, dtype) -> tuple[Launch, mx.array]:
    """A launch, and its result in float32."""
    weights = packed(OUTPUTS, inputs, scheme, dtype)
    x = numbers(rows, inputs, dtype=dtype, seed=rows) * inputs**-0.5
    return PLANS[plan](x.astype(dtype), weights), x.astype(mx.float32) @ weights.dequantized().T


def built(wanted: list[tuple]) -> list[tuple[tuple, Launch, mx.array]]:
    made = [(case, *launches(*case)) for case in wanted]
    prepare(launch for _, launch, _ in made)
    return made


@pytest.mark.parametrize("plan", PLANS)
def test_every_inner_size_of_the_targets_at_every_number_of_rows(plan):
    cases = [
        (plan, rows, inputs, ("affine", 4, 64), mx.float32) for rows in ROWS for inputs in INPUTS
    ]
    for case, launch, wanted in built(cases):
        assert error(run(launch)[0], wanted) < BOUNDS[mx.float32], case


@pytest.mark.parametrize("scheme", FORMATS, ids=lambda s: f"{s[0]}{s[1]}")
@pytest.mark.parametrize("plan", PLANS)
def test_every_packing_in_every_dtype(plan, scheme):
    cases = [
        (plan, rows, inputs, scheme, dtype)
        for dtype in BOUNDS
        for rows, inputs in ((1, 5376), (2, 1536), (5, 2560), (8, 3840), (9, 2816))
    ]
    for case, launch, wanted in built(cases):
        assert error(run(launch)[0], wanted) < BOUNDS[case[-1]], case


def test_every_product_of_the_targets_is_taken():
    """Only 6-bit matrices of odd multiples of 64 inputs are left to `tile`, or to MLX."""
    for name, shapes in TARGETS.items():
        for outputs, inputs in shapes.products:
            for mode, bits, group in FORMATS:
                words = mx.zeros((outputs, inputs * bits // 32), mx.uint32)
                weights = Packed(words, words, None, bits, group, mode)
                assert matmul.fits_tile(9, weights), (name, outputs, inputs)
                if bits != 6 or inputs % 128 == 0:
                    assert matmul.fits_matrix(9, weights), (name, outputs, inputs)


def test_what_would_leave_outputs_or_inputs_over_is_refused():
    def taken(rows: int, outputs: int, inputs: int, bits: int = 4, group: int = 64) -> list[str]:
        words = mx.zeros((outputs, inputs * bits // 32), mx.uint32)
        weights = Packed(words, words, None, bits, group, "affine")
        return [name for name, fits in FITS.items() if fits(rows, weights)]

    assert taken(16, 16, 128) == ["tile", "matrix"]
    assert taken(17, 16, 128) == []
    assert taken(1, 8, 128) == ["tile"]
    assert taken(1, 4, 128, 6) == ["tile"]
    assert taken(1, 12, 128) == taken(1, 2, 128, 6) == []
    assert taken(1, 16, 192, 6) == ["tile"]
    assert taken(1, 16, 96) == []
    stacked = mx.zeros((2, 16, 16), mx.uint32)
    assert not any(
        fits(1, Packed(stacked, stacked, None, 4, 64, "affine")) for fits in FITS.values()
    )


@pytest.mark.parametrize("plan", PLANS)
def test_as_many_rows_as_are_taken(plan):
    for rows in (10, matmul.MAX_ROWS):
        launch, wanted = launches(plan, rows, 256, ("affine", 4, 64), mx.float32)
        assert error(run(launch)[0], wanted) < BOUNDS[mx.float32]


@pytest.mark.parametrize("plan", PLANS)
def test_scales_of_nvfp4_may_be_subnormal(plan):
    """Those of weights as small as real ones are: below 2^-6 they have no leading one."""
    small = numbers(OUTPUTS, 256) * mx.linspace(0.002, 0.2, OUTPUTS)[:, None]
    weights = Packed(*mx.quantize(small, 16, 4, mode="nvfp4"), None, 4, 16, "nvfp4")
    subnormal = mx.logical_and(weights.scales < 8, weights.scales > 0)
    assert 0.1 < mx.mean(subnormal).item() < 0.9
    x = numbers(2, 256, seed=1)
    wanted = x @ weights.dequantized().T
    each = mx.abs(run(PLANS[plan](x, weights))[0] - wanted).max(0) / mx.abs(wanted).max(0)
    assert each.max().item() < 1e-4


@pytest.mark.parametrize("plan", PLANS)
def test_half_precision_is_rounded_once_at_the_end(plan):
    for dtype in (mx.float16, mx.bfloat16):
        launch, wanted = launches(plan, 5, 1536, ("affine", 4, 64), dtype)
        assert mx.mean(run(launch)[0] != wanted.astype(dtype)).item() < 0.05


def test_packings_that_no_kernel_reads_are_left_to_mlx():
    def taken(mode: str) -> list[int]:
        every = []
        for bits in (2, 3, 4, 5, 6, 8):
            module = nn.Module()
            module.mode, module.bits, module.group_size = mode, bits, 64
            module.weight = module.scales = mx.zeros((1, 1))
            every += [bits] if Packed.of(module) else []
        return every

    assert taken("affine") == [4, 6, 8]
    assert taken("mxfp4") == taken("nvfp4") == [4]
    assert taken("mxfp8") == []


@needs_emulator
@pytest.mark.parametrize("scheme", FORMATS, ids=lambda s: f"{s[0]}{s[1]}")
@pytest.mark.parametrize("plan", PLANS)
def test_each_word_is_read_once_whatever_the_rows(plan, scheme):
    for rows in (1, 5, 8, 9):
        launch, _ = launches(plan, rows, 1536, scheme, mx.bfloat16)
        loads = emulate(launch).loads["w"]
        assert loads.min() == loads.max() == 1


@needs_emulator
@pytest.mark.parametrize("plan", PLANS)
def test_a_row_is_bit_for_bit_what_it_is_alone(plan):
    for dtype in (mx.float32, mx.bfloat16):
        launch, _ = launches(plan, 9, 1536, ("affine", 4, 64), dtype)
        x, *weights = launch.inputs
        together = emulate(launch).outputs[0]
        for row in (0, 4, 8):
            alone = PLANS[plan](
                x[row : row + 1], Packed(weights[0], weights[1], weights[2], 4, 64, "affine")
            )
            assert mx.array_equal(emulate(alone).outputs[0], together[row : row + 1])


@needs_emulator
@pytest.mark.parametrize("plan", PLANS)
def test_no_order_of_simdgroups_changes_a_bit(plan):
    launch, wanted = launches(plan, 5, 1536, ("affine", 6, 64), mx.float32)
    for order in (0, 1, 2):
        assert error(emulate_all(launch, order=order).outputs[0], wanted) < BOUNDS[mx.float32]


FAULTS = {
    "missing barrier": ("matrix", "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "wrong group": ("tile", "c * VALUES / GROUP", "c * VALUES / (2 * GROUP)"),
    "another row's scale": ("matrix", "const int g = n * groups", "const int g = n0 * groups"),
    "swapped nibbles": ("tile", "const int at = i * BITS % 32;", "const int at = 28 - i * 4;"),
    "rows mixed up": ("matrix", "m < M ? float(x[at + i])", "m < M ? float(x[at + i + K])"),
    "a chunk left out": ("tile", "int c = lane", "int c = lane + 1"),
    "bias of the next group": ("tile", "float(biases[g])", "float(biases[g + 1])"),
    "a simdgroup's part lost": ("matrix", "s < SPLIT; s++", "s < SPLIT - 1; s++"),
    "columns swapped": ("matrix", "q[b][0][i]", "q[b][1][i]"),
    "a diverging sum": (
        "tile",
        "const float total = simd_sum(sum[r][m]);",
        "float total = 0; if (lane < 16) total = simd_sum(sum[r][m]);",
    ),
    "read past the end": ("tile", "c < K / VALUES", "c <= K / VALUES"),
}


@needs_emulator
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault):
    plan, right, wrong = FAULTS[fault]
    launch, wanted = launches(plan, 5, 1536, ("affine", 4, 64), mx.float32)
    assert caught(edited(launch, right, wrong), wanted)
