"""Attention of a verify pass over a long KV, for the full layers (head dim 512), where stock MLX
has a fused kernel for one query only.

The query heads that share a kv head are rows of one problem, so K and V are read once for up to
40 rows, whole (bfloat16) or packed (8 or 4 bits). Threadgroups take turns at chunks of the keys
and keep a softmax of their own; a second, small kernel joins them. How keys fall into chunks and
parts does not depend on rows, length or capacity: a row is bit for bit what it is alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_mtp.kernels.launch import Kernel, Launch, on_metal
from mlx_mtp.kernels.quantized import HEADER

PARTS = 64  # threadgroups over the keys of all kv heads; those without a key end at once
# Of eight rows: 512 threads have 104 registers each (M1, M2), of which a tile takes 12. A kernel
# that needs more is refused by MLX when it is launched.
MOST_TILES = 5

ROWS_HEADER = (
    HEADER
    + r"""
namespace mtp {

// Eight numbers of a row of K or V from `at` on, which is a multiple of eight.
template <int BITS, int GROUP> struct Eight {
  template <typename W, typename S>
  static METAL_FUNC void read(W part, S scales, S biases, int row, int D, int at,
                              thread float* values) {
    const int g = row * (D / GROUP) + at / GROUP;
    unpack<BITS, AFFINE>(part + (row * D + at) / 32 * BITS + at % 32 / 8 * Chunk<BITS>::words,
                         float(scales[g]), float(biases[g]), values);
  }
};

template <int GROUP> struct Eight<0, GROUP> {
  template <typename W, typename S>
  static METAL_FUNC void read(W part, S scales, S biases, int row, int D, int at,
                              thread float* values) {
    UNROLL for (int i = 0; i < 8; i++) values[i] = float(part[row * D + at + i]);
  }
};

// Over the four lanes that hold parts of one row of an 8x8 matrix.
METAL_FUNC float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, 1));
  return max(x, simd_shuffle_xor(x, 8));
}
METAL_FUNC float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  return x + simd_shuffle_xor(x, 8);
}

}  // namespace mtp
"""
)

# Of each chunk a simdgroup scores eight keys against all rows; then weights go through threadgroup
# memory, and every simdgroup multiplies all of them with its own columns of V. As in the matrix
# product, which k meets which is chosen so that a lane reads eight numbers in a row.
CHUNKS = Kernel(
    "attend_chunks",
    ("q", "k", "k_scales", "k_biases", "v", "v_scales", "v_biases", "length"),
    ("out", "stats"),
    r"""
  constexpr int CHUNK = 8 * SIMDS, ROWS = 8 * TILES;
  constexpr int LINE = CHUNK + 8;  // so that eight rows lie in different banks
  constexpr int COLUMNS = D / SIMDS, STRIPS = COLUMNS / 32;
  const int lane = thread_index_in_simdgroup, simd_gid = simdgroup_index_in_threadgroup;
  const int row = mtp::tile_row(lane), column = mtp::tile_column(lane);
  const int rows = q_shape[2], heads = k_shape[1], slots = k_shape[2];
  const int head = threadgroup_position_in_grid.z;
  const int part = threadgroup_position_in_grid.y % PARTS;
  const int row0 = threadgroup_position_in_grid.y / PARTS * ROWS;
  const int first = length[head / heads];  // the position of the block's first query
  const int end = min(first + TOKENS, slots);

  const auto queries = q + (size_t(head) * rows + row0) * D;
  const size_t above = size_t(head) * slots;
  const auto keys = k + above * k_shape[3], values = v + above * v_shape[3];
  const auto key_scales = k_scales + (BITS ? above * (D / GROUP) : 0);
  const auto key_biases = k_biases + (BITS ? above * (D / GROUP) : 0);
  const auto value_scales = v_scales + (BITS ? above * (D / GROUP) : 0);
  const auto value_biases = v_biases + (BITS ? above * (D / GROUP) : 0);

  threadgroup T weights[ROWS * LINE];
  threadgroup float highest[SIMDS * ROWS];

  simdgroup_matrix<float, 8, 8> result[TILES][STRIPS * 4];
  float peak[TILES], total[TILES];
  UNROLL for (int t = 0; t < TILES; t++) {
    peak[t] = -INFINITY;
    total[t] = 0.0f;
    UNROLL for (int c = 0; c < STRIPS * 4; c++) result[t][c] = simdgroup_matrix<float, 8, 8>(0.0f);
  }

  for (int start = part * CHUNK; start < end; start += PARTS * CHUNK) {
    simdgroup_matrix<float, 8, 8> score[TILES];
    UNROLL for (int t = 0; t < TILES; t++) score[t] = simdgroup_matrix<float, 8, 8>(0.0f);
    const int key = start + simd_gid * 8 + column;
    if (start + simd_gid * 8 < end) {
      for (int d = 0; d < D; d += 64) {
        float near[8] = {}, far[8] = {};
        const int at = d + 8 * row;
        if (key < end)
          mtp::Eight<BITS, GROUP>::read(keys, key_scales, key_biases, key, D, at, near);
        if (key + 1 < end)
          mtp::Eight<BITS, GROUP>::read(keys, key_scales, key_biases, key + 1, D, at, far);
        UNROLL for (int t = 0; t < TILES; t++) {
          const int r = t * 8 + row;
          const bool there = row0 + r < rows;
          UNROLL for (int i = 0; i < 8; i++) {
            simdgroup_matrix<float, 8, 8> left, right;
            left.thread_elements()[0] = there ? float(queries[r * D + d + 8 * column + i]) : 0.0f;
            left.thread_elements()[1] =
                there ? float(queries[r * D + d + 8 * column + 8 + i]) : 0.0f;
            right.thread_elements()[0] = near[i];
            right.thread_elements()[1] = far[i];
            simdgroup_multiply_accumulate(score[t], left, right, score[t]);
          }
        }
      }
    }
    UNROLL for (int t = 0; t < TILES; t++) {
      // A row is (query head, token); its token sees the keys up to its own.
      const int last = first + (row0 + t * 8 + row) % TOKENS;
      UNROLL for (int e = 0; e < 2; e++)
        if (key + e > last) score[t].thread_elements()[e] = -INFINITY;
      const float most =
          mtp::row_max(max(score[t].thread_elements()[0], score[t].thread_elements()[1]));
      if (column == 0) highest[simd_gid * ROWS + t * 8 + row] = most;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int t = 0; t < TILES; t++) {
      const int r = t * 8 + row;
      float most = peak[t];
      for (int s = 0; s < SIMDS; s++) most = max(most, highest[s * ROWS + r]);
      const bool none = most == -INFINITY;
      const float fade = none ? 1.0f : exp(peak[t] - most);
      peak[t] = most;
      float sum = 0.0f;
      UNROLL for (int e = 0; e < 2; e++) {
        const float weight = none ? 0.0f : exp(score[t].thread_elements()[e] - most);
        weights[r * LINE + simd_gid * 8 + column + e] = T(weight);
        sum += weight;
      }
      total[t] = fma(total[t], fade, mtp::row_sum(sum));  // of this simdgroup's keys
      UNROLL for (int c = 0; c < STRIPS * 4; c++)
        UNROLL for (int e = 0; e < 2; e++) result[t][c].thread_elements()[e] *= fade;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int j = 0; j < CHUNK && start + j < end; j += 8) {
      const int slot = start + j + row;
      UNROLL for (int s = 0; s < STRIPS; s++) {
        float value[8] = {};
        if (slot < end)
          mtp::Eight<BITS, GROUP>::read(values, value_scales, value_biases, slot, D,
                                        simd_gid * COLUMNS + 32 * s + 4 * column, value);
        UNROLL for (int t = 0; t < TILES; t++) {
          simdgroup_matrix<float, 8, 8> left, right;
          UNROLL for (int e = 0; e < 2; e++) {
            const T weight = weights[(t * 8 + row) * LINE + j + column + e];
            left.thread_elements()[e] = float(weight);
          }
          UNROLL for (int c = 0; c < 4; c++) {
            right.thread_elements()[0] = value[c];
            right.thread_elements()[1] = value[4 + c];
            simdgroup_multiply_accumulate(result[t][4 * s + c], left, right, result[t][4 * s + c]);
          }
        }
      }
    }
    // The next chunk's first barrier comes before anything read here is written again.
  }

  // `highest` was last read before the loop's last barrier.
  UNROLL for (int t = 0; t < TILES; t++)
    if (column == 0) highest[simd_gid * ROWS + t * 8 + row] = total[t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (int t = 0; t < TILES; t++) {
    const int r = row0 + t * 8 + row;
    if (r >= rows) continue;
    const size_t place = (size_t(head) * PARTS + part) * rows + r;
    if (simd_gid == 0 && column == 0) {
      float sum = 0.0f;
      for (int s = 0; s < SIMDS; s++) sum += highest[s * ROWS + t * 8 + row];
      stats[place * 2] = peak[t];
      stats[place * 2 + 1] = sum;
    }
    if (part * CHUNK >= end) continue;
    UNROLL for (int s = 0; s < STRIPS; s++)
      UNROLL for (int c = 0; c < 4; c++)
        UNROLL for (int e = 0; e < 2; e++)
          out[place * D + simd_gid * COLUMNS + 32 * s + 4 * (column + e) + c] =
              result[t][4 * s + c].thread_elements()[e];
  }
""",
    ROWS_HEADER,
)

JOIN = Kernel(
    "attend_join",
    ("parts", "stats"),
    ("out",),
    r"""
  const int d = thread_position_in_grid.x, r = thread_position_in_grid.y;
  const int rows = parts_shape[2], head = r / rows;
  // Rows lie as (sequence, kv head, query head of it, token); written is (sequence, token, head).
  const int b = r / TOKENS / HEADS, t = r % TOKENS, h = r / TOKENS % HEADS;
  float peak = -INFINITY;
  for (int p = 0; p < PARTS; p++)
    peak = max(peak, stats[((head * PARTS + p) * rows + r % rows) * 2]);
  float sum = 0.0f, total = 0.0f;
  for (int p = 0; p < PARTS; p++) {
    const size_t place = size_t(head * PARTS + p) * rows + r % rows;
    if (stats[place * 2 + 1] == 0.0f) continue;  // it had no key, and wrote no result
    const float weight = exp(stats[place * 2] - peak);
    total = fma(weight, stats[place * 2 + 1], total);
    sum = fma(weight, parts[place * D + d], sum);
  }
  out[(size_t(b * TOKENS + t) * HEADS + h) * D + d] = T(sum / total);
""",
)


@dataclass(frozen=True)
class LongKV:
    """K and V of one layer in whole buffers, with slots that no row has reached yet.

    parts: (K, V), each [B, kv_heads, slots, D]; or packed by mx.quantize: (K words, scales,
    biases, V words, scales, biases).
    """

    parts: tuple[mx.array, ...]
    head_dim: int
    bits: int = 0
    group: int = 64

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Words, scales and biases of K and of V; whole numbers have only the first."""
        return self.parts if self.bits else tuple(part for part in self.parts for _ in range(3))

    @property
    def whole(self) -> tuple[mx.array, mx.array]:
        """K and V as numbers."""
        if not self.bits:
            return self.parts[0], self.parts[1]
        halves = self.parts[:3], self.parts[3:]
        keys, values = (
            mx.dequantize(
                words,
                scales.astype(mx.float32),
                biases.astype(mx.float32),
                self.group,
                self.bits,
            )
            for words, scales, biases in halves
        )
        return keys, values

    @property
    def kv_heads(self) -> int:
        return int(self.parts[0].shape[1])


def fits(head_dim: int, bits: int) -> bool:
    """Whether the kernel takes this head dim, and KV in so many bits (0: not packed)."""
    return head_dim == 512 and bits in (0, 4, 8)


def launch_chunks(
    queries: mx.array, kv: LongKV, length: mx.array, parts: int | None = None
) -> Launch:
    """queries [B, heads, T, D], length int32 [B], the position of the first of them (the T newest
    keys are theirs) -> results of every part, float32 [B * kv_heads, parts, rows, D], and its
    softmax's maximum and sum [..., rows, 2]; rows are (query head, token)."""
    B, heads, T, D = queries.shape
    rows = heads // kv.kv_heads * T
    blocks = -(-rows // (8 * _most_tiles(queries.dtype)))
    tiles = -(-rows // (8 * blocks))
    simds = 8 if queries.dtype == mx.float32 else 16
    parts = parts or max(PARTS // kv.kv_heads, 8)
    shape = (B * kv.kv_heads, parts, rows)
    return Launch(
        CHUNKS,
        (queries.reshape(B, kv.kv_heads, rows, D), *kv.arrays, length),
        grid=(32 * simds, parts * blocks, B * kv.kv_heads),
        threadgroup=(32 * simds, 1, 1),
        shapes=[(*shape, D), (*shape, 2)],
        dtypes=[mx.float32, mx.float32],
        template={
            "T": queries.dtype,
            "D": D,
            "TILES": tiles,
            "SIMDS": simds,
            "PARTS": parts,
            "TOKENS": T,
            "BITS": kv.bits,
            "GROUP": kv.group,
        },
    )


def launch_join(parts: mx.array, stats: mx.array, shape: tuple[int, ...], T: mx.Dtype) -> Launch:
    """The parts of `launch_chunks` for queries of `shape` [B, heads, tokens, D] -> the result
    [B, tokens, heads, D], as the product behind it wants it."""
    kv_heads, count, rows, D = parts.shape
    B, heads, tokens, _ = shape
    return Launch(
        JOIN,
        (parts, stats),
        grid=(D, kv_heads * rows, 1),
        threadgroup=(min(D, 256), 1, 1),
        shapes=[(B, tokens, heads, D)],
        dtypes=[T],
        template={"T": T, "D": D, "PARTS": count, "HEADS": heads, "TOKENS": tokens},
    )


def attend(queries: mx.array, kv: LongKV, length: mx.array) -> mx.array:
    """Causal attention at scale 1 of a block [B, heads, T, D] whose K and V are written already at
    positions length [B] and on."""
    if not on_metal():
        return reference(queries, kv, length)
    parts, stats = launch_chunks(queries, kv, length).run()
    (out,) = launch_join(parts, stats, queries.shape, queries.dtype).run()
    return out.swapaxes(1, 2)


def reference(queries: mx.array, kv: LongKV, length: mx.array) -> mx.array:
    """The same written out, over all slots, in float32."""
    B, heads, T, D = queries.shape
    keys, values = (part.astype(mx.float32) for part in kv.whole)
    rows = queries.astype(mx.float32).reshape(B, kv.kv_heads, -1, D)
    scores = (rows @ keys.swapaxes(-1, -2)).reshape(B, heads, T, -1)
    last = (length[:, None] + mx.arange(T))[:, None, :, None]
    scores = mx.where(mx.arange(keys.shape[2]) <= last, scores, -mx.inf)
    weights = mx.softmax(scores, -1).reshape(*rows.shape[:3], -1)
    return (weights @ values).reshape(queries.shape).astype(queries.dtype)


def _most_tiles(dtype: mx.Dtype) -> int:
    """With float32 a simdgroup has twice the columns, but 256 threads may have all registers."""
    return 4 if dtype == mx.float32 else MOST_TILES
