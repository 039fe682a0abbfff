"""From logits to token ids, so that the text for a seed does not depend on the draft length.

The noise of a choice is a pure function of (seed, absolute position of the token, token id).
Target and drafter choose argmax(filtered logits + Gumbel noise) with the same noise, and a draft
is accepted where both chose the same: the target's choice is always the one that plain decoding
would have made, and its distribution is exactly the target's (the Gumbel-max trick).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.errors import UsageError

FEW = 64  # up to this top_k, candidates are picked before anything is sorted


@dataclass(frozen=True)
class Sampling:
    """How a request chooses its tokens. Temperature 0 is greedy and ignores the rest.

    top_k 0 and top_p 1 and min_p 0 are off. Filters apply in transformers' order: temperature,
    top_k, top_p, min_p. Raises UsageError for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 100):
            raise UsageError(f"temperature is {self.temperature}; it must be 0 (greedy) to 100")
        if not 0 <= self.top_k < 1 << 31:
            raise UsageError(f"top-k is {self.top_k}; it must be 0 (off) to 2^31 - 1 tokens")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p is {self.top_p}; it must be above 0 and at most 1 (off)")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min-p is {self.min_p}; it must be 0 (off) to 1")
        if not 0 <= self.seed < 1 << 64:
            raise UsageError(f"seed is {self.seed}; it must be 0 to 2^64 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class SamplerState(NamedTuple):
    """The samplers of all rows as arrays: seed uint32 [B, 2], the others [B]."""

    seed: mx.array
    temperature: mx.array
    top_k: mx.array
    top_p: mx.array
    min_p: mx.array

    @classmethod
    def of(cls, rows: list[Sampling]) -> SamplerState:
        return cls(
            mx.array([[r.seed & 0xFFFFFFFF, r.seed >> 32] for r in rows], dtype=mx.uint32),
            mx.array([r.temperature for r in rows], dtype=mx.float32),
            mx.array([r.top_k for r in rows], dtype=mx.int32),
            mx.array([r.top_p for r in rows], dtype=mx.float32),
            mx.array([r.min_p for r in rows], dtype=mx.float32),
        )


def kind_of(rows: list[Sampling]) -> str:
    """The cheapest way to choose that serves all rows: 'greedy', 'few' or 'full'."""
    sampled = [r for r in rows if not r.greedy]
    if not sampled:
        return "greedy"
    return "few" if all(0 < r.top_k <= FEW for r in sampled) else "full"


def choose(
    logits: mx.array, ids: mx.array | None, positions: mx.array, state: SamplerState, kind: str
) -> mx.array:
    """Logits [B, T, C] of the tokens at `positions` [B, T] -> chosen token ids int32 [B, T].

    `ids` [B, T, C] names the tokens that the logits belong to; None means C is the vocabulary.
    """
    best = mx.argmax(logits, -1)
    greedy = _pick(ids, best)
    if kind == "greedy":
        return greedy
    scores = logits.astype(mx.float32)
    if kind == "few" and scores.shape[-1] > FEW:
        few = mx.argpartition(-scores, FEW - 1, axis=-1)[..., :FEW]
        scores = mx.take_along_axis(scores, few, -1)
        ids = few if ids is None else mx.take_along_axis(ids, few, -1)
    order = mx.argsort(-scores, axis=-1)
    scores = mx.take_along_axis(scores, order, -1)
    ids = order if ids is None else mx.take_along_axis(ids, order, -1)
    cold = state.temperature == 0
    scores = scores / mx.where(cold, 1.0, state.temperature)[:, None, None]
    scores = _filter(scores, state) + gumbel(state.seed, positions, ids)
    sampled = _pick(ids, mx.argmax(scores, -1))
    return mx.where(cold[:, None], greedy, sampled)


def gumbel(seed: mx.array, positions: mx.array, ids: mx.array) -> mx.array:
    """Standard Gumbel noise, float32 [B, T, C], from (seed uint32 [B, 2], position [B, T], token
    id [B, T, C]) alone.

    -log(-log(1 - w)) with w uniform in (0, 1): small w is the upper tail, where float32 is fine
    (a float32 uniform near 1 saturates at 16.6, with ties).
    """
    first = _mix(seed[:, :1] + _mix(positions.astype(mx.uint32)))
    second = _mix(seed[:, 1:] ^ _mix(first + 0x9E3779B9))
    bits = _mix(_mix(ids.astype(mx.uint32) + first[..., None]) ^ second[..., None])
    w = (bits.astype(mx.float32) + 0.5) * 2.0**-32
    w = mx.minimum(w, 1 - 2.0**-24)
    return -mx.log(-mx.log1p(-w))


def _mix(x: mx.array) -> mx.array:
    """murmur3's 32-bit finaliser: a bijection that spreads every bit of its input."""
    x = (x ^ (x >> 16)) * mx.array(0x85EBCA6B, dtype=mx.uint32)
    x = (x ^ (x >> 13)) * mx.array(0xC2B2AE35, dtype=mx.uint32)
    return x ^ (x >> 16)


def _filter(scores: mx.array, state: SamplerState) -> mx.array:
    """Sorted scores [B, T, C], best first, with -inf where top-k, top-p or min-p cut."""

    def column(x: mx.array) -> mx.array:
        return x[:, None, None]

    rank = mx.arange(scores.shape[-1])
    off = column(state.top_k == 0)
    scores = mx.where(off | (rank < column(state.top_k)), scores, -mx.inf)
    probs = mx.softmax(scores, -1)
    # A token stays while those before it hold less than top_p: the first always does.
    keep = (rank == 0) | (mx.cumsum(probs, -1) - probs < column(state.top_p))
    keep &= probs >= column(state.min_p) * probs[..., :1]
    return mx.where(keep, scores, -mx.inf)


def _pick(ids: mx.array | None, index: mx.array) -> mx.array:
    chosen = index if ids is None else mx.take_along_axis(ids, index[..., None], -1)[..., 0]
    return chosen.astype(mx.int32)
