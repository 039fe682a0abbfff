"""The rows of a batch: the host's side of each, and the state of all of them on the device.

Rows come and go between rounds. The device holds a bucket of 1, 2, 4, 8 or 16 rows, so that few
shapes occur; an unused row of a bucket decodes into nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx.utils import tree_map

from mlx_mtp.engine.copying import Copies, CopyIndex
from mlx_mtp.engine.kv import BLOCK, MIN_CAPACITY, Buffers, KVLayout, capacity_for
from mlx_mtp.engine.processors import Processed, ProcessorState, count
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.round import RoundState
from mlx_mtp.engine.sampling import SamplerState, Sampling


@dataclass(eq=False)
class Row:
    """The host's side of one row.

    length: committed KV slots as far as results were read; ahead: how far unread rounds may get
    beyond that. ids: the tokens in KV once no request runs here, for a prompt that goes on.
    copies: the text so far, where copied drafts may be used.
    """

    request: Request | None = None
    length: int = 0
    ahead: int = 0
    ids: list[int] = field(default_factory=list)
    started: float = 0.0
    copies: CopyIndex | None = None

    def reusable(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt stand in this row's KV; 0 unless all of `ids` do. The last
        prompt token is always run: its hidden state starts the rounds."""
        ids = self.ids
        return len(ids) if len(ids) < len(prompt) and list(prompt[: len(ids)]) == ids else 0


class Batch:
    """Up to `most` rows. `rows[i]` is row i of every array of `state`."""

    def __init__(self, layout: KVLayout, most: int):
        self.layout, self.most = layout, most
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

    def free_row(self, prompt: Sequence[int]) -> Row:
        """A row for a new request, best one whose KV the prompt goes on from; the bucket grows
        where all are taken. With nothing running the bucket is this row alone."""
        free = [row for row in self.rows if row.request is None]
        if not free:
            self.resize([*self.rows, Row()])
            free = self.rows[-1:]
        row = max(free, key=lambda row: (row.reusable(prompt), -len(row.ids)))
        if not self.running:
            self.resize([row])
        return row

    def shrink(self, reserved: Sequence[Row]) -> bool:
        """Use a smaller bucket where the rows in use have room in one."""
        used = [row for row in self.rows if row.request or row in reserved]
        smaller = len(used) > 0 and self.bucket(len(used)) < len(self.rows)
        if smaller:
            self.resize(used)
        return smaller

    def resize(self, rows: list[Row]) -> None:
        """Make `rows` the batch, filled up to a bucket; those of before keep their state."""
        rows = [*rows, *(Row() for _ in range(self.bucket(len(rows)) - len(rows)))]
        if rows == self.rows:
            return
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

    def take_kv(self, row: Row, positions: int) -> Buffers:
        """Buffers of one row for a prefill, with what `row` holds and room for `positions`. While
        other rows run they are a copy; a row that is alone gives its own away."""
        if len(self.rows) == 1:
            kv, self.state = self.state.kv, self.state._replace(kv=[])
        elif row.ids:
            kv = self.layout.take_row(self.state.kv, self.rows.index(row))
        else:
            kv = self.layout.allocate(1, capacity_for(positions))
        if self.layout.capacity(kv) < positions:
            kv = self.layout.grow(kv, capacity_for(positions))
        return kv

    def put_kv(self, row: Row, kv: Buffers) -> None:
        """Give a row the buffers that `take_kv` lent."""
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
