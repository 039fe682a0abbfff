"""Keys and values of all rows: how they lie in memory, and the views that models see them through.

Layers that attend to everything have a buffer of `capacity` slots that grows by powers of two;
sliding layers have a ring of C slots where position p lives in slot p mod C. A row's committed
length is an array beside the buffers: rollback is that number being smaller, nothing is copied.

With `bits`, full layers keep K and V packed (mx.quantize, affine): every pass, the drafter's too,
sees a position as it was quantised when it was written, so text does not depend on the draft length
or on prefill chunks. Rings keep the model's dtype: they do not grow, and a window of them is
smaller than the packed rest from some thousand positions on.

MLX writes out of bounds without an error, so the caller keeps an upper bound of every row's
length on the host, and `view` refuses a pass that might reach past the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from mlx_mtp.config import FULL, SLIDING, TextConfig
from mlx_mtp.engine.draft_length import MAX_DRAFT
from mlx_mtp.errors import UsageError
from mlx_mtp.kernels.attention import LongKV, attend
from mlx_mtp.models.layers import KVKey, on_cpu

# Per layer that owns KV: K and V [B, kv_heads, slots, D], or both as (packed, scales, biases).
LayerKV = tuple[mx.array, ...]
Buffers = list[LayerKV]
Product = Callable[[mx.array], mx.array]

BLOCK = MAX_DRAFT + 1  # the most tokens that one verify pass writes
MIN_CAPACITY = 256
# Elements of a prefill's scores at once: on a GPU enough rows for a fast product.
CPU_SCORES, GPU_SCORES = 1 << 18, 1 << 26
MOST_COPIED = 4096  # slots whose keys may be laid out anew for the CPU
GROUP_SIZES = (64, 32)  # of quantised KV: the first that divides the head dim


@dataclass(frozen=True)
class KVLayout:
    """The shape of the buffers for one target. bits: 8 or 4 to quantise full layers' KV. stepwise:
    passes begin to run while they are still being described, which on the CPU hides the describing.
    Their views take over the list of buffers that they are given, for a name that holds an old
    buffer makes a write copy it. Not within a trace. full_ways: how blocks of so many tokens attend
    in full layers, 'folded' (products and a softmax) or 'kernel' (`kernels.attention`); others take
    MLX's fused attention. kv_heads: how many heads of each layer that owns KV lie here; None: all.

    Raises UsageError for other bits, or where no group size divides the head dim.
    """

    text: TextConfig
    dtype: mx.Dtype
    bits: int | None = None
    stepwise: bool = False
    full_ways: Mapping[int, str] = field(default_factory=dict)
    kv_heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.bits not in (None, 8, 4):
            raise UsageError(f"KV can be quantised to 8 or 4 bits, not {self.bits}")
        head_dim = self.text.head_dim_of(FULL)
        if self.bits and head_dim % GROUP_SIZES[-1]:
            raise UsageError(
                f"KV of head dim {head_dim} cannot be quantised: it is no multiple of "
                f"{GROUP_SIZES[-1]}; leave kv bits away"
            )

    @property
    def ring(self) -> int:
        """Slots of a sliding layer. A stop is seen one round late, when two blocks have been
        written past it, and the window behind the stop must still stand: W + 2 blocks."""
        return -(-(self.text.sliding_window + 2 * BLOCK) // 16) * 16

    @property
    def group(self) -> int:
        """Values of a head dim that share a scale and a bias."""
        head_dim = self.text.head_dim_of(FULL)
        return next(size for size in GROUP_SIZES if head_dim % size == 0)

    def encode(self, kind: str, keys: mx.array, values: mx.array) -> LayerKV:
        """K and V [..., D] as a layer of type `kind` keeps them."""
        keys, values = keys.astype(self.dtype), values.astype(self.dtype)
        if kind != FULL or self.bits is None:
            return keys, values
        return (
            *mx.quantize(keys, self.group, self.bits),
            *mx.quantize(values, self.group, self.bits),
        )

    def decode(self, kv: LayerKV) -> LayerKV:
        """K and V out of what `encode` made of them."""
        if len(kv) == 2:
            return kv
        keys, key_scales, key_biases, values, scales, biases = kv
        return (
            mx.dequantize(keys, key_scales, key_biases, self.group, self.bits),
            mx.dequantize(values, scales, biases, self.group, self.bits),
        )

    def products(self, kv: LayerKV) -> tuple[Product, Product]:
        """Multiplication by a layer's K^T and by its V, as they lie: packed KV would be written
        and read again if it was unpacked first, more bytes than KV that never was packed."""
        if len(kv) == 2:
            score = _score_on_cpu if on_cpu() else _score
            return partial(score, kv[0]), lambda weights: weights @ kv[1]
        keys, key_scales, key_biases, values, scales, biases = kv
        group, bits = self.group, self.bits
        return (
            lambda x: mx.quantized_matmul(x, keys, key_scales, key_biases, True, group, bits),
            lambda x: mx.quantized_matmul(x, values, scales, biases, False, group, bits),
        )

    def long_kv(self, kv: LayerKV) -> LongKV:
        """A full layer's buffers as the attention kernel takes them."""
        return LongKV(kv, self.text.head_dim_of(FULL), self.bits or 0, self.group)

    def allocate(self, rows: int, capacity: int) -> Buffers:
        """Zeros: whatever never was written must not be NaN, which would leak through a mask."""
        buffers = []
        for kind, heads in self._owners:
            slots = capacity if kind == FULL else self.ring
            one = mx.zeros((1, 1, 1, self.text.head_dim_of(kind)), self.dtype)
            shape = (rows, heads, slots)
            parts = self.encode(kind, one, one)
            buffers.append(tuple(mx.zeros((*shape, p.shape[-1]), p.dtype) for p in parts))
        return buffers

    def nbytes(self, rows: int, capacity: int) -> int:
        """Bytes that `allocate` takes."""
        total = 0
        for kind, heads in self._owners:
            slots = capacity if kind == FULL else self.ring
            token = 2 * heads * self.text.head_dim_of(kind) * self.dtype.size
            if kind == FULL and self.bits:
                # Of each group its packed values, a scale and a bias.
                groups = token // self.dtype.size // self.group
                token = groups * (self.group * self.bits // 8 + 2 * self.dtype.size)
            total += slots * token
        return rows * total

    def grow(self, buffers: Buffers, capacity: int) -> Buffers:
        """The same KV in full buffers of `capacity` slots; rings stay as they are."""
        grown: Buffers = []
        for kind, layer in zip(self._kinds, buffers, strict=True):
            if kind == FULL:
                more = [(0, 0), (0, 0), (0, capacity - layer[0].shape[2]), (0, 0)]
                layer = tuple(mx.pad(part, more) for part in layer)
            grown.append(layer)
        return grown

    def rows(self, buffers: Buffers, index: list[int]) -> Buffers:
        """A copy of those rows, in that order; a row may come twice."""
        at = mx.array(index)
        return [tuple(mx.take(part, at, 0) for part in layer) for layer in buffers]

    def take_row(self, buffers: Buffers, row: int) -> Buffers:
        """A copy of one row, as buffers of one row."""
        return self.rows(buffers, [row])

    def put_row(self, buffers: Buffers, row: int, single: Buffers) -> Buffers:
        """`buffers` with one row's slots replaced by those of `single`, which has no more."""
        at = mx.array([row])
        return [
            tuple(mx.slice_update(p, q, at, axes=[0]) for p, q in zip(layer, one, strict=True))
            for layer, one in zip(buffers, single, strict=True)
        ]

    def rings(self, buffers: Buffers) -> Buffers:
        """The sliding layers' part of the buffers, under names of their own: an assignment to some
        elements changes the array that is named, and copies what lies under another name, too."""
        pairs = zip(self._kinds, buffers, strict=True)
        return [tuple(map(mx.array, layer)) for kind, layer in pairs if kind != FULL]

    def with_rings(self, buffers: Buffers, rings: Buffers) -> Buffers:
        """`buffers` with the sliding layers replaced by what `rings` gave."""
        parts, pairs = iter(rings), zip(self._kinds, buffers, strict=True)
        return [
            layer if kind == FULL else tuple(map(mx.array, next(parts))) for kind, layer in pairs
        ]

    def fork(self, buffers: Buffers, length: int, capacity: int) -> Buffers:
        """A copy of the first `length` slots in full buffers of `capacity`, and the rings, which
        the next write copies."""
        forked: Buffers = []
        for kind, layer in zip(self._kinds, buffers, strict=True):
            if kind == FULL:
                more = [(0, 0), (0, 0), (0, capacity - length), (0, 0)]
                layer = tuple(mx.pad(part[:, :, :length], more) for part in layer)
            forked.append(layer)
        return self.with_rings(forked, self.rings(buffers))

    def clear_row(self, buffers: Buffers, row: int) -> Buffers:
        """`buffers` with zeros in one row."""
        empty = [tuple(mx.zeros_like(part[:1]) for part in layer) for layer in buffers]
        return self.put_row(buffers, row, empty)

    def capacity(self, buffers: Buffers) -> int:
        """Slots of the full buffers."""
        return buffers[self.text.donors[FULL]][0].shape[2] if FULL in self.text.donors else 1 << 40

    @property
    def _kinds(self) -> Sequence[str]:
        """The types of the layers that own KV."""
        return self.text.layer_types[: self.text.num_owners]

    @property
    def _owners(self) -> Iterator[tuple[str, int]]:
        """Of the same layers also how many heads lie here."""
        heads = self.kv_heads or map(self.text.kv_heads_of, self._kinds)
        return zip(self._kinds, heads, strict=True)

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


def nbytes(buffers: Buffers) -> int:
    """Bytes that buffers take."""
    return sum(part.nbytes for layer in buffers for part in layer)


def capacity_for(positions: int) -> int:
    """Slots to allocate: the next power of two."""
    return max(MIN_CAPACITY, 1 << (positions - 1).bit_length())


def attended(bound: int, capacity: int) -> int:
    """How many slots attention covers: `bound` rounded up to an eighth of an octave. Covering the
    whole capacity would double the cost of every length just past a power of two, and covering
    `bound` itself would make every round a new shape, which a GPU traces anew. The CPU, where
    rounds are not compiled and every slot costs, goes in finer steps."""
    least, parts = (32, 64) if on_cpu() else (MIN_CAPACITY, 16)
    step = max(32, (1 << (max(bound, 1) - 1).bit_length()) // parts)
    return min(capacity, max(least, -(-bound // step) * step))


class Places:
    """Where a pass writes: slots int [B, T]; `run` says that there is one row and its slots follow
    each other.

    Both forms write in place where nothing else holds the buffer; put_along_axis and where would
    copy all of it. Indices for every axis spare MLX the making of some: four operations a write.
    """

    def __init__(self, slots: mx.array, run: bool):
        self._slots = slots
        self._start = slots[0, :1] if run else None
        self._indices: dict[int, tuple[mx.array, ...]] = {}

    def _index(self, heads: int) -> tuple[mx.array, ...]:
        if heads not in self._indices:
            rows, every = mx.arange(len(self._slots)), mx.arange(heads)
            self._indices[heads] = rows[:, None, None], every[:, None], self._slots[:, None]
        return self._indices[heads]

    def store(self, buffer: mx.array, new: mx.array) -> mx.array:
        """`buffer` [B, heads, S, D] with `new` [B, heads, T, D]."""
        if self._start is not None:
            return mx.slice_update(buffer, new, self._start, axes=[2])
        buffer[self._index(buffer.shape[1])] = new
        return buffer


def _score(keys: mx.array, queries: mx.array) -> mx.array:
    """queries [B, h, M, D] @ keys [B, h, S, D]^T."""
    return queries @ keys.swapaxes(-1, -2)


def _score_on_cpu(keys: mx.array, queries: mx.array) -> mx.array:
    """The same as the CPU's reference BLAS does it fastest: its
    inner loop wants two operands that both lie along the result's rows, which takes a copy of the
    smaller one."""
    rows, slots = queries.shape[2], keys.shape[2]
    if rows < 8:
        return queries @ keys.swapaxes(-1, -2)
    if slots <= min(rows * 16, MOST_COPIED):
        return queries @ mx.contiguous(keys.swapaxes(-1, -2))
    return (keys @ mx.contiguous(queries.swapaxes(-1, -2))).swapaxes(-1, -2)


def attention(
    queries: mx.array, kv_heads: int, score: Product, mix: Product, mask: mx.array
) -> mx.array:
    """scaled_dot_product_attention at scale 1, written out: `score` multiplies by K^T and `mix` by
    V. All query heads of a kv head are rows of one product, so that K and V are read once."""
    B, heads, T, D = queries.shape
    scores = score(queries.reshape(B, kv_heads, heads // kv_heads * T, D))
    slots = scores.shape[-1]
    scores = scores.reshape(B, kv_heads, heads // kv_heads, T, slots)
    # A finite floor: a row that sees nothing (an unused one of a batch) must not become NaN.
    scores = mx.where(mask[:, :, None], scores, mx.finfo(scores.dtype).min)
    weights = mx.softmax(scores, -1, precise=True)
    return mix(weights.reshape(B, kv_heads, -1, slots)).reshape(B, heads, T, D)


def by_mlx(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array) -> mx.array:
    """MLX's attention at scale 1, a block in as many calls as keep each on its fused kernel: there
    is one for head dims up to 256 while query rows times heads of a kv head are at most 32."""
    tokens, most = queries.shape[2], min(8, 32 // (queries.shape[1] // keys.shape[1]))
    if not most < tokens <= BLOCK or queries.shape[3] > 256:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask)
    parts = [
        mx.fast.scaled_dot_product_attention(
            queries[:, :, at : at + most], keys, values, scale=1.0, mask=mask[:, :, at : at + most]
        )
        for at in range(0, tokens, most)
    ]
    return mx.concatenate(parts, 2)


class View:
    """One pass over the buffers; afterwards `buffers` holds them with what was written.

    offset: int32 [B], the position of each row's first query. masks: per type of layer, bool
    [B, 1, T, slots], made once a pass. A layer's KV is written before it is first attended to.
    """

    def __init__(self, layout: KVLayout, buffers: Buffers, offset: mx.array, slots: int):
        self.layout, self.offset, self.slots = layout, offset, slots
        self.buffers = buffers if layout.stepwise else list(buffers)
        self.masks: dict[str, mx.array] = {}
        self._read: dict[int, LayerKV] = {}

    def write(self, key: KVKey, keys: mx.array, values: mx.array) -> None:
        raise AssertionError("this pass only reads")

    def store(self, layer: int, new: LayerKV, places: Places) -> None:
        self.buffers[layer] = tuple(
            places.store(old, part) for old, part in zip(self.buffers[layer], new, strict=True)
        )

    def attend(self, key: KVKey, queries: mx.array, seen: slice | None = None) -> mx.array:
        """[B, heads, T, D] over what is committed and what this pass wrote."""
        layer = self.layer(key)
        mask = self.masks[self.layout.text.layer_types[layer]]
        return self.attend_layer(layer, queries, self.offset, mask, seen)

    def attend_layer(
        self, layer: int, queries: mx.array, offset: mx.array, mask: mx.array, seen: slice | None
    ) -> mx.array:
        """`attend` for queries from positions `offset` [B] on."""
        way = None
        if self.layout.text.layer_types[layer] == FULL:
            way = self.layout.full_ways.get(queries.shape[2])
        if way == "kernel" and seen is None:
            return attend(queries, self.layout.long_kv(self.buffers[layer]), offset)
        kv = self.read(layer)
        if seen is not None:
            kv = tuple(part[:, seen] for part in kv)
        if len(kv) == 2 and not on_cpu() and way is None:
            return by_mlx(queries, *kv, mask)
        return attention(queries, kv[0].shape[1], *self.layout.products(kv), mask)

    def layer(self, key: KVKey) -> int:
        """The layer that owns the KV that `key` names."""
        return int(key)

    def read(self, layer: int) -> LayerKV:
        """What this pass attends to of a layer's buffers. On the CPU, whose product with packed
        KV is slow and in half precision wrong by percents, it is unpacked: once for all layers
        that share it and all steps of a drafter."""
        if layer not in self._read:
            # A ring that has not wrapped yet is read as far as it goes, too.
            kv = self.buffers[layer]
            if self.slots < kv[0].shape[2]:
                kv = tuple(part[:, :, : self.slots] for part in kv)
            self._read[layer] = self.layout.decode(kv) if on_cpu() else kv
        return self._read[layer]

    def start(self, x: mx.array) -> None:
        if self.layout.stepwise:
            mx.async_eval(x)

    def last(self) -> View:
        return LastView(self)

    def _ring_positions(self, last: mx.array) -> mx.array:
        """Which position each slot of a ring holds when `last` [B] is the newest: [B, 1, 1, .] of
        those that this pass reads. Negative where nothing was written yet."""
        ring, last = self.layout.ring, last[:, None, None, None]
        return last - (last + (ring - mx.arange(min(ring, self.slots)))) % ring

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
        # A block of several tokens may wrap around the end of a ring.
        one = len(length) == 1
        self.places = {
            FULL: Places(at, one),
            SLIDING: Places(at % layout.ring, one and tokens == 1),
        }
        self._mask(at, self._ring_positions(length + (tokens - 1)))

    def write(self, key: KVKey, keys: mx.array, values: mx.array) -> None:
        layer, kind = int(key), self.layout.text.layer_types[int(key)]
        self.store(layer, self.layout.encode(kind, keys, values), self.places[kind])


class PrefillView(View):
    """A chunk of the prompt, longer than a block. A ring cannot take it before it is attended to:
    queries see the ring as it was beside the chunk's own keys, and the ring keeps the end.

    Over a long context a chunk's scores would be the largest array of all: full layers take as
    many queries at a time as keep them under a fixed size."""

    def __init__(
        self, layout: KVLayout, buffers: Buffers, length: mx.array, tokens: int, slots: int
    ):
        super().__init__(layout, buffers, length, slots)
        self.tokens = tokens
        self.at = length[:, None] + mx.arange(tokens)
        before = self._ring_positions(length - 1)
        self._mask(self.at, mx.concatenate([before, self.at[:, None, None, :]], -1))
        self.chunks: dict[int, LayerKV] = {}

    def write(self, key: KVKey, keys: mx.array, values: mx.array) -> None:
        layer, kind = int(key), self.layout.text.layer_types[int(key)]
        new = self.layout.encode(kind, keys, values)
        slots, run = self.at, self.at.shape[0] == 1
        if kind == SLIDING:
            self.chunks[layer] = tuple(
                mx.concatenate([old[:, :, : self.slots], part], 2)
                for old, part in zip(self.buffers[layer], new, strict=True)
            )
            kept = min(self.tokens, self.layout.ring)
            slots, run = self.at[:, -kept:] % self.layout.ring, False
            new = tuple(part[:, :, -kept:] for part in new)
        self.store(layer, new, Places(slots, run))

    def attend(self, key: KVKey, queries: mx.array, seen: slice | None = None) -> mx.array:
        layer, heads = int(key), queries.shape[1]
        most = max(2, (CPU_SCORES if on_cpu() else GPU_SCORES) // (heads * self.slots))
        if layer in self.chunks or self.tokens <= most:
            return super().attend(key, queries, seen)
        pieces: list[mx.array] = []
        for start in range(0, self.tokens, most):
            some, at = queries[:, :, start : start + most], self.at[:, start : start + most]
            if pieces:
                # One after the other: MLX would hold the scores of several.
                some = mx.depends(some, pieces[-1])
            mask = mx.arange(self.slots) <= at[:, None, :, None]
            pieces.append(self.attend_layer(layer, some, self.offset + start, mask, seen))
        return mx.concatenate(pieces, 2)

    def read(self, layer: int) -> LayerKV:
        return self.chunks[layer] if layer in self.chunks else super().read(layer)


class LastView(View):
    """A pass narrowed to its last position, for the layers that own no KV."""

    def __init__(self, whole: View):
        tokens = whole.masks[FULL].shape[2]
        super().__init__(whole.layout, whole.buffers, whole.offset + (tokens - 1), whole.slots)
        self.masks = {
            FULL: mx.arange(self.slots) <= self.offset[:, None, None, None],
            SLIDING: whole.masks[SLIDING][:, :, -1:],
        }
        self.whole = whole

    def read(self, layer: int) -> LayerKV:
        return self.whole.read(layer)


class DonorView(View):
    """What the drafter sees: for each type of layer the KV of the target's last owner of it,
    committed slots only. Its queries sit at the last committed position all round long."""

    def __init__(self, layout: KVLayout, buffers: Buffers, length: mx.array, slots: int):
        super().__init__(layout, buffers, length - 1, slots)
        self._mask(self.offset[:, None], self._ring_positions(self.offset))

    def layer(self, key: KVKey) -> int:
        return self.layout.text.donors[str(key)]
