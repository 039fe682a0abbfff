"""Greedy output does not depend on drafting: not on the length, the drafter, or the neighbours."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from mlx_mtp.engine.requests import Request

from .pairs import (
    PROMPT,
    VOCAB,
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

LONG = 300 + WINDOW + 8  # past the window, across 256 slots and several sizes attended to


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def expected(target):
    return plain(target, PROMPT, LONG)


def scripted(expected, wrong):
    return ScriptedDrafter([PROMPT + expected], lambda _, p: wrong(p))


def test_plain_decoding_equals_a_forward_without_kv(target, expected):
    """Cases C02, C17: what stays in KV is what a full forward would see."""
    logits = forward(target, PROMPT + expected)
    best = mx.argmax(logits, -1).tolist()
    assert best[len(PROMPT) - 1 : -1] == expected


@pytest.mark.parametrize("draft_len", range(1, 9))
def test_drafts_that_are_never_right(target, expected, draft_len):
    """Cases C01, C02: every round is rolled back, past the window and across growth."""
    request = Request(PROMPT, LONG, draft_len=draft_len)
    assert run(Engine(target, scripted(expected, lambda p: True)), request) == [expected]
    assert request.stats.drafted == draft_len * request.stats.rounds
    assert request.stats.accepted == 0


@pytest.mark.parametrize("draft_len", range(1, 9))
def test_a_random_drafter(target, expected, draft_len):
    """A real drafter over the target's KV that knows nothing."""
    request = Request(PROMPT, 8 * WINDOW, draft_len=draft_len)
    assert run(Engine(target, make_drafter()), request) == [expected[: 8 * WINDOW]]
    assert request.stats.drafted == draft_len * request.stats.rounds
    assert request.stats.acceptance < 0.2


@pytest.mark.parametrize("draft_len", range(1, 9))
def test_a_drafter_that_is_always_right(target, expected, draft_len):
    """Cases D06, D13: scripted drafts are accepted to the last one, before and past the window."""
    request = Request(PROMPT, LONG, draft_len=draft_len)
    assert run(Engine(target, scripted(expected, lambda p: False)), request) == [expected]
    # The last round may hold more than was asked for.
    assert request.stats.accepted >= request.stats.drafted - draft_len
    assert request.stats.rounds == -(-(LONG - 1) // (draft_len + 1))


@pytest.mark.parametrize("every", [2, 3, 4, 7])
@pytest.mark.parametrize("draft_len", [1, 4, 8])
def test_forced_patterns_of_acceptance(target, expected, draft_len, every):
    """Case B13 and its kind: a wrong draft at every n-th position, so that blocks are cut at all
    places."""
    request = Request(PROMPT, LONG, draft_len=draft_len)
    drafter = scripted(expected, lambda p: p % every == 0)
    assert run(Engine(target, drafter), request) == [expected]
    assert 0 < request.stats.accepted < request.stats.drafted


@pytest.mark.parametrize("seed", range(4))
def test_a_draft_length_that_changes_every_round(target, expected, seed):
    """Case B13: plain steps between rejected and accepted rounds leave nothing stale."""
    rng = random.Random(seed)
    schedule = Schedule([0, 8] + [rng.randint(0, 8) for _ in range(37)])
    right = {p for p in range(len(PROMPT) + LONG) if rng.random() < 0.7}
    drafter = scripted(expected, lambda p: p not in right)
    engine = Engine(target, drafter, draft_length=schedule)
    assert run(engine, Request(PROMPT, LONG)) == [expected]


@pytest.mark.parametrize("length", [1, 2, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2])
@pytest.mark.parametrize("draft_len", [1, 4, 8])
def test_prompts_around_the_window(target, length, draft_len):
    """Case C01, H23: prompts of 1 token up to just past the window, then 3 windows more."""
    prompt = [(7 * i + 3) % VOCAB for i in range(length)]
    wanted = plain(target, prompt, 3 * WINDOW)
    for drafter in (make_drafter(), ScriptedDrafter([prompt + wanted], lambda _, p: p % 4 == 0)):
        assert run(Engine(target, drafter), Request(prompt, 3 * WINDOW, draft_len=draft_len)) == [
            wanted
        ]


@pytest.mark.parametrize("chunk", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 64, 512])
def test_any_prefill_chunk_gives_the_same_text(target, chunk):
    """Case C09: the chunk's size changes neither the first token nor what follows."""
    prompt = [(11 * i + 1) % VOCAB for i in range(5 * WINDOW + 3)]
    wanted = plain(target, prompt, 24)
    engine = Engine(target, make_drafter(), prefill_chunk=chunk)
    assert run(engine, Request(prompt, 24)) == [wanted]


def test_rows_of_a_batch_do_not_touch_each_other(target):
    """Cases B06, C12: three prompts of different length, each with its own pattern of acceptance
    and draft length, say what each says alone."""
    prompts = [PROMPT, [3, 1], [(5 * i) % VOCAB for i in range(3 * WINDOW)]]
    alone = [plain(target, prompt, LONG) for prompt in prompts]
    script = [prompt + tokens for prompt, tokens in zip(prompts, alone, strict=True)]
    patterns = [lambda p: False, lambda p: p % 2 == 0, lambda p: p % 5 != 0]
    drafter = ScriptedDrafter(script, lambda row, p: patterns[row](p))
    requests = [
        Request(prompt, LONG, draft_len=k) for prompt, k in zip(prompts, [8, 3, 5], strict=True)
    ]
    drafter.engine = Engine(target, drafter, rows=3)
    assert run(drafter.engine, *requests) == alone
    assert requests[0].stats.acceptance > 0.95
    assert requests[1].stats.rounds > requests[0].stats.rounds


def test_more_requests_than_rows(target):
    """Rows that finish take the next request, while the others go on."""
    prompts = [[i + 1, 2 * i + 1, 7] for i in range(5)]
    lengths = [40, 9, 25, 1, 17]
    alone = [plain(target, prompt, n) for prompt, n in zip(prompts, lengths, strict=True)]
    requests = [Request(p, n) for p, n in zip(prompts, lengths, strict=True)]
    assert run(Engine(target, make_drafter(), rows=2), *requests) == alone


@pytest.mark.parametrize("ordered", [True, False])
def test_both_heads_of_the_drafter_draft(target, expected, ordered):
    """Cases A16, D07, D08: centroid and dense heads both propose N tokens in every round."""
    request = Request(PROMPT, 40, draft_len=3)
    assert run(Engine(target, make_drafter(ordered=ordered)), request) == [expected[:40]]
    assert request.stats.drafted_by_position[:4] == [request.stats.rounds] * 3 + [0]


def test_a_drafter_of_nan_changes_nothing(target, expected):
    """Case D09: what the drafter computes can cost speed, never text."""
    drafter = make_drafter()
    drafter.norm.weight = drafter.norm.weight * float("nan")
    assert run(Engine(target, drafter), Request(PROMPT, 30)) == [expected[:30]]
