"""Peak memory of rounds and prefills beside what rests, for tests and benchmarks/memory.py."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx

from mlx_mtp.config import FULL
from mlx_mtp.engine.kv import KVLayout
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.session import Engine
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.target import Target

from .pairs import drafter_config, make_target, randomise

WIDE: dict[str, Any] = {"global_head_dim": 64}
# Few operations: g++ compiles each where its cache is cold.
SMALL = WIDE | {"num_hidden_layers": 1, "layer_types": [FULL]}
SMALL_TARGET = SMALL | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}


def make_engine(
    rows: int = 1, bits: int | None = None, compile: bool = False, pipeline: bool = True
) -> Engine:
    target = make_target(**(SMALL_TARGET if compile else WIDE))
    drafter = Drafter(drafter_config(ordered=not compile, **(SMALL if compile else WIDE)))
    drafter = randomise(drafter, 2)
    return Engine(target, drafter, rows=rows, kv_bits=bits, compile=compile, pipeline=pipeline)


def of_rounds(engine: Engine, rows: int, capacity: int, hold: bool = False) -> int:
    """Bytes above the resting level in six rounds over buffers of `capacity` slots, one in flight.
    hold: keep a name of the buffers, which makes a round copy them."""
    for i in range(rows):
        engine.add(Request([3 + i, 17, 5][: 3 - i], 40, draft_len=1))
    while any(len(r.request.tokens) < 3 if r.request else True for r in engine._batch.rows):
        engine.step()
    engine._batch.grow(capacity - 1)
    for _ in range(2):
        engine.step()
    held = list(engine._batch.state.kv) if hold else None
    mx.eval(engine._batch.state)
    gc.collect()
    resting = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(6):
        engine.step()
    mx.eval(engine._batch.state)
    assert engine.layout.capacity(engine._batch.state.kv) == capacity
    del held
    return int(mx.get_peak_memory() - resting)


def of_chunk(target: Target, chunk: int, done: int) -> int:
    """Bytes above the resting level for a prompt's last chunk behind `done` tokens."""
    layout = KVLayout(target.config.text, mx.float32)
    kv = layout.allocate(1, 1 << 14)
    mx.eval(kv)
    resting = mx.get_active_memory()
    mx.reset_peak_memory()
    view = layout.view(kv, mx.array([done]), chunk, done)
    hidden = target(mx.zeros((1, chunk), mx.int32), view, keep=1)
    kv = view.buffers
    del view
    mx.eval(hidden, kv)
    return int(mx.get_peak_memory() - resting)
