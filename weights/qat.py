"""Checkpoints of quantisation-aware training, unpacked to floats: every 32 numbers lie on q4_0's
grid, d * (-8 .. 7), where the largest by magnitude is -8 d. MLX's quantiser would lay a grid of its
own through them; here they get theirs back, as an affine packing with scale d and bias -8 d."""

from __future__ import annotations

import mlx.core as mx

from mlx_mtp.weights.recipe import Scheme

GROUP = 32


def fits(scheme: Scheme) -> bool:
    """Whether the grid can be kept in this packing, in groups of GROUP."""
    return (scheme.bits, scheme.mode) == (4, "affine")


def looks_like_it(rows: mx.array) -> bool:
    """Whether all of these rows [n, K] lie on such grids, and not by being zero. WAITS for the
    device."""
    if rows.shape[-1] % GROUP or not mx.issubdtype(rows.dtype, mx.floating):
        return False
    _, _, right = _grids(rows)
    return bool(right.all()) and bool((rows != 0).any())


def on_grid(rows: mx.array, packed: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    """rows [n, K] and what mx.quantize made of them in groups of GROUP, 4 bits: the same packed by
    their own grids, where they have one."""
    d, values, right = _grids(rows)
    shifts = 4 * mx.arange(8, dtype=mx.uint32)
    words = (values.astype(mx.uint32).reshape(*right.shape, -1, 8) << shifts).sum(-1)
    weight, scales, biases = packed
    weight = mx.where(right[..., None], words, weight.reshape(words.shape)).reshape(weight.shape)
    scales = mx.where(right, d.astype(scales.dtype), scales)
    return weight.astype(mx.uint32), scales, mx.where(right, (-8 * d).astype(biases.dtype), biases)


def _grids(rows: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Of each group of [n, K]: d [n, groups], its values 0..15 [n, groups, GROUP], and whether
    these give the group exactly."""
    groups = rows.astype(mx.float32).reshape(len(rows), -1, GROUP)
    at = mx.argmax(mx.abs(groups), -1, keepdims=True)
    d = mx.take_along_axis(groups, at, -1) / -8
    values = mx.round(groups / mx.where(d == 0, 1.0, d)) + 8
    again = ((values - 8) * d).astype(rows.dtype).astype(mx.float32)
    right = (again == groups).all(-1) & (values >= 0).all(-1) & (values <= 15).all(-1)
    return d[..., 0], values, right
