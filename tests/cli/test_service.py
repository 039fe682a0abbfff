"""The service alone: pairs that are let go when nobody asks, and what it counts."""

import queue
import time

import mlx.core as mx
import pytest

from mlx_mtp.cli.backends import openai
from mlx_mtp.cli.backends.service import Cancelled, Job, NotLoaded, Service
from mlx_mtp.errors import LoadError
from mlx_mtp.weights.load import load_pair


class Ask(Job):
    """Answers `body`, and keeps what came of it."""

    def __init__(self, **body):
        self.body = openai.completion({"max_tokens": 8, "temperature": 0} | body)
        self.ended = queue.Queue()

    def begin(self, conversations, engine):
        return self.body.start(conversations, engine)

    def show(self, piece):
        pass

    def end(self, error):
        self.ended.put(error)

    def outcome(self, service):
        """The text, or the error."""
        service.submit(self)
        error = self.ended.get(timeout=20)
        return self.answer.result().text if error is None else error


def opened(load=lambda: load_pair(), **how):
    return Service(
        lambda progress: load(),
        lambda pair: pair.engine(rows=2, cache_bytes=1 << 26),
        rows=2,
        **how,
    )


def until(true):
    ends = time.monotonic() + 20
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_weights_that_nobody_asks_for_are_let_go_and_loaded_again():
    service = opened(idle_s=0.05)
    first = Ask(prompt="def gcd(a, b):")
    said = first.outcome(service)
    taught = service._draft_length
    del first.answer
    until(lambda: service.state == "unloaded")
    until(lambda: service.memory()["kv"] == 0)
    assert service._pair is None
    until(lambda: mx.get_cache_memory() == 0)
    assert service.model.context > 0
    assert service.model.tokenizer.encode("a", bos=True) != []
    service.between_steps(lambda engine: engine.forget("s"))  # there is none, and nothing to forget
    assert Ask(prompt="def gcd(a, b):").outcome(service) == said
    assert service._draft_length is taught
    assert service.totals.requests == {"length": 2}


def test_a_turn_is_remembered_while_the_weights_are_gone():
    service = opened(idle_s=0.05)
    messages = [{"role": "user", "content": "Write a function gcd(a, b)."}]
    ask = Ask(prompt="")
    ask.body = openai.chat({"messages": messages, "max_tokens": 8, "temperature": 0})
    said = ask.outcome(service)
    ids = ask.answer.request.prompt + ask.answer.request.tokens
    until(lambda: service.state == "unloaded")
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Shorter."}]
    ask.body = openai.chat({"messages": messages, "max_tokens": 8, "temperature": 0})
    ask.outcome(service)
    assert ask.answer.request.prompt[: len(ids)] == ids


def test_a_load_that_fails_later_fails_those_who_wait_and_is_tried_again():
    outcomes = iter([None, LoadError("the disk is gone"), None])

    def load():
        if (outcome := next(outcomes)) is not None:
            raise outcome
        return load_pair()

    service = opened(load, idle_s=0.05)
    said = Ask(prompt="def gcd(a, b):").outcome(service)
    until(lambda: service.state == "unloaded")
    failed = Ask(prompt="def gcd(a, b):").outcome(service)
    assert isinstance(failed, NotLoaded)
    assert (str(failed), failed.exit_code) == ("the disk is gone", 3)
    assert (service.failed, service.state) == (None, "failed")
    service.between_steps(lambda engine: 1 / 0)  # there is none
    assert Ask(prompt="def gcd(a, b):").outcome(service) == said
    assert service.state == "ready"
    assert service.totals.requests == {"length": 2, "error": 1}


def test_a_first_load_that_fails_is_for_good():
    def load():
        raise LoadError("no such folder")

    service = opened(load)
    assert service.loaded.wait(10)
    assert service.state == "failed"
    for _ in range(3):
        with pytest.raises(NotLoaded, match="no such folder") as caught:
            service.submit(Ask(prompt="x"))
    assert len(caught.traceback) == 3  # this frame and the two that raise it


def test_what_ended_is_counted():
    service = opened()
    first = Ask(prompt="def gcd(a, b):", draft_len=2)
    assert isinstance(first.outcome(service), str)
    more = Ask(prompt=first.answer.request.prompt + first.answer.request.tokens, draft_len=2)
    assert isinstance(more.outcome(service), str)
    jobs = [first, more]
    assert isinstance(Ask(prompt=[1, 10**9]).outcome(service), Exception)
    stats = [job.answer.request.stats for job in jobs]
    totals = service.totals
    assert totals.requests == {"length": 2, "refused": 1}
    assert totals.tokens["completion_tokens"] == 16
    assert totals.tokens["cached_tokens"] == sum(s.cached_tokens for s in stats) > 0
    assert totals.tokens["drafted"] == sum(s.drafted for s in stats) > 0
    by_position = [sum(s.accepted_by_position[i] for s in stats) for i in range(8)]
    assert [totals.accepted_by_position[i] for i in range(8)] == by_position
    assert sum(by_position) == totals.tokens["accepted"]
    assert 0 < totals.decode_s < 20


def test_a_job_cancelled_while_it_waits_is_counted_and_never_runs():
    service = opened()
    assert service.loaded.wait(20)
    running = [Ask(prompt="a", max_tokens=3000, min_tokens=3000) for _ in range(2)]
    waiting = Ask(prompt="b")
    for job in (*running, waiting):
        service.submit(job)
    until(lambda: service.running == 2)
    assert service.waiting == 1
    service.cancel(waiting)
    assert isinstance(waiting.ended.get(timeout=5), Cancelled)
    assert waiting.answer is None
    for job in running:
        service.cancel(job)
        assert isinstance(job.ended.get(timeout=5), Cancelled)
    until(lambda: service.totals.requests == {"cancelled": 3})
