"""Our models and engine against transformers itself, on checkpoints that it saves here and now."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mtp.engine import round
from mlx_mtp.engine.session import Engine, Request
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.target import Target
from mlx_mtp.weights.load import load_drafter, load_target
from tests.oracle.models import TOLERANCE, Row, difference, draft
from tests.oracle.shapes import DRAFTERS, TARGETS, VOCAB, WINDOW, Config, flat

torch = pytest.importorskip("torch", reason="needs the extra 'oracle'")
pytest.importorskip("transformers", reason="needs the extra 'oracle'")
reference = pytest.importorskip("tests.oracle.reference")

pytestmark = pytest.mark.oracle

SHAPES = list(TARGETS)
SEEDS = (31, 32)


@dataclass
class Both:
    """One random pair of checkpoints in both implementations."""

    theirs: Any
    their_drafter: Any
    ours: Target
    our_drafter: Drafter


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """pair(name, seed) -> Both, made once."""
    torch.set_num_threads(1)

    @functools.cache
    def make(name: str, seed: int) -> Both:
        theirs = reference.build(TARGETS[name], seed)
        their_drafter = reference.build(DRAFTERS[name], seed + 100)
        folder = tmp_path_factory.mktemp(name)
        ours = load_target(reference.save(theirs, folder / "target"))
        our_drafter = load_drafter(reference.save(their_drafter, folder / "drafter"))
        return Both(theirs, their_drafter, ours, our_drafter)

    return make


def to_mlx(tensor: Any) -> mx.array:
    return mx.array(tensor.numpy())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SHAPES)
def test_logits(pair: Any, name: str, seed: int) -> None:
    both = pair(name, seed)
    ids = reference.random_ids(6 * WINDOW, VOCAB, seed)
    run = reference.run(both.theirs, ids)
    row = Row(both.ours)
    hidden = row.feed_in_chunks(ids, WINDOW + 1)
    assert difference(hidden, to_mlx(run.hidden)) < TOLERANCE
    assert difference(row.logits(hidden), to_mlx(run.logits)) < TOLERANCE


def test_logits_far_from_the_start(pair: Any) -> None:
    """Positions where a float32 angle has few digits left behind the point."""
    both = pair("12b", SEEDS[0])
    ids = reference.random_ids(700, VOCAB, 1)
    run = reference.run(both.theirs, ids)
    row = Row(both.ours, room=len(ids))
    hidden = row.feed_in_chunks(ids, 256)
    assert difference(row.logits(hidden), to_mlx(run.logits)) < 10 * TOLERANCE


@pytest.mark.parametrize("name", ["e2b", "12b", "26b"])
def test_logits_of_a_text_only_checkpoint(name: str, tmp_path: Path) -> None:
    """`gemma4_text` and `gemma4_unified_text`: a flat config, tensors under `model.`."""
    config: Config = flat(TARGETS[name])
    theirs = reference.build(config, seed=41)
    ids = reference.random_ids(3 * WINDOW, VOCAB, seed=41)
    row = Row(load_target(reference.save(theirs, tmp_path)))
    logits = row.logits(row.feed(ids))
    assert difference(logits, to_mlx(reference.run(theirs, ids).logits)) < TOLERANCE


def test_embeddings_in_bfloat16(tmp_path: Path) -> None:
    """The factor sqrt(H) is rounded to the weights' type first: 5.65625 here, not 5.65685."""
    theirs = reference.build(TARGETS["12b"], seed=51)
    ours = load_target(reference.save(theirs, tmp_path))
    theirs.bfloat16()
    ours.set_dtype(mx.bfloat16)
    with torch.no_grad():
        wanted = theirs.get_input_embeddings()(torch.tensor([[5, 6, 7]])).float()
    assert mx.array_equal(ours.embed(mx.array([[5, 6, 7]])).astype(mx.float32), to_mlx(wanted))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SHAPES)
