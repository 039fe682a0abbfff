"""A kernel and one launch of it: what `mx.fast.metal_kernel` needs, described before it is run.

Planning a launch needs no Metal, so that the emulator of the tests runs the very source, grid and
template that a Mac would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx

Size = tuple[int, int, int]

# Before loops over what lies in registers: an index that is known only when it runs would have
# Metal put the array in memory. Such loops have one exit, or a compiler may not unroll them.
UNROLL = """
#define UNROLL _Pragma("clang loop unroll(full)")
"""


def on_metal() -> bool:
    """Whether kernels can run here; elsewhere every operation takes its stock way."""
    return mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu


@dataclass(frozen=True)
class Kernel:
    """A kernel's body in Metal's language; `header` holds the functions that it calls. MLX writes
    the signature: every input by its name (below 8 elements in `constant` memory, so bodies name
    no address space for inputs and take pointers by `auto`), `<input>_shape` where the body
    mentions it, and the thread positions that it mentions."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    header: str = ""

    @cached_property
    def metal(self) -> Any:
        """The callable that MLX makes of it, compiled by Metal at its first call."""
        return mx.fast.metal_kernel(
            name=self.name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=self.source,
            header=self.header,
        )


@dataclass(frozen=True)
class Launch:
    """One call of a kernel. grid: threads in all, threadgroup: threads of a group. Inputs must lie
    row by row, or MLX copies them."""

    kernel: Kernel
    inputs: Sequence[mx.array]
    grid: Size
    threadgroup: Size
    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[mx.Dtype]
    template: Mapping[str, mx.Dtype | int | bool] = field(default_factory=dict)

    def run(self) -> list[mx.array]:
        """The outputs, lazily. Needs a Metal device (or a trace of `mx.export_function`)."""
        return list(
            self.kernel.metal(
                inputs=list(self.inputs),
                template=list(self.template.items()),
                grid=self.grid,
                threadgroup=self.threadgroup,
                output_shapes=list(self.shapes),
                output_dtypes=list(self.dtypes),
            )
        )
