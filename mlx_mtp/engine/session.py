"""The engine: requests in, events out, one prefill chunk or one round at a time.

`Engine.step` dispatches round r+1 before it reads round r, so that the device never waits for the
host; the price is that a stop is seen one round late, and the round behind it is thrown away.
Joining, leaving, growing and cancelling happen only between steps. An engine belongs to the
thread that made it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx

from mlx_mtp.engine.draft_length import MAX_DRAFT, DraftLength, FixedLength
from mlx_mtp.engine.kv import BLOCK, MIN_CAPACITY, Buffers, KVLayout, capacity_for
from mlx_mtp.engine.requests import Event, Request
from mlx_mtp.engine.round import RoundShape, RoundState, run_round
from mlx_mtp.engine.sampling import SamplerState, Sampling, choose, kind_of
from mlx_mtp.errors import FitError, UsageError
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.target import Target

__all__ = ["Engine", "Event", "Request"]


@dataclass
class Row:
    """The host's side of one row of the batch.

    length: committed KV slots as far as results were read; ahead: how far unread rounds may get
    beyond that. ids: the tokens in KV once no request runs here, for a prompt that goes on.
    """

    request: Request | None = None
    length: int = 0
    ahead: int = 0
    ids: list[int] = field(default_factory=list)
    started: float = 0.0


@dataclass
class Flight:
    """A dispatched round, or a prefill's first token, whose result was not read yet.

    result: int32 [., k + 3] as run_round gives it; rows: (row of the result, row, request).
    """

    result: mx.array
    draft_len: int
    rows: list[tuple[int, int, Request]]
    first: bool = False


@dataclass
class Prefill:
    """A prompt on its way into a row, in buffers of one row."""

    row: int
    request: Request
    kv: Buffers
    done: int
    chunks: deque[mx.array] = field(default_factory=deque)


class Engine:
    """Decodes up to `rows` requests at a time with one target and, where given, its drafter.

    draft_length chooses each round's draft length; a request's own `draft_len` caps it.
    memory_limit: bytes that weights and KV may take; a prompt whose KV would pass it is refused.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        rows: int = 1,
        prefill_chunk: int = 512,
        draft_length: DraftLength | None = None,
        memory_limit: int | None = None,
    ):
        if rows < 1 or not 1 <= prefill_chunk <= 4096:
            raise UsageError(f"rows {rows} and prefill chunk {prefill_chunk} must be 1 or more")
        self.target, self.drafter = target, drafter
        self.draft_length = draft_length or FixedLength(MAX_DRAFT)
        self.prefill_chunk = prefill_chunk
        self.memory_limit = memory_limit
        self.layout = KVLayout(target.config.text, target.dtype)
        self.rows = [Row() for _ in range(rows)]
        self.waits = 0  # how often the host waited for the device
        self._waiting: deque[Request] = deque()
        self._prefill: Prefill | None = None
        self._prefilled_last = False
        self._flights: deque[Flight] = deque()
        self._state = self._fresh_state()

    # -- what callers use ---------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        running = any(row.request for row in self.rows)
        return bool(self._waiting or self._prefill or self._flights or running)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the engine holds."""
        kv = self._state.kv + (self._prefill.kv if self._prefill else [])
        return sum(k.nbytes + v.nbytes for k, v in kv)

    def add(self, request: Request) -> None:
        """Queue a request. Raises UsageError if the model's context has no room for its prompt,
        FitError if the memory has none for its KV: before anything runs."""
        limit = self.target.config.text.max_position_embeddings
        if len(request.prompt) >= limit:
            raise UsageError(
                f"the prompt has {len(request.prompt)} tokens, the model's context {limit} "
                "with at least one to generate"
            )
        vocabulary = self.target.config.text.vocab_size
        if not all(0 <= token < vocabulary for token in request.prompt):
            raise UsageError(f"the prompt has token ids outside the vocabulary of {vocabulary}")
        self._check_memory(len(request.prompt))
        request.max_tokens = min(request.max_tokens, limit - len(request.prompt))
        request.stats.prompt_tokens = len(request.prompt)
        self._waiting.append(request)

    def step(self) -> list[Event]:
        """At most one prefill chunk or one round; then read one result, one round late. WAITS for
        the device where it reads."""
        if self._waiting and self._waiting[0].max_tokens == 0:
            request = self._waiting.popleft()
            request.finish_reason = "length"
            return [Event(request, [], [], 0)]
        decoding = self._plan_round()
        if self._prefill is None and self._waiting:
            self._start_prefill()
        # With a prefill under way the batch and the prompt take turns.
        if self._prefill and not (decoding and self._prefilled_last):
            self._prefilled_last = True
            return self._prefill_chunk()
        self._prefilled_last = False
        if decoding:
            self._dispatch_round(decoding)
        if self._flights and (not decoding or len(self._flights) > 1):
            return self._read(self._flights.popleft())
        return []

    def cancel(self, request: Request) -> None:
        """End a request between two steps; what it emitted stays, its KV is kept for a prompt
        that goes on from it."""
        if request.finish_reason is not None:
            return
        request.finish_reason = "cancelled"
        if request in self._waiting:
            self._waiting.remove(request)
        elif self._prefill and self._prefill.request is request:
            self._end_prefill()
        else:
            self._release([i for i, row in enumerate(self.rows) if row.request is request])

    def close(self) -> None:
        """Cancel everything and WAIT for what is in flight."""
        running = [row.request for row in self.rows if row.request]
        if self._prefill:
            running.append(self._prefill.request)
        for request in [*running, *self._waiting]:
            self.cancel(request)
        self._flights.clear()
        self.waits += 1
        mx.eval(self._state)

    def _check_memory(self, prompt: int) -> None:
        """The KV of a prompt is new memory unless the buffers are long enough already: while they
        grow, the old ones stand beside the new."""
        if self.memory_limit is None:
            return
        capacity = capacity_for(prompt + BLOCK)
        if self._state.kv and capacity <= self.layout.capacity(self._state.kv):
            return
        needed = self.layout.nbytes(len(self.rows), capacity)
        free = max(self.memory_limit - mx.get_active_memory(), 0)
        if needed > free:
            raise FitError(
                f"a prompt of {prompt} tokens needs {needed / 1e9:.2f} GB of KV, but only "
                f"{free / 1e9:.2f} of {self.memory_limit / 1e9:.2f} GB are free; shorten it or "
                "use a smaller model or quantisation"
            )

    # -- rounds ---------------------------------------------------------------------------------

    def _plan_round(self) -> list[tuple[int, Request]]:
        """The rows that a next round would serve: those that may still lack tokens after what is
        in flight, of which each result brings one at least."""
        unread = [i for flight in self._flights for _, i, _ in flight.rows]
        return [
            (i, row.request)
            for i, row in enumerate(self.rows)
            if row.request and len(row.request.tokens) + unread.count(i) < row.request.max_tokens
        ]

    def _dispatch_round(self, serve: list[tuple[int, Request]]) -> None:
        budget = max(request.draft_len for _, request in serve)
        k = min(self.draft_length.choose(), budget) if self.drafter else 0
        bound = max(row.length + row.ahead for row in self.rows)
        if bound + k + 1 > self.layout.capacity(self._state.kv):
            grown = self.layout.grow(self._state.kv, capacity_for(bound + k + 1))
            self._state = self._state._replace(kv=grown)
        shape = RoundShape(k, bound, kind_of([request.sampling for _, request in serve]))
        self._state, result = run_round(self.target, self.drafter, self.layout, self._state, shape)
        mx.async_eval(result, self._state)
        for i, _ in serve:
            self.rows[i].ahead += k + 1
        self._flights.append(Flight(result, k, [(i, i, request) for i, request in serve]))

    def _read(self, flight: Flight) -> list[Event]:
        """WAITS for one result, hands out its tokens and lets go of the rows that ended."""
        self.waits += 1
        result = cast(list[list[int]], flight.result.tolist())
        now = time.perf_counter()
        events: list[Event] = []
        ended: list[int] = []
        for place, i, request in flight.rows:
            row = self.rows[i]
            if row.request is not request:
                continue  # it ended while this round was in flight
            *tokens, accepted, finite = result[place]
            if not finite:
                # This row alone is lost; the others of the batch go on.
                request.finish_reason = "error"
                request.error = (
                    "the model's logits are not finite: its weights are damaged or overflow in "
                    "this dtype"
                )
                events.append(Event(request, [], [], len(request.prompt)))
                ended.append(i)
                continue
            events.append(self._hand_out(row, request, flight, tokens, accepted, now))
            if request.finish_reason:
                ended.append(i)
        self._release(ended)
        return events

    def _hand_out(
        self,
        row: Row,
        request: Request,
        flight: Flight,
        tokens: list[int],
        accepted: int,
        now: float,
    ) -> Event:
        stats, before = request.stats, len(request.tokens)
        for token in tokens[: accepted + 1]:
            if not request.take(token) or request.finish_reason:
                break
        new = request.tokens[before:]
        drafted = [i < accepted for i in range(len(new))]
        if flight.first:
            stats.first_token_s = now - row.started
        else:
            row.length += accepted + 1
            row.ahead -= flight.draft_len + 1
            stats.count_round(min(flight.draft_len, request.draft_len), sum(drafted))
            stats.decode_s = now - row.started - stats.first_token_s
        return Event(request, new, drafted, len(request.prompt))

    # -- rows coming and going ------------------------------------------------------------------

    def _start_prefill(self) -> None:
        """Give the oldest waiting request a free row: one whose KV its prompt goes on from, if
        there is one. The last prompt token is always run: its hidden state starts the rounds."""
        free = [i for i, row in enumerate(self.rows) if row.request is None]
        if not free:
            return
        request = self._waiting.popleft()

        def reusable(i: int) -> int:
            ids = self.rows[i].ids
            fits = len(ids) < len(request.prompt) and request.prompt[: len(ids)] == ids
            return len(ids) if fits else 0

        row = max(free, key=lambda i: (reusable(i), -len(self.rows[i].ids)))
        done = reusable(row)
        request.stats.cached_tokens = done
        positions = len(request.prompt) + BLOCK
        if len(self.rows) == 1:
            kv, self._state = self._state.kv, self._state._replace(kv=[])
        elif done:
            kv = self.layout.take_row(self._state.kv, row)
        else:
            kv = self.layout.allocate(1, capacity_for(positions))
        if self.layout.capacity(kv) < positions:
            kv = self.layout.grow(kv, capacity_for(positions))
        self.rows[row].started = time.perf_counter()
        self.rows[row].ids, self.rows[row].length = [], 0
        self._prefill = Prefill(row, request, kv, done)

    def _prefill_chunk(self) -> list[Event]:
        """Dispatch the next chunk; WAITS for the one before the last, so that at most two are in
        flight. The last chunk brings the first token and the row joins the batch."""
        assert self._prefill is not None
        fill, request = self._prefill, self._prefill.request
        chunk = request.prompt[fill.done : fill.done + self.prefill_chunk]
        final = fill.done + len(chunk) == len(request.prompt)
        view = self.layout.view(fill.kv, mx.array([fill.done]), len(chunk), fill.done)
        hidden = self.target(mx.array([chunk]), view, keep=int(final))
        fill.kv = view.buffers
        del view
        fill.done += len(chunk)
        if final:
            self._join(fill, hidden)
            return [Event(request, [], [], fill.done)]
        marker = fill.kv[-1][0][0, 0, 0, 0]
        mx.async_eval(marker, fill.kv)
        fill.chunks.append(marker)
        if len(fill.chunks) > 2:
            self.waits += 1
            mx.eval(fill.chunks.popleft())
        return [Event(request, [], [], fill.done)]

    def _join(self, fill: Prefill, hidden: mx.array) -> None:
        """Put a prefilled prompt into its row and dispatch the choice of its first token."""
        request, row, i = fill.request, self.rows[fill.row], fill.row
        row.request, row.length, row.ahead = request, len(request.prompt), 0
        kv, fill.kv = fill.kv, []
        if len(self.rows) > 1:
            wanted = self.layout.capacity(kv)
            if self.layout.capacity(self._state.kv) < wanted:
                self._state = self._state._replace(kv=self.layout.grow(self._state.kv, wanted))
            batch, self._state = self._state.kv, self._state._replace(kv=[])
            kv = self.layout.put_row(batch, i, kv)
            del batch
        self._prefill = None
        logits = self.target.logits(hidden)
        finite = mx.isfinite(logits.sum(-1))
        bias = self._bias([request])
        if bias is not None:
            logits = logits + bias[:, None]
        one = SamplerState.of([request.sampling])
        place = mx.array([[row.length]])
        first = choose(logits, None, place, one, kind_of([request.sampling]))
        state = self._state
        self._state = state._replace(
            kv=kv,
            bonus=mx.slice_update(state.bonus, first[0], mx.array([i]), axes=[0]),
            hidden=mx.slice_update(state.hidden, hidden[0], mx.array([i]), axes=[0]),
        )
        del kv, state
        self._sync({i})
        zero = mx.zeros((1, 1), dtype=mx.int32)
        result = mx.concatenate([first, zero, finite.astype(mx.int32)], -1)
        mx.async_eval(result, self._state)
        self._flights.append(Flight(result, 0, [(0, i, request)], first=True))

    def _end_prefill(self) -> None:
        """Give up a prompt half way; what of it is in KV can be gone on from."""
        fill = self._prefill
        assert fill is not None
        self._prefill = None
        if len(self.rows) == 1:
            self._state = self._state._replace(kv=fill.kv)
            row = self.rows[fill.row]
            row.ids, row.length = fill.request.prompt[: fill.done], fill.done
            self._sync({fill.row})

    def _release(self, rows: list[int]) -> None:
        """Let go of rows whose requests ended. Their KV is cut back to what was kept: a block in
        flight may have written past it, which the next pass overwrites."""
        for i in rows:
            row = self.rows[i]
            assert row.request is not None
            kept = row.request.prompt + row.request.tokens
            if row.request.error:
                # NaN in KV leaks through a mask: the row starts again from zeros.
                kept = []
                self._state = self._state._replace(kv=self.layout.clear_row(self._state.kv, i))
            # The newest token is chosen but not in KV yet; before an EOS everything kept is.
            whole = row.request.ended_by_eos or not row.request.tokens or not kept
            row.ids = kept if whole else kept[:-1]
            row.request, row.length, row.ahead = None, len(row.ids), 0
        if rows:
            self._sync(set(rows))
        live = [f for f in self._flights if any(self.rows[i].request is r for _, i, r in f.rows)]
        self._flights = deque(live)

    def _sync(self, moved: set[int]) -> None:
        """Bring the device's idea of the rows up to the host's; `moved` rows get the host's
        length, the others' may be ahead of it."""
        lengths = mx.array([row.length for row in self.rows])
        mask = mx.array([i in moved for i in range(len(self.rows))])
        running = [row.request for row in self.rows]
        self._state = self._state._replace(
            length=mx.where(mask, lengths, self._state.length),
            budget=mx.array([r.draft_len if r else 0 for r in running]),
            active=mx.array([int(r is not None) for r in running]),
            sampler=SamplerState.of([r.sampling if r else Sampling() for r in running]),
            bias=self._bias(running),
        )

    def _bias(self, requests: Sequence[Request | None]) -> mx.array | None:
        """What is added to the target's logits, float32 [B, V]: -inf where suppressed."""
        if not any(r and r.suppress for r in requests):
            return None
        bias = mx.zeros((len(requests), self.target.config.text.vocab_size))
        for i, request in enumerate(requests):
            if request and request.suppress:
                bias[i, mx.array(request.suppress)] = -mx.inf
        return bias

    def _fresh_state(self) -> RoundState:
        B, text = len(self.rows), self.target.config.text
        zeros = mx.zeros((B,), dtype=mx.int32)
        return RoundState(
            kv=self.layout.allocate(B, MIN_CAPACITY),
            bonus=zeros,
            hidden=mx.zeros((B, text.hidden_size), dtype=self.layout.dtype),
            length=zeros,
            budget=zeros,
            active=zeros,
            sampler=SamplerState.of([Sampling()] * B),
            bias=None,
        )
