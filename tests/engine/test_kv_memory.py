"""A round writes KV in place: what it needs beside the buffers does not grow with their capacity.

A copy of a buffer stands beside the old one for a moment, so the peak of a round would be higher
by it. Nothing here is timed.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_mtp.config import FULL
from mlx_mtp.engine.requests import Request

from . import peaks
from .pairs import make_target, run

SLOTS = 1 << 16


def smallest_buffer(engine):
    """Bytes of the smallest of the full layers' arrays: a copy of it must not go unseen."""
    kv = engine._batch.state.kv[engine.layout.text.donors[FULL]]
    return min(part.nbytes for part in kv)


@pytest.mark.parametrize(
    ("rows", "bits", "compile"),
    [(1, None, False), (1, 8, False), (2, None, False), (2, 8, False), (1, None, True)],
)
def test_a_rounds_peak_does_not_grow_with_capacity(rows, bits, compile):
    """One row is written by slice_update, ragged rows by indexed assignment."""
    above = []
    for capacity in (SLOTS // 16, SLOTS):
        engine = peaks.make_engine(rows, bits, compile)
        above.append(peaks.of_rounds(engine, rows, capacity))
    assert above[1] - above[0] < smallest_buffer(engine) / 2


def test_a_copy_would_be_seen():
    """The test above can fail: a name that still holds the old buffers makes a round copy them."""
    engine = peaks.make_engine()
    assert peaks.of_rounds(engine, 1, SLOTS, hold=True) > smallest_buffer(engine)


def test_a_prefill_writes_in_place():
    """Chunk after chunk with no wait between them, into a row that has long buffers already."""
    engine = peaks.make_engine()
    engine.prefill_chunk = 32
    engine._batch.grow(SLOTS - 1)
    mx.eval(engine._batch.state)
    resting = mx.get_active_memory()
    mx.reset_peak_memory()
    request = Request([3] * 300, 2, draft_len=1)
    run(engine, request)
    assert engine.layout.capacity(engine._batch.state.kv) == SLOTS
    assert mx.get_peak_memory() - resting < smallest_buffer(engine) / 2


@pytest.mark.parametrize("chunk", [128, 512])
def test_the_peak_of_a_prefill_does_not_grow_with_the_prompt(chunk):
    """Case J08: beyond KV, the last chunk of 16k tokens takes what that of 8k takes."""
    target = make_target()
    above = [peaks.of_chunk(target, chunk, prompt - chunk) for prompt in (1 << 13, 1 << 14)]
    assert above[1] < 1.1 * above[0]
