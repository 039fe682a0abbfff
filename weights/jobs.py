"""What a conversion has to do, tensor by tensor, decided from headers before anything is written.

A job takes rows of one or more source tensors to rows of one or more output tensors; it can be done
a block of rows at a time, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mtp.config import DRAFTER_TYPES
from mlx_mtp.errors import LoadError
from mlx_mtp.weights import layout, qat
from mlx_mtp.weights.checkpoint import INDEX, LISTING, OTHER_FORMATS, Tensor
from mlx_mtp.weights.planned import Planned
from mlx_mtp.weights.recipe import DRAFTER, Recipe, Scheme
from mlx_mtp.weights.rows import DTYPES as MLX_TYPES
from mlx_mtp.weights.rows import read_rows

# Bytes of source rows in one piece of work: an interrupt waits for those that are begun.
BLOCK = 4 << 20
SMALL = 64 << 20  # larger files beside the weights are not part of a checkpoint
NOT_COPIED = ("README.md", "config.json", LISTING, INDEX)
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class Slot:
    """A tensor of the output."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def row_bytes(self) -> int:
        return self.nbytes // max(_rows(self.shape), 1)


@dataclass(frozen=True)
class Job:
    """One tensor's way, by rows (its leading dimensions flattened). segments: which rows of the
    source, in order. scheme: how to pack it; packed: how the source is; grid: the source lies on
    q4_0's grid. dtype: of floats, None as in the source. Without scheme and dtype, bytes are copied
    whatever they mean."""

    slots: tuple[Slot, ...]
    sources: tuple[Tensor, ...]
    segments: tuple[tuple[int, int], ...]
    scheme: Scheme | None = None
    packed: Mapping[str, Any] | None = None
    grid: bool = False
    dtype: str | None = None

    @property
    def numbers(self) -> int:
        """Weights, however they are packed. Scales and biases are none: they are in their
        weights' bits."""
        first = self.sources[0]
        if first.name.endswith((".scales", ".biases")):
            return 0
        width = first.shape[-1] if first.shape else 1
        width = width * 32 // self.packed["bits"] if self.packed else width
        return width * sum(end - begin for begin, end in self.segments)

    @property
    def rows(self) -> int:
        """Of the source tensors, all segments or not."""
        return _rows(self.sources[0].shape)

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """(first row of the source, one behind its last, first row of the output)."""
        row = sum(t.nbytes for t in self.sources) // max(self.rows, 1)
        most = max(1, BLOCK // max(row, 1))
        done = 0
        for begin, end in self.segments:
            for at in range(begin, end, most):
                yield at, min(at + most, end), done + at - begin
            done += end - begin

    def convert(self, folder: Path, begin: int, end: int) -> list[bytes]:
        """Those rows, for every slot. WAITS for the device. Raises LoadError."""
        sources = self.sources
        if self.scheme is None and self.dtype is None:
            sources = tuple(_as_bytes(tensor) for tensor in sources)
        parts = [read_rows(folder / t.file, t, begin, end) for t in sources]
        if self.packed is not None and (self.scheme or self.dtype):
            biases = parts[2] if len(parts) > 2 else None
            scheme, dtype = self.packed, MLX_TYPES[self.dtype] if self.dtype else None
            packing = scheme["group_size"], scheme["bits"], scheme["mode"]
            parts = [mx.dequantize(parts[0], parts[1], biases, *packing, dtype=dtype)]
        elif self.dtype is not None:
            parts = [part.astype(MLX_TYPES[self.dtype]) for part in parts]
        if self.dtype == "F16" and not mx.isfinite(parts[0]).all():
            raise LoadError(
                f"{self.sources[0].name} has numbers that float16 cannot hold; take bfloat16"
            )
        if self.scheme is not None:
            plain = mx.quantize(parts[0], **self.scheme.as_dict())
            parts = list(qat.on_grid(parts[0], plain) if self.grid else plain)
        mx.eval(parts)
        return [_bytes(part) for part in parts]


@dataclass
class Side:
    """A target or a drafter on its way. place: where in the output it goes. quantization: what its
    config is to say, None for nothing; bits: name of each packed matrix, without `.weight`, in the
    output -> bits. dtype: what its config is to say, None as it does. as_is: config and names are
    the source's."""

    planned: Planned[Any]
    place: str
    jobs: list[Job]
    quantization: dict[str, Any] | None
    bits: dict[str, int]
    dtype: str | None = None
    as_is: bool = False

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for job in self.jobs for slot in job.slots)

    @property
    def read(self) -> int:
        """Bytes of the source's tensors."""
        return sum({t.name: t.nbytes for job in self.jobs for t in job.sources}.values())

    @property
    def numbers(self) -> int:
        """Weights, however they are packed."""
        return sum(job.numbers for job in self.jobs)

    @property
    def files(self) -> list[str]:
        """What is read of the source."""
        weights = {t.file for job in self.jobs for t in job.sources}
        return ["config.json", *self.beside, *sorted(weights)]

    @property
    def beside(self) -> list[str]:
        """Files of the checkpoint that are copied as they are."""
        return [
            name
            for name, size in self.planned.source.files().items()
            if size <= SMALL
            and name not in NOT_COPIED
            and not name.startswith(".")
            and not name.endswith((".safetensors", ".index.json", *OTHER_FORMATS))
        ]


