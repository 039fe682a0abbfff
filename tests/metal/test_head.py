"""The head's best tokens and chosen blocks, without logits."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_mtp.kernels import head
from mlx_mtp.kernels.head import Adjustments, Candidates, Shortlist
from mlx_mtp.kernels.launch import Launch
from mlx_mtp.kernels.quantized import Packed
from tests.metal.emulator import emulate, emulate_all, prepare
from tests.metal.pairs import through_the_emulator
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

VOCAB = 256  # of 262,144: blocks know nothing of each other
CAP = 30.0
HIDDEN = sorted({shapes.hidden for shapes in TARGETS.values()} | {256, 1024})


def table(inputs: int, scheme=("affine", 4, 64), dtype=mx.float32, rows=VOCAB) -> Packed:
    return packed(rows, inputs, scheme, dtype)


def hidden(rows: int, inputs: int, dtype=mx.float32) -> mx.array:
    """Logits between -60 and 60, so that the softcap bends."""
    return (numbers(rows, inputs, seed=rows) * 20 * inputs**-0.5).astype(dtype)


def logits_of(x: mx.array, weights: Packed, cap: float | None = CAP) -> mx.array:
    """In float32, rounded to x's dtype where the stock operations round."""
    logits = (x.astype(mx.float32) @ weights.flat.dequantized().T).astype(x.dtype)
    return logits if cap is None else mx.tanh(logits / cap) * cap


def banned(sequences: int, seed: int) -> mx.array:
    """A table of biases, a fifth of them bans."""
    some = mx.random.uniform(shape=(sequences, VOCAB), key=mx.random.key(seed))
    return mx.where(some < 0.2, -mx.inf, some)


def best_of(values: mx.array) -> tuple[mx.array, mx.array]:
    blocks = values.reshape(len(values), -1, head.BLOCK)
    tokens = mx.argmax(blocks, -1) + mx.arange(0, values.shape[1], head.BLOCK)
    return blocks.max(-1), tokens


def check(launch: Launch, values: mx.array, dtype: mx.Dtype) -> None:
    """Against all values: the best of every block, and a token that has it."""
    found, tokens = run(launch)
    wanted, _ = best_of(values)
    bound = BOUNDS[dtype] * float(mx.abs(wanted).max())
    assert mx.abs(found - wanted).max() <= bound
    assert mx.abs(mx.take_along_axis(values, tokens, 1) - wanted).max() <= bound


@pytest.mark.parametrize("inputs", HIDDEN)
def test_the_hidden_sizes_of_the_targets_and_drafters_at_every_number_of_rows(inputs):
    weights = table(inputs)
    given = [hidden(rows, inputs) for rows in range(1, 10)]
    launches = [head.score(x, weights, sequences=1, cap=CAP) for x in given]
    prepare(launches)
    for x, launch in zip(given, launches, strict=True):
        check(launch, logits_of(x, weights), mx.float32)


@pytest.mark.parametrize("scheme", FORMATS, ids=lambda s: f"{s[0]}{s[1]}")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_every_packing_in_every_dtype(scheme, dtype):
    weights, x = table(512, scheme, dtype), hidden(3, 512, dtype)
    values = logits_of(x, weights).astype(mx.float32)
    check(head.score(x, weights, sequences=1, cap=CAP), values, dtype)


