"""What a request does to logits before a token is chosen from them: bias, bans and penalties.

A processor counts the drafts before a place as said, so every place of a verify pass sees what
plain decoding would have seen there, and the text is the same at every draft length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.errors import UsageError


@dataclass(frozen=True)
class Processing:
    """One request's processors, applied in this order: suppress, min_tokens, logit_bias, penalties.

    repetition_penalty: above 0, 1 is off; divides positive logits and multiplies negative ones of
    every token of prompt and answer (transformers). presence_penalty and frequency_penalty: -2 to
    2, 0 is off; subtracted once, and once per use, for tokens of the answer (OpenAI). logit_bias:
    (token id, what is added), -100 to 100. min_tokens: no EOS before so many tokens.
    Raises UsageError for a value out of range.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    suppress: tuple[int, ...] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.repetition_penalty) and 0 < self.repetition_penalty <= 100):
            raise UsageError(
                f"repetition-penalty is {self.repetition_penalty}; it must be above 0, at most 100"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise UsageError(
                    f"{name.replace('_', '-')} is {getattr(self, name)}; it must be -2 to 2"
                )
        if not 0 <= self.min_tokens < 1 << 30:
            raise UsageError(f"min-tokens is {self.min_tokens}; it must be 0 to 2^30 - 1")
        for token, bias in self.logit_bias:
            if token < 0 or not -100 <= bias <= 100:
                raise UsageError(f"logit-bias is {token}:{bias}; it must be ID:BIAS, -100 to 100")

    @property
    def penalties(self) -> tuple[float, float, float]:
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty

    @property
    def counts(self) -> bool:
        """Whether it has to know what was said."""
        return self.penalties != (1.0, 0.0, 0.0)

    def check(self, vocabulary: int) -> None:
        """Raises UsageError where a token id is none of the model's."""
        for token in (*self.suppress, *(token for token, _ in self.logit_bias)):
            if not 0 <= token < vocabulary:
                raise UsageError(f"token id {token} is outside the vocabulary of {vocabulary}")


class Processed(NamedTuple):
    """A row as `ProcessorState.of` needs it: its processing, EOS ids, prompt and answer so far."""

    processing: Processing
    eos: frozenset[int]
    prompt: list[int]
    answer: list[int]


class ProcessorState(NamedTuple):
    """The processors of all rows; None where no row needs them, so that they cost nothing.

    bias: float32 [B, V], -inf where suppressed. early: float32 [B, V], -inf at EOS, for positions
    below until, int32 [B]. penalties: float32 [B, 3] as in `Processing`. prompt: bool [B, V].
    counts: int32 [B, V], uses in the answer, the bonus token's included.
    """

    bias: mx.array | None = None
    early: mx.array | None = None
    until: mx.array | None = None
    penalties: mx.array | None = None
    prompt: mx.array | None = None
    counts: mx.array | None = None

    @classmethod
    def of(cls, rows: Sequence[Processed | None], vocabulary: int) -> ProcessorState:
        """The state of rows whose answers are known on the host; None is an unused row."""
        B, used = len(rows), [(i, row) for i, row in enumerate(rows) if row]
        state = cls()
        if any(row.processing.suppress or row.processing.logit_bias for _, row in used):
            bias = mx.zeros((B, vocabulary))
            for i, row in used:
                for token, value in row.processing.logit_bias:
                    bias[i, token] = value
                if row.processing.suppress:
                    bias[i, mx.array(row.processing.suppress)] = -mx.inf
            state = state._replace(bias=bias)
        if any(row.processing.min_tokens for _, row in used):
            early, until = mx.zeros((B, vocabulary)), [0] * B
            for i, row in used:
                if row.processing.min_tokens and row.eos:
                    early[i, mx.array(sorted(row.eos))] = -mx.inf
                    until[i] = len(row.prompt) + row.processing.min_tokens
            state = state._replace(early=early, until=mx.array(until))
        if any(row.processing.counts for _, row in used):
            penalties = [(1.0, 0.0, 0.0)] * B
            prompt, counts = (
                mx.zeros((B, vocabulary), mx.bool_),
                mx.zeros((B, vocabulary), mx.int32),
            )
            for i, row in used:
                penalties[i] = row.processing.penalties
                prompt[i, mx.array(row.prompt)] = True
                if row.answer:
                    counts = counts.at[i, mx.array(row.answer)].add(1)
            state = state._replace(penalties=mx.array(penalties), prompt=prompt, counts=counts)
        return state


def process(
    logits: mx.array,
    ids: mx.array | None,
    positions: mx.array,
    state: ProcessorState,
    counts: mx.array | None,
) -> mx.array:
    """Logits [B, T, C] of the tokens at `positions` [B, T], processed.

    `ids` [B, T, C] names the tokens that the logits belong to; None means C is the vocabulary.
    `counts` [B, T, V]: uses in the answer before each place (see `counts_before`).
    """

    def of_tokens(table: mx.array) -> mx.array:
        """[B, T or 1, V] -> the entries of the logits' tokens."""
        if ids is None:
            return table
        table = mx.broadcast_to(table, (*ids.shape[:2], table.shape[-1]))
        return mx.take_along_axis(table, ids, -1)

    if state.bias is not None:
        logits = logits + of_tokens(state.bias[:, None])
    if state.early is not None and state.until is not None:
        too_early = (positions < state.until[:, None])[..., None]
        logits = logits + mx.where(too_early, of_tokens(state.early[:, None]), 0.0)
    if state.penalties is not None and state.prompt is not None and counts is not None:
        repetition, presence, frequency = (state.penalties[:, i, None, None] for i in range(3))
        used = of_tokens(counts)
        said = of_tokens(state.prompt[:, None]) | (used > 0)
        penalised = mx.where(logits > 0, logits / repetition, logits * repetition)
        logits = mx.where(said, penalised, logits)
        logits = logits - presence * (used > 0) - frequency * used
    return logits


def permit(logits: mx.array, ids: mx.array | None, masks: mx.array) -> mx.array:
    """Logits [B, T, C] (as in `process`) with -inf where masks uint32 [B, T, ceil(V / 32)] say no:
    bit t % 32 of word t // 32 is token t's."""
    if ids is None:
        ids = mx.arange(logits.shape[-1])[None, None]
    ids = mx.broadcast_to(ids, logits.shape).astype(mx.uint32)
    words = mx.take_along_axis(masks, ids >> 5, -1)
    return mx.where((words >> (ids & 31)) & 1, logits, -mx.inf)


def counts_before(state: ProcessorState, drafts: mx.array) -> mx.array | None:
    """For the k+1 places of a block with drafts [B, k]: int32 [B, k+1, V] uses before each."""
    if state.counts is None:
        return None
    B, V = state.counts.shape
    new = (drafts[..., None] == mx.arange(V)).astype(mx.int32)
    new = mx.concatenate([mx.zeros((B, 1, V), mx.int32), mx.cumsum(new, axis=1)], 1)
    return state.counts[:, None] + new


def count(state: ProcessorState, tokens: mx.array, emitted: mx.array) -> ProcessorState:
    """The state after tokens [B, T] of which those with `emitted` [B, T] (1 or 0) were said."""
    if state.counts is None:
        return state
    rows = mx.arange(tokens.shape[0])[:, None]
    return state._replace(counts=state.counts.at[rows, tokens].add(emitted))
