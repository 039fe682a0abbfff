"""One round of speculative decoding on the device: draft, verify, accept. Nothing here waits.

    draft   k times: token and hidden state -> the drafter, over the target's KV -> next token;
            or what follows the newest tokens where they stand earlier in the text
    verify  target([bonus, d1..dk]) writes KV at length..length+k; logits at k+1 places
    accept  n drafts that the target would have chosen too; it adds one token of its own

Where a grammar narrows the choice, the host has to read the drafts to say what may follow each of
them: `propose` is draft and verify, and `accept` comes with masks once these are known.

The bonus token is the newest one: it is chosen, but not in KV yet. `hidden` is the target's
normed output at the position before it, from which it was chosen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import mlx.core as mx

from mlx_mtp.engine.copying import Copies
from mlx_mtp.engine.kv import Buffers, KVLayout, attended
from mlx_mtp.engine.processors import ProcessorState, count, counts_before, permit, process
from mlx_mtp.engine.requests import Request, TokenLogprob
from mlx_mtp.engine.sampling import FEW, SamplerState, choose
from mlx_mtp.kernels.head import Adjustments
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.layers import on_cpu
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
    processors: ProcessorState


class RoundShape(NamedTuple):
    """What fixes the shape of a round's graph."""

    steps: int  # drafts by the drafter
    bound: int  # no row's length exceeds it
    sampler: str  # see sampling.kind_of
    copied: int = 0  # drafts copied from the text, in place of the drafter's where they apply
    logprobs: int | None = None  # how many likeliest tokens to report beside the chosen one

    @property
    def draft_len(self) -> int:
        return max(self.steps, self.copied)


class Logprobs(NamedTuple):
    """By the target's own logits, before processors and temperature, at every place of a block:
    of the chosen token [B, T], and of the likeliest ones [B, T, N] with their ids."""

    chosen: mx.array
    ids: mx.array
    likeliest: mx.array


class RoundResult(NamedTuple):
    """tokens: int32 [B, k + 4], the k+1 tokens the target chose, how many drafts were accepted
    (the row emits one token more; -1: its grammar leaves nothing to say), 1 where the logits were
    finite, 1 where the drafts were copied. differs: bool, of several ranks, whether this one would
    have drafted or chosen otherwise than rank 0."""

    tokens: mx.array
    logprobs: Logprobs | None
    differs: mx.array | None = None


class Proposed(NamedTuple):
    """drafts: int32 [B, k], of which -1 is none; copied: as in `RoundResult`; hidden [B, k+1, H]
    and KV of the verify pass; differs: as in `RoundResult`."""

    drafts: mx.array
    copied: mx.array
    hidden: mx.array
    kv: Buffers
    differs: mx.array | None = None


def run_round(
    target: Target,
    drafter: Drafter | None,
    layout: KVLayout,
    state: RoundState,
    copies: Copies | None,
    shape: RoundShape,
    beside: mx.Device | mx.Stream | None = None,
) -> tuple[RoundState, RoundResult]:
    """The state after one round, and its result; `beside` as in `propose`."""
    proposed = propose(target, drafter, layout, state, copies, shape, beside)
    return accept(target, state, proposed, None, shape)


def propose(
    target: Target,
    drafter: Drafter | None,
    layout: KVLayout,
    state: RoundState,
    copies: Copies | None,
    shape: RoundShape,
    beside: mx.Device | mx.Stream | None = None,
) -> Proposed:
    """Draft and verify. `beside`: where the drafter runs, if not where the target does; weights
    and KV lie in memory that both see."""
    with nullcontext() if beside is None else mx.stream(beside):
        drafts = draft(target, drafter, layout, state, shape)
    copied = mx.zeros_like(state.bonus)
    if shape.copied and copies is not None:
        pad = [(0, 0), (0, shape.draft_len - shape.steps)]
        found, copied = copies.drafts(state.bonus, state.length, shape.draft_len)
        # -1 is no token: the target never chooses it.
        drafts = mx.where(copied[:, None] == 1, found, mx.pad(drafts, pad, constant_values=-1))
    differs = None
    if target.ranks.size > 1 and drafts.size:
        own, drafts = drafts, target.ranks.leaders(drafts)
        differs = (own != drafts).any()
    return Proposed(drafts, copied, *verify(target, layout, state, drafts, shape), differs)


def draft(
    target: Target, drafter: Drafter | None, layout: KVLayout, state: RoundState, shape: RoundShape
) -> mx.array:
    """The drafter's tokens int32 [B, steps] for positions length+1 .. length+steps."""
    if shape.steps == 0 or drafter is None:
        return mx.zeros((state.bonus.shape[0], 0), dtype=mx.int32)
    view = layout.donor_view(state.kv, state.length, shape.bound)
    rotate = drafter.rotations(view)
    token, hidden, drafts = state.bonus[:, None], state.hidden[:, None], []
    processors, emitted = state.processors, mx.ones_like(state.bonus)[:, None]
    for i in range(1, shape.steps + 1):
        out = drafter(target.embed(token), hidden, view, rotate)
        places = (state.length + i)[:, None]
        said = None if processors.counts is None else processors.counts[:, None]
        scores = score(drafter, out[:, None], places, processors, said, shape)
        token = choose(scores.values, scores.ids, places, state.sampler, shape.sampler)
        drafts.append(token)
        view.start(token)
        if i < shape.steps:
            hidden = drafter.next_hidden(out)
            processors = count(processors, token, emitted)
    return mx.concatenate(drafts, -1)


