"""Copied drafts: found on the host, placed on the device, and never a change of the text."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_mtp.engine.copying import MATCH, Copies, CopyIndex
from mlx_mtp.engine.draft_length import AutoLength, Outcome, Shape
from mlx_mtp.engine.requests import Request

from .pairs import PROMPT, VOCAB, Engine, ScriptedDrafter, make_drafter, make_target, plain, run


def test_what_follows_the_newest_tokens_elsewhere():
    index = CopyIndex([1, 2, 3, 4, 5, 6, 7, 9])
    assert index.continuation(3) == []
    index.extend([2, 3, 4])
    assert index.continuation(3) == []
    index.extend([5])
    assert index.continuation(3) == [5, 6, 7, 9]
    assert len([2, 3, 4, 5]) == MATCH


def test_a_copy_is_followed_although_the_words_stand_elsewhere_too():
    index = CopyIndex([1, 2, 3, 4, 5, 50, 60, 2, 3, 4, 5, 99, 1, 2, 3, 4])
    assert index.continuation(2) == [4, 5, 50]
    index.extend([5])
    assert index.continuation(1) == [5, 50]
    index.extend([7])
    assert index.continuation(1) == []


def test_a_text_that_repeats_itself_goes_on_repeating():
    index = CopyIndex([1, 2, 3] * 3)
    assert index.continuation(7) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert CopyIndex([5] * 6).continuation(3) == [5, 5, 5, 5]


def test_on_the_device_a_copy_applies_where_unread_rounds_went_along_it():
    copies = Copies(mx.array([10, 10, 10, 10]), mx.array([[7, 8, 9, 1, 2, 3]] * 3 + [[-1] * 6]))
    length, bonus = mx.array([10, 12, 12, 10]), mx.array([7, 9, 5, 7])
    drafts, applies = copies.drafts(bonus, length, 2)
    assert applies.tolist() == [1, 1, 0, 0]
    assert drafts[:2].tolist() == [[8, 9], [1, 2]]
    far, none = copies.drafts(bonus, mx.array([19] * 4), 2)
    assert none.tolist() == [0] * 4
    assert far.shape == (4, 2)


class Always:
    """Copies whenever there is a match, and drafts `steps` tokens otherwise."""

    def __init__(self, steps: int, copied: int):
        self.steps, self.copied = steps, copied
        self.outcomes: list[Outcome] = []

    def choose(self, match: bool = False) -> Shape:
        return Shape(self.steps if self.steps or not match else 0, self.copied if match else 0)

    def learn(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


@pytest.fixture(scope="module")
def looping():
    """A target whose text runs into a loop, so that copies are right for long."""
    for seed in range(8, 40):  # the first that does
        target = make_target(seed, final_logit_softcapping=5.0)
        text = plain(target, PROMPT, 120)
        if text[-40:] == text[-80:-40] or text[60:90] == text[90:120]:
            return target, text
    raise AssertionError("no seed loops")


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize(("steps", "copied"), [(0, 8), (2, 8), (4, 2), (0, 1)])
def test_the_text_is_unchanged_and_copies_are_accepted(looping, steps, copied, pipeline):
    target, text = looping
    engine = Engine(target, make_drafter(), draft_length=Always(steps, copied), pipeline=pipeline)
    request = Request(PROMPT, 120)
    assert run(engine, request) == [text]
    assert request.stats.copied > 20
    assert request.stats.accepted >= request.stats.copied


def test_rows_that_copy_beside_rows_that_draft(looping):
    target, text = looping
    other = [9, 8, 7, 6]
    wanted = plain(target, other, 60)
    controller = Always(2, 8)
    requests = [Request(PROMPT, 120), Request(other, 60)]
    assert run(Engine(target, make_drafter(), rows=2, draft_length=controller), *requests) == [
        text,
        wanted,
    ]
    assert any(o.copied == (True, False) for o in controller.outcomes)


FILE = [(i * 37 + i // 11) % (VOCAB - 2) + 1 for i in range(300)]
EDITED = [(t + 5) % VOCAB if i in (60, 150, 230) else t for i, t in enumerate(FILE)]


class Scripted:
    """A target that says a given text whatever it reads: logits by position, KV as usual."""

    def __init__(self, target, text):
        self.inner, self.config, self.dtype = target, target.config, target.dtype
        self.says = mx.array([*text, *[0] * 64])
        self.embed, self.shortlist = target.embed, None
        self.ranks, self.kv_heads = target.ranks, target.kv_heads

    def __call__(self, ids, kv, keep=None):
        at = kv.offset[:, None] + mx.arange(ids.shape[1])
        self.next = self.says[at + 1]
        if keep is not None:
            self.next = self.next[:, self.next.shape[1] - keep :]
        return self.inner(ids, kv, keep)

    def logits(self, hidden):
        return (mx.arange(VOCAB) == self.next[..., None]).astype(mx.float32) * 20

    def scores(self, hidden):
        return self.logits(hidden), None


class Even(AutoLength):
    """On a machine whose rounds always take what their shape says."""

    def learn(self, outcome):
        n, steps = outcome.shape.draft_len, outcome.shape.steps
        super().learn(replace(outcome, seconds=1 + 0.1 * n + 0.06 * steps))


def test_an_edit_takes_far_fewer_rounds_with_copies():
    """The same file with three changes: at least 1.5 times the tokens a round of MTP alone."""
    target = Scripted(make_target(), [*FILE, 3, *EDITED])
    figures = []
    for copy in (False, True):
        drafter = ScriptedDrafter([[*FILE, 3, *EDITED]], lambda _, p: (p * 7) % 10 >= 7)
        engine = Engine(target, drafter, draft_length=Even(copy=copy))
        request = Request([*FILE, 3], 300)
        assert run(engine, request) == [EDITED]
        figures.append(request.stats.tokens_per_round)
    assert figures[1] >= 1.5 * figures[0], figures
