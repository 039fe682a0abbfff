"""Stops are decided token by token inside a block, and KV afterwards is what was kept."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_mtp.engine.processors import Processing
from mlx_mtp.engine.requests import Request
from mlx_mtp.errors import FitError, UsageError

from .pairs import PROMPT, VOCAB, WINDOW, Engine, ScriptedDrafter, make_target, plain, run

PAST = 2 * WINDOW  # the first stop tried: past the window


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def expected(target):
    return plain(target, PROMPT, 90)


def first_use(expected, at):
    """The token at `at`, or the nearest one behind it that was not said before."""
    while expected[at] in expected[:at]:
        at += 1
    return at, expected[at]


@pytest.fixture
def drafter(expected):
    return ScriptedDrafter([PROMPT + expected], lambda _, p: False)


@pytest.mark.parametrize("draft_len", range(9))
def test_eos_at_every_place_of_a_block(target, expected, drafter, draft_len):
    """Cases A01, A02, A14, A15: nothing behind the EOS is emitted, counted or kept in KV; a second
    prompt on the same KV says what a cold engine says."""
    for at in range(PAST, PAST + draft_len + 2):
        place, token = first_use(expected, at)
        request = Request(PROMPT, 80, draft_len=draft_len, eos=frozenset([token]))
        engine = Engine(target, drafter)
        assert run(engine, request) == [expected[:place]]
        assert (request.finish_reason, request.stats.completion_tokens) == ("stop", place)
        follow = PROMPT + request.tokens + [3, 1, 4, 1, 5]
        second = Request(follow, 20, draft_len=draft_len)
        assert run(engine, second) == [plain(target, follow, 20)]
        assert second.stats.cached_tokens == len(PROMPT) + place


@pytest.mark.parametrize("draft_len", range(9))
def test_a_budget_that_ends_at_every_place_of_a_block(target, expected, drafter, draft_len):
    """The newest token is emitted but not in KV yet: the next prompt brings it again."""
    for tokens in range(PAST, PAST + draft_len + 2):
        request = Request(PROMPT, tokens, draft_len=draft_len)
        engine = Engine(target, drafter)
        assert run(engine, request) == [expected[:tokens]]
        assert request.finish_reason == "length"
        follow = PROMPT + request.tokens + [9, 9]
        second = Request(follow, 12, draft_len=draft_len)
        assert run(engine, second) == [plain(target, follow, 12)]
        assert second.stats.cached_tokens == len(PROMPT) + tokens - 1


@pytest.mark.parametrize("draft_len", range(9))
def test_a_stop_string_at_every_place_of_a_block(target, expected, drafter, draft_len):
    """Case A09: the engine asks after every token, also in the middle of an accepted block."""
    for at in range(PAST, PAST + draft_len + 2):
        seen: list[int] = []

        def stop(token, seen=seen, at=at):
            seen.append(token)
            return len(seen) == at

        request = Request(PROMPT, 80, draft_len=draft_len, stop=stop)
        engine = Engine(target, drafter)
        assert run(engine, request) == [expected[:at]]
        assert seen == expected[:at]
        assert request.finish_reason == "stop"
        follow = PROMPT + request.tokens + [8]
        assert run(engine, Request(follow, 12)) == [plain(target, follow, 12)]


@pytest.mark.parametrize("draft_len", [0, 2, 8])
def test_eos_and_budget_in_one_block(target, expected, drafter, draft_len):
    """Cases A04, A05: whichever comes first in the text wins, wherever the block ends."""
    at, token = first_use(expected, 12)
    for tokens, reason in ((at + 1, "stop"), (at, "length"), (at - 1, "length")):
        request = Request(PROMPT, tokens, draft_len=draft_len, eos=frozenset([token]))
        assert run(Engine(target, drafter), request) == [expected[: min(at, tokens)]]
        assert request.finish_reason == reason


def test_eos_as_the_first_token(target, expected):
    """The first token comes from the prefill: nothing is emitted, no round is counted."""
    request = Request(PROMPT, 20, eos=frozenset([expected[0]]))
    engine = Engine(target, None)
    assert run(engine, request) == [[]]
    assert (request.finish_reason, request.stats.rounds) == ("stop", 0)
    follow = [*PROMPT, 6]
    assert run(engine, Request(follow, 8)) == [plain(target, follow, 8)]


def test_every_listed_eos_stops(target, expected):
    """Case E01 and E02 in the engine: any id of the set ends the text."""
    at, token = first_use(expected, 7)
    unused = next(t for t in range(VOCAB) if t not in expected[:at])
    request = Request(PROMPT, 60, eos=frozenset([token, unused]))
    assert run(Engine(target), request) == [expected[:at]]


def test_counts_add_up(target, expected):
    """Case A14: accepted drafts and the target's own tokens are all that was emitted."""
    drafter = ScriptedDrafter([PROMPT + expected], lambda _, p: p % 3 == 0)
    engine = Engine(target, drafter)
    request = Request(PROMPT, 61, draft_len=5)
    engine.add(request)
    drafted = own = 0
    while engine.busy:
        for event in engine.step():
            assert len(event.tokens) == len(event.drafted)
            drafted += sum(event.drafted)
            own += len(event.tokens) - sum(event.drafted)
    stats = request.stats
    assert drafted == stats.accepted == sum(stats.accepted_by_position)
    assert drafted + own == stats.completion_tokens == 61
    assert stats.drafted == sum(stats.drafted_by_position) == 5 * stats.rounds
    assert 0 < stats.acceptance < 1


