"""A round writes KV in place: what it needs beside the buffers does not grow with their capacity.

A copy of a buffer stands beside the old one for a moment, so the peak of a round, one in flight,
would be higher by it. Nothing here is timed.
"""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest

from mlx_mtp.config import FULL
from mlx_mtp.engine.kv import KVLayout
from mlx_mtp.engine.requests import Request
from mlx_mtp.models.drafter import Drafter

from .pairs import Engine, drafter_config, make_target, randomise

SLOTS = 1 << 16
WIDE = {"global_head_dim": 64}
# Few operations: g++ compiles each where its cache is cold.
SMALL = WIDE | {"num_hidden_layers": 1, "layer_types": [FULL]}
SMALL_TARGET = SMALL | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}


def make_engine(compile=False, **options):
    target = make_target(**(SMALL_TARGET if compile else WIDE))
    drafter = Drafter(drafter_config(ordered=not compile, **(SMALL if compile else WIDE)))
    return Engine(target, randomise(drafter, 2), compile=compile, **options)


def peak_of_rounds(engine, rows, capacity, hold=False):
    """Bytes above the resting level in six rounds over buffers of `capacity` slots."""
    for i in range(rows):
        engine.add(Request([3 + i, 17, 5][: 3 - i], 40, draft_len=1))
    while any(len(row.request.tokens) < 3 if row.request else True for row in engine._batch.rows):
        engine.step()
    engine._batch.grow(capacity - 1)
    for _ in range(2):
        engine.step()
    held = engine._batch.state.kv if hold else None
    mx.eval(engine._batch.state)
    gc.collect()
    resting = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(6):
        engine.step()
    mx.eval(engine._batch.state)
    assert engine.layout.capacity(engine._batch.state.kv) == capacity
    del held
    return mx.get_peak_memory() - resting


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
        engine = make_engine(rows=rows, kv_bits=bits, compile=compile)
        above.append(peak_of_rounds(engine, rows, capacity))
    assert above[1] - above[0] < smallest_buffer(engine) / 2


def test_a_copy_would_be_seen():
    """The test above can fail: a name that still holds the old buffers makes a round copy them."""
    engine = make_engine()
    assert peak_of_rounds(engine, 1, SLOTS, hold=True) > smallest_buffer(engine)


@pytest.mark.parametrize("chunk", [128, 512])
def test_the_peak_of_a_prefill_does_not_grow_with_the_prompt(chunk):
    """Case J08: beyond KV, a chunk far into a prompt of 16k tokens takes what it takes before."""
    target = make_target()
    layout = KVLayout(target.config.text, mx.float32)

    def peak(done):
        kv = layout.allocate(1, 1 << 14)
        mx.eval(kv)
        resting = mx.get_active_memory()
        mx.reset_peak_memory()
        view = layout.view(kv, mx.array([done]), chunk, done)
        hidden = target(mx.zeros((1, chunk), mx.int32), view, keep=1)
        kv = view.buffers
        del view
        mx.eval(hidden, kv)
        return mx.get_peak_memory() - resting

    assert peak((1 << 14) - chunk) < 1.1 * peak((1 << 13) - chunk)
