"""One target on several ranks: which rows of which matrix, which heads and which part of an MLP
each of them holds, and the sums that make one result of their parts.

Attention is divided by kv heads, or by query heads where there are fewer kv heads than ranks; MLPs
and experts by width. The two donor layers keep all their keys and values on every rank, for the
drafter, which every rank runs whole. Embeddings, norms, router and head are whole everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_mtp.config import TextConfig
from mlx_mtp.errors import UsageError

MATRIX = re.compile(r"layers\.(\d+)\.(self_attn|mlp|experts)\.(\w+)_proj\.")


@dataclass
class Ranks:
    """This process among `size` that run one model together; rank 0 leads. messages and bytes:
    what it handed to collectives. differences: rounds in which it would have gone on otherwise than
    rank 0, as Macs of different generations may at a near tie; on rank 0, those of all others."""

    rank: int = 0
    size: int = 1
    group: mx.distributed.Group | None = None
    messages: int = 0
    bytes: int = 0
    differences: int = 0

    def total(self, x: mx.array) -> mx.array:
        """The sum of all ranks' `x`."""
        if self.size == 1:
            return x
        self.messages += 1
        self.bytes += x.nbytes
        return mx.distributed.all_sum(x, group=self.group)

    def leaders(self, x: mx.array) -> mx.array:
        """Rank 0's integers `x`, on every rank. Elsewhere they are computed, too: a collective that
        did not wait for those before it would meet another one of rank 0's."""
        return self.total(x if self.rank == 0 else x * 0)

    def same(self, digest: Sequence[int]) -> bool:
        """Whether rank 0 has the same `digest`, of a length that all know. WAITS."""
        mine = mx.array(list(digest), dtype=mx.int32)
        with mx.stream(mx.cpu):
            return mx.array_equal(self.leaders(mine), mine).item() is True

    def counted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, which describes its collectives at its first call alone, as it is compiled, but
        does them at every one."""
        sent: list[tuple[int, int]] = []

        def called(*given: Any) -> Any:
            before = self.messages, self.bytes
            result = run(*given)
            if not sent:
                sent.append((self.messages - before[0], self.bytes - before[1]))
            else:
                self.messages, self.bytes = before[0] + sent[0][0], before[1] + sent[0][1]
            return result

        return called


class Cut(NamedTuple):
    """Of an axis of `whole` elements those from `start` to `stop`; packed weights have fewer, in
    the same proportion."""

    axis: int
    start: int
    stop: int
    whole: int

    @property
    def share(self) -> float:
        return (self.stop - self.start) / self.whole

    def of(self, array: mx.array) -> mx.array:
        """That part, without the rest in memory."""
        size = array.shape[self.axis]
        start, stop = self.start * size // self.whole, self.stop * size // self.whole
        index = [slice(None)] * array.ndim
        index[self.axis] = slice(start, stop)
        return mx.contiguous(array[tuple(index)])


@dataclass(frozen=True)
class Shards:
    """A target's division among `ranks`. groups: of packed matrices, by path, how many of their
    inputs share a scale, which stay together. Raises UsageError where heads cannot be divided."""

    text: TextConfig
    ranks: Ranks = field(default_factory=Ranks)
    groups: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in sorted(set(self.text.layer_types)):
            heads, kv, size = (*self._counts(kind), self.ranks.size)
            if heads % size or (kv % size and size % kv):
                raise UsageError(
                    f"{heads} query heads and {kv} kv heads of {kind} layers cannot be divided "
                    f"among {size} ranks; take fewer"
                )

    def _counts(self, kind: str) -> tuple[int, int]:
        return self.text.num_attention_heads, self.text.kv_heads_of(kind)

    def queries(self, kind: str) -> range:
        """Query heads of this rank in layers of a type."""
        each = self.text.num_attention_heads // self.ranks.size
        return range(self.ranks.rank * each, (self.ranks.rank + 1) * each)

    def seen(self, kind: str) -> range:
        """The kv heads that these attend to."""
        heads, kv = self._counts(kind)
        mine, alike = self.queries(kind), heads // kv
        return range(mine.start // alike, (mine.stop - 1) // alike + 1)

    def held(self, layer: int) -> range:
        """The kv heads that this rank keeps of a layer: all of a donor's."""
        kind = self.text.layer_types[layer]
        if layer in self.text.donors.values():
            return range(self.text.kv_heads_of(kind))
        return self.seen(kind)

    def inner(self, path: str, width: int) -> range:
        """Which of the `width` hidden units of an MLP, or of every expert, are this rank's; `path`
        is that of the matrix that takes them in."""
        unit, size = self.groups.get(path, 1), self.ranks.size
        units = width // unit
        if units < size:
            raise UsageError(f"{path}: {units} groups of inputs are too few for {size} ranks")
        starts = [units * rank // size * unit for rank in (self.ranks.rank, self.ranks.rank + 1)]
        return range(*starts)

    def cut(self, name: str) -> Cut | None:
        """What this rank reads of a parameter; None: all of it."""
        found = MATRIX.match(name)
        if found is None or self.ranks.size == 1:
            return None
        layer, block, matrix = int(found[1]), found[2], found[3]
        text, kind = self.text, self.text.layer_types[int(found[1])]
        if block == "self_attn":
            held = self.queries(kind) if matrix in "qo" else self.held(layer)
            heads, kv = self._counts(kind)
            whole, unit = heads if matrix in "qo" else kv, text.head_dim_of(kind)
            into = matrix == "o"
        else:
            whole, unit = text.moe_intermediate_size, 1
            if block == "mlp":
                whole = text.mlp_width(layer)
            held = self.inner(f"layers.{layer}.{block}.down_proj", whole)
            into = matrix == "down"
        return Cut(-1 if into else -2, held.start * unit, held.stop * unit, whole * unit)