def test_max_tokens_zero(target):
    """Case A08: an empty answer, not an error."""
    request = Request(PROMPT, 0)
    assert run(Engine(target), request) == [[]]
    assert request.finish_reason == "length"


def test_cancel_between_steps_keeps_text_and_kv(target, expected, drafter):
    """Cancelled in prefill, in decoding and in the queue; later requests are as in a fresh engine
    (case H22)."""
    engine = Engine(target, drafter, prefill_chunk=4)
    long = [(3 * i) % VOCAB for i in range(30)]
    early = Request(long, 10)
    engine.add(early)
    engine.step()
    engine.step()
    engine.cancel(early)
    assert (early.finish_reason, early.tokens, engine.busy) == ("cancelled", [], False)
    again = Request(long, 10)
    assert run(engine, again) == [plain(target, long, 10)]
    assert again.stats.cached_tokens == 8

    running, queued = Request(PROMPT, 60), Request([1, 2], 5)
    engine.add(running)
    engine.add(queued)
    while len(running.tokens) < 20:
        engine.step()
    engine.cancel(running)
    engine.cancel(queued)
    assert running.tokens == expected[: len(running.tokens)]
    assert not engine.busy
    follow = PROMPT + running.tokens + [5]
    assert run(engine, Request(follow, 9)) == [plain(target, follow, 9)]


def test_close_drains_what_is_in_flight(target, drafter):
    engine = Engine(target, drafter)
    request, queued = Request(PROMPT, 60), Request(PROMPT, 60)
    engine.add(request)
    engine.add(queued)
    for _ in range(6):
        engine.step()
    engine.close()
    assert request.finish_reason == queued.finish_reason == "cancelled"
    assert not engine.busy


def test_suppressed_tokens_are_never_said(target, expected):
    """generation_config's suppress_tokens: the next best is said instead, with and without
    drafts."""
    banned = tuple(expected[:5])
    texts = []
    for draft_len in (0, 4):
        drafter = ScriptedDrafter([PROMPT + expected], lambda _, p: False)
        request = Request(PROMPT, 40, processing=Processing(suppress=banned), draft_len=draft_len)
        texts += run(Engine(target, drafter), request)
    assert texts[0] == texts[1]
    assert not set(banned) & set(texts[0])


def test_what_cannot_be_done_is_said(target):
    """Cases A17, J01's kind: one line with the value and the range, before anything runs."""
    with pytest.raises(UsageError, match="draft length is 9; it must be 0 to 8"):
        Request(PROMPT, 5, draft_len=9)
    with pytest.raises(UsageError, match="prompt is empty"):
        Request([], 5)
    with pytest.raises(UsageError, match="max-tokens is -1"):
        Request(PROMPT, -1)
    with pytest.raises(UsageError, match=f"outside the vocabulary of {VOCAB}"):
        Engine(target).add(Request([VOCAB], 5))
    with pytest.raises(UsageError, match="33000 tokens; the model's context, or max-kv, is 32768"):
        Engine(target).add(Request([1] * 33000, 5))


def test_a_prompt_that_memory_has_no_room_for(target):
    """Case J01: refused with numbers before prefill; the engine goes on answering."""
    used = mx.get_active_memory()
    engine = Engine(target, memory_limit=used + 1_000_000)
    with pytest.raises(FitError, match=r"20000 tokens needs \d+\.\d MB of KV, but only \d\.\d of"):
        engine.add(Request([1] * 20_000, 5))
    assert run(engine, Request(PROMPT, 5)) == [plain(target, PROMPT, 5)]


def test_nan_weights_are_an_error_not_text(target):
    """Case C10, G26: logits that are not finite end the request."""
    damaged = make_target()
    damaged.norm.weight = damaged.norm.weight * float("nan")
    request = Request(PROMPT, 5)
    assert run(Engine(damaged), request) == [[]]
    assert request.finish_reason == "error"
    assert "not finite" in request.error
    assert not request.outgrown


@pytest.mark.parametrize("rows", [1, 3])
def test_a_row_that_breaks_takes_no_other_with_it(rows):
    """Cases C12, H22: one token's embedding is NaN. The request that meets it ends in an error, the
    rows beside it lose nothing, and later requests find a clean row."""
    damaged = make_target()
    good = [[3, 1, 4], [2, 7, 1, 8]]
    alone = [plain(damaged, prompt, 30) for prompt in good]
    said = {token for tokens in [*good, *alone] for token in tokens}
    poison = next(token for token in range(VOCAB) if token not in said)
    table = damaged.embed_tokens_per_layer.weight
    table[poison] = float("nan")
    damaged.embed_tokens_per_layer.weight = table
    engine = Engine(damaged, rows=rows)
    bad = Request([5, poison, 5], 30)
    requests = [Request(good[0], 30), bad, Request(good[1], 30)]
    for request in requests:
        engine.add(request)
    seen: dict[int, list[int]] = {id(request): [] for request in requests}
    while engine.busy:
        for event in engine.step():
            seen[id(event.request)] += event.tokens
    assert bad.finish_reason == "error"
    assert [requests[0].tokens, requests[2].tokens] == alone
    assert all(seen[id(request)] == request.tokens for request in requests)
    for prompt, wanted in zip(good, alone, strict=True):
        assert run(engine, Request(prompt, 30)) == [wanted]
