"""Products with the experts of a mixture that read every needed expert once for all its rows.

Stock MLX reads an expert again for every row that chose it. Here the (row, expert) pairs are put
in order of expert; the threadgroups of an expert's first pair serve all of its pairs, the others
end at once.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_mtp.kernels.launch import Kernel, Launch, on_metal
from mlx_mtp.kernels.quantized import HEADER, Packed

MOST = 8  # pairs of one expert that share a reading of it

PAIRS = Kernel(
    "expert_rows",
    ("x", "w", "scales", "biases", "order", "expert"),
    ("y",),
    r"""
  constexpr int VALUES = mtp::Chunk<BITS>::values, WORDS = mtp::Chunk<BITS>::words;
  const int K = x_shape[1], N = w_shape[1], pairs = expert_shape[0];
  const int words = w_shape[2], groups = K / GROUP;
  const int lane = thread_index_in_simdgroup;
  const int n0 = thread_position_in_grid.y * OUTS;
  const int p = threadgroup_position_in_grid.z, e = expert[p];
  if (p > 0 && int(expert[p - 1]) == e) return;
  int end = p + 1;
  while (end < pairs && int(expert[end]) == e) end++;

  for (int start = p; start < end; start += MOST) {
    float sum[OUTS][MOST] = {};
    int row[MOST];
    UNROLL for (int m = 0; m < MOST; m++) row[m] = int(order[min(start + m, end - 1)]) / EACH;
    for (int c = lane; c < K / VALUES; c += 32) {
      float q[OUTS][VALUES];
      UNROLL for (int r = 0; r < OUTS; r++) {
        const size_t n = size_t(e) * N + n0 + r;
        const size_t g = n * groups + c * VALUES / GROUP;
        mtp::unpack<BITS, MODE>(
            w + (n * words + c * WORDS), mtp::scale_of<MODE>(scales[g]),
            MODE == mtp::AFFINE ? float(biases[g]) : 0.0f, q[r]);
      }
      UNROLL for (int m = 0; m < MOST; m++) {
        if (start + m >= end) continue;
        UNROLL for (int i = 0; i < VALUES; i++) {
          const float xi = float(x[row[m] * K + c * VALUES + i]);
          UNROLL for (int r = 0; r < OUTS; r++) sum[r][m] = fma(xi, q[r][i], sum[r][m]);
        }
      }
    }
    UNROLL for (int m = 0; m < MOST; m++) {
      if (start + m >= end) continue;
      UNROLL for (int r = 0; r < OUTS; r++) {
        const float total = simd_sum(sum[r][m]);
        if (lane == 0) y[size_t(order[start + m]) * N + n0 + r] = T(total);
      }
    }
  }
""",
    HEADER,
)


def fits(packed: Packed) -> bool:
    """Whether the kernel takes this stack of matrices [E, N, K]."""
    return (
        packed.weight.ndim == 3
        and packed.outputs % (2 * packed.outs) == 0
        and packed.inputs % packed.group_size == 0
        and packed.inputs % packed.chunk == 0
    )


def in_order(chosen: mx.array) -> tuple[mx.array, mx.array]:
    """uint32 [rows, k], the experts of each row -> (pairs in order of expert, their experts), both
    uint32 [rows * k]; pair r * k + j is row r with its j-th expert."""
    flat = chosen.flatten()
    order = mx.argsort(flat)
    return order, flat[order]


def multiply(x: mx.array, packed: Packed, order: mx.array, expert: mx.array) -> mx.array:
    """[pairs, N], pair by pair (not in `order`). x holds one row for each pair [pairs, K], or one
    for all pairs of a row [rows, K]."""
    if on_metal():
        (out,) = launch(x, packed, order, expert).run()
        return out
    rows = mx.repeat(x, len(order) // len(x), 0)[order]
    sorted_out = mx.gather_qmm(
        rows[:, None],
        *packed.arrays[:2],
        packed.biases,
        rhs_indices=expert,
        transpose=True,
        group_size=packed.group_size,
        bits=packed.bits,
        mode=packed.mode,
        sorted_indices=True,
    )
    return sorted_out[:, 0][mx.argsort(order)]


def launch(x: mx.array, packed: Packed, order: mx.array, expert: mx.array) -> Launch:
    """The kernel's launch for `multiply`."""
    pairs = len(order)
    return Launch(
        PAIRS,
        (x, *packed.arrays, order, expert),
        grid=(32, packed.outputs // packed.outs, pairs),
        threadgroup=(32, 2, 1),
        shapes=[(pairs, packed.outputs)],
        dtypes=[x.dtype],
        template={
            "T": x.dtype,
            "OUTS": packed.outs,
            "MOST": MOST,
            "EACH": pairs // len(x),
            **packed.template,
        },
    )
