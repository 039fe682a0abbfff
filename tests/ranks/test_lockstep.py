"""A leader, and afterwards a follower that has only its journal and its tokens: it must do the same
in the same order, whatever stops, cancels and fails on rank 0 alone."""

from __future__ import annotations

import pickle
from collections import deque

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.engine.draft_length import Shape
from mlx_mtp.engine.lockstep import Follower, Leader, follow
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.sampling import Sampling
from mlx_mtp.errors import MtpError
from mlx_mtp.models.shards import Ranks
from tests.engine.pairs import PROMPT, VOCAB, Schedule, make_drafter, make_target, run

LONG = [2, *range(30, 60)]


class End(Exception):
    """Of the journal."""


class Lost(Exception):
    """The journal was told that a collective failed."""


class Log:
    """A journal that is read once all of it is written."""

    engine = -1

    def __init__(self) -> None:
        self.entries: deque = deque()
        self.waiting: list = []
        self.reported: list[int] = []

    def write(self, entry) -> None:
        self.waiting.append(pickle.loads(pickle.dumps(entry)))

    def send(self) -> None:
        self.entries += self.waiting
        self.waiting = []

    def read(self):
        if not self.entries:
            raise End
        return self.entries.popleft()

    def put_back(self, entry) -> None:
        self.entries.appendleft(entry)

    def report(self, differences: int) -> None:
        self.reported.append(differences)

    def lost(self, error: RuntimeError):
        raise Lost from error


class Tape(Ranks):
    """Collectives of two ranks that run one after the other, each with a whole target."""

    tape: deque

    def total(self, x: mx.array) -> mx.array:
        return x

    def leaders(self, x: mx.array) -> mx.array:
        if self.rank == 0:
            self.tape.append(x)
            return x
        found = self.tape.popleft()
        assert found.shape == x.shape
        return found


