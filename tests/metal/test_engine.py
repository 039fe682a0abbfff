"""A whole engine through the kernels: what they say is what plain decoding says."""

from __future__ import annotations

import pytest

from mlx_mtp.engine.processors import Processing
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.sampling import Sampling
from mlx_mtp.engine.session import Engine
from tests.engine.pairs import PROMPT, run
from tests.metal.pairs import MIXTURE, make_pair, through_the_emulator, use_everything

KERNELS = {"rows_matrix", "attend_chunks", "attend_join", "head_blocks"}
REQUESTS = {
    "greedy": {},
    "sampled": {"sampling": Sampling(temperature=0.8, top_k=40, seed=3)},
    "biased": {
        "processing": Processing(logit_bias=((5, 9.0),), suppress=(7, 8), min_tokens=4),
        "eos": frozenset({5, 6}),
    },
    "penalised": {"processing": Processing(repetition_penalty=1.3)},
}


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("ordered", [False, True], ids=["dense", "centroids"])
def test_references_say_what_plain_decoding_says(kind, ordered):
    """Where there is no Metal every site runs its stock operations, short list included."""
    target, drafter = make_pair(ordered)
    wanted = run(Engine(target), Request(PROMPT, 16, draft_len=0, **REQUESTS[kind]))
    engine = use_everything(target, drafter)
    for k in (0, 3):
        assert run(engine, Request(PROMPT, 16, draft_len=k, **REQUESTS[kind])) == wanted, k


@pytest.mark.parametrize(
    ("changes", "bits", "kind", "kernels"),
    [
        ({}, None, "greedy", KERNELS),
        ({}, 8, "sampled", KERNELS),
        (MIXTURE, None, "biased", KERNELS | {"expert_rows"}),
    ],
    ids=["dense", "packed KV", "mixture"],
)
def test_kernels_say_what_plain_decoding_says(monkeypatch, changes, bits, kind, kernels):
    target, drafter = make_pair(ordered=bits == 8, **changes)
    request = REQUESTS[kind]
    wanted = run(Engine(target, kv_bits=bits), Request(PROMPT, 8, draft_len=0, **request))
    engine = use_everything(target, drafter, bits)
    ran = through_the_emulator(monkeypatch)
    assert run(engine, Request(PROMPT, 8, draft_len=2, **request)) == wanted
    assert kernels <= set(ran)
