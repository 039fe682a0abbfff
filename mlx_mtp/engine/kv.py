"""Keys and values of all rows: how they lie in memory, and the views that models see them through.

Layers that attend to everything have a buffer of `capacity` slots that grows by powers of two;
sliding layers have a ring of C slots where position p lives in slot p mod C. A row's committed
length is an array beside the buffers: rollback is that number being smaller, nothing is copied.

MLX writes out of bounds without an error, so the caller keeps an upper bound of every row's
length on the host, and `view` refuses a pass that might reach past the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_mtp.config import FULL, SLIDING, TextConfig
from mlx_mtp.engine.draft_length import MAX_DRAFT
from mlx_mtp.models.layers import KVKey, on_cpu

Buffers = list[tuple[mx.array, mx.array]]  # per layer that owns KV: K and V [B, kv_heads, slots, D]

BLOCK = MAX_DRAFT + 1  # the most tokens that one verify pass writes
MIN_CAPACITY = 256


@dataclass(frozen=True)
class KVLayout:
    """The shape of the buffers for one target."""

    text: TextConfig
    dtype: mx.Dtype

    @property
    def ring(self) -> int:
        """Slots of a sliding layer. A stop is seen one round late, when two blocks have been
        written past it, and the window behind the stop must still stand: W + 2 blocks."""
        return -(-(self.text.sliding_window + 2 * BLOCK) // 16) * 16

    def allocate(self, rows: int, capacity: int) -> Buffers:
        """Zeros: whatever never was written must not be NaN, which would leak through a mask."""
        buffers = []
        for kind in self.text.layer_types[: self.text.num_owners]:
            slots = capacity if kind == FULL else self.ring
            shape = (rows, self.text.kv_heads_of(kind), slots, self.text.head_dim_of(kind))
            buffers.append((mx.zeros(shape, self.dtype), mx.zeros(shape, self.dtype)))
        return buffers

    def nbytes(self, rows: int, capacity: int) -> int:
        """Bytes that `allocate` takes."""
        total = 0
        for kind in self.text.layer_types[: self.text.num_owners]:
            slots = capacity if kind == FULL else self.ring
            total += slots * self.text.kv_bytes_per_token(kind, self.dtype.size)
        return rows * total

    def grow(self, buffers: Buffers, capacity: int) -> Buffers:
        """The same KV in full buffers of `capacity` slots; rings stay as they are."""
        grown: Buffers = []
        for kind, pair in zip(self.text.layer_types, buffers, strict=False):
            if kind == FULL:
                more = [(0, 0), (0, 0), (0, capacity - pair[0].shape[2]), (0, 0)]
                pair = (mx.pad(pair[0], more), mx.pad(pair[1], more))
            grown.append(pair)
        return grown

    def take_row(self, buffers: Buffers, row: int) -> Buffers:
        """A copy of one row, as buffers of one row."""
        return [(k[row : row + 1], v[row : row + 1]) for k, v in buffers]

    def put_row(self, buffers: Buffers, row: int, single: Buffers) -> Buffers:
        """`buffers` with one row's slots replaced by those of `single`, which has no more."""
        at = mx.array([row])
        return [
            (mx.slice_update(k, one_k, at, axes=[0]), mx.slice_update(v, one_v, at, axes=[0]))
            for (k, v), (one_k, one_v) in zip(buffers, single, strict=True)
        ]

    def clear_row(self, buffers: Buffers, row: int) -> Buffers:
        """`buffers` with zeros in one row."""
        empty = [(mx.zeros_like(k[:1]), mx.zeros_like(v[:1])) for k, v in buffers]
        return self.put_row(buffers, row, empty)

    def capacity(self, buffers: Buffers) -> int:
        """Slots of the full buffers."""
        return buffers[self.text.donors[FULL]][0].shape[2] if FULL in self.text.donors else 1 << 40

    def view(self, buffers: Buffers, length: mx.array, tokens: int, bound: int) -> View:
        """A pass that writes `tokens` (1 or more) after each row's `length` [B] and attends.

        `bound` is what the host knows no row's length to exceed.
        """
        capacity = self.capacity(buffers)
        assert bound + tokens <= capacity, f"KV overflow: {bound} + {tokens} > {capacity} slots"
        slots = attended(bound + tokens, capacity)
        if tokens <= BLOCK:
            return BlockView(self, buffers, length, tokens, slots)
        return PrefillView(self, buffers, length, tokens, slots)

    def donor_view(self, buffers: Buffers, length: mx.array, bound: int) -> DonorView:
        """The drafter's read-only view of the committed slots."""
        return DonorView(self, buffers, length, attended(bound, self.capacity(buffers)))


