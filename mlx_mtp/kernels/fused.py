"""The small operations around the products of a layer, a launch instead of two to eight.

`launch_add` joins a residual to the norms before and behind it; `launch_heads` makes queries, keys
and values of the product that they come out of: norm, weight, RoPE, and the order that attention
wants. Both round where the stock operations round, so that in half precision only the order of the
sums of squares is another (float32 has no rounding that keeps a compiler from joining a product
and a sum). That order does not depend on how many rows there are.

Keys and values are not written to the KV here: the outputs of mx.fast.metal_kernel are new arrays,
and a buffer of the KV would have to be copied to be one.
"""

from __future__ import annotations

import struct

import mlx.core as mx

from mlx_mtp.kernels.launch import UNROLL, Kernel, Launch, on_metal

READ = 4  # numbers that a thread reads in a row
MOST_THREADS = 512  # of a row: 1024 are only allowed to a kernel that needs few registers
MOST_READS = 4  # of a thread, which keeps what it read

SUMS = (
    UNROLL
    + r"""
namespace mtp {

// The sum over the threadgroup, the same in all threads. `parts` must not be in use.
template <int SIMDS>
METAL_FUNC float sum_of_all(float x, threadgroup float* parts, int lane, int simd_gid) {
  x = simd_sum(x);
  if (SIMDS == 1) return x;
  if (lane == 0) parts[simd_gid] = x;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < SIMDS ? parts[lane] : 0.0f);
}

// What mx.fast.rms_norm multiplies by, given the sum of squares.
template <int N> METAL_FUNC float norm_factor(float sum, int eps) {
  return precise::rsqrt(sum / N + as_type<float>(eps));
}

// A normed number times its weight: MLX rounds before and after.
template <typename T> METAL_FUNC float weighed(float x, float factor, float weight) {
  return float(T(float(T(x * factor)) * weight));
}

}  // namespace mtp
"""
)

# A threadgroup has a row.
ADD_SOURCE = r"""
  constexpr int SIMDS = THREADS / 32;
  const int lane = thread_index_in_simdgroup, simd_gid = simdgroup_index_in_threadgroup;
  const int first = READ * thread_position_in_threadgroup.x;
  const size_t row = size_t(threadgroup_position_in_grid.y) * H;
  threadgroup float parts[SIMDS];

  float value[READS][READ] = {}, square = 0.0f;
  UNROLL for (int r = 0; r < READS; r++) {
    const int at = first + r * READ * THREADS;
    if (at >= H) continue;
    UNROLL for (int i = 0; i < READ; i++) {
      value[r][i] = float(a[row + at + i]);
      square += value[r][i] * value[r][i];
    }
  }
  const float factor =
      mtp::norm_factor<H>(mtp::sum_of_all<SIMDS>(square, parts, lane, simd_gid), EPS);
  UNROLL for (int r = 0; r < READS; r++) {
    const int at = first + r * READ * THREADS;
    if (at >= H) continue;
    UNROLL for (int i = 0; i < READ; i++) {
      const float part = mtp::weighed<T>(value[r][i], factor, float(weight[at + i]));
      value[r][i] = float(T(float(x[row + at + i]) + part));
      if (SCALED) value[r][i] = float(T(value[r][i] * float(scale[0])));
      sum[row + at + i] = T(value[r][i]);
    }
  }
"""

ADD = Kernel("add_norm", ("x", "a", "weight", "scale"), ("sum",), ADD_SOURCE, SUMS)

ADD_NORM = Kernel(
    "add_norm_twice",
    ("x", "a", "weight", "scale", "next_weight"),
    ("sum", "normed"),
    ADD_SOURCE
    + r"""
  threadgroup float next_parts[SIMDS];  // `parts` may still be read
  square = 0.0f;
  UNROLL for (int r = 0; r < READS; r++)
    UNROLL for (int i = 0; i < READ; i++) square += value[r][i] * value[r][i];
  const float next_factor =
      mtp::norm_factor<H>(mtp::sum_of_all<SIMDS>(square, next_parts, lane, simd_gid), EPS);
  UNROLL for (int r = 0; r < READS; r++) {
    const int at = first + r * READ * THREADS;
    if (at >= H) continue;
    UNROLL for (int i = 0; i < READ; i++)
      normed[row + at + i] =
          T(mtp::weighed<T>(value[r][i], next_factor, float(next_weight[at + i])));
  }
""",
    SUMS,
)

