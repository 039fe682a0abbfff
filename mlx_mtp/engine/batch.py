"""The rows of a batch: the host's side of each, and the state of all of them on the device.

Rows come and go between rounds. The device holds a bucket of 1, 2, 4, 8 or 16 rows, so that few
shapes occur; an unused row of a bucket decodes into nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
from mlx.utils import tree_map

from mlx_mtp.engine.copying import Copies, CopyIndex
from mlx_mtp.engine.kv import BLOCK, MIN_CAPACITY, Buffers, KVLayout, capacity_for
from mlx_mtp.engine.prefix import Found, Prefixes, Slot
from mlx_mtp.engine.processors import Processed, ProcessorState, count
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.round import RoundState
from mlx_mtp.engine.sampling import SamplerState, Sampling


@dataclass(eq=False)
class Row:
    """The host's side of one row.

    length: committed KV slots as far as results were read; ahead: how far unread rounds may get
    beyond that. slot: what lies in the row's KV, for a prompt that goes on from it. copies: the
    text so far, where copied drafts may be used.
    """

    request: Request | None = None
    length: int = 0
    ahead: int = 0
    slot: Slot = field(default_factory=Slot)
    started: float = 0.0
    copies: CopyIndex | None = None


class Batch:
    """Up to `most` rows. `rows[i]` is row i of every array of `state`. cache_bytes: what KV of
    conversations may take for which there is no row, see `Prefixes`."""

    def __init__(self, layout: KVLayout, most: int, cache_bytes: int = 0):
        self.layout, self.most = layout, most
        self.prefixes = Prefixes(layout, cache_bytes)
        self.rows = [Row()]
        zeros = mx.zeros((1,), dtype=mx.int32)
        self.state = RoundState(
            kv=layout.allocate(1, MIN_CAPACITY),
            bonus=zeros,
            hidden=mx.zeros((1, layout.text.hidden_size), dtype=layout.dtype),
            length=zeros,
            budget=zeros,
            active=zeros,
            sampler=SamplerState.of([Sampling()]),
            processors=ProcessorState(),
        )

    @property
    def running(self) -> list[Row]:
        return [row for row in self.rows if row.request]

    @property
    def bound(self) -> int:
        """No running row's length exceeds it, whatever the rounds in flight bring."""
        return max((row.length + row.ahead for row in self.running), default=0)

    @property
    def longest(self) -> int:
        """The same of all rows: idle ones attend to as little as the others, but write behind
        their own length."""
        return max(row.length + row.ahead for row in self.rows)

    def bucket(self, rows: int) -> int:
        return min(1 << (rows - 1).bit_length(), self.most)

    @property
    def idle(self) -> list[Row]:
        return [row for row in self.rows if row.request is None]

    @property
    def slots(self) -> list[Slot]:
        return [row.slot for row in self.rows]

    def admit(self, request: Request) -> tuple[Row, Buffers, int]:
        """A row for a new request; buffers of one row for its prefill, with room for its prompt;
        and how many of its tokens are in them. The bucket grows where all rows are taken; with
        nothing running it is this row alone. `put_kv` brings the buffers back."""
        idle = [row.slot for row in self.idle]
        found = self.prefixes.find(request.prompt, idle, request.session)
        row = self._choose_row(found)
        kv = self._source(row, found, capacity_for(len(request.prompt) + BLOCK))
        slot = replace(found.slot, kv=None) if found.forks else found.slot
        slot.rewind(found.length, found.snapshot)
        slot.session, row.slot = request.session, slot
        return row, kv, found.length

    def _choose_row(self, found: Found) -> Row:
        """The idle row that holds what was found, unless that stays there for others; else one
        whose loss is the least."""
        at = self._row_of(found.slot)
        if not self.running:
            self.resize([at or self.rows[0]])
        elif not self.idle:
            self.resize([*self.rows, Row()])
        if at and not found.forks:
            return at
        return min(self.idle, key=lambda r: (r is at, len(r.slot.ids) > 0, r.slot.used))

    def _source(self, row: Row, found: Found, room: int) -> Buffers:
        """Buffers of one row with what was found in them, and `room` slots or more. What the row
        held leaves it, if that is not the same."""
        at = self._row_of(found.slot)
        if at is row and not found.forks:
            kv = self._lift(row)
        else:
            kv = self._vacate(row)
            if found.length:
                kv = self._lift(at) if at and at is not row else self.prefixes.take(found, room)
        kv = kv or self.layout.allocate(1, room)
        if found.snapshot:
            kv = self.layout.with_rings(kv, found.snapshot.rings)
        return self.layout.grow(kv, room) if self.layout.capacity(kv) < room else kv

    def _vacate(self, row: Row) -> Buffers:
        """Park what a row holds where it is worth it; else its buffers, where they are its own."""
        if not self.prefixes.keeps(row.slot):
            return self._lift(row) if len(self.rows) == 1 else []
        self.prefixes.park(row.slot, self._lift(row))
        return []

    def _row_of(self, slot: Slot) -> Row | None:
        return next((row for row in self.rows if row.slot is slot), None)

    def shrink(self, reserved: Sequence[Row]) -> bool:
        """Use a smaller bucket where the rows in use have room in one."""
        used = [row for row in self.rows if row.request or row in reserved]
        smaller = len(used) > 0 and self.bucket(len(used)) < len(self.rows)
        if smaller:
            self.resize(used)
        return smaller

    def resize(self, rows: list[Row]) -> None:
        """Make `rows` the batch, filled up to a bucket; those of before keep their state, and what
        idle ones held that leave is parked."""
        rows = [*rows, *(Row() for _ in range(self.bucket(len(rows)) - len(rows)))]
        if rows == self.rows:
            return
        for row in self.rows:
            if row not in rows and self.prefixes.keeps(row.slot):
                self.prefixes.park(row.slot, self._lift(row))
        # A new row starts as a copy of some old one: all it needs is to be finite.
        index = [self.rows.index(row) if row in self.rows else 0 for row in rows]
        new = {i for i, row in enumerate(rows) if row not in self.rows}
        kv, state = self.state.kv, self.state._replace(kv=[])
        self.rows = rows
        taken = mx.array(index)
        state = tree_map(lambda table: None if table is None else table[taken], state)
        self.state = state._replace(kv=self.layout.rows(kv, index))
        del kv
        self.sync(new)

    def grow(self, positions: int) -> bool:
        """Make room for `positions` tokens a row; returns whether buffers were copied for it."""
        if positions <= self.layout.capacity(self.state.kv):
            return False
        kv, self.state = self.state.kv, self.state._replace(kv=[])
        self.state = self.state._replace(kv=self.layout.grow(kv, capacity_for(positions)))
        return True

    def _lift(self, row: Row) -> Buffers:
        """A row's buffers: a copy while there are other rows, else its own."""
        if len(self.rows) > 1:
            return self.layout.take_row(self.state.kv, self.rows.index(row))
        kv, self.state = self.state.kv, self.state._replace(kv=[])
        return kv

    def put_kv(self, row: Row, kv: Buffers) -> None:
        """Give a row the buffers that `admit` lent."""
        if len(self.rows) > 1:
            self.grow(self.layout.capacity(kv) if kv else 0)
            whole, self.state = self.state.kv, self.state._replace(kv=[])
            kv = self.layout.put_row(whole, self.rows.index(row), kv)
            del whole
        self.state = self.state._replace(kv=kv)

    def clear(self, row: Row) -> None:
        """Zeros in a row's KV: NaN there leaks through a mask."""
        kv, self.state = self.state.kv, self.state._replace(kv=[])
        self.state = self.state._replace(kv=self.layout.clear_row(kv, self.rows.index(row)))

    def sync(self, moved: set[int]) -> None:
        """Bring the device's idea of the rows up to the host's. Rows in `moved` get the host's
        length and counts, those of the others may be ahead of it."""
        mask = mx.array([i in moved for i in range(len(self.rows))])
        lengths = mx.array([row.length for row in self.rows])
        running = [row.request for row in self.rows]
        processors = ProcessorState.of(
            [Processed(r.processing, r.eos, r.prompt, r.tokens) if r else None for r in running],
            self.layout.text.vocab_size,
        )
        known = self.state.processors.counts
        if known is not None and processors.counts is not None:
            counts = mx.where(mask[:, None], processors.counts, known)
            processors = processors._replace(counts=counts)
        self.state = self.state._replace(
            length=mx.where(mask, lengths, self.state.length),
            budget=mx.array([r.budget if r else 0 for r in running]),
            active=mx.array([int(r is not None) for r in running]),
            sampler=SamplerState.of([r.sampling if r else Sampling() for r in running]),
            processors=processors,
        )

    def join(self, row: Row, request: Request, first: RoundState) -> None:
        """A request whose prompt is in its row's KV runs from now on. first: the state of one row
        behind the choice of its first token."""
        row.request, row.length, row.ahead = request, len(request.prompt), 0
        if request.draft_len is None:
            row.copies = CopyIndex(request.prompt)
        i, state = self.rows.index(row), self.state
        self.state = state._replace(
            bonus=mx.slice_update(state.bonus, first.bonus, mx.array([i]), axes=[0]),
            hidden=mx.slice_update(state.hidden, first.hidden, mx.array([i]), axes=[0]),
        )
        del state
        self.sync({i})
        only = (mx.arange(len(self.rows)) == i).astype(mx.int32)[:, None]
        processors = count(self.state.processors, self.state.bonus[:, None], only)
        self.state = self.state._replace(processors=processors)

    def leave(self, row: Row, ids: list[int]) -> None:
        """A row's request is over. ids: what of it is in KV, for a prompt that goes on from it."""
        if row.slot.forgotten or not ids:
            ids, row.slot = [], Slot()
        row.slot.ids = ids
        row.request = row.copies = None
        row.length, row.ahead = len(ids), 0
        self.sync({self.rows.index(row)})

    def forget(self, session: str, busy: Sequence[Row]) -> None:
        """Let go of what is kept under that name; of what lies in a `busy` row, at its end."""
        self.prefixes.forget(session)
        for row in self.rows:
            if row.slot.session == session:
                row.slot.forgotten = True
                row.slot = row.slot if row in busy else Slot()

    def copies(self, length: int) -> Copies | None:
        """What rows may copy, up to `length` drafts behind what rounds in flight bring; None
        where no row matches."""
        count = BLOCK + length
        found = [row.copies.continuation(count) if row.copies else [] for row in self.rows]
        if not any(found):
            return None
        nothing = [-1] * (count + 1)
        return Copies(
            mx.array([row.length for row in self.rows]),
            mx.array([tokens or nothing for tokens in found]),
        )
