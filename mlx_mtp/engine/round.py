"""One round of speculative decoding on the device: draft, verify, accept. Nothing here waits.

    draft   k times: token and hidden state -> the drafter, over the target's KV -> next token
    verify  target([bonus, d1..dk]) writes KV at length..length+k; logits at k+1 places
    accept  n drafts that the target would have chosen too; it adds one token of its own

The bonus token is the newest one: it is chosen, but not in KV yet. `hidden` is the target's
normed output at the position before it, from which it was chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.engine.kv import Buffers, KVLayout
from mlx_mtp.engine.sampling import SamplerState, choose
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.target import Target


class RoundState(NamedTuple):
    """All rows between two rounds; every field is an array (or a tree of them) on the device."""

    kv: Buffers
    bonus: mx.array  # int32 [B]
    hidden: mx.array  # [B, H]
    length: mx.array  # int32 [B], committed KV slots; the bonus token's position
    budget: mx.array  # int32 [B], the most drafts this row may accept
    active: mx.array  # int32 [B], 1 or 0; an inactive row keeps its length
    sampler: SamplerState
    bias: mx.array | None  # float32 [B, V] added to the target's logits, or None for no row


class RoundShape(NamedTuple):
    """What fixes the shape of a round's graph."""

    draft_len: int
    bound: int  # no row's length exceeds it
    sampler: str  # see sampling.kind_of


def run_round(
    target: Target, drafter: Drafter | None, layout: KVLayout, state: RoundState, shape: RoundShape
) -> tuple[RoundState, mx.array]:
    """Returns the state after the round and its result, int32 [B, k + 3]: the k+1 tokens the
    target chose, how many drafts were accepted (the row emits one token more), and 1 where the
    logits were finite."""
    drafts = draft(target, drafter, layout, state, shape)
    hidden, kv = verify(target, layout, state, drafts, shape)
    logits = target.logits(hidden)
    return accept(state._replace(kv=kv), drafts, hidden, logits, shape)


def draft(
    target: Target, drafter: Drafter | None, layout: KVLayout, state: RoundState, shape: RoundShape
) -> mx.array:
    """The drafter's tokens int32 [B, k] for positions length+1 .. length+k."""
    if shape.draft_len == 0 or drafter is None:
        return mx.zeros((state.bonus.shape[0], 0), dtype=mx.int32)
    view = layout.donor_view(state.kv, state.length, shape.bound)
    rotate = drafter.rotations(view)
    token, hidden, drafts = state.bonus[:, None], state.hidden[:, None], []
    for i in range(1, shape.draft_len + 1):
        out = drafter(target.embed(token), hidden, view, rotate)
        logits, ids = drafter.scores(out)
        places = (state.length + i)[:, None]
        token = choose(
            logits[:, None],
            None if ids is None else ids[:, None],
            places,
            state.sampler,
            shape.sampler,
        )
        drafts.append(token)
        if i < shape.draft_len:
            hidden = drafter.next_hidden(out)
    return mx.concatenate(drafts, -1)


def verify(
    target: Target, layout: KVLayout, state: RoundState, drafts: mx.array, shape: RoundShape
) -> tuple[mx.array, Buffers]:
    """One forward pass over the bonus token and the drafts: hidden [B, k+1, H] and the new KV."""
    block = mx.concatenate([state.bonus[:, None], drafts], -1)
    view = layout.view(state.kv, state.length, block.shape[1], shape.bound)
    return target(block, view), view.buffers


def accept(
    state: RoundState, drafts: mx.array, hidden: mx.array, logits: mx.array, shape: RoundShape
) -> tuple[RoundState, mx.array]:
    """Keeps the drafts up to the first that the target would not have chosen there."""
    rows, k = drafts.shape
    finite = mx.isfinite(logits.sum(-1)).all(-1)
    if state.bias is not None:
        logits = logits + state.bias[:, None]
    places = state.length[:, None] + mx.arange(1, k + 2)
    tokens = choose(logits, None, places, state.sampler, shape.sampler)
    right = mx.cumprod((drafts == tokens[:, :k]).astype(mx.int32), axis=-1)
    n = mx.minimum(right.sum(-1), state.budget)
    every = mx.arange(rows)
    kept = state.active == 1
    after = state._replace(
        bonus=mx.where(kept, tokens[every, n], state.bonus),
        hidden=mx.where(kept[:, None], hidden[every, n], state.hidden),
        length=state.length + (n + 1) * state.active,
    )
    result = [tokens, n[:, None].astype(mx.int32), finite[:, None].astype(mx.int32)]
    return after, mx.concatenate(result, -1)
