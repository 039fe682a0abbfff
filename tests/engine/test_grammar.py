"""Grammars: every place of a verify pass is masked by what stands before it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.sampling import Sampling
from mlx_mtp.errors import UsageError

from .pairs import (
    PROMPT,
    VOCAB,
    Engine,
    ScriptedDrafter,
    follows,
    forward,
    make_drafter,
    make_target,
    run,
)

EOS = 1


class Steps:
    """Behind token t only the tokens t + 5, t + 7 and t + 11 may come; nothing behind `last`."""

    def __init__(self, said: int = PROMPT[-1], free: int = 0, last: int | None = None) -> None:
        self.said, self.free, self.last = said, free, last

    def allowed(self, token: int) -> list[int]:
        if token == self.last:
            return []
        return [(token + step) % VOCAB for step in (5, 7, 11)]

    def masks(self, drafts: Sequence[int]) -> np.ndarray | None:
        if self.free > len(drafts):
            return None
        table = np.full((len(drafts) + 1, VOCAB // 32), 0xFFFFFFFF, np.uint32)
        said = self.said
        for place, draft in enumerate([*drafts, -1]):
            if place >= self.free:
                table[place] = 0
                for token in self.allowed(said):
                    table[place, token // 32] |= np.uint32(1 << token % 32)
                if draft not in self.allowed(said):
                    break
            said = draft
        return table

    def accept(self, token: int) -> None:
        self.said, self.free = token, max(self.free - 1, 0)


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def expected(target):
    """Greedy decoding one token at a time over a full forward, with the rule written out."""
    said = list(PROMPT)
    for _ in range(40):
        logits = forward(target, said)[-1].tolist()
        said.append(max(Steps().allowed(said[-1]), key=lambda token: logits[token]))
    return said[len(PROMPT) :]


@pytest.mark.parametrize("draft_len", [0, 1, 4, 8])
@pytest.mark.parametrize("pipeline", [True, False])
def test_b10_every_place_is_masked_at_any_draft_length(target, expected, draft_len, pipeline):
    script = ScriptedDrafter([[*PROMPT, *expected]], lambda row, at: at % 5 == 0)
    engine = Engine(target, script, pipeline=pipeline)
    request = Request(list(PROMPT), 40, draft_len=draft_len, grammar=Steps())
    assert run(engine, request) == [expected]
    assert request.stats.accepted > 0 or draft_len == 0
    assert engine.describe()["grammar_rounds"] == request.stats.rounds


def test_no_round_is_run_ahead_and_drafts_are_one_wait_more(target, expected):
    engine = Engine(target, make_drafter())
    request = Request(list(PROMPT), 40, draft_len=4, grammar=Steps())
    run(engine, request)
    assert engine.waits == 1 + 2 * request.stats.rounds


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=20, seed=3)])
def test_rows_without_a_grammar_beside_one_say_what_they_say_alone(target, sampling):
    def requests():
        ruled = Request(list(PROMPT), 16, sampling, draft_len=3, grammar=Steps())
        return [Request([7, 8], 20, sampling, draft_len=4), ruled, Request([9], 8, sampling)]

    alone = [run(Engine(target), request)[0] for request in requests()]
    assert run(Engine(target, make_drafter(), rows=3), *requests()) == alone


def test_the_seed_decides_at_any_draft_length(target):
    def say(draft_len):
        sampling = Sampling(1.3, top_p=0.95, seed=11)
        request = Request(list(PROMPT), 20, sampling, draft_len=draft_len, grammar=Steps())
        return run(Engine(target, make_drafter()), request)[0]

    text = say(0)
    assert text == say(4) == say(8)
    said = [PROMPT[-1], *text]
    assert all(b in Steps().allowed(a) for a, b in itertools.pairwise(said))


def test_a_grammar_may_begin_in_the_middle_of_a_block(target):
    free = run(Engine(target), Request(list(PROMPT), 6))[0]
    texts = [
        run(
            Engine(target, make_drafter()),
            Request(list(PROMPT), 20, draft_len=draft_len, grammar=Steps(free=6)),
        )[0]
        for draft_len in (0, 3, 8)
    ]
    assert texts[0][:6] == free
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][6] in Steps().allowed(free[-1])


def test_a_place_where_nothing_may_be_said_ends_that_row_alone(target, expected):
    request = Request(list(PROMPT), 40, grammar=Steps(last=expected[9]))
    other = Request([7, 8], 12)
    run(Engine(target, rows=2), request, other)
    assert request.tokens == expected[:10]
    assert request.finish_reason == "error"
    assert "nothing is left that may be said" in request.error
    assert request.outgrown
    assert other.finish_reason == "length"
    first = Request(list(PROMPT), 40, grammar=Steps(last=PROMPT[-1]))
    run(Engine(target), first)
    assert first.finish_reason == "error"


@pytest.mark.parametrize("draft_len", [0, 2, 8])
def test_what_was_said_before_a_dead_place_is_kept(target, expected, draft_len):
    """The drafts before it count, in the block that holds it, too; and so does their KV."""
    for dead in range(4, 13):
        engine = Engine(target, ScriptedDrafter([[*PROMPT, *expected]], lambda row, at: False))
        request = Request(list(PROMPT), 40, draft_len=draft_len, grammar=Steps(last=expected[dead]))
        assert run(engine, request) == [expected[: dead + 1]]
        assert (request.finish_reason, request.outgrown) == ("error", True)
        follow = Request([*PROMPT, *request.tokens], 3, grammar=Steps(expected[dead]))
        assert run(engine, follow) == [expected[dead + 1 : dead + 4]]
        assert follow.stats.cached_tokens == len(PROMPT) + dead


@pytest.mark.parametrize("draft_len", [0, 2, 8])
def test_a_draft_that_leads_nowhere_ends_nothing(target, expected, draft_len):
    """Where it may come itself but is not chosen, what could follow it is of no matter."""
    at, other = next(
        (i, token)
        for i in range(4, 30)
        for token in Steps().allowed(expected[i - 1])
        if token not in expected
    )
    script = [*PROMPT, *expected[:at], other, *expected[at + 1 :]]
    engine = Engine(target, ScriptedDrafter([script], lambda row, place: False))
    request = Request(list(PROMPT), 40, draft_len=draft_len, grammar=Steps(last=other))
    assert run(engine, request) == [expected]
    assert request.finish_reason == "length"


class Outgrown(Steps):
    """Gives up after so many tokens, in one of its methods."""

    def __init__(self, method: str, after: int) -> None:
        super().__init__()
        self.method, self.after = method, after

    def masks(self, drafts):
        if self.method == "masks" and self.after <= 0:
            raise UsageError("too large")
        return super().masks(drafts)

    def accept(self, token):
        self.after -= 1
        if self.method == "accept" and self.after <= 0:
            raise UsageError("too large")
        super().accept(token)


@pytest.mark.parametrize(("method", "after"), [("masks", 0), ("masks", 7), ("accept", 7)])
def test_a_grammar_that_is_outgrown_ends_its_row_alone(target, expected, method, after):
    request = Request(list(PROMPT), 40, draft_len=0, grammar=Outgrown(method, after))
    other = Request([7, 8], 12)
    engine = Engine(target, rows=2, cache_bytes=1 << 24)
    run(engine, request, other)
    assert (request.finish_reason, request.error) == ("error", "too large")
    assert request.outgrown
    assert request.tokens == expected[:after]
    assert other.finish_reason == "length"
    follow = Request([*PROMPT, *expected[:after], 3], 1)
    run(engine, follow)
    assert follow.stats.cached_tokens == len(PROMPT) + max(after - 1, 0)
    assert follows(target, follow.prompt, follow.tokens)


@pytest.mark.parametrize("draft_len", [0, 3])
def test_compiled_rounds_under_a_grammar(target, expected, draft_len):
    engine = Engine(target, make_drafter(), compile=True)
    request = Request(list(PROMPT), 10, draft_len=draft_len, grammar=Steps())
    assert run(engine, request) == [expected[:10]]
