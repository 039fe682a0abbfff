"""The layout of KV: rings, growth, bounds, and that nothing uncommitted is ever seen."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from mlx_mtp.config import FULL, SLIDING
from mlx_mtp.engine import kv
from mlx_mtp.engine.draft_length import MAX_DRAFT
from mlx_mtp.engine.kv import (
    BLOCK,
    MIN_CAPACITY,
    KVLayout,
    attended,
    attention,
    by_mlx,
    capacity_for,
)
from mlx_mtp.engine.requests import Request

from .pairs import (
    PROMPT,
    WINDOW,
    Engine,
    Schedule,
    ScriptedDrafter,
    forward,
    make_drafter,
    make_target,
    plain,
    run,
)


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture
def layout(target):
    return KVLayout(target.config.text, mx.float32)


def test_only_layers_that_own_kv_have_buffers(layout):
    """Case C05: one buffer per owner, not per layer."""
    buffers = layout.allocate(2, 512)
    assert [k.shape for k, _ in buffers] == [(2, 2, layout.ring, 8), (2, 2, 512, 16)]


def test_a_ring_keeps_a_window_behind_a_stop_seen_late():
    """W + 2 blocks: the stop's round and the one run ahead have both written past it."""
    for window in (8, 128, 512, 1024):
        layout = KVLayout(make_target(sliding_window=window).config.text, mx.float32)
        ring = layout.ring
        assert ring % 16 == 0
        written = 1000  # the newest position after both rounds
        kept = written - 2 * BLOCK  # where the stop cut
        needed = range(kept - window + 1, kept + 1)
        alive = range(written - ring + 1, written + 1)
        assert needed.start >= alive.start


@pytest.mark.parametrize(
    ("bound", "capacity", "gpu", "cpu"),
    [
        (1, 256, 256, 32),
        (33, 256, 256, 64),
        (257, 512, 288, 288),
        (289, 512, 320, 320),
        (1025, 2048, 1152, 1056),
        (9000, 16384, 9216, 9216),
        (33000, 65536, 36864, 33792),
        (500, 500, 500, 500),
    ],
)
def test_attention_covers_an_eighth_of_an_octave_more(bound, capacity, gpu, cpu, monkeypatch):
    assert attended(bound, capacity) == cpu
    monkeypatch.setattr(kv, "on_cpu", lambda: False)
    assert attended(bound, capacity) == gpu


def test_capacity_grows_by_powers_of_two():
    assert [capacity_for(n) for n in (1, 256, 257, 1000)] == [256, 256, 512, 1024]


def test_growth_keeps_what_was_written(layout):
    buffers = [(k + 1, v + 2) for k, v in layout.allocate(1, MIN_CAPACITY)]
    grown = layout.grow(buffers, 2 * MIN_CAPACITY)
    assert layout.capacity(grown) == 2 * MIN_CAPACITY
    for (k, v), (more_k, more_v) in zip(buffers, grown, strict=True):
        assert mx.array_equal(more_k[:, :, : k.shape[2]], k)
        assert mx.array_equal(more_v[:, :, : v.shape[2]], v)
        assert not more_k[:, :, k.shape[2] :].any()


def test_a_pass_that_could_write_past_the_end_is_refused(layout):
    """MLX would corrupt memory without a word."""
    buffers = layout.allocate(1, MIN_CAPACITY)
    layout.view(buffers, mx.array([247]), 9, bound=247)
    with pytest.raises(AssertionError, match="KV overflow: 248 \\+ 9 > 256"):
        layout.view(buffers, mx.array([240]), 9, bound=248)


@pytest.mark.parametrize("start", range(MIN_CAPACITY - 12, MIN_CAPACITY + 2))
def test_every_border_of_capacity_with_a_round_in_flight(target, start):
    """Prompts that end at each place before the buffer is full: it grows in time, and the text
    goes on."""
    prompt = [(13 * i + 5) % 96 for i in range(start)]
    wanted = plain(target, prompt, 24)
    for draft_len in (1, 8):
        drafter = ScriptedDrafter([prompt + wanted], lambda _, p: p % 6 == 0)
        assert run(Engine(target, drafter), Request(prompt, 24, draft_len=draft_len)) == [wanted]


def _junk(like: mx.array, rng: random.Random) -> mx.array:
    if like.dtype == mx.uint32:
        return mx.random.randint(0, 1 << 31, like.shape).astype(mx.uint32)
    return 1e3 * rng.choice([-1, 1]) * (1 + mx.random.uniform(shape=like.shape))


def poison(engine: Engine, rng: random.Random) -> None:
    """Write garbage into every slot that no row has committed."""
    layout, state = engine.layout, engine._batch.state
    poisoned = []
    for kind, layer in zip(layout.text.layer_types, state.kv, strict=False):
        slots = mx.arange(layer[0].shape[2])
        length = state.length[:, None, None, None]
        if kind == SLIDING:
            last = length - 1
            held = last - (last + (layout.ring - slots[None, None, :, None])) % layout.ring
            live = (held >= 0) & (held > last - WINDOW - 2 * BLOCK + 2)
        else:
            live = slots[None, None, :, None] < length
        poisoned.append(tuple(mx.where(live, part, _junk(part, rng)) for part in layer))
    engine._batch.state = state._replace(kv=poisoned)


