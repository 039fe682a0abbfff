"""A graph as mx.export_function traces it, read as what a GPU would launch for it and read.

Launches
- Views launch nothing: transpose, slice, split, broadcast, and a reshape wherever strides allow it.
  Strides are followed, with what is computed taken to lie row by row. A reshape that cannot be a
  view is a copy, and so is an input that its kernel wants row by row and gets otherwise.
- A concatenation is a copy for each part, a write into a slice one copy, or two launches where an
  array says where. Written buffers are taken to be donated. All else is one launch; the second one
  of a product that is split along K is left out.
- Eager, every elementwise operation is a launch. Fused as by mx.compile: equal operations become
  one, then every maximal tree of elementwise operations whose inner results nothing else needs is
  one launch, up to 11 deep and with 24 inputs.
- What MLX fuses by itself (mx.fast, mx.dequantize) is traced as its parts where there is no GPU, so
  whoever traces puts a custom kernel in its place, named as in STAND_INS. Fused attention is two
  launches from 4096 slots on where query heads share kv heads, else one.

Bytes
- A launch reads each input once, broadcast parts not repeated; gathers read rows and indices.
- A quantised product of M rows reads its weights, scales and biases M times on M1 and M2, ceil(M /
  5) times on M3 and newer; both once per 32 rows from the M on where MLX multiplies in tiles.
  Experts (gather_qmm) are read once for every pair of row and expert.
- Fused attention reads K and V once. A product reads its right side for every matrix of the batch
  and 64 rows: unfused, K is read for every query head, but once where there is one kv head only,
  since a batch that shares its right side is multiplied as one matrix.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

STAND_INS = ("rms_norm", "rope", "attention", "dequantize")
RESHAPES = {"Reshape", "Flatten", "Unflatten", "Squeeze", "ExpandDims"}
# Want their first input row by row; custom kernels want all of theirs so.
ROW_BY_ROW = {"QuantizedMatmul", "GatherQMM", "Softmax", "Scan", "rms_norm", "rope", "attention"}
WRITES = {"SliceUpdate", "DynamicSliceUpdate", "Scatter"}
ELEMENTWISE = set(
    """Abs Add AsType BitwiseBinary BitwiseInvert Ceil Cos Divide Equal Erf Exp Expm1 Floor
    FloorDivide Greater GreaterEqual Less LessEqual Log Log1p LogAddExp LogicalAnd LogicalNot
    LogicalOr Maximum Minimum Multiply Negative NotEqual Power Remainder Round Select Sigmoid
    Sign Sin Sqrt Square Subtract Tanh""".split()  # noqa: SIM905
)
DEPTH, INPUTS = 11, 24  # of what mx.compile fuses
ROWS_AT_ONCE = {"M1/M2": 1, "M3+": 5}  # that share a reading of packed weights
# From how many rows on there are tiles, for matrices up to 2048 wide and high, up to 4096, above.
TILES_FROM = {"M1/M2": (14, 10, 6), "M3+": (18, 12, 10)}
CHIPS = tuple(TILES_FROM)


@dataclass(frozen=True)
class Node:
    """A primitive; custom kernels go by their own names. key: with the inputs, all that the result
    depends on. copied: inputs that have to be laid out anew, in launches of their own."""

    name: str
    key: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    launches: int = 0
    copied: tuple[str, ...] = ()


class Graph:
    """`tell` is the callback of mx.export_function. Nodes are in order of execution. An array is
    the shape and the strides of what its id names, without memory."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.itemsize: dict[str, int] = {}
        self.outputs: list[str] = []
        self._same: dict[str, str] = {}
        self._scalars: dict[tuple[Any, ...], str] = {}

    def tell(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "inputs":
            for given in event["inputs"]:
                self._add(*given)
        elif kind == "outputs":
            self.outputs = [name for name, *_ in event["outputs"]]
        elif kind == "constants":
            for name, value in event["constants"]:
                self._add(name, value.shape, value.dtype)
                if value.ndim == 0:
                    scalar = self._scalars.setdefault((value.item(), value.dtype), name)
                    self._same[name] = scalar
        elif kind == "primitive":
            self.nodes.append(self._node(event))

    def nbytes(self, name: str) -> int:
        """Of what lies in memory: a broadcast dimension counts once."""
        array = self.arrays[name]
        there = [n for n, stride in zip(array.shape, array.strides, strict=True) if stride]
        return math.prod(there) * self.itemsize[name] if array.size else 0

    def _add(
        self, name: str, shape: Sequence[int], dtype: mx.Dtype, view: np.ndarray | None = None
    ) -> None:
        if view is None:
            steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            view = np.lib.stride_tricks.as_strided(np.empty(1, np.uint8), shape, steps)
        self.arrays[name], self.itemsize[name] = view, dtype.size

    def _node(self, event: dict[str, Any]) -> Node:
        name, arguments = event["name"], event.get("arguments", [])
        inputs = tuple(self._same.get(name, name) for name, *_ in event["inputs"])
        outputs = tuple(name for name, *_ in event["outputs"])
        key, custom = f"{name} {arguments}", name == "CustomKernel"
        if custom:
            name = arguments[0].removeprefix("custom_kernel_")
            name = next((known for known in STAND_INS if name.startswith(known)), name)
        given = [self.arrays[name] for name in inputs]
        views = _views(name, arguments, given, [shape for _, shape, _ in event["outputs"]])
        for output, view in zip(event["outputs"], views, strict=True):
            self._add(*output, view)
        node = Node(name, key, inputs, outputs)
        if views[0] is not None or not any(self.arrays[output].size for output in outputs):
            return node
        if custom and name not in STAND_INS:
            strict = inputs
        else:
            strict = inputs[:1] if name in ROW_BY_ROW else ()
        copied = tuple(name for name in strict if not self.arrays[name].flags.c_contiguous)
        return replace(node, launches=_launches(name, given) + len(copied), copied=copied)


def _views(
    name: str, arguments: list[Any], given: list[np.ndarray], shapes: list[tuple[int, ...]]
) -> list[np.ndarray | None]:
    """The outputs as views of the first input, None where they are arrays of their own."""
    view = None
    if name == "Split":
        return list(np.split(given[0], *arguments))
    if name == "Broadcast":
        view = np.broadcast_to(given[0], shapes[0])
    elif name == "Transpose":
        view = given[0].transpose(arguments[0])
    elif name == "Slice":
        view = given[0][tuple(map(slice, *arguments))]
    elif name in RESHAPES:
        with suppress(ValueError):
            view = np.reshape(given[0], shapes[0], copy=False)
    return [view] * len(shapes)


def _launches(name: str, given: list[np.ndarray]) -> int:
    if name == "Concatenate":
        return sum(part.size > 0 for part in given)
    if name == "attention":
        queries, keys = given[:2]
        return 2 if keys.shape[2] >= 4096 and keys.shape[1] < queries.shape[1] else 1
    return 2 if name == "DynamicSliceUpdate" else 1


def fused(graph: Graph, results: set[str]) -> list[list[Node]]:
    """Groups of nodes that mx.compile makes one launch of, where the function gives back `results`;
    of every group its last node first."""
    nodes: list[Node] = []
    first: dict[tuple[str, ...], Node] = {}
    same: dict[str, str] = {}
    for node in graph.nodes:
        node = replace(node, inputs=tuple(same.get(name, name) for name in node.inputs))
        known = first.setdefault((node.key, *node.inputs), node) if node.inputs else node
        if known is node or results.intersection(node.outputs):
            nodes.append(node)
        else:
            same.update(zip(node.outputs, known.outputs, strict=True))
    makers = {name: node for node in nodes for name in node.outputs}
    users: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        for name in node.inputs:
            users[name].add(node.outputs[0])
    groups: list[list[Node]] = []
    done: set[str] = set()

    def grow(name: str, depth: int, group: dict[str, Node], outer: set[str]) -> None:
        if name in group:
            return
        outer.add(name)
        node, root = makers.get(name), next(iter(group), name)
        if node is None or name in done or depth == DEPTH:
            return
        if node.name not in ELEMENTWISE and (node.name != "Broadcast" or name == root):
            return
        if name != root and not users[name] <= group.keys():
            return
        if name not in results:
            outer.remove(name)
        elif graph.arrays[name].shape != graph.arrays[root].shape:
            return
        if len(outer) < INPUTS:
            group[name] = node
            for source in node.inputs:
                grow(source, depth + 1, group, outer)

    for node in reversed(nodes):
        if node.outputs[0] not in done:
            group: dict[str, Node] = {}
            grow(node.outputs[0], 0, group, set())
            done |= group.keys()
            groups.append(list(group.values()) or [node])
    return groups


def bytes_read(graph: Graph, group: list[Node], share: dict[str, float]) -> dict[str, int]:
    """What one group reads, for each of CHIPS. share: of inputs, which part of them is read."""
    node, inner = group[0], {name for node in group for name in node.outputs}
    sizes = {
        name: share.get(name, 1) * graph.nbytes(name)
        for node in group
        for name in node.inputs
        if name not in inner
    }
    copies = sum(sizes[name] for name in node.copied)
    first, out = next(iter(node.inputs), ""), graph.arrays[node.outputs[0]]
    repeats = dict.fromkeys(CHIPS, 1)
    if node.name == "QuantizedMatmul":
        rows = out.size // out.shape[-1]
        width = max(graph.arrays[first].shape[-1], out.shape[-1])
        for chip, tiles in TILES_FROM.items():
            few = rows < tiles[(width > 2048) + (width > 4096)]
            repeats[chip] = -(-rows // (ROWS_AT_ONCE[chip] if few else 32))
    elif node.name in ("Gather", "GatherAxis"):
        sizes[first] = out.size * graph.itemsize[node.outputs[0]]
    elif node.name in WRITES:
        sizes[first] = 0
    elif node.name == "GatherQMM":
        for name in node.inputs[1:4]:
            sizes[name] *= math.prod(out.shape[:-2]) / len(graph.arrays[name])
    elif node.name == "Matmul":
        name = node.inputs[1]
        right, rows, batch = graph.arrays[name], out.shape[-2], math.prod(out.shape[:-2])
        steps = zip(right.shape[:-2], right.strides, strict=False)
        if all(n == 1 or not step for n, step in steps):
            rows, batch = rows * batch, 1
        sizes[name] = math.prod(right.shape[-2:]) * graph.itemsize[name] * batch * -(-rows // 64)
    others = sum(sizes.values()) - sizes.get(first, 0)
    return {chip: round(copies + sizes.get(first, 0) + others * repeats[chip]) for chip in CHIPS}
