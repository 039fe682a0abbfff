"""Sampled text for a seed does not depend on drafting, and follows the target's distribution."""

from __future__ import annotations

import math
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.sampling import SamplerState, Sampling, choose, gumbel, kind_of
from mlx_mtp.engine.session import Engine
from mlx_mtp.errors import UsageError

from .pairs import PROMPT, ScriptedDrafter, forward, make_drafter, make_target, run

FILTERS = [
    Sampling(1.0, seed=11),
    Sampling(0.7, top_k=20, seed=12),
    Sampling(1.3, top_p=0.8, seed=13),
    Sampling(1.0, min_p=0.05, seed=1 << 40),
    Sampling(0.9, top_k=30, top_p=0.9, min_p=0.02, seed=15),
    Sampling(2.0, top_k=90, seed=16),
]


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_the_text_for_a_seed_is_the_same_at_every_draft_length(target, sampling):
    """Cases B03, B04: temperature and seed act the same with and without drafts."""
    wanted = run(Engine(target), Request(PROMPT, 40, sampling, draft_len=0))
    for draft_len in (1, 4, 8):
        near = ScriptedDrafter([PROMPT + wanted[0]], lambda _, p: p % 5 == 0)
        for drafter in (make_drafter(), near):
            request = Request(PROMPT, 40, sampling, draft_len=draft_len)
            assert run(Engine(target, drafter), request) == wanted
            if drafter is near:
                # The script is proposed with a margin that the noise does not overturn.
                assert request.stats.acceptance > 0.3


def test_seeds_differ_and_rows_keep_theirs(target):
    """Cases B04, B06: interleaved requests each say what they say alone."""
    samplings = [Sampling(1.0, seed=s) for s in range(3)]
    alone = [run(Engine(target), Request(PROMPT, 20, s, draft_len=0))[0] for s in samplings]
    assert len({tuple(tokens) for tokens in alone}) == 3
    requests = [Request(PROMPT, 20, s) for s in samplings] + [Request(PROMPT, 20)]
    together = run(Engine(target, make_drafter(), rows=4), *requests)
    assert together[:3] == alone
    assert together[3] == run(Engine(target), Request(PROMPT, 20))[0]


class TableDrafter:
    """Drafts from a table [V, V] of logits by current token: the target's own table makes it
    near-perfect, flat or wrong ones useless."""

    shortlist = None

    def __init__(self, target, table):
        self.table, self.embeddings = table, target.embed(mx.arange(VOCAB)[None])[0]

    def rotations(self, view):
        return None

    def __call__(self, embedding, hidden, view, _):
        distance = ((embedding - self.embeddings[None]) ** 2).sum(-1)
        return mx.argmin(distance, -1)

    def next_hidden(self, out):
        return mx.zeros((out.shape[0], 1, 32))

    def scores(self, out):
        return self.table[out], None


VOCAB = 32


@pytest.fixture(scope="module")
def bigram():
    """A target whose next token depends on the current one alone (attention gives nothing), and
    its table of logits: what makes a near-perfect drafter possible."""
    target = make_target(
        seed=5,
        vocab_size=VOCAB,
        vocab_size_per_layer_input=VOCAB,
        num_hidden_layers=2,
        num_kv_shared_layers=0,
    )
    for layer in target.layers:
        layer.self_attn.o_proj.weight = layer.self_attn.o_proj.weight * 0
    table = mx.concatenate([forward(target, [t])[-1:] for t in range(VOCAB)])
    mx.eval(table)
    return target, table