def test_drafts(pair: Any, name: str, seed: int) -> None:
    """Each implementation drafts from its own KV, from inside the first window to far past it."""
    both = pair(name, seed)
    ids = reference.random_ids(6 * WINDOW, VOCAB, seed + 1)
    run = reference.run(both.theirs, ids)
    row = Row(both.ours)
    for committed in range(2, len(ids), 5):
        hidden = row.feed(ids[row.length : committed])[-1]
        bonus = int(run.logits[committed - 1].argmax())
        theirs = reference.draft(
            both.their_drafter,
            both.theirs,
            run.kv,
            run.hidden[committed - 1],
            bonus,
            committed,
            steps=6,
        )
        tokens, logits, states = draft(both.our_drafter, row, hidden, bonus, steps=6)
        assert tokens == theirs.tokens, committed
        assert difference(states, to_mlx(theirs.hidden)) < TOLERANCE
        their_logits = to_mlx(theirs.logits)
        ours = mx.where(mx.isfinite(logits), logits, their_logits)
        assert difference(ours, their_logits) < TOLERANCE


@pytest.mark.parametrize("name", SHAPES)
def test_drafts_after_any_number_accepted(pair: Any, name: str) -> None:
    """Rounds in which 0, 1, .. 4 of 4 drafts are right: each next round drafts what transformers'
    drafter does after the text so far. A wrong hidden state or a rejected slot left visible would
    never show in the text, only in how many drafts are accepted."""
    both, k = pair(name, SEEDS[0]), 4
    prompt = reference.random_ids(5, VOCAB, seed=66)
    text = prompt + reference.greedy(both.theirs, prompt, tokens=6 * WINDOW)
    run = reference.run(both.theirs, text)
    row = Row(both.ours)
    state, shape = row.round(row.feed(prompt)[-1], bonus=text[len(prompt)], draft_len=k)
    committed, accepted = len(prompt), 0
    while committed + k + 1 < len(text):
        shape = shape._replace(bound=committed)
        theirs = reference.draft(
            both.their_drafter,
            both.theirs,
            run.kv,
            run.hidden[committed - 1],
            text[committed],
            committed,
            steps=k,
        )
        ours = round.draft(both.ours, both.our_drafter, row.layout, state, shape)
        assert ours.tolist() == [theirs.tokens], (committed, accepted)
        proposed = text[committed + 1 : committed + 1 + k]
        proposed[accepted:] = [(token + 1) % VOCAB for token in proposed[accepted:]]
        drafts = mx.array([proposed], dtype=mx.int32)
        hidden, kv = round.verify(both.ours, row.layout, state, drafts, shape)
        made = round.Proposed(drafts, mx.zeros((1,), mx.int32), hidden, kv)
        state, _ = round.accept(both.ours, state, made, None, shape)
        committed += accepted + 1
        assert int(state.length) == committed
        assert int(state.bonus) == text[committed]
        accepted = (accepted + 1) % (k + 1)


@pytest.mark.parametrize("name", SHAPES)
def test_the_reference_feeds_the_drafter_as_transformers_does(pair: Any, name: str) -> None:
    """`reference.draft` differs from transformers' candidate generator in the position alone,
    where the prompt is within the window and nothing was rejected."""
    both = pair(name, SEEDS[0])
    prompt = reference.random_ids(WINDOW - 1, VOCAB, seed=61)
    run = reference.run(both.theirs, prompt)
    bonus = int(run.logits[-1].argmax())
    theirs = reference.candidates(both.their_drafter, both.theirs, prompt, bonus, steps=4)
    same = reference.draft(
        both.their_drafter,
        both.theirs,
        run.kv,
        run.hidden[-1],
        bonus,
        committed=len(prompt),
        steps=4,
        position=len(prompt),
    )
    assert same.tokens == theirs


@pytest.mark.parametrize("draft_len", [0, 4])
@pytest.mark.parametrize("name", ["e2b", "12b", "26b"])
def test_greedy_text(pair: Any, name: str, draft_len: int) -> None:
    """The engine writes what transformers' `generate` writes, far past the window."""
    both = pair(name, SEEDS[1])
    prompt = reference.random_ids(WINDOW + 2, VOCAB, seed=71)
    wanted = reference.greedy(both.theirs, prompt, tokens=60)
    engine = Engine(both.ours, both.our_drafter, prefill_chunk=WINDOW)
    request = Request(prompt, max_tokens=60, draft_len=draft_len)
    engine.add(request)
    while request.finish_reason is None:
        engine.step()
    engine.close()
    assert request.tokens == wanted
    assert request.finish_reason == "length"
