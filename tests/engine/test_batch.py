"""Continuous batching: rows come and go in buckets, and each says what it would say alone."""

from __future__ import annotations

import gc
import random

import mlx.core as mx
import pytest

from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.sampling import Sampling
from mlx_mtp.engine.session import Engine as Plain
from mlx_mtp.errors import FitError, UsageError

from .pairs import PROMPT, VOCAB, WINDOW, Engine, follows, make_drafter, make_target, plain, run


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.mark.parametrize("pipeline", [True, False])
def test_c12_rows_that_come_and_go_say_what_they_say_alone(target, pipeline):
    """Nine requests of their own length, sampler, draft length and time of arrival on five rows."""
    rng = random.Random(7)
    requests, wanted = [], []
    for i in range(9):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, WINDOW, 3 * WINDOW + 1]))]
        tokens = rng.choice([3, 12, 40, 60])
        sampling = Sampling(0.8, top_k=rng.choice([0, 9]), seed=i) if i % 3 == 0 else Sampling()
        solo = Request(prompt, tokens, sampling, draft_len=0)
        wanted += run(Engine(target), solo)
        draft_len = rng.choice([None, 0, 3, 8])
        requests.append(Request(prompt, tokens, sampling, draft_len=draft_len))
    engine = Engine(target, make_drafter(), rows=5, pipeline=pipeline)
    sizes, later = set(), list(requests[3:])
    for request in requests[:3]:
        engine.add(request)
    while engine.busy or later:
        if later and rng.random() < 0.1:
            engine.add(later.pop(0))
        engine.step()
        sizes.add(len(engine._batch.rows))
    assert [request.tokens for request in requests] == wanted
    assert sizes >= {1, 2, 4}
    assert sizes <= {1, 2, 4, 5}


def test_a_row_left_alone_uses_a_bucket_of_one(target):
    engine = Engine(target, make_drafter(), rows=8)
    requests = [Request([i, 3, 5], 8 + 30 * (i == 4)) for i in range(6)]
    sizes = []
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
        sizes.append(len(engine._batch.rows))
    assert max(sizes) == 8
    assert sizes[-1] == 1
    assert engine.grown > 0


def test_a_conversation_goes_on_from_the_row_that_ran_last(target):
    """A bucket that shrinks lets go of the rows that are idle, not of the one that goes on."""
    engine = Engine(target, make_drafter(), rows=2)
    first, last = Request([7, 7, 1], 5), Request(PROMPT, 40)
    run(engine, first, last)
    follow = PROMPT + last.tokens + [3, 1, 4]
    second = Request(follow, 12)
    assert run(engine, second) == [plain(target, follow, 12)]
    assert second.stats.cached_tokens > len(PROMPT)


def test_a_request_leaves_the_draft_length_of_another_alone(target):
    """A fixed length is a row's budget, whatever the rows beside it draft."""
    fixed, plain_row = Request(PROMPT, 30, draft_len=3), Request([4, 4], 30, draft_len=0)
    run(Engine(target, make_drafter(), rows=2), fixed, plain_row)
    assert plain_row.stats.drafted == 0
    assert plain_row.stats.rounds == 29
    assert fixed.stats.drafted == 3 * fixed.stats.rounds


def test_without_pipelining_no_round_is_thrown_away(target):
    """On the CPU a round is read before the next is dispatched: a stop costs nothing."""
    text = plain(target, PROMPT, 30)
    eos = frozenset([text[9]])
    waits = {}
    for pipeline in (False, True):
        engine = Plain(target, pipeline=pipeline)
        run(engine, Request(PROMPT, 30, eos=eos, draft_len=0))
        waits[pipeline] = engine.waits
        assert engine.describe()["pipeline"] is pipeline
    assert waits[False] == text.index(text[9]) + 1


@pytest.mark.parametrize("bits", [8, 4])
def test_c11_packed_kv_at_any_draft_length_and_in_a_batch(target, bits):
    """`--kv-bits` with and without drafts, past the window: as its own plain decoding."""
    wide = make_target(global_head_dim=32)
    prompts = [PROMPT, [3, 1, 4, 1, 5, 9, 2, 6]]
    alone = [
        run(Engine(wide, kv_bits=bits), Request(prompt, 40, draft_len=0))[0] for prompt in prompts
    ]
    for draft_len in (None, 1, 8):
        requests = [Request(prompt, 40, draft_len=draft_len) for prompt in prompts]
        assert run(Engine(wide, make_drafter_for(wide), rows=2, kv_bits=bits), *requests) == alone


def make_drafter_for(target):
    """Its heads are as wide as the target's: it reads the target's KV."""
    from mlx_mtp.models.drafter import Drafter

    from .pairs import drafter_config, randomise

    return randomise(Drafter(drafter_config(global_head_dim=target.config.text.global_head_dim)), 2)


def test_max_kv_bounds_prompt_and_answer(target):
    engine = Engine(target, max_kv=20)
    with pytest.raises(UsageError, match=r"20 tokens.* 20 with"):
        engine.add(Request([1] * 20, 5))
    request = Request(PROMPT, 100)
    run(engine, request)
    assert len(PROMPT) + len(request.tokens) == 20
    with pytest.raises(UsageError, match="max-kv is 1"):
        Engine(target, max_kv=1)