def filtered(logits: np.ndarray, s: Sampling) -> np.ndarray:
    """The distribution that `s` asks for, in plain float64: an independent statement of it."""
    scaled = logits.astype(np.float64) / s.temperature
    keep = np.ones_like(scaled, dtype=bool)
    if s.top_k:
        keep &= scaled >= np.sort(scaled)[-s.top_k]
    p = np.where(keep, np.exp(scaled - scaled.max()), 0)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= s.top_p]] = 0
    p[p < s.min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize("near_perfect", [True, False])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(1.2, top_k=12, top_p=0.9, min_p=0.02)],
    ids=["bare", "filters"],
)
def test_chi_square_through_the_engine(bigram, near_perfect, sampling):
    """Cases B01, B02: over seeds, the token at the first and at the third place of a block has the
    target's filtered distribution, whatever the drafter; nothing outside it is ever said."""
    target, table = bigram
    wrong = mx.roll(table, 7, axis=-1)
    drafter = TableDrafter(target, table if near_perfect else wrong)
    engine = Engine(target, drafter, rows=3)
    requests = [
        Request(
            [3],
            4,
            Sampling(
                sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed=1000 + s
            ),
            draft_len=3,
        )
        for s in range(800 if near_perfect else 500)
    ]
    texts = run(engine, *requests)
    stats = [r.stats for r in requests]
    accepted = sum(s.accepted for s in stats) / sum(s.drafted for s in stats)
    assert accepted > 0.95 if near_perfect else accepted < 0.3
    logits = np.array(table)
    # The block is [first token, d1, d2, d3]; its places 1 and 3 are the texts' tokens 1 and 3.
    for place in (1, 3):
        seen = Counter((text[place - 1], text[place]) for text in texts)
        before = Counter(text[place - 1] for text in texts)
        statistic = degrees = 0.0
        for token, count in before.items():
            p = filtered(logits[token], sampling)
            outside = [b for (a, b) in seen if a == token and p[b] == 0]
            assert not outside
            big = [b for b in range(VOCAB) if count * p[b] >= 5]
            if len(big) < 2:
                continue
            rest = count - sum(seen[token, b] for b in big)
            pairs = [(seen[token, b], count * p[b]) for b in big]
            if count * (1 - p[big].sum()) >= 5:
                pairs.append((rest, count * (1 - p[big].sum())))
            else:  # too few to test apart: compare within the big ones
                total, mass = count - rest, p[big].sum()
                pairs = [(seen[token, b], total * p[b] / mass) for b in big]
            statistic += sum((o - e) ** 2 / e for o, e in pairs)
            degrees += len(pairs) - 1
        assert degrees >= 10
        # Wilson-Hilferty: the cube root is near normal; 4 sigma is one run in 30,000.
        z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(
            2 / (9 * degrees)
        )
        assert z < 4, (place, statistic, degrees)


def test_gumbel_noise_is_gumbel():
    """Mean 0.5772, variance pi^2 / 6, no ties at the top, the same for the same key only."""
    seed = mx.array([[12345, 6]], dtype=mx.uint32)
    ids = mx.arange(200_000)[None, None]
    noise = gumbel(seed, mx.array([[77]]), ids)
    values = np.array(noise).ravel()
    assert abs(values.mean() - 0.5772) < 0.01
    assert abs(values.var() - math.pi**2 / 6) < 0.03
    top = np.sort(values)[-200:]
    assert len(np.unique(top)) == 200
    assert np.array_equal(values, np.array(gumbel(seed, mx.array([[77]]), ids)).ravel())
    others = [
        gumbel(seed, mx.array([[78]]), ids),
        gumbel(seed + 1, mx.array([[77]]), ids),
        gumbel(mx.array([[12345, 7]], dtype=mx.uint32), mx.array([[77]]), ids),
    ]
    for other in others:
        assert abs(np.corrcoef(values, np.array(other).ravel())[0, 1]) < 0.01


def test_noise_belongs_to_the_token_not_to_the_candidates():
    """A centroid head or top-k sees a few tokens: their noise is what the whole vocabulary has."""
    seed, place = mx.array([[1, 2]], dtype=mx.uint32), mx.array([[5]])
    few = mx.array([[[90_000, 3, 511]]])
    whole = gumbel(seed, place, mx.arange(100_000)[None, None])
    assert mx.array_equal(gumbel(seed, place, few), mx.take_along_axis(whole, few, -1))


def test_candidates_are_chosen_by_their_ids():
    logits, ids = mx.array([[[0.1, 5.0, 0.2]]]), mx.array([[[70, 80, 90]]])
    cold = SamplerState.of([Sampling()])
    assert choose(logits, ids, mx.array([[0]]), cold, "greedy").tolist() == [[80]]
    one = SamplerState.of([Sampling(1.0, top_k=1)])
    assert choose(logits, ids, mx.array([[0]]), one, "few").tolist() == [[80]]


def test_few_and_full_choose_the_same():
    """The cheap way for top_k <= 64 is the same filter as sorting everything."""
    mx.random.seed(3)
    logits = mx.random.normal((2, 3, 500)) * 3
    state = SamplerState.of([Sampling(1.1, 40, 0.9, 0.01, 7), Sampling(0.8, 5, seed=9)])
    places = mx.array([[4, 5, 6], [9, 10, 11]])
    few, full = (choose(logits, None, places, state, kind) for kind in ("few", "full"))
    assert mx.array_equal(few, full)


def test_the_kind_of_a_batch():
    cold, warm, wide = Sampling(), Sampling(1.0, top_k=64), Sampling(1.0, top_k=65)
    assert kind_of([cold, cold]) == "greedy"
    assert kind_of([cold, warm]) == "few"
    assert kind_of([warm, wide]) == kind_of([Sampling(1.0)]) == "full"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top-k is -1"),
        ({"top_k": 1 << 40}, "top-k is 1099511627776; it must be 0"),
        ({"top_p": 0.0}, "top-p is 0.0; it must be above 0"),
        ({"top_p": 1.5}, "top-p is 1.5"),
        ({"min_p": 2.0}, "min-p is 2.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_values_out_of_range(values, words):
    with pytest.raises(UsageError, match=words):
        Sampling(**values)
