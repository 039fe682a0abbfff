"""Products with the experts of a mixture, each read once for all of its rows."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_mtp.kernels import experts
from mlx_mtp.kernels.quantized import Packed
from tests.metal.emulator import emulate, emulate_all
from tests.metal.runner import run
from tests.metal.shapes import (
    BOUNDS,
    FORMATS,
    TARGETS,
    caught,
    edited,
    error,
    needs_emulator,
    numbers,
    packed,
)

EXPERTS, TOP, OUTPUTS = 16, 8, 16  # of 128 experts, and of their 704 or 2816 outputs
MIXTURE = TARGETS["26B-A4B"]


def stack(inputs: int, scheme=("affine", 4, 64), dtype=mx.float32) -> Packed:
    rows = packed(EXPERTS * OUTPUTS, inputs, scheme, dtype)
    parts = [part.reshape(EXPERTS, OUTPUTS, -1) for part in rows.arrays]
    biases = None if rows.biases is None else parts[2]
    return Packed(parts[0], parts[1], biases, rows.bits, rows.group_size, rows.mode)


def routed(rows: int, experts_used: int = EXPERTS) -> mx.array:
    some = mx.random.uniform(shape=(rows, experts_used), key=mx.random.key(rows))
    return mx.argsort(some, -1)[:, :TOP]


def wanted(x: mx.array, weights: Packed, chosen: mx.array) -> mx.array:
    """Pair by pair, in float32."""
    matrices = weights.flat.dequantized().reshape(EXPERTS, OUTPUTS, -1)[chosen.flatten()]
    each = mx.repeat(x.astype(mx.float32), chosen.size // len(x), 0)
    return (matrices @ each[..., None])[..., 0]


@pytest.mark.parametrize("rows", range(1, 10))
def test_the_mixtures_products_at_every_number_of_rows(rows):
    """Gate and up take a row for all of its experts, down has one for each."""
    chosen = routed(rows)
    for inputs, pairs in ((MIXTURE.hidden, rows), (MIXTURE.moe, rows * TOP)):
        weights, x = stack(inputs), numbers(pairs, inputs) * inputs**-0.5
        launch = experts.launch(x, weights, *experts.in_order(chosen))
        found = run(launch)[0]
        assert error(found, wanted(x, weights, chosen)) < BOUNDS[mx.float32]
        assert mx.allclose(
            experts.multiply(x, weights, *experts.in_order(chosen)), found, atol=1e-4
        )


@pytest.mark.parametrize("scheme", FORMATS, ids=lambda s: f"{s[0]}{s[1]}")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_every_packing_in_every_dtype(scheme, dtype):
    weights, chosen = stack(704, scheme, dtype), routed(5)
    x = (numbers(5, 704) / 26).astype(dtype)
    launch = experts.launch(x, weights, *experts.in_order(chosen))
    assert error(run(launch)[0], wanted(x, weights, chosen)) < BOUNDS[dtype]


def test_more_pairs_of_an_expert_than_share_a_reading():
    """Every row chooses the same, twice as many as are read for at once, and one."""
    rows = 2 * experts.MOST + 1
    chosen = mx.broadcast_to(mx.array([[11, 2]]), (rows, 2))
    weights, x = stack(256), numbers(rows, 256) / 16
    found = run(experts.launch(x, weights, *experts.in_order(chosen)))[0]
    assert error(found, wanted(x, weights, chosen)) < BOUNDS[mx.float32]


def test_stacks_that_would_leave_outputs_or_inputs_over_are_refused():
    def taken(outputs: int, inputs: int, bits: int = 4, group: int = 64) -> bool:
        words = mx.zeros((2, outputs, inputs * bits // 32), mx.uint32)
        return experts.fits(Packed(words, words, None, bits, group, "affine"))

    assert all((taken(8, 64), taken(4, 64, 6), taken(16, 96, group=32)))
    assert not any((taken(4, 64), taken(12, 64), taken(2, 64, 6), taken(8, 96)))
    assert not experts.fits(stack(64).flat)


@needs_emulator
def test_an_expert_is_read_once_for_eight_rows_and_not_at_all_without():
    for rows, times in ((1, 1), (8, 1), (9, 2), (16, 2)):
        chosen = routed(rows, TOP + 1)  # nearly all rows choose the same
        x = numbers(rows, 704)
        loads = emulate(experts.launch(x, stack(704), *experts.in_order(chosen))).loads["w"]
        for expert in range(EXPERTS):
            pairs = int((chosen == expert).sum())
            assert (loads[expert] == -(-pairs // experts.MOST)).all()
        assert loads.max() == times


@needs_emulator
def test_a_pair_is_bit_for_bit_what_it_is_alone():
    weights, chosen, x = stack(704), routed(9), numbers(9, 704)
    together = emulate(experts.launch(x, weights, *experts.in_order(chosen))).outputs[0]
    for row in (0, 8):
        order = experts.in_order(chosen[row : row + 1])
        alone = emulate(experts.launch(x[row : row + 1], weights, *order)).outputs[0]
        assert mx.array_equal(alone, together[row * TOP : (row + 1) * TOP])


TURNS = "  for (int start = p; start < end; start += MOST) {\n"
FAULTS = {
    "the pair before": ("order[start + m]) * N", "order[max(start + m - 1, 0)]) * N"),
    "no leader": ("if (p > 0 && int(expert[p - 1]) == e) return;", "if (p > 0) return;"),
    "a run too short": ("end < pairs && int(expert", "end < pairs - 1 && int(expert"),
    "the wrong row": (") / EACH", ") % EACH"),
    "the next expert": ("size_t(e) * N", "size_t(e ^ 1) * N"),
    "sums kept from eight to eight": (  # chosen by a second reader
        f"{TURNS}    float sum[OUTS][MOST] = {{}};\n",
        f"float sum[OUTS][MOST] = {{}};\n{TURNS}",
    ),
}


@needs_emulator
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault):
    """All rows choose the same experts, one more than share a reading."""
    weights, chosen, x = stack(704), routed(9, TOP), numbers(9, 704)
    launch = edited(experts.launch(x, weights, *experts.in_order(chosen)), *FAULTS[fault])
    assert caught(launch, wanted(x, weights, chosen))


@needs_emulator
def test_no_order_of_simdgroups_changes_a_bit():
    weights, chosen, x = stack(704), routed(5), numbers(5, 704) / 26
    found = emulate_all(experts.launch(x, weights, *experts.in_order(chosen))).outputs[0]
    assert error(found, wanted(x, weights, chosen)) < BOUNDS[mx.float32]