def test_an_answer_is_cut_to_what_memory_has_room_for(target):
    """The prompt fits and the whole answer would not: as much is promised as fits."""
    layout = Engine(target).layout
    limit = mx.get_active_memory() + 4 * layout.nbytes(1, 1024)
    engine = Engine(target, memory_limit=limit)
    request = Request(PROMPT, 30_000)
    engine.add(request)
    assert 900 < request.max_tokens < 5000
    with pytest.raises(FitError, match=r"30000 tokens needs .* MB of KV"):
        engine.add(Request([1] * 30_000, 5))


def test_how_many_rows_an_engine_takes(target):
    with pytest.raises(UsageError, match="rows 17 must be 1 to 16"):
        Engine(target, rows=17)


def test_a_drafter_on_another_stream_drafts_the_same(target):
    """A second CPU stream stands in for another device: same text, same drafts."""
    counts = []
    for device in (None, mx.new_stream(mx.cpu)):
        engine = Plain(target, make_drafter(), drafter_device=device)
        request = Request(PROMPT, 40, draft_len=3)
        assert run(engine, request) == [plain(target, PROMPT, 40)]
        counts.append(request.stats.accepted_by_position)
    assert counts[0] == counts[1]
    with pytest.raises(UsageError, match="--compile cannot be had"):
        Plain(target, make_drafter(), drafter_device=mx.cpu, compile=True)


@pytest.mark.parametrize("seed", range(3))
def test_joins_put_no_more_rounds_in_flight(target, seed):
    """A long row decodes while others join, are cancelled and gone on from: a stop is seen one
    round late at most, so that what a ring still has to hold is never overwritten."""
    rng = random.Random(seed)
    long = Request(PROMPT, 140, draft_len=rng.choice([0, 8]))
    engine = Engine(target, make_drafter(), rows=2)
    engine.add(long)
    finished = []
    prompt = [4, 8, 15]
    while not long.finish_reason:
        request = Request(list(prompt), rng.choice([4, 30]), draft_len=rng.choice([0, 3, 8]))
        engine.add(request)
        for _ in range(rng.randrange(2, 14)):
            engine.step()
            assert len(engine._flights) <= 2
        engine.cancel(request)
        finished.append(request)
        prompt = prompt + request.tokens + [rng.randrange(VOCAB)]
        if len(prompt) > 60:
            prompt = [rng.randrange(VOCAB), 1]
    assert len(long.tokens) == 140
    assert follows(target, PROMPT, long.tokens)
    assert any(request.stats.cached_tokens for request in finished)
    for request in finished[::3]:
        assert follows(target, request.prompt, request.tokens)


def test_memory_is_planned_for_all_rows_that_wait(target):
    layout = Engine(target).layout
    limit = mx.get_active_memory() + 3 * layout.nbytes(1, 1024)
    engine = Engine(target, rows=8, memory_limit=limit)
    requests = [Request([i, 1], 1000) for i in range(8)]
    for request in requests:
        engine.add(request)
    assert requests[0].max_tokens == 1000
    assert requests[-1].max_tokens < 300


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_memory_is_planned_for_rows_as_long_as_the_longest(target, steps):
    """All rows of a batch have as many slots: beside a long one a short one takes as much."""
    gc.collect()  # what an error's traceback holds would be counted
    layout = Engine(target).layout
    engine = Engine(target, rows=2, prefill_chunk=4096)
    engine.memory.limit = mx.get_active_memory() + 3 * layout.nbytes(1, 1 << 13) // 2
    engine.add(Request([3] * 5000, 20))
    for _ in range(steps):
        engine.step()
    with pytest.raises(FitError, match="2 tokens needs"):
        engine.add(Request([7, 8], 5))
    alone = Engine(target)
    alone.memory.limit = mx.get_active_memory() + 3 * layout.nbytes(1, 1 << 13) // 2
    alone.add(Request([3] * 5000, 20))
    alone.add(Request([7, 8], 5))


def test_a_request_is_given_to_one_engine_once(target):
    engine, request = Engine(target), Request(PROMPT, 3)
    engine.add(request)
    with pytest.raises(UsageError, match="given to an engine before"):
        engine.add(request)
    run(engine)
    with pytest.raises(UsageError, match="given to an engine before"):
        engine.add(request)


def test_no_row_of_the_device_is_longer_than_the_host_allows_for(target):
    """A prompt is read into the row of a long text that ended, while another row decodes: rounds
    in between must not write where the long text stopped, which the host no longer guards."""
    long = Request([(3 * i) % VOCAB for i in range(244)], 3, draft_len=0)
    other = Request(PROMPT, 60, draft_len=8)
    third = Request([(5 * i + 1) % VOCAB for i in range(90)], 12)
    engine = Engine(target, make_drafter(), rows=2, prefill_chunk=10)
    for request in (other, long, third):
        engine.add(request)
    while engine.busy:
        engine.step()
        batch = engine._batch
        lengths = batch.state.length.tolist()
        assert max(lengths) <= batch.longest
        running = [row.request is not None for row in batch.rows]
        assert all(n <= batch.bound for n, runs in zip(lengths, running, strict=True) if runs)
    assert other.tokens == plain(target, PROMPT, 60)
    assert third.tokens == plain(target, third.prompt, 12)
