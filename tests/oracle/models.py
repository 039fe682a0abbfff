"""Our side of the comparison: one row of KV, drafts after it, and the engine's rounds from it."""

from __future__ import annotations

import mlx.core as mx

from mlx_mtp.engine.kv import Buffers, KVLayout, capacity_for
from mlx_mtp.engine.processors import ProcessorState
from mlx_mtp.engine.round import RoundShape, RoundState
from mlx_mtp.engine.sampling import SamplerState, Sampling
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.layers import on_cpu
from mlx_mtp.models.target import Target

# The largest difference allowed, as a part of the largest value. Two correct float32
# implementations of these models are 2e-5 apart; a GPU's own exponentials add to that.
TOLERANCE = 1e-4 if on_cpu() else 1e-3


def difference(ours: mx.array, theirs: mx.array) -> float:
    """The largest absolute difference, relative to the largest value of `theirs`."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float(mx.abs(ours - theirs).max() / mx.abs(theirs).max())


class Row:
    """One sequence in a target's KV. Assigning `length` rolls back."""

    def __init__(self, target: Target, room: int = 256):
        self.target = target
        self.layout = KVLayout(target.config.text, mx.float32)
        self.kv: Buffers = self.layout.allocate(1, capacity_for(room))
        self.length = 0

    def feed(self, ids: list[int], keep: int | None = None) -> mx.array:
        """Runs `ids` in one pass and commits them: the hidden state [T, H] after the final norm,
        of the last `keep` positions if given."""
        view = self.layout.view(self.kv, mx.array([self.length]), len(ids), self.length)
        hidden = self.target(mx.array([ids]), view, keep)
        self.kv = view.buffers
        self.length += len(ids)
        mx.eval(hidden, self.kv)
        return hidden[0]

    def feed_in_chunks(self, ids: list[int], chunk: int) -> mx.array:
        """[T, H], from passes of at most `chunk` tokens."""
        return mx.concatenate(
            [self.feed(ids[i : i + chunk]) for i in range(0, len(ids), chunk)], axis=0
        )

    def logits(self, hidden: mx.array) -> mx.array:
        """[T, H] -> [T, V]."""
        return self.target.logits(hidden[None])[0]

    def round(self, hidden: mx.array, bonus: int, draft_len: int) -> tuple[RoundState, RoundShape]:
        """A greedy round of the engine from here; `hidden` [H] is the one that chose `bonus`."""
        state = RoundState(
            kv=self.kv,
            bonus=mx.array([bonus], dtype=mx.int32),
            hidden=hidden[None],
            length=mx.array([self.length], dtype=mx.int32),
            budget=mx.array([draft_len], dtype=mx.int32),
            active=mx.array([1], dtype=mx.int32),
            sampler=SamplerState.of([Sampling()]),
            processors=ProcessorState(),
        )
        return state, RoundShape(draft_len, self.length, "greedy")


def draft(
    drafter: Drafter, row: Row, hidden: mx.array, bonus: int, steps: int
) -> tuple[list[int], mx.array, mx.array]:
    """Greedy drafts after `bonus`, whose predecessor's hidden state is `hidden` [H].

    Returns the tokens, the logits [steps, V] (-inf outside the chosen centroids) and what each
    step hands to the next, [steps, H].
    """
    view = row.layout.donor_view(row.kv, mx.array([row.length]), row.length)
    vocab = row.target.config.text.vocab_size
    token, state = bonus, hidden[None, None]
    tokens, logits, states = [], [], []
    rotate = drafter.rotations(view)
    for _ in range(steps):
        out = drafter(row.target.embed(mx.array([[token]])), state, view, rotate)
        scores, ids = drafter.scores(out)
        if ids is not None:
            scores = mx.put_along_axis(mx.full((1, vocab), -mx.inf), ids, scores, axis=-1)
        token, state = int(scores.argmax()), drafter.next_hidden(out)
        tokens.append(token)
        logits.append(scores[0])
        states.append(state[0, 0])
    return tokens, mx.stack(logits), mx.stack(states)