def capacity_for(positions: int) -> int:
    """Slots to allocate: the next power of two."""
    return max(MIN_CAPACITY, 1 << (positions - 1).bit_length())


def attended(bound: int, capacity: int) -> int:
    """How many slots attention covers: `bound` rounded up to an eighth of an octave. Covering the
    whole capacity would double the cost of every length just past a power of two, and covering
    `bound` itself would make every round a new shape."""
    step = max(MIN_CAPACITY, 1 << (max(bound, 1) - 1).bit_length()) // 8
    return min(capacity, max(MIN_CAPACITY, -(-bound // step) * step))


def _store(buffer: mx.array, new: mx.array, slots: mx.array, run: bool) -> mx.array:
    """`buffer` [B, h, S, D] with `new` [B, h, T, D] in `slots` int [B, T]; `run` says that there
    is one row and its slots follow each other.

    Both forms write in place where nothing else holds the buffer; put_along_axis and where would
    copy all of it.
    """
    new = new.astype(buffer.dtype)
    if run:
        return mx.slice_update(buffer, new, slots[0, :1], axes=[2])
    rows = mx.arange(buffer.shape[0])[:, None]
    # Advanced indices with a slice between them come first: the update is [B, T, h, D].
    buffer[rows, :, slots] = new.swapaxes(1, 2)
    return buffer


def _attention_on_cpu(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array
) -> mx.array:
    """scaled_dot_product_attention at scale 1, written for the CPU's reference BLAS: all query
    heads of a kv head in one product, and keys laid out anew, which costs less than the half of
    the product's time that it saves."""
    B, heads, T, D = queries.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    folded = queries.reshape(B, kv_heads, heads // kv_heads * T, D)
    scores = folded @ mx.contiguous(keys.swapaxes(-1, -2))
    scores = scores.reshape(B, kv_heads, heads // kv_heads, T, slots)
    # A finite floor: a row that sees nothing (an unused one of a batch) must not become NaN.
    scores = mx.where(mask[:, :, None], scores, mx.finfo(scores.dtype).min)
    weights = mx.softmax(scores, -1, precise=True)
    return (weights.reshape(B, kv_heads, -1, slots) @ values).reshape(B, heads, T, D)


class View:
    """One pass over the buffers; afterwards `buffers` holds them with what was written.

    offset: int32 [B], the position of each row's first query. masks: per type of layer, bool
    [B, 1, T, slots], made once a pass.
    """

    def __init__(self, layout: KVLayout, buffers: Buffers, offset: mx.array, slots: int):
        self.layout, self.buffers, self.offset, self.slots = layout, list(buffers), offset, slots
        self.masks: dict[str, mx.array] = {}

    def write(self, key: KVKey, keys: mx.array, values: mx.array) -> None:
        raise AssertionError("this pass only reads")

    def attend(self, key: KVKey, queries: mx.array) -> mx.array:
        """[B, heads, T, D] over what is committed and what this pass wrote."""
        kind, keys, values = self.read(key)
        mask = self.masks[kind]
        if on_cpu():
            return _attention_on_cpu(queries, keys, values, mask)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask)

    def read(self, key: KVKey) -> tuple[str, mx.array, mx.array]:
        """The type of the layer `key`, its keys and its values as this pass attends to them."""
        layer = int(key)
        kind = self.layout.text.layer_types[layer]
        keys, values = self.buffers[layer]
        if kind == FULL:
            keys, values = keys[:, :, : self.slots], values[:, :, : self.slots]
        return kind, keys, values

    def last(self) -> View:
        return LastView(self)

    def _ring_positions(self, last: mx.array) -> mx.array:
        """Which position each slot of a ring holds when `last` [B] is the newest: [B, 1, 1, C].
        Negative where nothing was written yet."""
        ring, last = self.layout.ring, last[:, None, None, None]
        return last - (last + (ring - mx.arange(ring))) % ring

    def _mask(self, queries: mx.array, ring: mx.array) -> None:
        """Queries at positions [B, T]; `ring`: positions of what sliding layers attend to."""
        at, window = queries[:, None, :, None], self.layout.text.sliding_window
        self.masks = {
            FULL: mx.arange(self.slots) <= at,
            SLIDING: (ring >= 0) & (ring <= at) & (ring > at - window),
        }


class BlockView(View):
    """A decode or verify pass: a block of at most BLOCK tokens, written in place, ring included."""

    def __init__(
        self, layout: KVLayout, buffers: Buffers, length: mx.array, tokens: int, slots: int
    ):
        super().__init__(layout, buffers, length, slots)
        self.tokens = tokens
        at = length[:, None] + mx.arange(tokens)
        self.places = {FULL: at, SLIDING: at % layout.ring}
        self._mask(at, self._ring_positions(length + (tokens - 1)))

    def write(self, key: KVKey, keys: mx.array, values: mx.array) -> None:
        kind = self.layout.text.layer_types[int(key)]
        places = self.places[kind]
        # A block of several tokens may wrap around the end of a ring.
        run = places.shape[0] == 1 and (kind == FULL or self.tokens == 1)
        old_keys, old_values = self.buffers[int(key)]
        self.buffers[int(key)] = (
            _store(old_keys, keys, places, run),
            _store(old_values, values, places, run),
        )


class PrefillView(View):
    """A chunk of the prompt, longer than a block. A ring cannot take it before it is attended to:
    queries see the ring as it was beside the chunk's own keys, and the ring keeps the end."""

    def __init__(
        self, layout: KVLayout, buffers: Buffers, length: mx.array, tokens: int, slots: int
    ):
        super().__init__(layout, buffers, length, slots)
        self.tokens = tokens
        self.at = length[:, None] + mx.arange(tokens)
        before = self._ring_positions(length - 1)
        self._mask(self.at, mx.concatenate([before, self.at[:, None, None, :]], -1))
        self.chunks: dict[int, tuple[mx.array, mx.array]] = {}

    def write(self, key: KVKey, keys: mx.array, values: mx.array) -> None:
        layer = int(key)
        old_keys, old_values = self.buffers[layer]
        places, run = self.at, self.at.shape[0] == 1
        if self.layout.text.layer_types[layer] == SLIDING:
            self.chunks[layer] = (
                mx.concatenate([old_keys, keys.astype(old_keys.dtype)], 2),
                mx.concatenate([old_values, values.astype(old_values.dtype)], 2),
            )
            kept = min(self.tokens, self.layout.ring)
            places, run = self.at[:, -kept:] % self.layout.ring, False
            keys, values = keys[:, :, -kept:], values[:, :, -kept:]
        self.buffers[layer] = (
            _store(old_keys, keys, places, run),
            _store(old_values, values, places, run),
        )

    def read(self, key: KVKey) -> tuple[str, mx.array, mx.array]:
        if int(key) in self.chunks:
            return SLIDING, *self.chunks[int(key)]
        return super().read(key)


class LastView(View):
    """A pass narrowed to its last position, for the layers that own no KV."""

    def __init__(self, whole: View):
        tokens = whole.masks[FULL].shape[2]
        super().__init__(whole.layout, whole.buffers, whole.offset + (tokens - 1), whole.slots)
        self.masks = {kind: mask[:, :, -1:] for kind, mask in whole.masks.items()}
        self.whole = whole

    def read(self, key: KVKey) -> tuple[str, mx.array, mx.array]:
        return self.whole.read(key)


class DonorView(View):
    """What the drafter sees: for each type of layer the KV of the target's last owner of it,
    committed slots only. Its queries sit at the last committed position all round long."""

    def __init__(self, layout: KVLayout, buffers: Buffers, length: mx.array, slots: int):
        super().__init__(layout, buffers, length - 1, slots)
        self._mask(self.offset[:, None], self._ring_positions(self.offset))

    def read(self, key: KVKey) -> tuple[str, mx.array, mx.array]:
        return super().read(self.layout.text.donors[str(key)])