# A simdgroup has a head, and every lane of it D / 64 of the pairs that RoPE turns.
HEAD_HEADER = (
    SUMS
    + r"""
namespace mtp {

template <typename T, int D> struct Head {
  enum { PAIRS = D / 64 };
  float low[PAIRS], high[PAIRS];
  int at;  // of the first pair: (at, at + D / 2)

  template <typename X> METAL_FUNC void read_normed(X x, int lane, int eps) {
    at = lane * PAIRS;
    float square = 0.0f;
    UNROLL for (int i = 0; i < PAIRS; i++) {
      low[i] = float(x[at + i]);
      high[i] = float(x[at + i + D / 2]);
      square += low[i] * low[i];
      square += high[i] * high[i];
    }
    const float factor = norm_factor<D>(simd_sum(square), eps);
    UNROLL for (int i = 0; i < PAIRS; i++) {
      low[i] = float(T(low[i] * factor));
      high[i] = float(T(high[i] * factor));
    }
  }

  template <typename W> METAL_FUNC void weigh(W weight) {
    UNROLL for (int i = 0; i < PAIRS; i++) {
      low[i] = float(T(low[i] * float(weight[at + i])));
      high[i] = float(T(high[i] * float(weight[at + i + D / 2])));
    }
  }

  // The arithmetic of mx.fast.rope, whose periods are infinite where nothing turns.
  template <typename P> METAL_FUNC void turn(P periods, int position) {
    UNROLL for (int i = 0; i < PAIRS; i++) {
      const float angle = float(position) * (1.0f / periods[at + i]);
      const float c = fast::cos(angle), s = fast::sin(angle);
      const float x = low[i], y = high[i];
      low[i] = x * c - y * s;
      high[i] = x * s + y * c;
    }
  }

  template <typename Y> METAL_FUNC void write(Y y) {
    UNROLL for (int i = 0; i < PAIRS; i++) {
      y[at + i] = T(low[i]);
      y[at + i + D / 2] = T(high[i]);
    }
  }
};

}  // namespace mtp
"""
)

QUERIES = Kernel(
    "queries",
    ("raw", "weight", "periods", "offset"),
    ("q",),
    r"""
  const int h = threadgroup_position_in_grid.y, heads = threadgroups_per_grid.y;
  const int row = threadgroup_position_in_grid.z, tokens = raw_shape[0] / offset_shape[0];
  const int b = row / tokens, t = row % tokens;
  mtp::Head<T, D> head;
  head.read_normed(raw + (size_t(row) * heads + h) * D, thread_index_in_simdgroup, EPS);
  head.weigh(weight);
  head.turn(periods, offset[b] + t);
  head.write(q + (size_t(b * heads + h) * tokens + t) * D);
""",
    HEAD_HEADER,
)

# Where V is the raw key, the simdgroup of a key writes both.
HEADS = Kernel(
    "queries_keys_values",
    ("raw", "weight", "periods", "offset"),
    ("q", "k", "v"),
    r"""
  const int h = threadgroup_position_in_grid.y, heads = threadgroups_per_grid.y;
  const int row = threadgroup_position_in_grid.z, tokens = raw_shape[0] / offset_shape[0];
  const int b = row / tokens, t = row % tokens;
  mtp::Head<T, D> head;
  head.read_normed(raw + (size_t(row) * heads + h) * D, thread_index_in_simdgroup, EPS);
  const bool query = h < QUERIES, value = h >= QUERIES + KEYS;
  const size_t place = (size_t(b * KEYS + (h - QUERIES) % KEYS) * tokens + t) * D;
  if (value || (SHARED && !query)) head.write(v + place);
  if (value) return;
  head.weigh(weight + h * D);
  head.turn(periods, offset[b] + t);
  if (query)
    head.write(q + (size_t(b * QUERIES + h) * tokens + t) * D);
  else
    head.write(k + place);
""",
    HEAD_HEADER,
)


def fits_add(
    x: mx.array,
    a: mx.array,
    weight: mx.array,
    scale: mx.array | None = None,
    next_weight: mx.array | None = None,
) -> bool:
    """Whether `add_norm` takes these: all of one dtype, or the stock operations promote."""
    width, beside = x.shape[-1], (a, weight, scale, next_weight)
    return (
        x.ndim == 2
        and width % READ == 0
        and width <= READ * MOST_READS * MOST_THREADS
        and all(other is None or other.dtype == x.dtype for other in beside)
    )


def add_norm(
    x: mx.array,
    a: mx.array,
    weight: mx.array,
    scale: mx.array | None = None,
    next_weight: mx.array | None = None,
    *,
    eps: float,
) -> list[mx.array]:
    """x, a [M, H], weights [H], scale [1] -> (x + rms_norm(a) * weight) * scale; and behind it its
    own rms_norm, times next_weight, where that is given."""
    given = x, a, weight, scale, next_weight
    if on_metal():
        return launch_add(*given, eps=eps).run()
    return reference_add(*given, eps=eps)


