"""Products of a few rows with a packed matrix that read each of its words once for all rows.

Stock MLX reads the matrix once a row on M1 and M2, and in two passes from six rows on M3 and
newer. Two kernels compete: `tile` multiplies in registers, `matrix` with 8x8 simdgroup matrices.
In both, every output is a sum in an order that does not depend on how many rows there are: a row
of a verify pass is bit for bit what it is alone.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_mtp.kernels.launch import Kernel, Launch, on_metal
from mlx_mtp.kernels.quantized import HEADER, Packed

MAX_ROWS = 16
SPLIT = 4  # simdgroups of `matrix` that share the sum of an output

# One simdgroup owns OUTS outputs. Its lanes stride through the chunks of K, unpack OUTS rows of
# weights, and use each for all M rows of x.
TILE = Kernel(
    "rows_tile",
    ("x", "w", "scales", "biases"),
    ("y",),
    r"""
  constexpr int VALUES = mtp::Chunk<BITS>::values, WORDS = mtp::Chunk<BITS>::words;
  const int K = x_shape[1], N = w_shape[0];
  const int words = w_shape[1], groups = K / GROUP;
  const int lane = thread_index_in_simdgroup;
  const int n0 = thread_position_in_grid.y * OUTS;

  float sum[OUTS][M] = {};
  for (int c = lane; c < K / VALUES; c += 32) {
    float q[OUTS][VALUES];
    UNROLL for (int r = 0; r < OUTS; r++) {
      const int g = (n0 + r) * groups + c * VALUES / GROUP;
      mtp::unpack<BITS, MODE>(
          w + ((n0 + r) * words + c * WORDS), mtp::scale_of<MODE>(scales[g]),
          MODE == mtp::AFFINE ? float(biases[g]) : 0.0f, q[r]);
    }
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int i = 0; i < VALUES; i++) {
        const float xi = float(x[m * K + c * VALUES + i]);
        UNROLL for (int r = 0; r < OUTS; r++) sum[r][m] = fma(xi, q[r][i], sum[r][m]);
      }
  }
  UNROLL for (int r = 0; r < OUTS; r++)
    UNROLL for (int m = 0; m < M; m++) {
      const float total = simd_sum(sum[r][m]);
      if (lane == 0) y[m * N + n0 + r] = T(total);
    }
