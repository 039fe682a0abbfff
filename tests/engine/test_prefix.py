"""Prefix reuse: a prompt that goes on from KV says what it says in a fresh engine."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from mlx_mtp.engine.kv import MIN_CAPACITY, KVLayout
from mlx_mtp.engine.prefix import MOST_SLOTS, Prefixes, Slot, Snapshot, common_prefix
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.sampling import Sampling

from .pairs import VOCAB, Engine, follows, make_drafter, make_target, run

ROOM = 1 << 30
SYSTEM = [2, *(7 * i % VOCAB for i in range(1, 60))]


@pytest.fixture(scope="module")
def target():
    return make_target()


def turn(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def ask(engine, prompt, tokens=12, draft_len=3, snapshots=(), **kw):
    """Runs a prompt and checks it against passes without KV; the request."""
    request = Request(list(prompt), tokens, draft_len=draft_len, snapshots=tuple(snapshots), **kw)
    run(engine, request)
    assert len(request.tokens) == tokens
    assert follows(engine.target, prompt, request.tokens)
    return request


@pytest.mark.parametrize("draft_len", [0, 3, 8])
def test_a_conversation_far_past_the_window_is_read_once(target, draft_len):
    engine = Engine(target, make_drafter(), cache_bytes=ROOM)
    prompt = SYSTEM + turn(20, 1)
    for i in range(4):
        request = ask(engine, prompt, draft_len=draft_len, snapshots=[len(SYSTEM), len(prompt) - 2])
        if i:
            assert request.stats.cached_tokens == before - 1  # noqa: F821 - the newest is not in KV
        before = len(prompt) + len(request.tokens)  # noqa: F841
        prompt = [*prompt, *request.tokens, *turn(15, i)]


def test_another_conversation_in_between_and_one_that_forks(target):
    engine = Engine(target, make_drafter(), cache_bytes=ROOM)
    first, other = SYSTEM + turn(30, 1), turn(70, 2)
    one = ask(engine, first, snapshots=[len(SYSTEM), len(first) - 2])
    assert ask(engine, other, snapshots=[68]).stats.cached_tokens == 0
    forked = SYSTEM + turn(30, 3)
    two = ask(engine, forked, snapshots=[len(SYSTEM), len(forked) - 2])
    assert two.stats.cached_tokens == len(SYSTEM)
    # The first conversation goes on as if nothing had been, and so does the other one.
    more = first + one.tokens + turn(9, 4)
    assert ask(engine, more).stats.cached_tokens == len(first) + len(one.tokens) - 1
    assert ask(engine, other + turn(3, 5)).stats.cached_tokens == 68
    assert ask(engine, forked + turn(3, 6)).stats.cached_tokens == len(forked) - 2


def test_the_same_prompt_twice_runs_what_is_behind_its_last_snapshot(target):
    engine = Engine(target, make_drafter(), cache_bytes=ROOM)
    prompt = SYSTEM + turn(40, 1)
    first = ask(engine, prompt, snapshots=[len(SYSTEM), len(prompt) - 3])
    again = ask(engine, prompt, snapshots=[len(SYSTEM), len(prompt) - 3])
    assert again.tokens == first.tokens
    assert again.stats.cached_tokens == len(prompt) - 3


def test_an_edited_last_message_goes_on_from_the_snapshot_before_it(target):
    engine = Engine(target, make_drafter(), cache_bytes=ROOM)
    prompt = SYSTEM + turn(40, 1)
    ask(engine, prompt, snapshots=[len(SYSTEM), len(SYSTEM) + 20])
    edited = prompt[: len(SYSTEM) + 30] + turn(10, 9)
    assert ask(engine, edited).stats.cached_tokens == len(SYSTEM) + 20


def test_what_is_forked_a_few_tokens_back_goes_on_too(target):
    """Without a snapshot, from rings that both conversations then write to."""
    engine = Engine(target, make_drafter(), cache_bytes=ROOM)
    first = SYSTEM + turn(10, 1)
    one = ask(engine, first)
    for seed in range(3):
        forked = [*first, *one.tokens[:8], *turn(2, seed)]
        assert ask(engine, forked).stats.cached_tokens >= len(first) + 8
    more = first + one.tokens + turn(3, 4)
    assert ask(engine, more).stats.cached_tokens == len(first) + len(one.tokens) - 1


def test_a_session_is_wound_back_not_forked(target):
    engine = Engine(target, make_drafter(), cache_bytes=ROOM)
    prompt = SYSTEM + turn(40, 1)
    ask(engine, prompt, snapshots=[len(SYSTEM)], session="a")
    ask(engine, SYSTEM + turn(40, 2), snapshots=[len(SYSTEM)], session="a")
    assert engine._batch.prefixes.parked == []
    ask(engine, SYSTEM + turn(40, 3), session="b")
    assert len(engine._batch.prefixes.parked) == 1
    engine.forget("a")
    assert engine._batch.prefixes.parked == []
    engine.forget("b")
    assert ask(engine, SYSTEM + turn(40, 3)).stats.cached_tokens == 0


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_a_session_that_is_forgotten_while_it_runs_is_let_go_of_at_its_end(target, steps):
    """In the middle of its prefill, or with rounds in flight."""
    engine = Engine(target, make_drafter(), cache_bytes=ROOM, prefill_chunk=32)
    prompt = SYSTEM + turn(40, 1)
    request = Request(list(prompt), 12, draft_len=2, snapshots=(len(SYSTEM),), session="a")
    engine.add(request)
    for _ in range(steps):
        engine.step()
    engine.forget("a")
    run(engine)
    assert follows(target, prompt, request.tokens)
    assert len(request.tokens) == 12
    assert engine.cached_bytes == 0
    assert ask(engine, prompt + request.tokens, session="a").stats.cached_tokens == 0


def test_a_session_that_is_wound_back_far_brings_back_no_long_buffers(target):
    engine = Engine(target, make_drafter(), rows=2, cache_bytes=ROOM)
    prompt = SYSTEM + turn(900, 1)
    ask(engine, prompt, tokens=2, snapshots=[len(SYSTEM)], session="a")
    other = Request(turn(20, 2), 30)
    engine.add(other)
    while not other.tokens:
        engine.step()
    again = Request(SYSTEM + turn(20, 3), 12, draft_len=3, session="a")
    run(engine, again)
    assert again.stats.cached_tokens == len(SYSTEM)
    assert engine.layout.capacity(engine._batch.state.kv) == MIN_CAPACITY
    for request in (other, again):
        assert follows(target, request.prompt, request.tokens)


@pytest.mark.parametrize("length", [243, 250, 400])
def test_what_lies_in_an_idle_row_is_neither_attended_to_nor_lost(target, length):
    """Rounds of the others write behind it, up to the end of its buffers."""
    engine = Engine(target, make_drafter(), rows=3, cache_bytes=ROOM)
    long = Request(turn(length, 1), 3)
    others = [Request([5, 7 + i], 16, draft_len=8) for i in range(2)]
    for request in (others[0], long, others[1]):
        engine.add(request)
    while long.finish_reason is None or len(engine._batch.running) < 2:
        engine.step()
    assert engine._batch.idle
    assert engine._batch.bound < 100 < length <= engine._batch.longest
    while len(others[1].tokens) < 6:
        engine.step()
    follow = Request([*long.prompt, *long.tokens, 9], 10, draft_len=8)
    run(engine, follow)
    assert follow.stats.cached_tokens == length + 2
    for request in (*others, long, follow):
        assert follows(target, request.prompt, request.tokens)


@pytest.mark.parametrize("cache_bytes", [0, ROOM])
def test_wound_back_again_and_again(target, cache_bytes):
    """A little further every time: rings hold what the first text wrote far behind it."""
    engine = Engine(target, make_drafter(), cache_bytes=cache_bytes)
    ask(engine, turn(60, 1), tokens=6, draft_len=8, session="a")
    cached = 0
    for seed in range(6):
        prompt = [*engine._batch.rows[0].slot.ids[:-5], seed + 3]
        request = ask(engine, prompt, tokens=1, draft_len=8, session="a")
        cached += request.stats.cached_tokens
    assert cached > 0


def test_without_a_budget_only_the_row_itself_is_gone_on_from(target):
    engine = Engine(target, make_drafter())
    prompt = SYSTEM + turn(40, 1)
    first = ask(engine, prompt, snapshots=[len(SYSTEM)])
    follow = prompt + first.tokens + turn(5, 2)
    assert ask(engine, follow).stats.cached_tokens == len(prompt) + len(first.tokens) - 1
    assert ask(engine, SYSTEM + turn(40, 3)).stats.cached_tokens == 0
    assert engine.cached_bytes == 0


@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_a_cancelled_turn_is_gone_on_from(target, after):
    """In the middle of the prefill, or with rounds in flight."""
    engine = Engine(target, make_drafter(), cache_bytes=ROOM, prefill_chunk=32)
    prompt = SYSTEM + turn(60, 1)
    request = Request(list(prompt), 60, draft_len=4, snapshots=(len(SYSTEM), len(prompt) - 2))
    engine.add(request)
    for _ in range(after):
        engine.step()
    engine.cancel(request)
    kept = prompt + request.tokens
    follow = ask(engine, kept + turn(8, 2), snapshots=[len(SYSTEM)])
    assert follow.stats.cached_tokens >= (31 if after == 1 else 59)
    assert ask(engine, prompt).stats.cached_tokens >= len(SYSTEM)


def test_what_is_kept_stays_within_the_budget_and_within_memory(target):
    layout = KVLayout(target.config.text, mx.float32)
    one = layout.nbytes(1, 256)
    engine = Engine(target, make_drafter(), cache_bytes=3 * one)
    for i in range(12):
        prompt = turn(50, i)
        ask(engine, prompt, tokens=2, snapshots=[40, 48])
        assert engine.cached_bytes <= 3 * one
    assert len(engine._batch.prefixes.parked) >= 1
    # A tight limit gives way to a prompt that needs the memory.
    tight = Engine(target, make_drafter(), cache_bytes=ROOM)
    ask(tight, turn(50, 1), tokens=2)
    ask(tight, turn(50, 2), tokens=2)
    assert tight.cached_bytes > 0
    tight.memory.limit = mx.get_active_memory() + one
    ask(tight, turn(50, 3), tokens=2)
    assert tight.cached_bytes <= one


def test_a_short_conversation_takes_little_beside_a_long_one(target):
    """It leaves a row of long buffers, by itself or with others, and does not hold on to them."""
    layout = KVLayout(target.config.text, mx.float32)
    mx.clear_cache()
    before = mx.get_active_memory()
    engine = Engine(target, make_drafter(), rows=4, cache_bytes=ROOM)
    engine.add(Request(turn(4200, 0), 60, draft_len=0))
    for i in range(3):
        engine.add(Request(turn(50, 1 + i), 3 + i))
    while len(engine._batch.running) < 4:
        engine.step()
    for i in range(3):
        short = Request(turn(60, 5 + i), 3)
        engine.add(short)
        while short.finish_reason is None:
            engine.step()
    while engine.busy:
        engine.step()
    assert len(engine._batch.prefixes.parked) >= 4
    mx.eval(engine._batch.state)
    assert mx.get_active_memory() - before < 1.5 * layout.nbytes(1, 1 << 13)


def test_what_is_kept_makes_room_for_a_text_that_grows(target):
    one = KVLayout(target.config.text, mx.float32).nbytes(1, 1024)
    engine = Engine(target, cache_bytes=ROOM)
    for i in range(6):
        run(engine, Request(turn(800, i), 2))
    limit = engine.memory.limit = mx.get_active_memory() + one
    growing = Request(turn(2020, 9), 60)
    engine.add(growing)
    while not growing.tokens:
        engine.step()
    mx.reset_peak_memory()
    run(engine)
    assert len(growing.tokens) == 60
    assert engine.layout.capacity(engine._batch.state.kv) == 4096
    assert mx.get_peak_memory() < limit + one / 2
    assert engine.cached_bytes > 0


def test_the_oldest_of_many_goes(target):
    engine = Engine(target, make_drafter(), cache_bytes=ROOM)
    for i in range(MOST_SLOTS + 4):
        ask(engine, turn(50, i), tokens=1)
    assert len(engine._batch.prefixes.parked) == MOST_SLOTS
    assert ask(engine, [*turn(50, MOST_SLOTS + 2), 5], tokens=1).stats.cached_tokens == 50
    assert ask(engine, [*turn(50, 0), 5], tokens=1).stats.cached_tokens == 0


@pytest.mark.parametrize(("seed", "rows"), [(0, 1), (1, 1), (2, 3), (3, 2), (4, 4)])
def test_any_traffic_says_what_fresh_engines_say(target, seed, rows):
    """Prompts that share beginnings, come together, get cancelled, edited and repeated, under a
    budget that evicts."""
    rng = random.Random(seed)
    room = KVLayout(target.config.text, mx.float32).nbytes(1, 256)
    engine = Engine(target, make_drafter(), rows=rows, cache_bytes=rng.choice([2, 5, 50]) * room)
    known = [turn(n, n) for n in (5, 40, 90)]
    running: list[Request] = []
    cached = 0
    for i in range(20):
        base = rng.choice(known[-8:])
        cut = rng.choice([len(base), len(base), rng.randrange(1, len(base) + 1)])
        prompt = [*base[:cut], *turn(rng.choice([1, 3, 12, 40]), 100 * seed + i)]
        marks = sorted(rng.sample(range(1, len(prompt)), min(2, len(prompt) - 1)))
        sampling = Sampling(0.9, top_k=5, seed=i) if rng.random() < 0.3 else Sampling()
        request = Request(
            prompt,
            rng.choice([1, 5, 12]),
            sampling,
            draft_len=rng.choice([0, 2, 8, None]),
            snapshots=tuple(marks),
            session=rng.choice([None, None, "a", "b"]),
        )
        engine.add(request)
        running.append(request)
        for _ in range(rng.randrange(12)):
            engine.step()
        if rng.random() < 0.2:
            engine.cancel(rng.choice(running))
        known.append(prompt + request.tokens)
    while engine.busy:
        engine.step()
    for request in running:
        assert follows(target, request.prompt, request.tokens, request.sampling)
        if request.finish_reason == "length":
            assert len(request.tokens) == request.max_tokens
        cached += request.stats.cached_tokens
    assert cached > 0


def test_j05_j06_memory_is_flat_over_requests_and_cancels(target):
    """Two hundred, a quarter of them cancelled, under a budget that is soon full."""
    rng = random.Random(3)
    budget = 4 * KVLayout(target.config.text, mx.float32).nbytes(1, 256)
    engine = Engine(target, make_drafter(), rows=2, cache_bytes=budget)
    levels = []
    for i in range(200):
        prompt = [*SYSTEM, *turn(9, i)]
        request = Request(prompt, 2, draft_len=i % 2, snapshots=(len(SYSTEM), len(prompt) - 2))
        engine.add(request)
        for _ in range(rng.randrange(4) if i % 4 == 0 else 99):
            if not engine.busy:
                break
            engine.step()
        engine.cancel(request)
        if i % 20 == 19:
            mx.clear_cache()
            levels.append(mx.get_active_memory())
    assert max(levels[2:]) <= 1.05 * min(levels[2:])


def test_snapshots_are_kept_at_the_system_message_and_the_last_turns():
    slot = Slot()
    for length in (10, 20, 30, 40, 50, 60, 60):
        slot.keep(Snapshot(length, []))
    assert [s.length for s in slot.snapshots] == [10, 30, 40, 50, 60]
    slot.rewind(45)
    assert [s.length for s in slot.snapshots] == [10, 30, 40]


def test_a_message_that_is_written_anew_goes_on_from_before_it(target):
    engine = Engine(target, make_drafter(), cache_bytes=ROOM)
    prompt = SYSTEM + turn(40, 1)
    first = ask(engine, prompt, snapshots=[len(SYSTEM), len(prompt) - 2])
    held = prompt + first.tokens
    for seed in (2, 3, 4):
        follow = held + turn(30, seed)
        stats = ask(engine, follow, snapshots=[len(SYSTEM), len(follow) - 2]).stats
        assert stats.cached_tokens == len(held) - 1


def test_the_longest_prefix_is_found(target):
    prefixes = Prefixes(KVLayout(target.config.text, mx.float32), ROOM)
    near, far = Slot(list(range(50))), Slot(list(range(70)))
    far.snapshots = [Snapshot(40, []), Snapshot(56, [])]
    found = prefixes.find([*range(58), 3], [near, far], None)
    assert (found.slot, found.length) == (far, 56)
    # A few tokens back the rings still hold the window.
    found = prefixes.find([*range(66), 3], [near, far], None)
    assert (found.slot, found.length, found.snapshot) == (far, 66, None)
    found = prefixes.find([*range(55), 3], [near, far], None)
    assert (found.slot, found.length, found.whole) == (near, 50, True)
    assert prefixes.find([9, 9], [near, far], None).length == 0


def test_common_prefix():
    rng = random.Random(1)
    for _ in range(200):
        a = [rng.randrange(2) for _ in range(rng.randrange(8))]
        b = [rng.randrange(2) for _ in range(rng.randrange(8))]
        wanted = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        assert common_prefix(a, b) == (min(len(a), len(b)) if wanted is None else wanted)
