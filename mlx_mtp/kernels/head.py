"""The head without its logits: the best token of every 64, straight from the packed table.

A greedy choice needs no more. The 64 likeliest tokens all lie in the 64 blocks with the highest
best, so a sampler's candidates are the tokens of those blocks, scored in a second, small launch.
Softcap, biases and bans are applied where the logits arise; only penalties, logprobs and sampling
from the whole vocabulary need all logits, and take the stock way. The drafter's centroid head is
the second launch alone: its clusters are the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.kernels.launch import Kernel, Launch, on_metal
from mlx_mtp.kernels.quantized import HEADER, Packed

BLOCK = 64  # rows of the table that a threadgroup scores
MAX_ROWS = 16

# The product is `matmul.TILE`'s; lane m finishes row m. CHOSEN says that every row of x has blocks
# of its own. Logits are rounded as the stock operations round them, or ties would be broken
# otherwise than they do.
SCORE = Kernel(
    "head_blocks",
    ("x", "w", "scales", "biases", "chosen", "names", "bias", "early", "is_early", "cap"),
    ("value", "token"),
    r"""
  constexpr int VALUES = mtp::Chunk<BITS>::values, WORDS = mtp::Chunk<BITS>::words;
  const int K = x_shape[1], words = K / VALUES * WORDS, groups = K / GROUP;
  const int lane = thread_index_in_simdgroup, simd_gid = simdgroup_index_in_threadgroup;
  const int block = threadgroup_position_in_grid.y, blocks = threadgroups_per_grid.y;
  const int m0 = threadgroup_position_in_grid.z;
  int first = block * 64;
  if (CHOSEN)
    first = (int(chosen[m0 * (blocks / PER) + block / PER]) * PER + block % PER) * 64;
  threadgroup float bests[M];
  threadgroup int places[M];

  float best = -INFINITY;
  int place = first + simd_gid * OUTS;
  for (int n0 = place; n0 < first + 64; n0 += 2 * OUTS) {
    float sum[OUTS][M] = {};
    for (int c = lane; c < K / VALUES; c += 32) {
      float q[OUTS][VALUES];
      UNROLL for (int r = 0; r < OUTS; r++) {
        const int g = (n0 + r) * groups + c * VALUES / GROUP;
        mtp::unpack<BITS, MODE>(
            w + (size_t(n0 + r) * words + c * WORDS), mtp::scale_of<MODE>(scales[g]),
            MODE == mtp::AFFINE ? float(biases[g]) : 0.0f, q[r]);
      }
      UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int i = 0; i < VALUES; i++) {
          const float xi = float(x[(m0 + m) * K + c * VALUES + i]);
          UNROLL for (int r = 0; r < OUTS; r++) sum[r][m] = fma(xi, q[r][i], sum[r][m]);
        }
    }
    UNROLL for (int r = 0; r < OUTS; r++) {
      float logit = 0.0f;
      UNROLL for (int m = 0; m < M; m++) {
        const float total = simd_sum(sum[r][m]);
        if (lane == m) logit = total;
      }
      if (lane >= M) continue;
      logit = float(T(logit));
      if (CAPPED) {
        const float most = float(T(cap[0]));
        logit = float(T(precise::tanh(float(T(logit / most)))));
        logit = float(T(logit * most));
      }
      const int name = NAMED ? int(names[n0 + r]) : n0 + r;
      const size_t entry = size_t((m0 + lane) / TOKENS) * VOCABULARY + name;
      if (BIASED) logit += float(bias[entry]);
      if (EARLY && int(is_early[m0 + lane]) != 0) logit += float(early[entry]);
      if (!BEST)
        value[(size_t(m0 + lane) * blocks + block) * 64 + n0 + r - first] = logit;
      // A value that is not a number stays, so that damaged weights are found.
      else if (logit > best || isnan(logit)) {
        best = logit;
        place = n0 + r;
      }
    }
  }
  if (!BEST) {
    if (lane == 0 && simd_gid == 0) token[m0 * blocks + block] = first;
    return;
  }
  if (simd_gid == 1 && lane < M) {
    bests[lane] = best;
    places[lane] = place;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd_gid == 0 && lane < M) {
    const float other = bests[lane];
    if (other > best || isnan(other) || (other == best && places[lane] < place)) {
      best = other;
      place = places[lane];
    }
    value[(m0 + lane) * blocks + block] = best;
    token[(m0 + lane) * blocks + block] = NAMED ? int(names[place]) : place;
  }