@pytest.mark.parametrize("sequences", [1, 3])
def test_biases_and_early_bans_are_those_of_the_rows_sequence(sequences):
    weights, x = table(512), hidden(6, 512)
    adjust = Adjustments(
        banned(sequences, 1), banned(sequences, 2), mx.array([1, 0, 1, 0, 0, 1], dtype=mx.int32)
    )
    bias, early = (mx.repeat(part, 6 // sequences, 0) for part in adjust[:2])
    values = logits_of(x, weights) + bias
    values = values + mx.where(adjust.is_early[:, None] == 1, early, 0.0)
    launch = head.score(x, weights, sequences=sequences, cap=CAP, adjust=adjust)
    check(launch, values, mx.float32)
    chosen = mx.array([[(row + j) % 4 for j in range(2)] for row in range(6)], dtype=mx.int32)
    launch = head.score(
        x, weights, sequences=sequences, cap=CAP, adjust=adjust, chosen=chosen, best=False
    )
    found, first = run(launch)
    wanted = mx.take_along_axis(values.reshape(6, 4, 64), chosen[..., None], 1).flatten(1)
    assert mx.array_equal(first, chosen * 64)
    assert mx.allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("equal", [(70, 75, 90, 127), (66, 70, 90, 127)], ids=str)
def test_of_equal_logits_the_lowest_token_is_chosen(equal):
    """bfloat16 logits are often equal; stock argmax takes the first. Of every eight rows one
    simdgroup has the lower four."""
    weights = table(512, dtype=mx.bfloat16)
    order = mx.array([equal[0] if i in equal else i for i in range(VOCAB)])
    same = Packed(*(part[order] for part in weights.arrays), 4, 64, "affine")
    x = (same.dequantized()[equal[0] : equal[0] + 1] / 20).astype(
        mx.bfloat16
    )  # theirs are the highest
    _, tokens = best_of(logits_of(x, same))
    assert tokens[0, 1] == equal[0]
    assert mx.array_equal(run(head.score(x, same, sequences=1, cap=CAP))[1], tokens)


def test_the_first_token_of_a_block_stands_for_one_that_is_banned():
    weights, x = table(512), hidden(2, 512)
    bias = mx.where(mx.arange(VOCAB) // 64 == mx.array([[1], [2]]), -mx.inf, 0.0)
    values, tokens = run(
        head.score(x, weights, sequences=2, cap=CAP, adjust=Adjustments(bias=bias))
    )
    for row, block in ((0, 1), (1, 2)):
        assert values[row, block] == -mx.inf
        assert tokens[row, block] == 64 * block


def test_logits_are_rounded_where_the_stock_operations_round():
    """bfloat16 logits, of which a rounding more or less moves every fifth; biases are added in
    float32."""
    weights, x = table(256, dtype=mx.bfloat16), hidden(4, 256, mx.bfloat16)
    adjust = Adjustments(bias=numbers(1, VOCAB, seed=4))
    for cap in (None, CAP):
        values = logits_of(x, weights, cap).astype(mx.float32) + adjust.bias
        chosen = mx.broadcast_to(mx.arange(4), (4, 4)).astype(mx.int32)
        launch = head.score(
            x, weights, sequences=1, cap=cap, adjust=adjust, chosen=chosen, best=False
        )
        assert mx.mean(run(launch)[0] != values).item() < 0.05


def test_biases_are_those_of_the_tokens_that_rows_stand_for():
    weights, x = table(256), hidden(2, 256)
    names = mx.random.permutation(VOCAB, key=mx.random.key(4)).astype(mx.int32)
    adjust = Adjustments(banned(2, 1), banned(2, 2), mx.array([0, 1], dtype=mx.int32))
    values = logits_of(x, weights) + adjust.bias[:, names]
    values = values + mx.where(adjust.is_early[:, None] == 1, adjust.early[:, names], 0.0)
    wanted, places = best_of(values)
    found, tokens = run(head.score(x, weights, sequences=2, cap=CAP, adjust=adjust, names=names))
    assert mx.allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert mx.array_equal(tokens, names[places])


def test_as_many_rows_as_are_taken():
    weights, x = table(256), hidden(head.MAX_ROWS, 256)
    check(head.score(x, weights, sequences=1, cap=CAP), logits_of(x, weights), mx.float32)


def test_tables_that_would_leave_rows_or_inputs_over_are_refused():
    def taken(rows: int, outputs: int, inputs: int, bits: int = 4, group: int = 64) -> bool:
        words = mx.zeros((outputs, inputs * bits // 32), mx.uint32)
        return head.fits(rows, Packed(words, words, None, bits, group, "affine"))

    assert all((taken(16, 64, 64), taken(1, 64, 64, 6)))
    assert not any((taken(17, 64, 64), taken(1, 96, 64), taken(1, 64, 96)))


def test_clusters_have_names():
    """Two of four clusters of 128, whose rows stand for tokens in another order; every sequence
    has biases of its own."""
    rows = table(256, ("affine", 8, 64), rows=512)
    clusters = Packed(*(part.reshape(4, 128, -1) for part in rows.arrays), 8, 64, "affine")
    names = mx.random.permutation(512, key=mx.random.key(1)).astype(mx.int32)
    x, chosen = hidden(2, 256), mx.array([[3, 1], [0, 2]], dtype=mx.int32)
    adjust = Adjustments(bias=10 * numbers(2, 512, seed=5))
    launch = head.score(x, clusters, sequences=2, chosen=chosen, names=names, adjust=adjust)
    values, tokens = run(launch)
    logits = (logits_of(x, rows, None) + adjust.bias[:, names]).reshape(2, 4, 2, 64)
    for row in range(2):
        wanted = logits[row, chosen[row]].reshape(4, 64)
        assert mx.allclose(values[row], wanted.max(-1), rtol=1e-5, atol=1e-5)
        places = chosen[row][:, None] * 128 + mx.array([0, 64])
        places = places.flatten() + mx.argmax(wanted, -1)
        assert mx.array_equal(tokens[row], names[places])


@pytest.mark.parametrize("few", [None, 2])
@pytest.mark.parametrize("names", [None, "permuted"])
def test_candidates_hold_the_best_and_the_likeliest(few, names):
    """The stock way, which the engine's tests compare with the kernels."""
    named = names and mx.random.permutation(VOCAB, key=mx.random.key(2)).astype(mx.int32)
    short = Shortlist(table(512), CAP, named)
    x = hidden(3, 512)
    found = short.candidates(x, 1, Adjustments(), few)
    assert isinstance(found, Candidates)
    logits = logits_of(x, short.table)
    for row in range(3):
        tokens = found.tokens[row].tolist()
        assert len(tokens) == (4 if few is None else 2 * 64)
        at = mx.array([named.tolist().index(t) for t in tokens] if names else tokens)
        assert mx.allclose(found.values[row], logits[row, at], rtol=1e-4, atol=1e-4)
        best = mx.argsort(-logits[row])[: few or 1]
        best = named[best] if names else best
        assert set(best.tolist()) <= set(tokens)
        # In order of the table's rows, for of equal logits the first is chosen.
        assert at.tolist() == sorted(at.tolist())


@needs_emulator
@pytest.mark.parametrize("few", [None, 2])
def test_kernels_name_the_candidates_that_the_stock_operations_name(monkeypatch, few):
    names = mx.random.permutation(VOCAB, key=mx.random.key(2)).astype(mx.int32)
    short, x = Shortlist(table(256), CAP, names), hidden(2, 256)
    of_rows = None, mx.array([[3, 1], [0, 2]], dtype=mx.int32)
    wanted = [short.candidates(x, 1, Adjustments(), few, clusters) for clusters in of_rows]
    through_the_emulator(monkeypatch)
    for clusters, stock in zip(of_rows, wanted, strict=True):
        found = short.candidates(x, 1, Adjustments(), few, clusters)
        assert mx.array_equal(found.tokens, stock.tokens)
        assert mx.allclose(found.values, stock.values, rtol=1e-4, atol=1e-4)
        assert mx.array_equal(found.finite, stock.finite)


@pytest.mark.parametrize("damaged", [130, 134], ids=["one simdgroup", "the other"])
def test_damaged_weights_are_found(damaged):
    weights, x = table(512), hidden(2, 512)
    words, scales, biases = weights.arrays
    scales[damaged, 3] = mx.nan
    broken = Packed(words, scales, biases, 4, 64, "affine")
    values, _ = run(head.score(x, broken, sequences=1, cap=CAP))
    assert mx.isnan(values).tolist() == [[False, False, True, False]] * 2
    short = Shortlist(broken, CAP)
    for few in (None, 2):
        assert not short.candidates(x, 1, Adjustments(), few).finite.any()
        clusters = mx.array([[0, 2], [3, 1]], dtype=mx.int32)
        finite = short.candidates(x, 1, Adjustments(), few, clusters).finite
        assert finite.tolist() == [False, True]


@needs_emulator
def test_the_table_is_read_once_for_all_rows():
    for rows in (1, 5, 8):
        loads = emulate(head.score(hidden(rows, 512), table(512), sequences=1, cap=CAP)).loads
        assert (loads["w"] == 1).all()


@needs_emulator
def test_a_row_is_bit_for_bit_what_it_is_alone():
    weights, x = table(1536, dtype=mx.bfloat16), hidden(9, 1536, mx.bfloat16)
    together = emulate(head.score(x, weights, sequences=1, cap=CAP)).outputs
    for row in (0, 5, 8):
        alone = head.score(x[row : row + 1], weights, sequences=1, cap=CAP)
        for part, whole in zip(emulate(alone).outputs, together, strict=True):
            assert mx.array_equal(part, whole[row : row + 1])


FAULTS = {
    "no barrier": ("threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "the other half forgotten": ("if (other > best", "if (false && other > best"),
    "softcap left out": ("if (CAPPED)", "if (false)"),
    "another row's total": ("if (lane == m) logit", "if (lane == M - 1 - m) logit"),
    "the worst": ("logit > best ||", "logit < best ||"),
    "a step too wide": ("n0 += 2 * OUTS", "n0 += 4 * OUTS"),
}


@needs_emulator
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault):
    weights, x = table(512), hidden(4, 512)
    launch = edited(head.score(x, weights, sequences=1, cap=CAP), *FAULTS[fault])
    assert caught(launch, best_of(logits_of(x, weights))[0])


@needs_emulator
def test_no_order_of_simdgroups_changes_a_bit():
    weights, x = table(512), hidden(4, 512)
    found = emulate_all(head.score(x, weights, sequences=1, cap=CAP)).outputs[0]
    assert error(found, best_of(logits_of(x, weights))[0]) < BOUNDS[mx.float32]
