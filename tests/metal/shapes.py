"""What the five targets and their drafters ask of the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import pytest

from mlx_mtp.kernels.launch import Launch
from mlx_mtp.kernels.quantized import Packed
from tests.metal.emulator import EmulationError, compiler, emulate_all

needs_emulator = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@dataclass(frozen=True)
class Shapes:
    """kv: kv heads of sliding and of full layers. inner: widths of MLPs. moe: width of an expert.
    drafter: its hidden size."""

    hidden: int
    heads: int
    kv: tuple[int, int]
    inner: tuple[int, ...]
    drafter: int
    moe: int = 0
    per_layer: int = 0

    @property
    def products(self) -> set[tuple[int, int]]:
        """(outputs, inputs) of every product of target and drafter."""
        found = set()
        for hidden, kv, inner in (
            (self.hidden, self.kv, self.inner),
            (self.drafter, (0, 0), (8192 if self.drafter > 256 else 2048,)),
        ):
            for width, kv_heads in zip((256, 512), kv, strict=True):
                # Where V is the raw key, or the layer reads another's KV, there are fewer.
                found |= {((self.heads + n * kv_heads) * width, hidden) for n in (0, 1, 2)}
                found.add((hidden, self.heads * width))
            for width in inner:
                found |= {(2 * width, hidden), (hidden, width)}
            found.add((262144, hidden))
        if self.per_layer:
            found |= {(self.per_layer, self.hidden), (self.hidden, self.per_layer)}
        if self.moe:
            found |= {(self.moe, self.hidden), (self.hidden, self.moe)}
        return found | {(self.drafter, 2 * self.hidden), (self.hidden, self.drafter)}


TARGETS = {
    "E2B": Shapes(1536, 8, (1, 1), (6144, 12288), 256, per_layer=256),
    "E4B": Shapes(2560, 8, (2, 2), (10240,), 256, per_layer=256),
    "12B": Shapes(3840, 16, (8, 1), (15360,), 1024),
    "26B-A4B": Shapes(2816, 16, (8, 2), (2112,), 1024, moe=704),
    "31B": Shapes(5376, 32, (16, 4), (21504,), 1024),
}
INPUTS = sorted({inputs for shapes in TARGETS.values() for _, inputs in shapes.products})
FORMATS = (
    ("affine", 4, 64),
    ("affine", 6, 64),
    ("affine", 8, 32),
    ("mxfp4", 4, 32),
    ("nvfp4", 4, 16),
)
# Against float32, relative to the largest value: what rounding the result alone may cost, and a
# half of it again for what is rounded on the way.
BOUNDS = {mx.float32: 1e-5, mx.float16: 7.5e-4, mx.bfloat16: 6e-3}


def packed(outputs: int, inputs: int, scheme: tuple[str, int, int], dtype: mx.Dtype) -> Packed:
    """A random matrix in such a packing; seeded by its shape."""
    mode, bits, group = scheme
    key = mx.random.key(outputs * 65536 + inputs)
    weight, scales, *biases = mx.quantize(
        mx.random.normal((outputs, inputs), key=key).astype(dtype), group, bits, mode=mode
    )
    return Packed(weight, scales, biases[0] if biases else None, bits, group, mode)


def numbers(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def error(found: mx.array, wanted: mx.array) -> float:
    """The largest difference, relative to the largest value."""
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    return float(mx.abs(found - wanted).max() / mx.abs(wanted).max())


def caught(launch: Launch, wanted: mx.array) -> bool:
    """Whether a faulty launch shows: the emulator refuses it in some order, orders differ, or its
    first output is not what is wanted."""
    try:
        found = emulate_all(launch).outputs[0]
    except EmulationError:
        return True
    return not error(found, wanted) < 1e-3  # NaN is an error too


def edited(launch: Launch, right: str, wrong: str) -> Launch:
    """The launch with a fault in its kernel's text."""
    kernel = launch.kernel
    assert right in kernel.source + kernel.header
    source, header = (text.replace(right, wrong) for text in (kernel.source, kernel.header))
    return replace(launch, kernel=replace(kernel, source=source, header=header))
