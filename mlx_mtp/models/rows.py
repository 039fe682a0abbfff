"""Quantised products that take another way for some numbers of rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlx_mtp.kernels import matmul
from mlx_mtp.kernels.quantized import Packed


class RowsLinear(nn.Module):
    """A quantised linear map, or a tied head over the embedding's table, whose products with so
    many rows as `ways` names a kernel for are made by it; the rest is MLX's."""

    def __init__(self, linear: nn.Module, packed: Packed):
        super().__init__()
        self.linear = linear
        self._packed, self._ways = packed, dict[int, str]()

    @property
    def packed(self) -> Packed:
        return self._packed

    def take(self, ways: dict[int, str]) -> None:
        """Rows -> 'tile' or 'matrix' from now on."""
        self._ways = ways

    def __call__(self, x: mx.array) -> mx.array:
        way = self._ways.get(x.size // x.shape[-1])
        return self._packed.multiply(x) if way is None else matmul.multiply(way, x, self._packed)


def wrap(model: nn.Module) -> None:
    """Puts a RowsLinear around every quantised linear map of a model, and a tied head beside its
    table: no array is copied."""

    def around(module: Any) -> Any:
        packed = Packed.of(module) if type(module) is nn.QuantizedLinear else None
        return module if packed is None else RowsLinear(module, packed)

    table = model.get("embed_tokens")
    packed = None if table is None else Packed.of(table)
    if packed is not None and "lm_head" not in model:
        model.lm_head = RowsLinear(table, packed)
    model.update_modules(tree_map(around, model.leaf_modules(), is_leaf=nn.Module.is_module))