def verify(
    target: Target, layout: KVLayout, state: RoundState, drafts: mx.array, shape: RoundShape
) -> tuple[mx.array, Buffers]:
    """One forward pass over the bonus token and the drafts: hidden [B, k+1, H] and the new KV."""
    known = drafts if shape.copied == 0 else mx.maximum(drafts, 0)
    block = mx.concatenate([state.bonus[:, None], known], -1)
    view = layout.view(state.kv, state.length, block.shape[1], shape.bound)
    return target(block, view), view.buffers


class Scores(NamedTuple):
    """Processed logits [B, T, C] of the tokens `ids` [B, T, C] (None: of all tokens); and all of
    the model's [B, T, V], or where it gave a short list, whether they were finite."""

    values: mx.array
    ids: mx.array | None
    logits: mx.array | None
    tested: mx.array | None = None

    @property
    def finite(self) -> mx.array:
        """bool [B, T]; nobody asks it of a drafter's."""
        if self.tested is not None:
            return self.tested
        assert self.logits is not None
        return mx.isfinite(self.logits.sum(-1))


def score(
    model: Target | Drafter,
    hidden: mx.array,
    places: mx.array,
    processors: ProcessorState,
    said: mx.array | None,
    shape: RoundShape,
    masks: mx.array | None = None,
) -> Scores:
    """What a choice needs of the logits behind `hidden` [B, T, H]: all of them, or a short list
    where the model's head makes one and nothing asks for more. `masks`: see `permit`."""
    (B, T), short = places.shape, model.shortlist
    all_needed = shape.sampler == "full" or shape.logprobs is not None or said is not None
    all_needed |= masks is not None
    if short is not None and B * T in short.rows and not all_needed:
        early = None if processors.until is None else places < processors.until[:, None]
        adjust = Adjustments(
            processors.bias,
            processors.early,
            None if early is None else early.flatten().astype(mx.int32),
        )
        rows = hidden.reshape(B * T, -1)
        few = None if shape.sampler == "greedy" else FEW
        found = short.candidates(rows, B, adjust, few, model.clusters_of(rows))
        values, tokens = (part.reshape(B, T, -1) for part in found[:2])
        return Scores(values, tokens, None, found.finite.reshape(B, T))
    logits, ids = model.scores(hidden)
    values = process(logits, ids, places, processors, said)
    if masks is not None:
        values = permit(values, ids, masks)
    return Scores(values, ids, logits)


def accept(
    target: Target,
    state: RoundState,
    proposed: Proposed,
    masks: mx.array | None,
    shape: RoundShape,
) -> tuple[RoundState, RoundResult]:
    """Keeps the drafts up to the first that the target would not have chosen there, or behind
    which nothing can be said. `masks` [B, k+1, .] say what may be chosen, see `permit`."""
    drafts, copied, hidden, kv, differs = proposed
    rows, k = drafts.shape
    places = state.length[:, None] + mx.arange(1, k + 2)
    said = counts_before(state.processors, drafts)
    scores = score(target, hidden, places, state.processors, said, shape, masks)
    tokens = choose(scores.values, scores.ids, places, state.sampler, shape.sampler)
    right = drafts == tokens[:, :k]
    if masks is not None:
        alive = scores.values.max(-1) > -mx.inf
        right &= alive[:, 1:]
    n = mx.minimum(mx.cumprod(right.astype(mx.int32), axis=-1).sum(-1), state.budget)
    if masks is not None:
        n = mx.where(alive[:, 0], n, -1)
    tail = mx.stack([n, scores.finite.all(-1), copied], -1).astype(mx.int32)
    chosen = mx.concatenate([tokens, tail], -1)
    logprobs = logprobs_of(scores.logits, tokens, shape.logprobs)
    if target.ranks.size > 1:
        # A near tie may fall otherwise on another machine, and what then follows would not fit.
        own, chosen = chosen, target.ranks.leaders(chosen)
        here = (own != chosen).any()
        differs = here if differs is None else differs | here
        tokens, n = chosen[:, : k + 1], chosen[:, k + 1]
    every = mx.arange(rows)
    kept = state.active == 1
    emitted = (mx.arange(k + 1) <= n[:, None]) * state.active[:, None]
    after = state._replace(
        kv=kv,
        bonus=mx.where(kept, tokens[every, n], state.bonus),
        hidden=mx.where(kept[:, None], hidden[every, n], state.hidden),
        length=state.length + (n + 1) * state.active,
        processors=count(state.processors, tokens, emitted),
    )
    return after, RoundResult(chosen, logprobs, differs)


