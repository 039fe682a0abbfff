"""The host waits for the device once a round, and nowhere inside one."""

from __future__ import annotations

import threading
from collections import Counter

import mlx.core as mx
import pytest

from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.round import RoundShape, run_round
from mlx_mtp.engine.sampling import Sampling
from mlx_mtp.models.layers import on_cpu

from .pairs import PROMPT, Engine, Schedule, make_drafter, make_target, plain, run


@pytest.fixture(scope="module")
def pair():
    return make_target(), make_drafter()


@pytest.mark.parametrize("sampler", ["greedy", "few", "full"])
@pytest.mark.parametrize("draft_len", [0, 1, 4, 8])
def test_a_whole_round_traces(pair, draft_len, sampler):
    """Under mx.compile an evaluation raises: a round that traces has no wait in it."""
    target, drafter = pair
    engine = Engine(target, drafter, rows=2)
    shape = RoundShape(draft_len, 8, sampler)

    def traced(state):
        return run_round(target, drafter, engine.layout, state, None, shape)

    state, result = mx.compile(traced)(engine._batch.state)
    assert result.tokens.shape == (1, draft_len + 4)
    assert len(state.kv) == len(engine._batch.state.kv)


def test_a_wait_inside_a_round_would_be_caught(pair):
    """The test above can fail: the same trace with one evaluation in it raises."""

    def waits(x):
        return x + (1 if x.sum().item() > 0 else 2)

    with pytest.raises(ValueError, match="eval"):
        mx.compile(waits)(mx.array([1.0]))


WAITING = ("item", "tolist", "__bool__", "__int__", "__float__", "__array__", "__index__")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=20, seed=3)], ids=str)
def test_one_wait_a_round_counted_from_outside(pair, sampling, monkeypatch):
    """Everything that can make the host wait is wrapped and counted over 100 rounds."""
    target, drafter = pair
    engine = Engine(target, drafter)
    request = Request(PROMPT, 2000, sampling, draft_len=2)
    engine.add(request)
    while request.stats.rounds < 3:
        engine.step()
    counts: Counter[str] = Counter()

    def counted(name, call):
        def wrapper(*args, **kwargs):
            counts[name] += 1
            return call(*args, **kwargs)

        return wrapper

    for name in ("eval", "async_eval", "synchronize"):
        monkeypatch.setattr(mx, name, counted(name, getattr(mx, name)))
    for name in WAITING:
        if hasattr(mx.array, name):
            monkeypatch.setattr(mx.array, name, counted(name, getattr(mx.array, name)))
    bool(mx.array(True))
    assert counts.pop("__bool__") == 1  # the wrapping of the type works
    rounds, waits = request.stats.rounds, engine.waits
    while request.stats.rounds < rounds + 100:
        engine.step()
    # On the CPU a round starts piece by piece; none of the pieces is waited for.
    pieces = 1 + (len(target.layers) + 2) * on_cpu()
    assert counts == {"async_eval": 100 * pieces, "tolist": 100}
    assert engine.waits - waits == 100


def test_a_round_is_dispatched_before_the_one_before_is_read(pair):
    """One in flight: when round r is handed out, r+1 is on its way."""
    engine = Engine(*pair)
    engine.add(Request(PROMPT, 50))
    seen = []
    while engine.busy:
        if any(event.tokens for event in engine.step()):
            seen.append(len(engine._flights))
    assert seen[1:-1] == [1] * len(seen[1:-1])


def test_no_round_is_dispatched_that_cannot_be_needed(pair):
    """With N tokens left and rounds that bring one at least, at most N are on their way."""
    engine = Engine(pair[0])
    request = Request(PROMPT, 5)
    run(engine, request)
    assert request.stats.rounds == 4
    assert engine.waits == 5


def test_in_a_worker_thread(pair):
    """MLX's streams belong to threads: an engine made and stepped in another one works."""
    expected = plain(pair[0], PROMPT, 40)
    texts = []

    def work():
        target, drafter = make_target(), make_drafter()
        texts.append(run(Engine(target, drafter), Request(PROMPT, 40))[0])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == [expected, expected]


@pytest.mark.skipif(not on_cpu(), reason="a GPU does run ahead")
@pytest.mark.parametrize("pipeline", [False, True])
def test_where_nothing_runs_ahead_a_pipelined_round_teaches_no_cost(pair, pipeline):
    """The time before its result is that of the round behind it: `mlx-mtp tune` once kept a profile
    in which the seconds of every draft length were those of the next."""
    told = []

    class Told(Schedule):
        def learn(self, outcome):
            told.append(outcome.seconds)

    engine = Engine(*pair, draft_length=Told([0, 4]), pipeline=pipeline)
    run(engine, Request(PROMPT, 40))
    assert any(seconds is not None for seconds in told) is not pipeline
