"""KV kept in 8 or 4 bits: the text of plain decoding with the same bits, whatever drafts."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from mlx_mtp.config import FULL
from mlx_mtp.engine import kv
from mlx_mtp.engine.kv import MIN_CAPACITY, KVLayout
from mlx_mtp.engine.requests import Request
from mlx_mtp.errors import UsageError
from mlx_mtp.models.drafter import Drafter

from .pairs import (
    PROMPT,
    WINDOW,
    Engine,
    ScriptedDrafter,
    drafter_config,
    make_target,
    randomise,
    run,
    target_config,
)
from .test_kv import poison

WIDE = {"global_head_dim": 32}  # the smallest that a group size divides
EDGE = [(13 * i + 5) % 96 for i in range(MIN_CAPACITY - 20)]  # the buffers grow soon after it

bits = pytest.mark.parametrize("bits", [8, 4])


@pytest.fixture(scope="module")
def target():
    return make_target(**WIDE)


@pytest.fixture(scope="module")
def plain(target):
    """plain(bits, prompt, n): the first n tokens of plain decoding; slow ones run once."""
    texts: dict[tuple[int, tuple[int, ...]], list[int]] = {}

    def tokens(bits, prompt, n):
        known = texts.get((bits, tuple(prompt)), [])
        if len(known) < n:
            known = run(Engine(target, kv_bits=bits), Request(list(prompt), n, draft_len=0))[0]
            texts[bits, tuple(prompt)] = known
        return known[:n]

    return tokens


def wide_drafter():
    return randomise(Drafter(drafter_config(**WIDE)), 2)


def filled(layout, rows=2):
    """Buffers in which every number differs from its neighbours, but of finite scales."""
    mx.random.seed(3)
    return [
        tuple(mx.random.randint(1, 200, part.shape).astype(part.dtype) for part in layer)
        for layer in layout.allocate(rows, MIN_CAPACITY)
    ]


def same(one, other):
    return all(
        mx.array_equal(a, b)
        for layer, others in zip(one, other, strict=True)
        for a, b in zip(layer, others, strict=True)
    )


@bits
@pytest.mark.parametrize("draft_len", [1, 4, 8])
def test_any_draft_length_gives_plain_decodings_text(target, plain, bits, draft_len):
    """Case C11: verify and one-row passes see each position as it was quantised once, across
    growth, with a drafter that is sometimes right."""
    wanted = plain(bits, EDGE, 40)
    drafter = ScriptedDrafter([EDGE + wanted], lambda _, p: p % 3 == 0)
    request = Request(EDGE, 40, draft_len=draft_len)
    assert run(Engine(target, drafter, kv_bits=bits), request) == [wanted]
    assert 0 < request.stats.accepted < request.stats.drafted


@bits
def test_the_drafter_reads_packed_kv(target, plain, bits):
    """Case C11: it drafts over the target's packed KV, and its drafts change no text."""
    request = Request(PROMPT, 40, draft_len=4)
    assert run(Engine(target, wide_drafter(), kv_bits=bits), request) == [plain(bits, PROMPT, 40)]
    assert request.stats.drafted == 4 * request.stats.rounds


@bits
@pytest.mark.parametrize("chunk", [1, 9, 10, 64])
def test_any_prefill_chunk_gives_the_same_text(target, plain, bits, chunk):
    """A chunk attends to its own positions as quantised too."""
    prompt = [(11 * i + 1) % 96 for i in range(3 * WINDOW + 3)]
    engine = Engine(target, wide_drafter(), kv_bits=bits, prefill_chunk=chunk)
    assert run(engine, Request(prompt, 16)) == [plain(bits, prompt, 16)]


@bits
def test_ragged_rows_say_what_each_says_alone(target, plain, bits):
    """Cases C11, C12: more requests than rows, each with its own length and acceptance."""
    prompts = [PROMPT, [3, 1], [(5 * i) % 96 for i in range(3 * WINDOW)]]
    alone = [plain(bits, prompt, 40) for prompt in prompts]
    requests = [Request(p, 40, draft_len=k) for p, k in zip(prompts, [8, 3, 5], strict=True)]
    assert run(Engine(target, wide_drafter(), rows=2, kv_bits=bits), *requests) == alone