""",
    HEADER,
)


class Adjustments(NamedTuple):
    """What is added to logits: bias [B, V] always, early [B, V] at rows with is_early int32 [M].
    M rows are B sequences of equally many tokens."""

    bias: mx.array | None = None
    early: mx.array | None = None
    is_early: mx.array | None = None


class Candidates(NamedTuple):
    """Tokens int32 [M, C] that a choice may fall on, and their logits float32 [M, C], adjusted;
    finite bool [M]: no logit of the row is NaN."""

    values: mx.array
    tokens: mx.array
    finite: mx.array


@dataclass(frozen=True)
class Shortlist:
    """The head of one model: its packed table [V, H], or clusters [clusters, n, h] with the tokens
    that their rows stand for. rows: how many rows of x it serves; others take all logits."""

    table: Packed
    cap: float | None = None
    names: mx.array | None = None
    rows: frozenset[int] = frozenset()

    def candidates(
        self,
        x: mx.array,
        sequences: int,
        adjust: Adjustments,
        few: int | None,
        clusters: mx.array | None = None,
    ) -> Candidates:
        """x [M, H] of `sequences`. few None: the best token is among them. few n: the n likeliest
        are. clusters int32 [M, n]: the only ones to look at."""
        if clusters is not None:
            whole = self._score(x, sequences, adjust, clusters, best=few is None)
            return Candidates(*whole, ~mx.isnan(whole[0]).any(-1))
        values, tokens = self._score(x, sequences, adjust, None, best=True)
        finite = ~mx.isnan(values).any(-1)
        if few is not None:
            # In order, for of equal logits the first is chosen.
            few = min(few, values.shape[1])
            blocks = mx.sort(mx.argpartition(-values, few - 1, axis=-1)[:, :few], -1)
            values, tokens = self._score(x, sequences, adjust, blocks.astype(mx.int32), best=False)
        return Candidates(values, tokens, finite)

    def _score(
        self,
        x: mx.array,
        sequences: int,
        adjust: Adjustments,
        chosen: mx.array | None,
        best: bool,
    ) -> tuple[mx.array, mx.array]:
        """Values and tokens, of the best of every block or of all rows of the chosen."""
        if not on_metal():
            return self._reference(x, adjust, chosen, best)
        values, tokens = score(
            x,
            self.table,
            sequences=sequences,
            cap=self.cap,
            adjust=adjust,
            chosen=chosen,
            names=self.names,
            best=best,
        ).run()
        if not best:
            tokens = (tokens[..., None] + mx.arange(BLOCK)).flatten(1)
            tokens = tokens if self.names is None else self.names[tokens]
        return values, tokens

    def _reference(
        self, x: mx.array, adjust: Adjustments, chosen: mx.array | None, best: bool
    ) -> tuple[mx.array, mx.array]:
        """The same by stock operations, all logits first."""
        logits = self.table.flat.multiply(x)
        if self.cap is not None:
            logits = mx.tanh(logits / self.cap) * self.cap
        rows, vocabulary = logits.shape
        values = logits.astype(mx.float32)
        names = mx.arange(vocabulary, dtype=mx.int32) if self.names is None else self.names

        def added(table: mx.array) -> mx.array:
            return mx.repeat(table, rows // len(table), 0)[:, names]

        if adjust.bias is not None:
            values = values + added(adjust.bias)
        if adjust.early is not None and adjust.is_early is not None:
            values = values + mx.where(adjust.is_early[:, None] != 0, added(adjust.early), 0.0)
        values = values.reshape(rows, -1, BLOCK)
        names = mx.broadcast_to(names, (rows, vocabulary)).reshape(values.shape)
        if chosen is not None:
            per = self.table.outputs // BLOCK if self.table.weight.ndim == 3 else 1
            blocks = (chosen[..., None] * per + mx.arange(per)).reshape(rows, -1, 1)
            values = mx.take_along_axis(values, blocks, 1)
            names = mx.take_along_axis(names, blocks, 1)
        if not best:
            return values.flatten(1), names.flatten(1)
        at = mx.argmax(values, -1, keepdims=True)
        return (
            mx.take_along_axis(values, at, -1)[..., 0],
            mx.take_along_axis(names, at, -1)[..., 0],
        )


def fits(rows: int, packed: Packed) -> bool:
    """Whether the kernel takes that many rows of x and this table, [V, H] or [clusters, n, H]."""
    return (
        rows <= MAX_ROWS
        and packed.outputs % BLOCK == 0
        and packed.inputs % packed.group_size == 0
        and packed.inputs % packed.chunk == 0
    )


def score(
    x: mx.array,
    packed: Packed,
    *,
    sequences: int,
    cap: float | None = None,
    adjust: Adjustments | None = None,
    chosen: mx.array | None = None,
    names: mx.array | None = None,
    best: bool = True,
) -> Launch:
    """x [M, H] of `sequences` -> (values float32 [M, blocks], tokens int32 [M, blocks]), the best
    of every block of 64 rows; best=False: (all values [M, blocks * 64], the blocks' first rows).

    chosen: int32 [M, n], which clusters to score for each row, of the table [clusters, rows, H] or
    of blocks of 64; None scores the whole table. names: int32 [V], the tokens that rows stand for.
    """
    adjust = adjust or Adjustments()
    rows = len(x)
    vocabulary = packed.weight.size // packed.weight.shape[-1]
    per = packed.outputs // BLOCK if packed.weight.ndim == 3 else 1
    blocks = vocabulary // BLOCK if chosen is None else chosen.shape[1] * per
    unused = packed.scales
    template = {
        "T": x.dtype,
        "M": rows if chosen is None else 1,
        "OUTS": packed.outs,
        "TOKENS": rows // sequences,
        "VOCABULARY": vocabulary,
        "PER": per,
        "CHOSEN": chosen is not None,
        "NAMED": names is not None,
        "BIASED": adjust.bias is not None,
        "EARLY": adjust.early is not None,
        "CAPPED": cap is not None,
        "BEST": best,
        **packed.template,
    }
    given = (chosen, names, *adjust)
    return Launch(
        SCORE,
        (
            x,
            *packed.arrays,
            *(unused if part is None else part for part in given),
            mx.array([cap or 0.0]),
        ),
        grid=(32, 2 * blocks, 1 if chosen is None else rows),
        threadgroup=(32, 2, 1),
        shapes=[(rows, blocks if best else blocks * BLOCK), (rows, blocks)],
        dtypes=[mx.float32, mx.int32],
        template=template,
    )