class Even:
    """A grammar: even tokens only, and too few of them."""

    def __init__(self, most: int = 100) -> None:
        self.most, self.said = most, 0

    def masks(self, drafts):
        return np.full((len(drafts) + 1, VOCAB // 32), 0x55555555, np.uint32)

    def accept(self, token: int) -> None:
        self.said += 1
        if self.said == self.most:
            raise MtpError("the text outgrows its grammar")


class Stop:
    """Stops at the nth token, which takes some state."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, token: int) -> bool:
        self.left -= 1
        return self.left == 0


@pytest.fixture(scope="module")
def models():
    return make_target(), make_drafter()


def steps(engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def several(lead):
    asked = [Request(PROMPT[:n], 9 + n, draft_len=d) for n, d in ((2, 0), (5, 4), (3, None))]
    asked += [Request(LONG, 8, Sampling(1.0, seed=4)), Request(PROMPT, 0)]
    run(lead(rows=3), *asked)
    return asked


def stops(lead):
    asked = [Request(PROMPT, 20, stop=Stop(7)), Request(LONG, 20, stop=Stop(3), draft_len=4)]
    asked += [Request(PROMPT[:3], 20, eos=frozenset(range(0, VOCAB, 5)))]
    run(lead(rows=2), *asked)
    assert {r.finish_reason for r in asked} == {"stop"}
    assert [len(r.tokens) for r in asked[:2]] == [7, 3]
    return asked


def grammars(lead):
    asked = [Request(PROMPT, 9, grammar=Even(), draft_len=3), Request(LONG, 9, draft_len=2)]
    asked += [Request(PROMPT[:3], 9, grammar=Even(most=4), draft_len=1)]
    run(lead(rows=3), *asked)
    assert all(token % 2 == 0 for r in (asked[0], asked[2]) for token in r.tokens)
    assert asked[2].error == "the text outgrows its grammar"
    return asked


def cancelled_in_prefill(lead):
    engine = lead(prefill_chunk=8, cache_bytes=1 << 22)
    first, second = Request(LONG, 5), Request([*LONG, 7, 8], 5)
    engine.add(first)
    engine.add(second)
    steps(engine, 2)
    assert not first.tokens
    engine.cancel(first)
    run(engine)
    assert second.stats.cached_tokens >= 8
    return [first, second]


def cancelled_in_decode(lead):
    engine = lead(rows=2)
    first, second, third = (Request(PROMPT[:n], 12, draft_len=2) for n in (3, 4, 5))
    for request in (first, second, third):
        engine.add(request)
    steps(engine, 7)
    assert first.tokens
    engine.cancel(first)
    run(engine)
    engine.cancel(first)  # it has ended
    engine.cancel(Request(PROMPT, 3))  # of nobody
    return [first, second, third]


def forgotten(lead):
    engine = lead(cache_bytes=1 << 22, rows=2)
    first = Request(PROMPT, 6, session="a")
    run(engine, first)
    second = Request([*PROMPT, *first.tokens, 9], 4, session="a")
    run(engine, second)
    assert second.stats.cached_tokens
    engine.forget("a")
    third = Request([*PROMPT, *first.tokens, 9], 4, session="b")
    run(engine, third)
    return [first, second, third]


def an_engine_anew(lead):
    """As the service has it after an error in a step."""

    def fails(token: int) -> bool:
        raise ValueError("a bug")

    engine = lead(rows=2)
    asked = [Request(PROMPT, 12, draft_len=2), Request(LONG, 12, stop=fails)]
    for request in asked:
        engine.add(request)
    with pytest.raises(ValueError, match="a bug"):
        run(engine)
    for request in asked:
        engine.cancel(request)
    engine.close()
    last = Request(PROMPT, 6)
    run(lead(), last)
    return [*asked, last]


def an_error_before_a_round(lead):
    """The other rank must not begin that round."""
    engine, first, last = lead(), Request(PROMPT, 9), Request(LONG, 4)
    engine.add(first)
    while len(first.tokens) < 3:
        engine.step()
    engine.draft_length = None
    with pytest.raises(AttributeError):
        run(engine)
    engine.cancel(first)
    engine.close()
    run(lead(), last)
    return [first, last]


def two_engines(lead):
    """As bench has them, each in turn."""
    one, two = lead(rows=2), lead()
    asked = [Request(PROMPT, 6, draft_len=2), Request(LONG, 6, draft_len=0), Request(PROMPT, 5)]
    run(one, asked[0])
    run(two, asked[1])
    one.add(asked[2])
    steps(one, 1)
    two.close()
    run(one)
    return asked


SCENES = [
    several,
    stops,
    grammars,
    cancelled_in_prefill,
    cancelled_in_decode,
    forgotten,
    an_engine_anew,
    an_error_before_a_round,
    two_engines,
]


class Played:
    """A scene on rank 0, then on rank 1 by its journal."""

    def __init__(self, models, scene, *, pipeline=False, drafter=None):
        target, own = models
        self.log, self.asked = Log(), []
        tapes = Tape(0, 2), Tape(1, 2)
        tapes[0].tape = tapes[1].tape = deque()
        self.leaders, self.followers = [], []
        schedule = Schedule([3, 0, 2, 5])

        def lead(**how):
            how |= {"pipeline": pipeline, "draft_length": schedule}
            self.leaders.append(Leader(target, own, journal=self.log, **how))
            return self.leaders[-1]

        seen = self.seen = []

        class Seen(Follower):
            def take_over(self, request, stops, grammar):
                seen.append(request)
                super().take_over(request, stops, grammar)

        def make(**how):
            self.followers.append(Seen(target, drafter or own, journal=self.log, **how))
            return self.followers[-1]

        target.ranks = tapes[0]
        try:
            self.asked = scene(lead)
            target.ranks = tapes[1]
            with pytest.raises(End):
                follow(self.log, make)
            self.left = len(tapes[1].tape)
        finally:
            target.ranks = Ranks()


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("scene", SCENES)
def test_a_follower_does_what_the_leader_did(models, scene, pipeline):
    played = Played(models, scene, pipeline=pipeline)
    assert played.left == 0
    assert not played.log.waiting
    given = [(r.prompt, r.max_tokens) for r in played.asked]
    assert sorted((r.prompt, r.max_tokens) for r in played.seen) == sorted(given)
    for request in played.asked:
        same = [r for r in played.seen if r.prompt == request.prompt]
        assert (request.tokens, request.finish_reason, request.error) in [
            (r.tokens, r.finish_reason, r.error) for r in same
        ]
    for leader, follower in zip(played.leaders, played.followers, strict=True):
        assert leader._batch.longest == follower._batch.longest
        assert leader.kv_bytes == follower.kv_bytes
        assert leader.cached_bytes == follower.cached_bytes
        assert follower.busy == leader.busy
    assert not played.log.reported


def test_a_follower_that_would_draft_otherwise_goes_with_the_leader(models):
    played = Played(models, several, drafter=make_drafter(seed=77))
    assert [r.tokens for r in played.seen] == [r.tokens for r in played.asked]
    assert played.log.reported == [*range(1, len(played.log.reported) + 1)]
    assert played.log.reported


def test_what_a_grammar_forbids_is_no_difference(models):
    def scene(lead):
        asked = [Request(PROMPT, 9, grammar=Even(), draft_len=0)]
        run(lead(), *asked)
        return asked

    assert not Played(models, scene).log.reported


def test_a_collective_that_fails_ends_it(models, monkeypatch):
    log = Log()
    leader = Leader(*models, journal=log)
    leader.add(Request(PROMPT, 4))

    def fail(*_):
        raise RuntimeError("[ring] connection to a peer was lost")

    monkeypatch.setattr(leader, "_step", fail)
    with pytest.raises(Lost):
        leader.step()


def test_a_shape_survives_the_way():
    assert pickle.loads(pickle.dumps(Shape(3, 2))) == Shape(3, 2)