@bits
def test_poison_in_every_uncommitted_slot_changes_nothing(target, plain, bits):
    rng = random.Random(5)
    prompts = [PROMPT, [(7 * i) % 96 for i in range(2 * WINDOW)]]
    engine = Engine(target, wide_drafter(), rows=2, kv_bits=bits)
    requests = [Request(prompt, 30, draft_len=3) for prompt in prompts]
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
        poison(engine, rng)
    assert [r.tokens for r in requests] == [plain(bits, prompt, 30) for prompt in prompts]


@bits
def test_packed_products_as_on_a_gpu(target, plain, bits, monkeypatch):
    """A GPU multiplies by packed KV as it lies. float32, where MLX's CPU product is right."""
    monkeypatch.setattr(kv, "on_cpu", lambda: False)
    engine = Engine(target, wide_drafter(), kv_bits=bits, compile=False)
    assert run(engine, Request(PROMPT, 40, draft_len=4)) == [plain(bits, PROMPT, 40)]


@pytest.mark.parametrize(("bits", "error"), [(8, 0.05), (4, 0.5)])
def test_logits_stay_near_those_of_whole_kv(target, bits, error):
    """And they are not the same: the KV is packed indeed."""
    logits = []
    for layout in (KVLayout(target.config.text, mx.float32, b) for b in (None, bits)):
        view = layout.view(layout.allocate(1, MIN_CAPACITY), mx.array([0]), 60, 0)
        ids = mx.array([[(5 * i + 1) % 96 for i in range(60)]])
        logits.append(target.logits(target(ids, view)))
    away = mx.abs(logits[1] - logits[0]).mean() / mx.abs(logits[0]).mean()
    assert 0 < away.item() < error


@pytest.mark.parametrize(
    ("bits", "dims", "position"),
    [
        (None, {}, 2 * 2 * 16 * 4),
        (8, {"global_head_dim": 32}, 2 * 2 * (32 + 2 * 4)),
        (4, {"global_head_dim": 128}, 2 * 2 * 2 * (32 + 2 * 4)),  # groups of 64
    ],
)
def test_bytes_are_as_planned(bits, dims, position):
    """`nbytes` is what `allocate` takes; a position of a full layer costs its packed values and a
    scale and bias a group."""
    layout = KVLayout(target_config(**dims).text, mx.float32, bits)
    taken = sum(part.nbytes for layer in layout.allocate(3, 512) for part in layer)
    assert layout.nbytes(3, 512) == taken
    more = layout.nbytes(1, 1024) - layout.nbytes(1, 512)
    assert more == 512 * position


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_rows_come_and_go_in_all_parts(bits):
    layout = KVLayout(target_config(**WIDE).text, mx.float32, bits)
    batch = filled(layout)
    one = layout.take_row(batch, 1)
    assert same(one, layout.rows(batch, [1]))
    assert same(layout.put_row(batch, 0, one), layout.rows(batch, [1, 1]))
    cleared = layout.clear_row(batch, 0)
    assert not any(part.any() for layer in layout.take_row(cleared, 0) for part in layer)
    assert same(layout.take_row(cleared, 1), one)
    swapped = layout.rows(batch, [1, 0])
    assert same(layout.rows(swapped, [1, 0]), batch)
    grown = layout.grow(one, 2 * MIN_CAPACITY)
    assert layout.capacity(grown) == 2 * MIN_CAPACITY
    slots = [MIN_CAPACITY if kind == FULL else layout.ring for kind in layout._kinds]
    cut = [tuple(p[:, :, :n] for p in layer) for layer, n in zip(grown, slots, strict=True)]
    assert same(cut, one)


def test_what_cannot_be_packed_is_refused():
    """In one line, from the config alone: before anything is loaded."""
    with pytest.raises(UsageError, match="8 or 4 bits, not 3"):
        KVLayout(target_config(**WIDE).text, mx.float32, 3)
    with pytest.raises(UsageError, match="head dim 16 cannot be quantised"):
        KVLayout(target_config().text, mx.float32, 8)