def side_of(
    planned: Planned[Any], place: str, recipe: Recipe | None, dtype: str | None, requantize: bool
) -> Side:
    if planned.quantized and (recipe or dtype) and not requantize:
        raise LoadError(
            f"{planned.source.name} is quantised already, and unpacking it to pack it again loses "
            "more; take the original weights, or give --requantize"
        )
    if recipe is None and not (dtype and planned.quantized):
        parts = planned.plan.parts
        packed = {parts[f"{p}.weight"].tensor.name: s for p, s in planned.quantized.items()}
        jobs = [
            _copy(name, t, None if layout.other_sense(name) else dtype, packed.get(name))
            for name, t in planned.checkpoint.tensors.items()
        ]
        bits = {name.removesuffix(".weight"): s["bits"] for name, s in packed.items()}
        return Side(planned, place, jobs, None, bits, dtype, as_is=True)
    return _Repack(planned, place, recipe, dtype).side()


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same rows as plain bytes."""
    rows = _rows(tensor.shape)
    return replace(tensor, dtype="U8", shape=(rows, tensor.nbytes // max(rows, 1)))


def _copy(
    name: str, tensor: Tensor, dtype: str | None = None, packed: Mapping[str, Any] | None = None
) -> Job:
    kept = dtype if tensor.dtype in DTYPES.values() and dtype != tensor.dtype else None
    size = tensor.nbytes
    if kept:
        size = size * MLX_TYPES[kept].size // MLX_TYPES[tensor.dtype].size
    slot = Slot(name, kept or tensor.dtype, tensor.shape, size)
    return Job((slot,), (tensor,), ((0, _rows(tensor.shape)),), packed=packed, dtype=kept)


class _Repack:
    """The jobs of a side that is packed or gets another dtype, under the names that mlx-lm uses."""

    def __init__(
        self, planned: Planned[Any], place: str, recipe: Recipe | None, dtype: str | None
    ) -> None:
        self.planned, self.place, self.recipe, self.dtype = planned, place, recipe, dtype
        self.drafter = planned.checkpoint.config.get("model_type") in DRAFTER_TYPES
        self.bits: dict[str, int] = {}
        self.stated: dict[str, Any] = {}

    def side(self) -> Side:
        parts, jobs = self.planned.plan.parts, []
        matrices = {
            path: module
            for path, module in self.planned.module.named_modules()
            if hasattr(module, "to_quantized") or path in self.planned.quantized
        }
        for key, part in parts.items():
            path, _, leaf = key.rpartition(".")
            if path in self.planned.quantized and leaf != "weight":
                continue  # with its weight
            if leaf == "weight" and path in matrices:
                jobs.append(self._matrix(path, part))
            else:
                renamed = _copy(self._name(key, part), part.tensor, self.dtype)
                jobs.append(renamed)
        for name, tensor in self.planned.checkpoint.tensors.items():
            if layout.other_sense(name):
                jobs.append(_copy(name, tensor))
        quantization, towers = None, self._packed_towers()
        if self.recipe is not None:
            quantization = {**self.recipe.base.as_dict(), **self.stated, **towers}
        elif towers:
            quantization = {**next(iter(towers.values())), **towers}
        return Side(self.planned, self.place, jobs, quantization, self.bits, self.dtype)

    def _packed_towers(self) -> dict[str, Any]:
        """What the source's config says of towers that are packed already: they stay so."""
        config = self.planned.checkpoint.config
        block = config.get("quantization") or config.get("quantization_config") or {}
        base = {key: block[key] for key in ("group_size", "bits", "mode") if key in block}
        names = self.planned.checkpoint.tensors
        stems = [n.removesuffix(".scales") for n in names if n.endswith(".scales")]
        return {stem: block.get(stem) or base for stem in stems if layout.other_sense(stem)}

    def _name(self, key: str, part: layout.Part) -> str:
        if self.drafter:
            return part.tensor.name
        nested = "text_config" in self.planned.checkpoint.config
        key = key.replace(".experts.", ".experts.switch_glu.")
        if key.startswith("lm_head."):
            return f"language_model.{key}" if nested else key
        return f"language_model.model.{key}" if nested else f"model.{key}"

    def _matrix(self, path: str, part: layout.Part) -> Job:
        packed = self.planned.quantized.get(path)
        sources, shape, floats = [part.tensor], part.shape, part.tensor.dtype
        if packed is not None:
            parts = self.planned.plan.parts
            leaves = [
                parts[f"{path}.{leaf}"]
                for leaf in ("scales", "biases")
                if f"{path}.{leaf}" in parts
            ]
            sources += [leaf.tensor for leaf in leaves]
            shape = (*shape[:-1], shape[-1] * 32 // packed["bits"])
            floats = "BF16" if leaves[0].tensor.dtype == "U8" else leaves[0].tensor.dtype
        floats = self.dtype or floats
        name = self._name(f"{path}.weight", part)
        scheme = None
        if self.recipe is not None:
            scheme = self.recipe.scheme(f"{DRAFTER if self.drafter else ''}{path}", shape[-1])
        grid = scheme is not None and packed is None and qat.fits(scheme) and self._on_grid(part)
        if grid and scheme is not None:
            scheme = replace(scheme, group_size=qat.GROUP)
        job = Job(
            self._slots(name, shape, floats, scheme),
            tuple(sources),
            _segments(part),
            scheme,
            packed,
            grid,
            floats if floats != part.tensor.dtype else None,
        )
        stem = name.removesuffix(".weight")
        if scheme is not None:
            self.bits[stem] = scheme.bits
            if self.recipe is not None and scheme != self.recipe.base:
                self.stated[stem] = scheme.as_dict()
        return job

    def _slots(
        self, name: str, shape: tuple[int, ...], floats: str, scheme: Scheme | None
    ) -> tuple[Slot, ...]:
        if scheme is None:
            return (_slot(name, floats, shape),)
        stem = name.removesuffix(".weight")
        words = (*shape[:-1], shape[-1] * scheme.bits // 32)
        groups = (*shape[:-1], shape[-1] // scheme.group_size)
        slots = [_slot(name, "U32", words)]
        if scheme.mode == "affine":
            return (
                *slots,
                *(_slot(f"{stem}.{leaf}", floats, groups) for leaf in ("scales", "biases")),
            )
        return (*slots, _slot(f"{stem}.scales", "U8", groups))

    def _on_grid(self, part: layout.Part) -> bool:
        """Whether the first rows look as if a q4_0 model had been unpacked to floats."""
        tensor = part.tensor
        if self.planned.source.to_download([tensor.file]):
            return False  # it is asked again when it is here
        folder = self.planned.source.fetch([tensor.file], None)
        begin, end = _segments(part)[0]
        return qat.looks_like_it(
            read_rows(folder / tensor.file, tensor, begin, min(end, begin + 64))
        )


def _segments(part: layout.Part) -> tuple[tuple[int, int], ...]:
    """The rows of a part: all, or of every expert its half."""
    rows = _rows(part.tensor.shape)
    if part.half is None:
        return ((0, rows),)
    height = part.tensor.shape[-2]
    half = height // 2
    starts = range(part.half * half, rows, height)
    return tuple((start, start + half) for start in starts)


def _rows(shape: Sequence[int]) -> int:
    count = 1
    for size in shape[:-1]:
        count *= size
    return count


def _slot(name: str, dtype: str, shape: tuple[int, ...]) -> Slot:
    return Slot(
        name, dtype, shape, _rows(shape) * (shape[-1] if shape else 1) * MLX_TYPES[dtype].size
    )


def _bytes(array: mx.array) -> bytes:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.array(array).tobytes()
