"""Compiled rounds: the same text, and one trace a shape. g++ compiles kernels where MLX's cache of
them is cold, so the models here are as small as they get."""

from __future__ import annotations

import shutil
import sys

import mlx.core as mx
import pytest

from mlx_mtp.engine.requests import Request

from .pairs import PROMPT, plain, run
from .peaks import make_engine

pytestmark = pytest.mark.skipif(
    sys.platform == "linux" and shutil.which("g++") is None and not mx.cuda.is_available(),
    reason="MLX compiles CPU kernels with g++, which is not installed",
)


@pytest.mark.parametrize("pipeline", [True, False])
def test_the_text_is_the_same_and_a_shape_is_traced_once(pipeline):
    engine = make_engine(compile=True, rows=2, pipeline=pipeline)
    prompts = [PROMPT, [7, 3]]
    wanted = [plain(engine.target, prompt, 20) for prompt in prompts]
    assert run(engine, Request(PROMPT, 20, draft_len=1)) == wanted[:1]
    assert engine.describe()["compile"] is True
    alone = engine.rounds.traces
    assert run(engine, *(Request(prompt, 20, draft_len=1) for prompt in prompts)) == wanted
    both = engine.rounds.traces
    assert alone < both
    again = [Request(prompt, 20, draft_len=1) for prompt in prompts]
    assert run(engine, *again) == wanted
    assert engine.rounds.traces == both


def test_a_race_decides_and_leaves_no_trace_in_the_text():
    engine = make_engine(compile=True)
    engine.calibrate(rounds=2)
    assert engine.policy.compile is engine.rounds.compiled
    assert run(engine, Request(PROMPT, 12, draft_len=1)) == [plain(engine.target, PROMPT, 12)]
