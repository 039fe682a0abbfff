"""A model whose weights are in memory only while they are used, for a single pass.

A layer is read and unpacked to float32 when it is called, and dropped behind it. Of embedding
tables only the rows of the given tokens are read, and the head is read in slices of the vocabulary.
Memory peaks at one layer or slice in float32 and the largest tensor, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_mtp.errors import LoadError
from mlx_mtp.models.layers import DecoderLayer, KVView, Rotate
from mlx_mtp.weights.checkpoint import Folder, Progress
from mlx_mtp.weights.layout import Part
from mlx_mtp.weights.planned import Model, Planned
from mlx_mtp.weights.rows import read_rows

SLICE = 16384  # rows of a head at a time
TABLES = ("embed_tokens.", "embed_tokens_per_layer.", "lm_head.")  # never read as a whole


def stream(planned: Planned[Model], progress: Progress | None) -> tuple[Any, Weights]:
    """The model in float32, and its weights, whose `product` is its head. Raises LoadError, and
    so do its layers, each of which can be called once."""
    weights = Weights(planned, progress)
    model: Any = type(planned.module)(planned.module.config)
    model.layers = [_Layer(layer, weights, f"layers.{i}.") for i, layer in enumerate(model.layers)]
    for name in ("embed_tokens", "embed_tokens_per_layer"):
        if name in model:
            setattr(model, name, _Table(weights, name))
    weights.fill(model, leave=("layers.", *TABLES))
    weights.evaluate(model)
    return model, weights


class _Table:
    """An embedding table of which only the rows of the given tokens are read."""

    def __init__(self, weights: Weights, path: str):
        self.weights, self.path = weights, path

    def __call__(self, ids: mx.array) -> mx.array:
        each: list[int] = ids.tolist()  # type: ignore[assignment]
        return mx.concatenate([self.weights.rows(self.path, i, i + 1) for i in each])


class _Layer:
    """A decoder layer that runs once: its weights are in memory only meanwhile."""

    def __init__(self, empty: DecoderLayer, weights: Weights, path: str):
        self.kind, self.empty, self.weights, self.path = empty.kind, [empty], weights, path

    def __call__(self, x: mx.array, kv: KVView, rotate: Rotate, *per_layer: mx.array) -> mx.array:
        layer = self.empty.pop()
        self.weights.fill(layer, self.path)
        # What is put together from the largest is not made beside all the rest.
        self.weights.evaluate(layer.mlp.gate_proj)
        self.weights.evaluate(layer.mlp.up_proj)
        layer.stack()
        self.weights.evaluate(layer)
        out = layer(x, kv, rotate, *per_layer)
        mx.eval(out)
        mx.clear_cache()
        return out


class Weights:
    """The parameters of a checkpoint in float32, each read when it is asked for."""

    def __init__(self, planned: Planned[Model], progress: Progress | None):
        self.name, self.quantized = planned.source.name, planned.quantized
        self.folder = planned.source.fetch(planned.files, progress)
        # Once more from disk: a header that came over the network does not say where data begin.
        headers = {file: Folder(self.folder).header(file) for file in planned.plan.files}
        self.parts: dict[str, Part] = {}
        for key, part in planned.plan.parts.items():
            old, new = part.tensor, headers[part.tensor.file].get(part.tensor.name)
            if new is None or (new.dtype, new.shape) != (old.dtype, old.shape):
                raise LoadError(f"{self.folder / old.file} changed while it was being read")
            self.parts[key] = replace(part, tensor=new)
        self.head = "lm_head" if "lm_head.weight" in self.parts else "embed_tokens"
        tables = tuple(table for table in TABLES if table != f"{self.head}.")
        whole = (part for key, part in self.parts.items() if not key.startswith(tables))
        self.done, self.total, self.progress = 0, sum(part.nbytes for part in whole), progress

    def fill(self, module: nn.Module, path: str = "", leave: tuple[str, ...] = ()) -> None:
        """Gives `module`, which stands at `path`, its parameters, not evaluated yet; those that
        start with one of `leave` are left away."""
        keys = [key for key in self.parts if key.startswith(path) and not key.startswith(leave)]
        with self.readable():
            files = {self.parts[key].tensor.file for key in keys}
            lazy: dict[str, Any] = {file: mx.load(str(self.folder / file)) for file in files}
        leaves: dict[str, dict[str, mx.array]] = {}
        for key in keys:
            part, (stem, _, leaf) = self.parts[key], key.rpartition(".")
            array = lazy[part.tensor.file][part.tensor.name]
            half = array if part.half is None else mx.split(array, 2, axis=-2)[part.half]
            leaves.setdefault(stem, {})[leaf] = half
        unpacked = {
            f"{stem}.{leaf}".removeprefix(path): array
            for stem, packed in leaves.items()
            for leaf, array in self._unpack(stem, packed).items()
        }
        module.update(tree_unflatten(list(unpacked.items())))
        self._tell(sum(self.parts[key].nbytes for key in keys))

    def evaluate(self, module: nn.Module) -> None:
        """Reads what `fill` described, the largest first. Raises LoadError."""
        arrays: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
        with self.readable():
            for array in sorted(arrays.values(), key=lambda array: -array.nbytes):
                mx.eval(array)

    def rows(self, path: str, begin: int, end: int) -> mx.array:
        """Rows of the matrix at `path`."""
        packed = {}
        for leaf in ("weight", "scales", "biases"):
            if part := self.parts.get(f"{path}.{leaf}"):
                packed[leaf] = read_rows(self.folder / part.tensor.file, part.tensor, begin, end)
        return self._unpack(path, packed)["weight"]

    def product(self, x: mx.array) -> mx.array:
        """The head's, [n, H] -> [n, vocabulary], a slice of the vocabulary at a time."""
        x, some = mx.contiguous(x.T), []
        count = self.parts[f"{self.head}.weight"].shape[0]
        for begin in range(0, count, SLICE):
            # In this order for the CPU's BLAS, which is twice as fast when `x` is the laid-out one.
            some.append(self.rows(self.head, begin, min(begin + SLICE, count)) @ x)
            mx.eval(some[-1])
            mx.clear_cache()
        self._tell(
            sum(p.nbytes for key, p in self.parts.items() if key.startswith(f"{self.head}."))
        )
        return mx.concatenate(some).T

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Says which checkpoint it is that MLX cannot read."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise LoadError(f"{self.name}: a weight file cannot be read: {error}") from None

    def _unpack(self, path: str, leaves: dict[str, mx.array]) -> dict[str, mx.array]:
        """A module's parameters as they are stored -> in float32."""
        ready = {
            leaf: array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
            for leaf, array in leaves.items()
        }
        scheme = self.quantized.get(path)
        if scheme is None:
            return ready
        packed = ready["weight"], ready["scales"], ready.get("biases")
        return {"weight": mx.dequantize(*packed, **scheme, dtype=mx.float32)}

    def _tell(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(f"prove {self.name}", self.done, self.total)
