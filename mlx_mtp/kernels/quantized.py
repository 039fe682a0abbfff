"""Packed matrices: what kernels need to know of them, and the functions that unpack them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_mtp.kernels.launch import UNROLL

MODES = {"affine": 0, "mxfp4": 1, "nvfp4": 2}
BITS = {"affine": (4, 6, 8), "mxfp4": (4,), "nvfp4": (4,)}

# MLX packs along a row, lowest bits first; 6-bit values cross the borders of words.
HEADER = (
    UNROLL
    + r"""
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>

namespace mtp {

enum Mode { AFFINE, MXFP4, NVFP4 };

// The fewest values that fill whole words, but 8 at least: what a lane reads at once.
template <int BITS> struct Chunk {
  enum { values = BITS == 6 ? 16 : 8, words = values * BITS / 32 };
};

// A 4-bit float: its exponent and mantissa in a half's place are the value times 2^-14.
METAL_FUNC float float4bit(uint q) {
  return float(as_type<half>(ushort((q & 7) << 9 | (q & 8) << 12))) * 16384.0f;
}

// Scales are numbers (affine), powers of two (mxfp4), or floats of 4 + 3 bits (nvfp4), which in a
// half's place are the value times 2^-8.
template <int MODE, typename S> METAL_FUNC float scale_of(S raw) {
  return MODE == MXFP4   ? as_type<float>(uint(raw) == 0 ? 0x400000u : uint(raw) << 23)
         : MODE == NVFP4 ? float(as_type<half>(ushort((uint(raw) & 127) << 7))) * 256.0f
                         : float(raw);
}

// Reads every word of a chunk once.
template <int BITS, int MODE, typename W>
METAL_FUNC void unpack(W words, float scale, float bias, thread float* values) {
  constexpr int WORDS = Chunk<BITS>::words;
  uint word[WORDS + 1];
  UNROLL for (int i = 0; i < WORDS; i++) word[i] = words[i];
  word[WORDS] = 0;
  UNROLL for (int i = 0; i < Chunk<BITS>::values; i++) {
    const int at = i * BITS % 32;
    uint q = word[i * BITS / 32] >> at;
    if (at + BITS > 32) q |= word[i * BITS / 32 + 1] << (32 - at);
    q &= (1u << BITS) - 1;
    values[i] = MODE == AFFINE ? fma(scale, float(q), bias) : scale * float4bit(q);
  }
}

// Where a lane's two elements of an 8x8 matrix lie: (tile_row, tile_column) and the next column.
METAL_FUNC int tile_row(int lane) { return (lane / 4 & 4) + lane / 2 % 4; }
METAL_FUNC int tile_column(int lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

}  // namespace mtp
"""
)


@dataclass(frozen=True)
class Packed:
    """A packed matrix [..., N, K]: `weight` uint32 words, scales and biases of every group of K.

    Modes other than affine have no biases.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    bits: int
    group_size: int
    mode: str

    @classmethod
    def of(cls, module: Any) -> Packed | None:
        """The matrix of a quantised mlx.nn module, or None where no kernel reads its packing."""
        bits, mode = getattr(module, "bits", None), getattr(module, "mode", "affine")
        group_size = getattr(module, "group_size", None)
        if bits not in BITS.get(mode, ()) or group_size is None:
            return None
        return cls(module.weight, module.scales, module.get("biases"), bits, group_size, mode)

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[-2])

    @property
    def inputs(self) -> int:
        return int(self.weight.shape[-1]) * 32 // self.bits

    @property
    def chunk(self) -> int:
        """Values that a lane reads at once: `mtp::Chunk`."""
        return 16 if self.bits == 6 else 8

    @property
    def outs(self) -> int:
        """Outputs of a simdgroup that sums in registers: as many as leave room for the sums."""
        return 2 if self.bits == 6 else 4

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """Weight, scales and biases; kernels do not look at biases where a mode has none."""
        return self.weight, self.scales, self.scales if self.biases is None else self.biases

    @property
    def flat(self) -> Packed:
        """A stack of matrices as one of all their rows."""
        return replace(
            self,
            weight=self.weight.flatten(0, -2),
            scales=self.scales.flatten(0, -2),
            biases=None if self.biases is None else self.biases.flatten(0, -2),
        )

    @property
    def template(self) -> dict[str, mx.Dtype | int | bool]:
        return {"BITS": self.bits, "GROUP": self.group_size, "MODE": MODES[self.mode]}

    def multiply(self, x: mx.array) -> mx.array:
        """The stock operation: x [..., K] -> [..., N]."""
        return mx.quantized_matmul(
            x,
            self.weight,
            self.scales,
            self.biases,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )

    def dequantized(self) -> mx.array:
        """The matrix in float32: what kernels are tested against, for MLX's quantised product in
        half precision is no oracle on the CPU."""
        if self.mode == "affine" and self.biases is not None:
            scales, biases = self.scales.astype(mx.float32), self.biases.astype(mx.float32)
            return mx.dequantize(self.weight, scales, biases, self.group_size, self.bits)
        values = mx.dequantize(
            self.weight, self.scales, None, self.group_size, self.bits, mode=self.mode
        )
        return values.astype(mx.float32)