def logprobs_of(
    logits: mx.array | None, tokens: mx.array, likeliest: int | None
) -> Logprobs | None:
    """Logits [B, T, V] and the tokens chosen [B, T] -> their logprobs, or None if not asked for."""
    if likeliest is None or logits is None:
        return None
    logprobs = logits.astype(mx.float32)
    logprobs = logprobs - mx.logsumexp(logprobs, -1, keepdims=True)
    best = mx.argpartition(-logprobs, max(likeliest - 1, 0), axis=-1)[..., :likeliest]
    chosen = mx.take_along_axis(logprobs, tokens[..., None], -1)[..., 0]
    return Logprobs(chosen, best.astype(mx.int32), mx.take_along_axis(logprobs, best, -1))


class ReadLogprobs:
    """The logprobs of a result on the host; read after its tokens, so that nothing waits."""

    def __init__(self, result: RoundResult):
        self._lists = [table.tolist() for table in result.logprobs] if result.logprobs else None

    def of(self, place: int, request: Request) -> list[TokenLogprob]:
        """Of every token of a row's block, as the request asks for."""
        if self._lists is None or request.logprobs is None:
            return []
        shown = []
        for chosen, ids, values in zip(*(cast(Any, t)[place] for t in self._lists), strict=True):
            best = sorted(zip(ids, values, strict=True), key=lambda pair: -pair[1])
            shown.append(TokenLogprob(chosen, tuple(best[: request.logprobs])))
        return shown


class Rounds:
    """run_round for one pair, eager or through a compiled function for every shape.

    Weights are captured by the compiled functions: handing them in as inputs cost twice the time
    a round. `traces` counts the functions that were made.
    """

    KEPT = 32  # compiled functions; a long text passes through many attended lengths

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        layout: KVLayout,
        compiled: bool,
        beside: mx.Device | mx.Stream | None = None,
    ):
        self.target, self.drafter, self.layout = target, drafter, layout
        self.stepwise = replace(layout, stepwise=on_cpu())
        self.compiled, self.beside = compiled, beside
        self.traces = 0
        self._runs: OrderedDict[tuple[object, ...], Callable[..., Any]] = OrderedDict()

    def __call__(
        self, state: RoundState, copies: Copies | None, shape: RoundShape
    ) -> tuple[RoundState, RoundResult, bool]:
        """The state after the round, its result, and whether a function was traced for it."""
        run, fresh = self._drafting(run_round, state, copies, shape)
        return (*run(state, copies), fresh)

    def propose(
        self, state: RoundState, copies: Copies | None, shape: RoundShape
    ) -> tuple[Proposed, bool]:
        """The first part of a round under a grammar, and whether a function was traced."""
        run, fresh = self._drafting(propose, state, copies, shape)
        return run(state, copies), fresh

    def accept(
        self, state: RoundState, proposed: Proposed, masks: mx.array | None, shape: RoundShape
    ) -> tuple[RoundState, RoundResult, bool]:
        """The rest of it."""
        kv, proposed = proposed.kv, proposed._replace(kv=[])
        key = accept, shape._replace(bound=0), masks is None
        run, fresh = self._function(key, state, partial(accept, self.target, shape=shape))
        after, result = run(state, proposed, masks)
        return after._replace(kv=kv), result, fresh

    def _drafting(
        self, part: Callable[..., Any], state: RoundState, copies: Copies | None, shape: RoundShape
    ) -> tuple[Callable[..., Any], bool]:
        """`run_round` or `propose` as a function of state and copies; see `_function`."""
        layout, beside, capacity = self.stepwise, self.beside, self.layout.capacity(state.kv)
        if self.compiled:
            # One trace for all bounds that attend to the same slots.
            layout, beside, tokens = self.layout, None, shape.draft_len + 1
            shape = shape._replace(bound=attended(shape.bound + tokens, capacity) - tokens)
        function = partial(part, self.target, self.drafter, layout, shape=shape, beside=beside)
        return self._function((part, shape, capacity, copies is None), state, function)

    def _function(
        self, key: tuple[object, ...], state: RoundState, function: Callable[..., Any]
    ) -> tuple[Callable[..., Any], bool]:
        """`function`, compiled where that is wanted, once for all that the shapes of its arrays
        depend on; and whether it has to be traced."""
        if not self.compiled:
            return function, False
        unused = tuple(table is None for table in state.processors)
        key = (*key, state.bonus.shape[0], unused)
        run = self._runs.pop(key, None)
        fresh = run is None
        if run is None:
            self.traces += 1
            run = self.target.ranks.counted(mx.compile(function))
        self._runs[key] = run
        if len(self._runs) > self.KEPT:
            self._runs.popitem(last=False)
        return run, fresh
