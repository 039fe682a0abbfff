"""The same prompt through our target and through mlx-lm's, from one folder."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from mlx_mtp.engine.kv import KVLayout, capacity_for
from mlx_mtp.models.target import Target

PROMPT = [2, 9, 77, 130, 200, 31, 8, 99, 14, 251, 3, 64]


def our_logits(target: Target, dtype: mx.Dtype = mx.float32) -> mx.array:
    """[T, V] for PROMPT, in one pass."""
    layout = KVLayout(target.config.text, dtype)
    buffers = layout.allocate(1, capacity_for(64))
    view = layout.view(buffers, mx.array([0]), len(PROMPT), 0)
    return target.logits(target(mx.array([PROMPT]), view))[0]


def mlx_lm_logits(folder: Path) -> mx.array:
    """[T, V] for PROMPT, with mlx-lm's loader and model, in float32."""
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    return model(mx.array([PROMPT]))[0].astype(mx.float32)


def difference(a: mx.array, b: mx.array) -> float:
    """The largest difference, relative to the largest value."""
    return float(mx.abs(a - b).max() / mx.abs(b).max())
