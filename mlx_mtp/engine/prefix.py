"""Which KV a prompt can go on from: conversations that are over for now keep theirs in slots.

A slot owns its full buffers. Rings cannot be wound back past their window, so on the way through
a prompt snapshots of them are taken: references, which make the next write copy them once. A slot
goes on from its end, or from a snapshot up to which the prompt says the same; the full buffers
need no snapshot, for a length that is smaller is all there is to a rewind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from mlx_mtp.engine.kv import BLOCK, Buffers, KVLayout, capacity_for, nbytes

MOST_SLOTS = 8
LEAST_FORKED = 32  # tokens; for fewer a copy of the buffers does not pay


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The sliding layers' buffers when `length` tokens were in KV; written: see `Slot`."""

    length: int
    rings: Buffers
    written: int = 0


@dataclass(eq=False)
class Slot:
    """One conversation's KV. ids: the tokens in it, once no request runs on it. kv: one row, or
    None while it lies in a row of the batch. session: the name under which it is asked for.
    used: when it was last, counted in requests. written: the position up to which its rings hold
    what was cut off since. forgotten: it is let go of once the request that runs on it ends."""

    ids: list[int] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    kv: Buffers | None = None
    session: str | None = None
    used: int = 0
    written: int = 0
    forgotten: bool = False

    @property
    def reach(self) -> int:
        """No position from here on was written: rounds in flight bring up to two blocks."""
        return max(self.written, len(self.ids) + 2 * BLOCK)

    def keep(self, snapshot: Snapshot) -> None:
        """Of many snapshots the first one, behind the system message, and the last four stay:
        from before and behind the user's last two messages."""
        others = [s for s in self.snapshots if s.length != snapshot.length]
        self.snapshots = [*others[:1], *others[1:][-3:], snapshot]

    def rewind(self, length: int, snapshot: Snapshot | None = None) -> None:
        """What comes after `length` tokens is about to be overwritten, with the rings as they are
        or as a snapshot has them."""
        self.written = snapshot.written if snapshot else self.reach
        self.ids = self.ids[:length]
        self.snapshots = [s for s in self.snapshots if s.length <= length]


@dataclass(frozen=True)
class Found:
    """What a prompt may go on from: the first `length` tokens of a slot, with the rings of a
    snapshot, or where that is None as they are. forks: in a copy, so that the conversation in the
    slot can go on, too."""

    slot: Slot
    length: int
    snapshot: Snapshot | None = None
    forks: bool = False

    @property
    def whole(self) -> bool:
        """Whether nothing of the slot is lost."""
        return self.length == len(self.slot.ids)


class Prefixes:
    """The slots that lie in no row, and the choice among all. budget: bytes that these and all
    snapshots may take; with 0 nothing is kept but what lies in the batch's rows."""

    def __init__(self, layout: KVLayout, budget: int) -> None:
        self.layout, self.budget = layout, budget
        self.parked: list[Slot] = []
        self._requests = 0

    def find(self, prompt: Sequence[int], slots: Iterable[Slot], session: str | None) -> Found:
        """The longest part of the prompt that is in KV, if need be nothing, in a new slot. The
        last token of a prompt is always run: its hidden state starts the rounds."""
        found = [self._reuse(slot, prompt) for slot in (*slots, *self.parked)]
        best = max(
            (one for one in found if one.length),
            key=lambda one: (one.length, one.whole, one.slot.session == session, one.slot.used),
            default=Found(Slot(), 0),
        )
        self._requests += 1
        best.slot.used = self._requests
        same = session is not None and best.slot.session == session
        return replace(best, forks=self.budget > 0 and not best.whole and not same)

    def keeps(self, slot: Slot) -> bool:
        """Whether a slot that has to leave its row is worth keeping."""
        return self.budget > 0 and len(slot.ids) > 0

    def park(self, slot: Slot, kv: Buffers) -> None:
        """Keep a slot that leaves its row."""
        slot.kv = self._cut(kv, len(slot.ids), capacity_for(len(slot.ids) + BLOCK))
        self.parked.append(slot)

    def take(self, found: Found, room: int) -> Buffers:
        """What was found in a parked slot, in buffers of `room` slots at most: a copy, or the
        slot's own, which is then no longer parked."""
        slot = found.slot
        assert slot.kv is not None
        if found.forks:
            return self.layout.fork(slot.kv, found.length, room)
        self.parked.remove(slot)
        kv, slot.kv = slot.kv, None
        return self._cut(kv, found.length, room)

    def _cut(self, kv: Buffers, length: int, room: int) -> Buffers:
        """`kv`, or where it is longer than `room` a copy of `length` slots. Evaluated: a copy that
        is only described holds what it is made of."""
        if self.layout.capacity(kv) > room:
            kv = self.layout.fork(kv, length, room)
        mx.async_eval(kv)
        return kv

    def nbytes(self, slots: Iterable[Slot]) -> int:
        """Bytes of parked slots, and of the snapshots of these and of `slots`."""
        held = [*self.parked, *slots]
        snapshots = {id(s): nbytes(s.rings) for slot in held for s in slot.snapshots}
        return sum(nbytes(slot.kv or []) for slot in self.parked) + sum(snapshots.values())

    def trim(self, slots: Sequence[Slot], most: int | None = None) -> None:
        """Keep within the budget, or within `most` bytes: the parked slot that was used least
        recently goes first, then snapshots of `slots`."""
        most = self.budget if most is None else min(most, self.budget)
        self.parked.sort(key=lambda slot: slot.used)
        while self.parked and (len(self.parked) > MOST_SLOTS or self.nbytes(slots) > most):
            self.parked.pop(0)
        for slot in sorted(slots, key=lambda slot: slot.used):
            while slot.snapshots and self.nbytes(slots) > most:
                slot.snapshots.pop(1 if len(slot.snapshots) > 2 else 0)

    def forget(self, session: str) -> None:
        self.parked = [slot for slot in self.parked if slot.session != session]

    def _reuse(self, slot: Slot, prompt: Sequence[int]) -> Found:
        ids = slot.ids
        same = common_prefix(ids, prompt[:-1])
        if same == len(ids) or (same >= LEAST_FORKED and self._rewinds(slot.reach, same)):
            return Found(slot, same)
        usable = [s for s in slot.snapshots if LEAST_FORKED <= s.length <= same]
        return Found(slot, usable[-1].length, usable[-1]) if usable else Found(slot, 0)

    def _rewinds(self, reach: int, to: int) -> bool:
        """Whether the window behind `to` still stands in rings that were written up to `reach`."""
        return reach <= max(to - self.layout.text.sliding_window, 0) + self.layout.ring


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two lists begin with alike; by halving, for comparing slices is quick."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
