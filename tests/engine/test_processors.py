"""Bias, bans, penalties and logprobs inside the verify pass: as plain decoding has them (B07)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.engine.processors import Processing
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.sampling import Sampling
from mlx_mtp.errors import UsageError

from .pairs import (
    PROMPT,
    VOCAB,
    Engine,
    ScriptedDrafter,
    forward,
    make_drafter,
    make_target,
    plain,
    run,
)

KINDS = {
    "repetition": Processing(repetition_penalty=1.5),
    "presence": Processing(presence_penalty=1.5),
    "frequency": Processing(frequency_penalty=0.7),
    "bias": Processing(logit_bias=((3, 4.0), (5, -100.0))),
    "suppress": Processing(suppress=(1, 17, 44)),
    "all": Processing(1.2, 0.5, 0.5, ((7, 2.0),), (9,), 12),
}


@pytest.fixture(scope="module")
def target():
    return make_target()


def by_hand(target, prompt, tokens, processing, eos=()):
    """Greedy text from full forward passes, with the processors written out in NumPy."""
    said: list[int] = []
    for n in range(tokens):
        logits = np.array(forward(target, [*prompt, *said])[-1])
        logits[list(processing.suppress)] = -np.inf
        if n < processing.min_tokens:
            logits[list(eos)] = -np.inf
        for token, bias in processing.logit_bias:
            logits[token] += bias
        for token in set(prompt) | set(said):
            factor = processing.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(said):
            logits[token] -= processing.presence_penalty
            logits[token] -= processing.frequency_penalty * said.count(token)
        said.append(int(logits.argmax()))
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_b07_every_processor_is_applied_at_every_place_of_a_block(target, kind):
    processing = KINDS[kind]
    wanted = by_hand(target, PROMPT, 30, processing)
    assert wanted != plain(target, PROMPT, 30)
    for draft_len in (0, 1, 4, 8):
        drafter = ScriptedDrafter([PROMPT + wanted], lambda _, p: p % 5 == 0)
        request = Request(PROMPT, 30, processing=processing, draft_len=draft_len)
        assert run(Engine(target, drafter), request) == [wanted]
        assert request.stats.accepted > 0 or draft_len == 0


@pytest.mark.parametrize("sampling", [Sampling(0.9, seed=4), Sampling(0.9, top_k=20, seed=4)])
def test_b07_sampled_text_with_penalties_is_that_of_plain_decoding(target, sampling):
    texts = [
        run(
            Engine(target, make_drafter()),
            Request(PROMPT, 40, sampling, KINDS["all"], draft_len=draft_len),
        )[0]
        for draft_len in (0, 3, 8)
    ]
    assert texts[0] == texts[1] == texts[2]


def test_no_end_before_min_tokens(target):
    text = plain(target, PROMPT, 30)
    eos = frozenset(text[3:6])
    processing = Processing(min_tokens=10)
    wanted = by_hand(target, PROMPT, 10, processing, eos)
    for draft_len in (0, 4):
        request = Request(PROMPT, 30, processing=processing, eos=eos, draft_len=draft_len)
        (tokens,) = run(Engine(target, make_drafter()), request)
        assert tokens[:10] == wanted
    short = Request(PROMPT, 30, eos=eos)
    assert len(run(Engine(target), short)[0]) <= 3


def test_rows_keep_their_own_processors(target):
    """Rows with and without join and leave beside each other; counts move with their rows."""
    kinds = [Processing(), KINDS["repetition"], KINDS["frequency"], KINDS["all"], KINDS["bias"]]
    prompts = [[i + 2, 5, 9 + i] for i in range(len(kinds))]
    lengths = [9, 30, 25, 14, 20]
    alone = [
        by_hand(target, prompt, n, kind)
        for prompt, n, kind in zip(prompts, lengths, kinds, strict=True)
    ]
    requests = [
        Request(prompt, n, processing=kind)
        for prompt, n, kind in zip(prompts, lengths, kinds, strict=True)
    ]
    assert run(Engine(target, make_drafter(), rows=3), *requests) == alone


@pytest.mark.parametrize("draft_len", [0, 4])
def test_logprobs_are_those_of_the_targets_own_logits(target, draft_len):
    text = plain(target, PROMPT, 20)
    drafter = ScriptedDrafter([PROMPT + text], lambda _, p: p % 4 == 0)
    request = Request(PROMPT, 20, Sampling(), KINDS["bias"], draft_len=draft_len, logprobs=3)
    (tokens,) = run(Engine(target, drafter), request)
    logits = forward(target, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    wanted = logits - mx.logsumexp(logits, -1, keepdims=True)
    assert len(request.token_logprobs) == len(tokens) == 20
    for at, token, row in zip(request.token_logprobs, tokens, wanted.tolist(), strict=True):
        assert at.logprob == pytest.approx(row[token], abs=1e-4)
        best = sorted(row, reverse=True)[:3]
        assert [value for _, value in at.likeliest] == pytest.approx(best, abs=1e-4)
        assert [row[i] for i, _ in at.likeliest] == pytest.approx(best, abs=1e-4)


def test_nobody_pays_for_what_nobody_asks(target):
    engine = Engine(target, make_drafter())
    run(engine, Request(PROMPT, 5))
    assert all(table is None for table in engine._batch.state.processors)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"repetition_penalty": 0.0}, "repetition-penalty is 0.0"),
        ({"repetition_penalty": float("nan")}, "repetition-penalty is nan"),
        ({"presence_penalty": 2.5}, "presence-penalty is 2.5; it must be -2 to 2"),
        ({"frequency_penalty": -3.0}, "frequency-penalty is -3.0"),
        ({"min_tokens": -1}, "min-tokens is -1"),
        ({"logit_bias": ((1, 101.0),)}, "logit-bias is 1:101.0"),
    ],
)
def test_values_out_of_range(values, words):
    with pytest.raises(UsageError, match=words):
        Processing(**values)


def test_token_ids_that_the_model_has_not(target):
    for processing in (Processing(suppress=(VOCAB,)), Processing(logit_bias=((VOCAB, 1.0),))):
        with pytest.raises(UsageError, match=f"token id {VOCAB} is outside the vocabulary"):
            Engine(target).add(Request(PROMPT, 5, processing=processing))
    with pytest.raises(UsageError, match="logprobs is 21; it must be 0 to 20"):
        Request(PROMPT, 5, logprobs=21)
