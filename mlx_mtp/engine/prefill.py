"""A prompt on its way into a row: its chunks, snapshots between them, and its first token."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_mtp.engine.batch import Row
from mlx_mtp.engine.grammars import masks_of
from mlx_mtp.engine.kv import Buffers, KVLayout
from mlx_mtp.engine.prefix import Snapshot
from mlx_mtp.engine.processors import Processed, ProcessorState
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.round import Proposed, RoundResult, RoundShape, RoundState, accept
from mlx_mtp.engine.sampling import SamplerState, kind_of
from mlx_mtp.models.target import Target


@dataclass(eq=False)
class Prefill:
    """kv: buffers of one row. done: how many tokens are in them. chunk: the most that one pass
    takes. stops: lengths at which a snapshot is kept. unread: of every chunk in flight something
    to wait for."""

    target: Target
    layout: KVLayout
    row: Row
    request: Request
    kv: Buffers
    done: int
    chunk: int
    stops: tuple[int, ...]
    unread: deque[mx.array] = field(default_factory=deque)

    def __post_init__(self) -> None:
        if 0 < self.done < max(self.stops, default=0):
            # A new turn of the user's: it may be written anew.
            self._keep()

    def advance(self) -> mx.array | None:
        """Dispatch the next chunk; after the last one, which is left to whoever needs its hidden
        state [1, 1, H], that."""
        prompt, start = self.request.prompt, self.done
        ends = (*self.stops, len(prompt), start + self.chunk)
        self.done = min(end for end in ends if end > start)
        final = self.done == len(prompt)
        chunk = mx.array([prompt[start : self.done]])
        view = self.layout.view(self.kv, mx.array([start]), self.done - start, start)
        hidden = self.target(chunk, view, keep=int(final))
        self.kv = view.buffers
        del view
        if self.done in self.stops:
            self._keep()
        if final:
            return hidden
        marker = self.kv[-1][0][0, 0, 0, 0] + 0  # no view: that would make the next chunk copy
        mx.async_eval(marker, self.kv)
        self.unread.append(marker)
        return None

    def first_token(self, hidden: mx.array) -> tuple[RoundState, RoundResult]:
        """A round without drafts, of which the last chunk was the verify pass. The state is that of
        one row without its KV."""
        request, vocabulary = self.request, self.target.config.text.vocab_size
        none = mx.array([0])
        alone = Processed(request.processing, request.eos, request.prompt, [])
        state = RoundState(
            kv=[],
            bonus=none,
            hidden=hidden[:, 0],
            length=mx.array([len(request.prompt) - 1]),
            budget=none,
            active=mx.array([1]),
            sampler=SamplerState.of([request.sampling]),
            processors=ProcessorState.of([alone], vocabulary),
        )
        proposed = Proposed(mx.zeros((1, 0), mx.int32), none, hidden, [])
        masks = masks_of([request], [[]], vocabulary)
        shape = RoundShape(0, 0, kind_of([request.sampling]), logprobs=request.logprobs)
        return accept(self.target, state, proposed, masks, shape)

    def _keep(self) -> None:
        slot = self.row.slot
        slot.keep(Snapshot(self.done, self.layout.rings(self.kv), slot.written))