@pytest.mark.parametrize("seed", range(3))
def test_poison_in_every_uncommitted_slot_changes_nothing(target, seed):
    """Under random draft lengths and acceptances, a batch of two, between all steps: rejected
    drafts and slots never written are as good as absent."""
    rng = random.Random(seed)
    prompts = [PROMPT, [(7 * i) % 96 for i in range(2 * WINDOW)]]
    wanted = [plain(target, prompt, 60) for prompt in prompts]
    script = [p + w for p, w in zip(prompts, wanted, strict=True)]
    right = {p for p in range(200) if rng.random() < 0.6}
    schedule = Schedule([rng.randint(0, MAX_DRAFT) for _ in range(29)])
    drafter = ScriptedDrafter(script, lambda _, p: p not in right)
    engine = drafter.engine = Engine(target, drafter, rows=2, draft_length=schedule)
    requests = [Request(prompt, 60) for prompt in prompts]
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
        poison(engine, rng)
    assert [request.tokens for request in requests] == wanted


def test_the_drafter_sees_no_uncommitted_slot(target):
    """Poisoned KV changes not one draft: acceptance by position stays what it was."""
    counts = []
    for poisoned in (False, True):
        engine = Engine(target, make_drafter())
        request = Request(PROMPT, 60, draft_len=4)
        engine.add(request)
        drafts = []
        while engine.busy:
            engine.step()
            if poisoned:
                poison(engine, random.Random(1))
            drafts.append(request.stats.accepted_by_position[:])
        counts.append(drafts)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_written_out_is_attention(kv_heads):
    """It gives what MLX's own operation gives, masks and groups too."""
    keys = [mx.random.key(i) for i in range(4)]
    q = mx.random.normal((2, 4, 5, 16), key=keys[0])
    k, v = (mx.random.normal((2, kv_heads, 40, 16), key=key) for key in keys[1:3])
    mask = mx.random.bernoulli(0.6, (2, 1, 5, 40), key=keys[3]) | (mx.arange(40) == 0)
    wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)
    score, mix = (lambda x: x @ k.swapaxes(-1, -2)), (lambda x: x @ v)
    assert mx.allclose(attention(q, kv_heads, score, mix, mask), wanted, atol=1e-5)
    nothing = attention(q, kv_heads, score, mix, mx.zeros_like(mask))
    assert mx.isfinite(nothing).all()


@pytest.mark.parametrize(("rows", "slots"), [(1, 50), (8, 50), (8, 200), (40, 300)])
def test_the_cpus_scores_are_a_product(rows, slots):
    """However many rows and slots choose its form."""
    q = mx.random.normal((2, 2, rows, 16), key=mx.random.key(0))
    k = mx.random.normal((2, 2, slots + 7, 16), key=mx.random.key(1))[:, :, :slots]
    assert mx.allclose(kv._score_on_cpu(k, q), q @ k.swapaxes(-1, -2), atol=1e-4)


def test_a_chunk_in_pieces_is_the_same_chunk(target, monkeypatch):
    """Where its scores would be too large, full layers attend a few queries at a time."""
    expected = forward(target, PROMPT * 20)
    monkeypatch.setattr(kv, "CPU_SCORES", 0)
    assert mx.allclose(forward(target, PROMPT * 20), expected, atol=1e-4)


@pytest.mark.parametrize("way", ["folded", "kernel"])
def test_a_piece_of_a_chunk_attends_as_a_block_of_its_length_does(monkeypatch, way):
    """The kernel takes no mask: it must be told where the piece begins, not the chunk."""
    target = make_target(global_head_dim=32)
    layout = KVLayout(target.config.text, mx.float32)
    ways = KVLayout(target.config.text, mx.float32, full_ways={1: way, 2: way})
    monkeypatch.setattr(kv, "CPU_SCORES", 0)  # pieces of two tokens
    ids = mx.array([(PROMPT * 20)[: BLOCK + 6]])
    hidden = [
        target(ids, each.view(each.allocate(1, 256), mx.array([0]), ids.shape[1], 0))
        for each in (layout, ways)
    ]
    assert mx.allclose(*hidden, atol=1e-4)


def test_full_layers_only_and_sliding_layers_only():
    """Capacity is a matter of full layers; a target without them never grows."""
    for kinds in ([FULL, FULL], [SLIDING, SLIDING]):
        only = make_target(layer_types=kinds, num_hidden_layers=2, num_kv_shared_layers=0)
        wanted = plain(only, PROMPT, 280)
        drafter = ScriptedDrafter([PROMPT + wanted], lambda _, p: p % 3 == 0)
        assert run(Engine(only, drafter), Request(PROMPT, 280)) == [wanted]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 1, 64), (8, 2, 64), (8, 1, 512)])
def test_blocks_are_split_into_calls_that_mlx_has_fused_kernels_for(
    monkeypatch, heads, kv_heads, head_dim
):
    """At most 8 tokens, and 32 rows of a kv head; wider heads have none for several tokens."""
    calls, whole = [], mx.fast.scaled_dot_product_attention

    def counted(queries, keys, values, **how):
        calls.append(queries.shape[2])
        return whole(queries, keys, values, **how)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", counted)
    keys, values = (
        mx.random.normal((2, kv_heads, 40, head_dim), key=mx.random.key(i)) for i in (1, 2)
    )
    for tokens in (1, 4, 5, 9):
        queries = mx.random.normal((2, heads, tokens, head_dim), key=mx.random.key(3)) * 0.1
        at = mx.array([20, 9])[:, None] + mx.arange(tokens)
        mask = mx.arange(40) <= at[:, None, :, None]
        calls.clear()
        found = by_mlx(queries, keys, values, mask)
        assert sum(calls) == tokens
        if head_dim <= 256:
            assert max(calls) <= min(8, 32 * kv_heads // heads)
        else:
            assert calls == [tokens]
        assert mx.allclose(found, whole(queries, keys, values, scale=1.0, mask=mask), atol=1e-5)
