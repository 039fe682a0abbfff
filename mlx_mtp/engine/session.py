"""The engine: requests in, events out, one prefill chunk or one round at a time.

With pipelining `Engine.step` dispatches round r+1 before it reads round r, so that the device
never waits for the host; the price is that a stop is seen one round late, and the round behind it
is thrown away. Joining, leaving, growing and cancelling happen only between steps. An engine
belongs to the thread that made it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import mlx.core as mx

from mlx_mtp.engine.batch import Batch, Row
from mlx_mtp.engine.copying import Copies
from mlx_mtp.engine.draft_length import MAX_DRAFT, AutoLength, DraftLength, Outcome, Shape
from mlx_mtp.engine.grammars import masks_of
from mlx_mtp.engine.kv import BLOCK, KVLayout, capacity_for, nbytes
from mlx_mtp.engine.memory import Memory
from mlx_mtp.engine.policy import Clock, Policy
from mlx_mtp.engine.prefill import Prefill
from mlx_mtp.engine.requests import Event, Request, TokenLogprob
from mlx_mtp.engine.round import ReadLogprobs, RoundResult, Rounds, RoundShape
from mlx_mtp.engine.sampling import kind_of
from mlx_mtp.errors import ContextError, UsageError
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.layers import on_cpu
from mlx_mtp.models.target import Target

__all__ = ["Engine", "Event", "Request"]

MAX_ROWS = 16
T = TypeVar("T")


@dataclass
class Flight:
    """A dispatched round, or a prefill's first token, whose result was not read yet.

    rows: (row of the result, row, request). teaches: whether its seconds say what its shape costs.
    """

    result: RoundResult
    shape: Shape
    rows: list[tuple[int, Row, Request]]
    first: bool = False
    teaches: bool = True


class Engine:
    """Decodes up to `rows` requests at a time with one target and, where given, its drafter.

    draft_length chooses every round's drafts for requests that leave it open. memory_limit: bytes
    that weights and KV may take; a prompt whose KV would pass it is refused. kv_bits: 8 or 4 to
    keep the KV of full layers quantised. cache_bytes: what KV of conversations may take that are
    over for now and lie in no row, and snapshots. max_kv: positions that a request may take.
    compile and pipeline: see `Policy`; None leaves them to the device. drafter_device: where the
    drafter runs, if not where the target does. full_ways: see `KVLayout`. Raises UsageError.
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
        kv_bits: int | None = None,
        cache_bytes: int = 0,
        max_kv: int | None = None,
        compile: bool | None = None,
        pipeline: bool | None = None,
        drafter_device: mx.Device | mx.Stream | None = None,
        full_ways: Mapping[int, str] | None = None,
    ):
        if not 1 <= rows <= MAX_ROWS or not 1 <= prefill_chunk <= 4096:
            raise UsageError(
                f"rows {rows} must be 1 to {MAX_ROWS}, prefill chunk {prefill_chunk} 1 to 4096"
            )
        if max_kv is not None and max_kv < 2:
            raise UsageError(f"max-kv is {max_kv}; it must be 2 positions or more")
        self.target, self.drafter = target, drafter
        self.draft_length = draft_length or AutoLength()
        self.prefill_chunk = prefill_chunk
        self.policy = Policy.for_device(compile, pipeline, drafter_device is not None)
        self.layout = KVLayout(
            target.config.text,
            target.dtype,
            kv_bits,
            full_ways=full_ways or {},
            kv_heads=target.kv_heads,
        )
        self.memory = Memory(self.layout, memory_limit)
        self.context = min(target.config.text.max_position_embeddings, max_kv or 1 << 62)
        self.waits = 0  # how often the host waited for the device
        self.grown = 0  # how often buffers were copied: into larger ones, or another bucket
        self._most_drafts, self._why = MAX_DRAFT, ""
        self.grammar_rounds = 0  # rounds that waited for their drafts, too, and ran nothing ahead
        self.rounds = Rounds(target, drafter, self.layout, self.policy.compile, drafter_device)
        self._batch = Batch(self.layout, rows, cache_bytes)
        self._waiting: deque[Request] = deque()
        self._prefill: Prefill | None = None
        self._prefilled_last = False
        self._flights: deque[Flight] = deque()
        self._clock = Clock()

    # -- what callers use ---------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._prefill or self._flights or self._batch.running)

    @property
    def most_rows(self) -> int:
        """Requests that it decodes at a time."""
        return self._batch.most

    @property
    def _reserved(self) -> list[Row]:
        """The row that a prompt is on its way into."""
        return [self._prefill.row] if self._prefill else []

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the engine holds."""
        batch, fill = self._batch, self._prefill
        return nbytes(batch.state.kv) + (nbytes(fill.kv) if fill else 0) + self.cached_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of these that only wait for a prompt that goes on from them."""
        return self._batch.prefixes.nbytes(self._batch.slots)

    def describe(self) -> dict[str, Any]:
        """How rounds were run so far: the policy, and counts of what costs time beside them."""
        auto = self.draft_length
        return {
            "compile": self.policy.compile,
            "pipeline": self.policy.pipeline,
            "waits": self.waits,
            "traces": self.rounds.traces,
            "buffer_growths": self.grown,
            "grammar_rounds": self.grammar_rounds,
            "kv_bits": self.layout.bits,
            "attention": dict(self.layout.full_ways),
            "context": self.context,
            "auto": auto.describe() if isinstance(auto, AutoLength) else None,
        }

    def add(self, request: Request) -> None:
        """Queue a request. Raises UsageError if the model's context has no room for its prompt,
        FitError if the memory has none for its KV: before anything runs."""
        if request.stats.prompt_tokens:
            raise UsageError("the request was given to an engine before; make a new one")
        prompt, vocabulary = len(request.prompt), self.target.config.text.vocab_size
        if prompt >= self.context:
            raise ContextError(prompt, self.context)
        if not all(0 <= token < vocabulary for token in request.prompt):
            raise UsageError(f"the prompt has token ids outside the vocabulary of {vocabulary}")
        if (request.draft_len or 0) > self._most_drafts:
            raise UsageError(f"a draft length of {request.draft_len} cannot be had: {self._why}")
        request.processing.check(vocabulary)
        room = self._room(prompt, request.max_tokens)
        request.max_tokens = min(request.max_tokens, room - prompt)
        self._queue(request)

    def _queue(self, request: Request) -> None:
        request.stats.prompt_tokens = len(request.prompt)
        self._waiting.append(request)

    def _agree(self, value: T) -> T:
        """What is known to one machine alone, as all ranks take it (`engine.lockstep`)."""
        return value

    def _room(self, prompt: int, answer: int) -> int:
        """Positions that context and memory have room for, beside all that runs and waits."""
        batch, prompts = self._batch, [request.prompt for request in self._waiting]
        if self._prefill:
            prompts.append(self._prefill.request.prompt)
        rows = batch.bucket(len(batch.running) + len(prompts) + 1)
        held = self.layout.capacity(batch.state.kv) if batch.state.kv else 0
        return self.memory.positions(
            prompt,
            answer,
            rows=rows,
            held=held if rows <= len(batch.rows) else 0,
            least=max(
                held * bool(batch.running),
                *(capacity_for(len(other) + BLOCK) for other in prompts),
                0,
            ),
            used=mx.get_active_memory() - self.cached_bytes,
            context=self.context,
        )

    def step(self) -> list[Event]:
        """At most one prefill chunk or one round; then read one result, with pipelining one round
        late. WAITS for the device where it reads."""
        self._clock.enter()
        try:
            return self._step()
        finally:
            self._clock.leave()

    def cancel(self, request: Request) -> None:
        """End a request between two steps; what it emitted stays, its KV is kept for a prompt
        that goes on from it."""
        if request.finish_reason is not None:
            return
        request.finish_reason = "cancelled"
        if request in self._waiting:
            self._waiting.remove(request)
        elif self._prefill and self._prefill.request is request:
            self._end_prefill(self._prefill)
        else:
            self._release([row for row in self._batch.rows if row.request is request])

    def limit_drafts(self, most: int, why: str) -> None:
        """Refuse requests that fix a longer draft length, and never choose one. Of a controller of
        one's own only `AutoLength` heeds it."""
        self._most_drafts, self._why = most, why
        if isinstance(self.draft_length, AutoLength):
            self.draft_length.limit(most)

    def forget(self, session: str) -> None:
        """Let go of what is kept under that name, and of what runs under it once that ends."""
        self._batch.forget(session, [*self._batch.running, *self._reserved])

    def close(self) -> None:
        """Cancel everything and WAIT for what is in flight."""
        running = [row.request for row in self._batch.rows if row.request]
        if self._prefill:
            running.append(self._prefill.request)
        for request in [*running, *self._waiting]:
            self.cancel(request)
        self._flights.clear()
        self.waits += 1
        mx.eval(self._batch.state)

    def calibrate(self, rounds: int = 4) -> None:
        """On an idle engine: run a short round over and over, eagerly and compiled, go on with the
        faster way, and tell the controller what it took. WAITS for the device."""
        steps = min(2, self.draft_length.choose().draft_len) if self.drafter else 0
        steps = self._agree(steps)
        self._batch.grow(self._batch.longest + steps + 1)
        seconds = {}
        for compiled in (True, False):
            self.rounds.compiled = compiled
            results: list[mx.array] = []
            for i in range(rounds + 2):
                if i == 2:  # behind the trace, with one round in flight
                    started = time.perf_counter()
                result, _ = self._run(None, RoundShape(steps, self._batch.bound, "greedy"))
                results.append(result.tokens)
                mx.eval(results[max(0, i - 1)])
            mx.eval(results)
            seconds[compiled] = (time.perf_counter() - started) / rounds
        self.rounds.compiled = self._agree(seconds[True] < seconds[False])
        self.policy = replace(self.policy, compile=self.rounds.compiled)
        self.draft_length.learn(Outcome(Shape(steps), (), (), min(seconds.values())))

    # -- rounds ---------------------------------------------------------------------------------

    def _run(self, copies: Copies | None, graph: RoundShape) -> tuple[RoundResult, bool]:
        """Dispatch one round on the batch; its result, and whether it had to be traced first."""
        # No name may hold the old buffers when the round runs, or it copies them.
        state, self._batch.state = self._batch.state, self._batch.state._replace(kv=[])
        self._batch.state, result, traced = self.rounds(state, copies, graph)
        del state
        mx.async_eval(result, self._batch.state)
        return result, traced

    def _run_in_step(self, copies: Copies | None, graph: RoundShape) -> tuple[RoundResult, bool]:
        """The same under grammars: WAITS for the drafts while the verify pass runs."""
        state, self._batch.state = self._batch.state, self._batch.state._replace(kv=[])
        proposed, traced = self.rounds.propose(state, copies, graph)
        state = state._replace(kv=[])
        mx.async_eval(proposed.drafts)
        mx.async_eval(proposed)
        self.waits += 1
        self.grammar_rounds += 1
        drafts = cast(list[list[int]], proposed.drafts.tolist())
        requests = [row.request for row in self._batch.rows]
        masks = masks_of(requests, drafts, self.target.config.text.vocab_size)
        self._batch.state, result, fresh = self.rounds.accept(state, proposed, masks, graph)
        del proposed
        mx.async_eval(result, self._batch.state)
        return result, traced or fresh

    def _step(self) -> list[Event]:
        if self._waiting and self._waiting[0].max_tokens == 0:
            request = self._waiting.popleft()
            request.finish_reason = "length"
            return [Event(request, [], [], 0)]
        # A grammar must know what was said before it can say what may follow.
        in_step = any(row.request and row.request.grammar for row in self._batch.running)
        pipelined = self.policy.pipeline and not in_step
        if self._flights and not pipelined:
            return self._read(self._flights.popleft())
        decoding = self._plan_round()
        if self._prefill is None and self._waiting:
            self._start_prefill()
        # With a prefill under way the batch and the prompt take turns.
        if self._prefill and not (decoding and self._prefilled_last):
            self._prefilled_last = True
            self._clock.disturb()
            return self._prefill_chunk()
        self._prefilled_last = False
        if decoding:
            self._dispatch_round(decoding, in_step)
        # All but the newest, or joins would add to what is in flight and rings be overwritten.
        behind, events = int(pipelined and bool(decoding)), list[Event]()
        while len(self._flights) > behind:
            events += self._read(self._flights.popleft())
        return events

    def _plan_round(self) -> list[tuple[Row, Request]]:
        """The rows that a next round would serve: those that may still lack tokens after what is
        in flight, of which each result brings one at least."""
        unread = [request for flight in self._flights for _, _, request in flight.rows]
        return [
            (row, row.request)
            for row in self._batch.running
            if row.request
            and len(row.request.tokens) + unread.count(row.request) < row.request.max_tokens
        ]

    def _choose_shape(self, serve: list[tuple[Row, Request]]) -> Shape:
        """The controller's choice for rows that leave it open, and what the others fixed."""
        fixed = max((r.draft_len for _, r in serve if r.draft_len is not None), default=0)
        shape = Shape(0)
        if any(request.draft_len is None for _, request in serve):
            match = any(row.copies and row.copies.source is not None for row, _ in serve)
            shape = self._agree(self.draft_length.choose(match))
        steps = max(shape.steps, fixed) if self.drafter else 0
        return Shape(steps, shape.copied)

    def _dispatch_round(self, serve: list[tuple[Row, Request]], in_step: bool) -> None:
        batch = self._batch
        moved = batch.shrink(self._reserved)
        shape = self._choose_shape(serve)
        copies = batch.copies(shape.draft_len) if shape.copied else None
        if copies is None:
            shape = Shape(shape.steps)
        k = shape.draft_len
        positions = batch.longest + k + 1
        if moved or positions > self.layout.capacity(batch.state.kv):
            self._make_room(positions)
        moved |= batch.grow(positions)
        self.grown += moved
        logprobs = [r.logprobs for _, r in serve if r.logprobs is not None]
        graph = RoundShape(
            shape.steps,
            batch.bound,
            kind_of([request.sampling for _, request in serve]),
            shape.copied,
            max(logprobs) if logprobs else None,
        )
        result, traced = (self._run_in_step if in_step else self._run)(copies, graph)
        if moved or traced:
            self._clock.disturb()
        for row, _ in serve:
            row.ahead += k + 1
            assert row.ahead <= 2 * BLOCK, "more rounds in flight than rings have slots for"
        places = [(batch.rows.index(row), row, request) for row, request in serve]
        # A CPU runs nothing ahead: there the time before a result is that of the round behind it.
        teaches = not (moved or traced or (self.policy.pipeline and on_cpu()))
        self._flights.append(Flight(result, shape, places, teaches=teaches))

    def _read(self, flight: Flight) -> list[Event]:
        """WAITS for one result, hands out its tokens and lets go of the rows that ended."""
        self.waits += 1
        result = cast(list[list[int]], flight.result.tokens.tolist())
        seconds = None if flight.first else self._clock.read()
        if flight.first:
            self._clock.disturb()
        logprobs = ReadLogprobs(flight.result)
        events: list[Event] = []
        ended: list[Row] = []
        taught: list[tuple[int, int, bool]] = []
        for place, row, request in flight.rows:
            if row.request is not request:
                continue  # it ended while this round was in flight
            *tokens, accepted, finite, copied = result[place]
            if not finite:
                request.fail(
                    "the model's logits are not finite: its weights are damaged or overflow in "
                    "this dtype"
                )
            elif accepted < 0:
                request.fail(
                    request.error
                    or "nothing is left that may be said here, by the grammar and by what is "
                    "suppressed",
                    outgrown=True,
                )
            if request.error:
                # This row alone is lost; the others of the batch go on.
                events.append(Event(request, [], [], len(request.prompt)))
                ended.append(row)
                continue
            drafts = min(request.budget, flight.shape.copied if copied else flight.shape.steps)
            taught.append((drafts, accepted, bool(copied)))
            shown = logprobs.of(place, request)
            events.append(self._hand_out(row, request, flight, tokens, accepted, copied, shown))
            if request.finish_reason:
                ended.append(row)
        if taught and not flight.first:
            rows = tuple((offered, accepted) for offered, accepted, _ in taught)
            self.draft_length.learn(
                Outcome(
                    flight.shape,
                    rows,
                    tuple(copied for *_, copied in taught),
                    seconds if flight.teaches else None,
                )
            )
        self._release(ended)
        return events

    def _hand_out(
        self,
        row: Row,
        request: Request,
        flight: Flight,
        tokens: list[int],
        accepted: int,
        copied: int,
        logprobs: list[TokenLogprob],
    ) -> Event:
        stats, before, now = request.stats, len(request.tokens), time.perf_counter()
        for token in tokens[: accepted + 1]:
            if not request.take(token) or request.finish_reason:
                break
        new = request.tokens[before:]
        request.token_logprobs += logprobs[: len(new)]
        if row.copies:
            row.copies.extend(new)
        drafted = [i < accepted for i in range(len(new))]
        if flight.first:
            stats.first_token_s = now - row.started
        else:
            row.length += accepted + 1
            row.ahead -= flight.shape.draft_len + 1
            offered = flight.shape.draft_len if copied else flight.shape.steps
            stats.count_round(min(offered, request.budget), sum(drafted), bool(copied))
            stats.decode_s = now - row.started - stats.first_token_s
        return Event(request, new, drafted, len(request.prompt))

    # -- rows coming and going ------------------------------------------------------------------

    def _start_prefill(self) -> None:
        """Give the oldest waiting request a row, if there is room for one."""
        batch = self._batch
        if len(batch.running) >= batch.most:
            return
        request = self._waiting.popleft()
        row, kv, done = batch.admit(request)
        self._make_room(len(request.prompt) + BLOCK)
        request.stats.cached_tokens = done
        row.started = time.perf_counter()
        row.length = 0
        # Rounds in between write behind an unused row's length, too: not where it ended before.
        batch.sync({batch.rows.index(row)})
        stops = request.snapshots if batch.prefixes.budget else ()
        self._prefill = Prefill(
            self.target, self.layout, row, request, kv, done, self.prefill_chunk, stops
        )

    def _make_room(self, positions: int) -> None:
        """Let go of KV that only waits, as far as buffers of so many positions a row need it."""
        batch = self._batch
        used = mx.get_active_memory() - self.cached_bytes
        left = self._agree(self.memory.left(positions, rows=len(batch.rows), used=used))
        batch.prefixes.trim(batch.slots, left)

    def _prefill_chunk(self) -> list[Event]:
        """Dispatch the next chunk; WAITS for the one before the last, so that at most two are in
        flight. The last chunk brings the first token and the row joins the batch."""
        fill = self._prefill
        assert fill is not None
        hidden = fill.advance()
        if hidden is not None:
            self._join(fill, hidden)
        elif len(fill.unread) > 2:
            self.waits += 1
            mx.eval(fill.unread.popleft())
        return [Event(fill.request, [], [], fill.done)]

    def _join(self, fill: Prefill, hidden: mx.array) -> None:
        """Put a prefilled prompt into its row and dispatch the choice of its first token."""
        batch, row, request = self._batch, fill.row, fill.request
        self._put_back(fill)
        first, result = fill.first_token(hidden)
        batch.join(row, request, first)
        mx.async_eval(result, batch.state)
        self._flights.append(Flight(result, Shape(0), [(0, row, request)], first=True))

    def _end_prefill(self, fill: Prefill) -> None:
        """Give up a prompt half way; what of it is in KV can be gone on from."""
        self._put_back(fill)
        self._batch.leave(fill.row, fill.request.prompt[: fill.done])

    def _put_back(self, fill: Prefill) -> None:
        """End a prefill: its buffers go into its row."""
        self._prefill = None
        kv, fill.kv = fill.kv, []
        self._batch.put_kv(fill.row, kv)

    def _release(self, rows: list[Row]) -> None:
        """Let go of rows whose requests ended. Their KV is cut back to what was kept: a block in
        flight may have written past it, which the next pass overwrites."""
        for row in rows:
            request = row.request
            assert request is not None
            ids = request.prompt + request.tokens
            if request.error and not request.outgrown:
                ids = []
                self._batch.clear(row)
            # The newest token is chosen but not in KV yet; before an EOS everything kept is.
            elif request.tokens and not request.ended_by_eos:
                ids.pop()
            self._batch.leave(row, ids)
        live = [f for f in self._flights if any(row.request is r for _, row, r in f.rows)]
        self._flights = deque(live)