def launch_add(
    x: mx.array,
    a: mx.array,
    weight: mx.array,
    scale: mx.array | None = None,
    next_weight: mx.array | None = None,
    *,
    eps: float,
) -> Launch:
    """The kernel's launch for `add_norm`."""
    width = x.shape[1]
    reads = -(-width // (READ * MOST_THREADS))
    threads = -(-width // (READ * reads * 32)) * 32
    inputs = (x, a, weight, weight if scale is None else scale)
    outputs = 1 if next_weight is None else 2
    return Launch(
        ADD if next_weight is None else ADD_NORM,
        inputs if next_weight is None else (*inputs, next_weight),
        grid=(threads, len(x), 1),
        threadgroup=(threads, 1, 1),
        shapes=[x.shape] * outputs,
        dtypes=[x.dtype] * outputs,
        template={
            "T": x.dtype,
            "H": width,
            "READ": READ,
            "READS": reads,
            "THREADS": threads,
            "SCALED": scale is not None,
            "EPS": _bits(eps),
        },
    )


def reference_add(
    x: mx.array,
    a: mx.array,
    weight: mx.array,
    scale: mx.array | None = None,
    next_weight: mx.array | None = None,
    *,
    eps: float,
) -> list[mx.array]:
    """`add_norm` by the stock operations."""
    x = x + mx.fast.rms_norm(a, weight, eps)
    x = x if scale is None else x * scale
    return [x] if next_weight is None else [x, mx.fast.rms_norm(x, next_weight, eps)]


def fits_heads(raw: mx.array, weight: mx.array, periods: mx.array) -> bool:
    """Whether `heads_of` takes these."""
    return len(periods) % 32 == 0 and len(periods) <= 256 and weight.dtype == raw.dtype


def heads_of(
    raw: mx.array,
    weight: mx.array,
    periods: mx.array,
    offset: mx.array,
    eps: float,
    heads: int,
    kv_heads: int,
) -> list[mx.array]:
    """The heads of B sequences of T tokens, normed, weighed, and turned by their positions.

    raw: [B * T, n * D], of every row the query heads, then `kv_heads` keys, then as many values;
    without values the raw keys are values, and with no kv heads there are only queries. weight:
    [n or heads + kv_heads, (1,) D], or [D] for queries alone; values have none. periods: float32
    [D / 2] as mx.fast.rope takes them. offset: int32 [B], the position of the first token.
    Gives [B, heads, T, D] and, with kv heads, K and V [B, kv_heads, T, D].
    """
    given = raw, weight, periods, offset, eps, heads, kv_heads
    return launch_heads(*given).run() if on_metal() else reference_heads(*given)


def launch_heads(
    raw: mx.array,
    weight: mx.array,
    periods: mx.array,
    offset: mx.array,
    eps: float,
    heads: int,
    kv_heads: int,
) -> Launch:
    """The kernel's launch for `heads_of`."""
    D, B, rows = 2 * len(periods), len(offset), len(raw)
    n = raw.shape[1] // D
    shapes = [(B, count, rows // B, D) for count in (heads, kv_heads, kv_heads) if count]
    template: dict[str, mx.Dtype | int | bool] = {"T": raw.dtype, "D": D, "EPS": _bits(eps)}
    if kv_heads:
        template |= {"QUERIES": heads, "KEYS": kv_heads, "SHARED": n == heads + kv_heads}
    return Launch(
        HEADS if kv_heads else QUERIES,
        (raw, weight, periods, offset),
        grid=(32, n, rows),
        threadgroup=(32, 1, 1),
        shapes=shapes,
        dtypes=[raw.dtype] * len(shapes),
        template=template,
    )


def reference_heads(
    raw: mx.array,
    weight: mx.array,
    periods: mx.array,
    offset: mx.array,
    eps: float,
    heads: int,
    kv_heads: int,
) -> list[mx.array]:
    """`heads_of` by the stock operations."""
    D, B, turning = 2 * len(periods), len(offset), heads + kv_heads
    normed = mx.fast.rms_norm(raw.reshape(B, len(raw) // B, -1, D).swapaxes(1, 2), None, eps)
    weighed = normed[:, :turning] * weight.reshape(-1, 1, D)[:turning]
    # In float32, as Metal's kernel turns half precision too; MLX's fallback for the CPU does not.
    turned = mx.fast.rope(
        weighed.astype(mx.float32),
        D,
        traditional=False,
        base=None,
        scale=1.0,
        offset=offset,
        freqs=periods,
    ).astype(raw.dtype)
    if not kv_heads:
        return [turned]
    return [turned[:, :heads], turned[:, heads:], normed[:, -kv_heads:]]


def _bits(number: float) -> int:
    """A float32 as the int of the same bits: kernels take no floats as template arguments."""
    return int(struct.unpack("i", struct.pack("f", number))[0])
