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
from mlx_mtp.engine.prefix import Prefixes, Slot
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
        """No row's length exceeds it, whatever the rounds in flight bring."""
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
        prompt, session = request.prompt, request.session
        found = self.prefixes.find(prompt, [row.slot for row in self.idle], session)
        slot, forks = found.slot, self.prefixes.forks(found, session)
        at = next((row for row in self.idle if row.slot is slot), None)
        if not self.running:
            self.resize([at or self.rows[0]])
        elif not self.idle:
            self.resize([*self.rows, Row()])
        # Another conversation's place is taken only where there is no empty one.
        elsewhere = min(self.idle, key=lambda r: (r is at, len(r.slot.ids) > 0, r.slot.used))
        row = at if at is not None and not forks else elsewhere
        alone = len(self.rows) == 1
        # What the row held, and what the prompt goes on from.
        left = self._lift(row) if alone or (row is not at and row.slot.ids) else None
        source = left if alone and at is row else None
        if source is None and found.length:
            source = self._lift(at) if at else slot.kv if forks else self.prefixes.take(slot)
        if forks:
            if row is at:
                left = left if alone else self._lift(row)
            if alone or at is None:
                assert source is not None
                source = self.layout.fork(source, found.length, capacity_for(len(prompt) + BLOCK))
            slot = replace(slot, kv=None)
        if row.slot is not slot and left is not None and self.prefixes.park(row.slot, left):
            left = None
        kv = source or left or self.layout.allocate(1, capacity_for(len(prompt) + BLOCK))
        del source, left
        if found.snapshot is not None:
            kv = self.layout.with_rings(kv, found.snapshot.rings)
        if self.layout.capacity(kv) < len(prompt) + BLOCK:
            kv = self.layout.grow(kv, capacity_for(len(prompt) + BLOCK))
        slot.rewind(found.length, found.snapshot)
        slot.session, row.slot = session, slot
        return row, kv, found.length

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
            if row not in rows and row.slot.ids and self.prefixes.budget:
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

    def count_first(self, i: int) -> None:
        """Count row i's bonus token as said: the first of its answer."""
        only = (mx.arange(len(self.rows)) == i).astype(mx.int32)[:, None]
        state = self.state
        processors = count(state.processors, state.bonus[:, None], only)
        self.state = state._replace(processors=processors)

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
