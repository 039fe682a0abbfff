"""Whether a verify pass of several rows gives, bit for bit, what passes of one row give here.

On a CPU in float32 it does. On a GPU, MLX multiplies one row and several by kernels of their own,
which may round differently, and a near-tie can then fall the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import mlx.core as mx

from mlx_mtp.engine.draft_length import MAX_DRAFT
from mlx_mtp.engine.kv import BLOCK, Buffers, KVLayout, attended
from mlx_mtp.engine.session import Engine
from mlx_mtp.errors import UsageError
from mlx_mtp.models.target import Target

# Positions behind which a block is verified: around these, attention changes its kernel, a ring of
# every published window has come round, and a block crosses a border of what is attended to.
CONTEXTS = (8, 250, 1020, 4092)
NOISE = 0.2  # of keys and values that stand for a text: scores then are neither flat nor all one's

Pass = Callable[[mx.array, mx.array, Buffers], tuple[mx.array, Buffers]]


def probe(target: Target, layout: KVLayout, compiled: bool = False) -> dict[int, float]:
    """Rows of a verify pass (2 to 9) -> the largest difference between its logits, and what it
    writes to KV, and those of as many passes of one row, at all CONTEXTS that the model takes. 0.0
    is bit-equal; NaN where numbers are not finite. WAITS for the device."""
    most = target.config.text.max_position_embeddings - BLOCK
    found = dict.fromkeys(range(2, BLOCK + 1), 0.0)
    for context in sorted({min(context, most) for context in CONTEXTS}):
        for rows, difference in _differences(target, layout, context, compiled).items():
            # Not `max`, which may lose a NaN.
            found[rows] = difference if not difference <= found[rows] else found[rows]
    return found


def most_drafts(differences: Mapping[int, float]) -> int:
    """The longest draft such that it and all shorter ones are verified bit for bit."""
    equal = (differences[drafts + 1] == 0.0 for drafts in range(1, MAX_DRAFT + 1))
    return next((i for i, same in enumerate(equal) if not same), MAX_DRAFT)


def limit(engine: Engine) -> None:
    """Have an engine draft only what it verifies exactly. WAITS for the device. Raises UsageError
    where that is nothing, or where it decodes several rows, whose passes are not probed."""
    if engine.most_rows > 1:
        raise UsageError("exact mode decodes one request at a time: leave --parallel away")
    if engine.drafter is None:
        return
    differences = probe(engine.target, engine.layout, engine.policy.compile)
    most = most_drafts(differences)
    if most == MAX_DRAFT:
        return
    why = (
        f"exact mode, and a verify pass of {most + 2} rows differs from plain decoding on this "
        f"machine by up to {differences[most + 2]:.1e}"
    )
    if most == 0:
        raise UsageError(f"{why}, so that nothing can be drafted; --draft-len 0 decodes plainly")
    engine.limit_drafts(most, f"{why}; at most {most} can be drafted")


def _differences(
    target: Target, layout: KVLayout, context: int, compiled: bool
) -> dict[int, float]:
    slots = attended(context + BLOCK, 1 << 40)
    kinds = layout.text.layer_types[: layout.text.num_owners]
    kv = layout.allocate(1, slots)
    for i, (kind, layer) in enumerate(zip(kinds, kv, strict=True)):
        shape = (*layer[0].shape[:3], layout.text.head_dim_of(kind))
        keys, values = (
            mx.random.normal(shape, key=key) * NOISE for key in mx.random.split(mx.random.key(i))
        )
        kv[i] = layout.encode(kind, keys, values)
    ids = mx.random.randint(0, layout.text.vocab_size, (1, BLOCK), key=mx.random.key(context))
    mx.eval(kv, ids)

    def run(rows: int, bound: int) -> Pass:
        step = partial(_verify, target, layout, bound)
        return mx.compile(step) if compiled else step

    one, logits = kv, list[mx.array]()
    for i in range(BLOCK):
        scores, one = run(1, context + i)(ids[:, i : i + 1], mx.array([context + i]), one)
        logits.append(scores)
        mx.eval(scores, one)
    found = {}
    for rows in range(2, BLOCK + 1):
        block, written = run(rows, context)(ids[:, :rows], mx.array([context]), kv)
        parts = [_difference(block, mx.concatenate(logits[:rows], 1))]
        positions = context + mx.arange(rows)
        for layer, alone in zip(written, one, strict=True):
            at = positions % layer[0].shape[2]
            new, wanted = (
                layout.decode(tuple(mx.take(part, at, 2) for part in parts_of))
                for parts_of in (layer, alone)
            )
            parts += map(_difference, new, wanted)
        found[rows] = float(mx.stack(parts).max())
        del written
    return found


def _verify(
    target: Target, layout: KVLayout, bound: int, ids: mx.array, length: mx.array, kv: Buffers
) -> tuple[mx.array, Buffers]:
    view = layout.view(kv, length, ids.shape[1], bound)
    return target.logits(target(ids, view)), view.buffers


def _difference(a: mx.array, b: mx.array) -> mx.array:
    return mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max()