""",
    HEADER,
)

# A threadgroup owns 16 outputs, its simdgroups take turns at steps of 8 chunks of K. Which k of a
# step meets which is free as long as x and the weights agree: with k = chunk * VALUES + i in tile
# i, a lane's part of the weights is whole chunks, and no word is read by two lanes.
MATRIX = Kernel(
    "rows_matrix",
    ("x", "w", "scales", "biases"),
    ("y",),
    r"""
  constexpr int VALUES = mtp::Chunk<BITS>::values, WORDS = mtp::Chunk<BITS>::words;
  constexpr int TILES = (M + 7) / 8, BLOCKS = 2;
  const int K = x_shape[1], N = w_shape[0];
  const int words = w_shape[1], groups = K / GROUP;
  const int lane = thread_index_in_simdgroup, simd_gid = simdgroup_index_in_threadgroup;
  const int row = mtp::tile_row(lane), column = mtp::tile_column(lane);
  const int n0 = threadgroup_position_in_grid.y * 8 * BLOCKS;
  threadgroup float part[SPLIT * BLOCKS * TILES * 64];

  simdgroup_matrix<float, 8, 8> sum[BLOCKS][TILES];
  UNROLL for (int b = 0; b < BLOCKS; b++)
    UNROLL for (int t = 0; t < TILES; t++) sum[b][t] = simdgroup_matrix<float, 8, 8>(0.0f);
  for (int step = simd_gid; step < K / (8 * VALUES); step += SPLIT) {
    const int c = step * 8 + row;
    float q[BLOCKS][2][VALUES];
    UNROLL for (int b = 0; b < BLOCKS; b++)
      UNROLL for (int e = 0; e < 2; e++) {
        const int n = n0 + b * 8 + column + e;
        const int g = n * groups + c * VALUES / GROUP;
        mtp::unpack<BITS, MODE>(
            w + (n * words + c * WORDS), mtp::scale_of<MODE>(scales[g]),
            MODE == mtp::AFFINE ? float(biases[g]) : 0.0f, q[b][e]);
      }
    UNROLL for (int t = 0; t < TILES; t++) {
      const int m = t * 8 + row;
      const int at = m * K + (step * 8 + column) * VALUES;
      UNROLL for (int i = 0; i < VALUES; i++) {
        simdgroup_matrix<float, 8, 8> left, right;
        left.thread_elements()[0] = m < M ? float(x[at + i]) : 0.0f;
        left.thread_elements()[1] = m < M ? float(x[at + VALUES + i]) : 0.0f;
        UNROLL for (int b = 0; b < BLOCKS; b++) {
          right.thread_elements()[0] = q[b][0][i];
          right.thread_elements()[1] = q[b][1][i];
          simdgroup_multiply_accumulate(sum[b][t], left, right, sum[b][t]);
        }
      }
    }
  }
  UNROLL for (int b = 0; b < BLOCKS; b++)
    UNROLL for (int t = 0; t < TILES; t++)
      UNROLL for (int e = 0; e < 2; e++)
        part[((simd_gid * BLOCKS + b) * TILES + t) * 64 + row * 8 + column + e] =
            sum[b][t].thread_elements()[e];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  constexpr int OWN = BLOCKS * TILES * 64;
  for (int i = simd_gid * 32 + lane; i < OWN; i += SPLIT * 32) {
    float total = 0.0f;
    for (int s = 0; s < SPLIT; s++) total += part[s * OWN + i];
    const int b = i / (TILES * 64), m = i / 64 % TILES * 8 + i / 8 % 8;
    if (m < M) y[m * N + n0 + b * 8 + i % 8] = T(total);
  }
""",
    HEADER,
)


def multiply(how: str, x: mx.array, packed: Packed) -> mx.array:
    """x [..., K] -> [..., N] by the kernel of that name, 'tile' or 'matrix'."""
    if not on_metal():
        return packed.multiply(x)
    plan = {"tile": tile, "matrix": matrix}[how]
    (out,) = plan(x.reshape(-1, x.shape[-1]), packed).run()
    return out.reshape(*x.shape[:-1], -1)


def fits_tile(rows: int, packed: Packed) -> bool:
    """Whether `tile` takes that many rows of x and this matrix."""
    return (
        packed.weight.ndim == 2
        and rows <= MAX_ROWS
        and packed.outputs % (2 * packed.outs) == 0
        and packed.inputs % packed.group_size == 0
    )


def tile(x: mx.array, packed: Packed) -> Launch:
    """x [M, K] -> [M, N] in x's dtype."""
    return Launch(
        TILE,
        (x, *packed.arrays),
        grid=(32, packed.outputs // packed.outs, 1),
        threadgroup=(32, 2, 1),
        shapes=[(len(x), packed.outputs)],
        dtypes=[x.dtype],
        template={"T": x.dtype, "M": len(x), "OUTS": packed.outs, **packed.template},
    )


def fits_matrix(rows: int, packed: Packed) -> bool:
    """Whether `matrix` takes that many rows of x and this matrix."""
    return (
        packed.weight.ndim == 2
        and rows <= MAX_ROWS
        and packed.outputs % 16 == 0
        and packed.inputs % (8 * packed.chunk) == 0
    )


def matrix(x: mx.array, packed: Packed) -> Launch:
    """x [M, K] -> [M, N] in x's dtype."""
    return Launch(
        MATRIX,
        (x, *packed.arrays),
        grid=(32, packed.outputs // 16 * SPLIT, 1),
        threadgroup=(32, SPLIT, 1),
        shapes=[(len(x), packed.outputs)],
        dtypes=[x.dtype],
        template={"T": x.dtype, "M": len(x), "SPLIT": SPLIT, **packed.template},
    )
