"""From the tensors of a checkpoint to the parameters of our modules, by name and shape alone.

Three layouts are in the wild (`model.language_model.`, `language_model.model.`, `model.`), with
fused or split experts, with or without the keys and values of KV-shared layers, quantised or not.
`plan` maps them to one tree; `check` compares that tree with a module's before data is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_mtp.errors import LoadError
from mlx_mtp.weights.checkpoint import Checkpoint, Tensor

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_OTHER_SENSES = (
    "vision_tower",
    "audio_tower",
    "vision_embedder",
    "embed_vision",
    "embed_audio",
    "multi_modal_projector",
    "vision_model",
    "audio_model",
)
# Buffers that some exporters write and nobody reads.
_BUFFERS = re.compile(r"(^|\.)(rotary_emb\..*|(input|output)_(min|max))$")
_KV = re.compile(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.")
_FLOATS = ("F32", "F16", "BF16")
# MLX's modes other than affine take one (bits, group size) each and keep their scales in a byte.
_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_BYTE_SCALES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}


@dataclass(frozen=True)
class Part:
    """A parameter's place in a checkpoint: `tensor`, or its half 0 or 1 along axis -2."""

    tensor: Tensor
    half: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensor.shape
        if self.half is None or len(shape) < 2:
            return shape
        return (*shape[:-2], shape[-2] // 2, shape[-1])

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes // (1 if self.half is None else 2)


@dataclass
class Plan:
    """`parts`: parameter name -> its place. `skipped`: prefixes of tensors that are not text.
    `head`: a tied model's own lm_head tensors, name -> tensor."""

    parts: dict[str, Part]
    skipped: tuple[str, ...]
    head: dict[str, Tensor]

    @property
    def files(self) -> list[str]:
        """The weight files that hold something wanted."""
        tensors = [p.tensor for p in self.parts.values()] + list(self.head.values())
        return sorted({t.file for t in tensors})

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts.values())


def strip(name: str) -> str:
    """`name` without the layout's prefix, in our spelling of the experts."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    return name.replace(".experts.switch_glu.", ".experts.")


def other_sense(name: str) -> str | None:
    """The prefix that makes `name` part of a vision or audio tower."""
    bare = strip(name)
    return next((p for p in _OTHER_SENSES if bare.startswith(p)), None)


def plan(checkpoint: Checkpoint, *, owners: int, tied: bool) -> Plan:
    """Where each parameter is. `owners`: layers from this one on own no KV, and theirs is dropped.
    Raises LoadError when two tensors claim one parameter."""
    parts: dict[str, Part] = {}
    head: dict[str, Tensor] = {}
    skipped: dict[str, None] = {}
    for name, tensor in checkpoint.tensors.items():
        if sense := other_sense(name):
            skipped[sense] = None
            continue
        bare = strip(name)
        shared = _KV.match(bare)
        if _BUFFERS.search(bare) or (shared and int(shared[1]) >= owners):
            continue
        if tied and bare.startswith("lm_head."):
            head[bare] = tensor
            continue
        for key, part in _parts(bare, tensor):
            if key in parts:
                raise LoadError(
                    f"{checkpoint.where(tensor.file)}: {name} and {parts[key].tensor.name} "
                    f"are both {key}"
                )
            parts[key] = part
    return Plan(parts, tuple(skipped), head)


def _parts(bare: str, tensor: Tensor) -> list[tuple[str, Part]]:
    if ".experts." in bare and not bare.endswith((".weight", ".scales", ".biases")):
        bare += ".weight"  # HF writes the experts' matrices without it
    stem, _, leaf = bare.rpartition(".")
    if stem.endswith(".experts.gate_up_proj"):
        base = stem.removesuffix("gate_up_proj")
        return [
            (f"{base}{proj}.{leaf}", Part(tensor, half))
            for half, proj in enumerate(("gate_proj", "up_proj"))
        ]
    return [(bare, Part(tensor))]


def quantize(module: nn.Module, plan: Plan, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Gives `module` (not evaluated) the quantised layers that the checkpoint has, each with its
    own bits, group size and mode; returns them by path. Raises LoadError where the config's
    statement about a tensor and its packed shape disagree."""
    block = checkpoint.config.get("quantization") or checkpoint.config.get("quantization_config")
    block = block if isinstance(block, Mapping) else {}
    stated = {strip(k): v for k, v in block.items() if isinstance(v, (Mapping, bool))}
    chosen: dict[str, dict[str, Any]] = {}
    if not any(name.endswith(".scales") for name in plan.parts):
        return chosen

    def decide(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in plan.parts or not hasattr(layer, "to_quantized"):
            return False
        chosen[path] = _scheme(path, layer.weight.shape[-1], plan, checkpoint, stated.get(path))
        return chosen[path]

    nn.quantize(module, class_predicate=decide)
    return chosen


def _scheme(
    path: str, width: int, plan: Plan, checkpoint: Checkpoint, stated: object
) -> dict[str, Any]:
    scales = plan.parts[f"{path}.scales"]
    packed = plan.parts.get(f"{path}.weight")
    where = checkpoint.where(scales.tensor.file)
    if packed is None:
        raise LoadError(f"{where}: {scales.tensor.name} has no weight beside it")
    # Both follow from the packed shapes, so a wrong global default cannot mislead.
    groups, words = (part.shape[-1] if part.shape else 0 for part in (scales, packed))
    bits, group_size = words * 32 // width, width // max(groups, 1)
    mode = "affine"
    if scales.tensor.dtype == "U8":
        mode = _BYTE_SCALES.get((bits, group_size), "")
    found = {"group_size": group_size, "bits": bits, "mode": mode}
    fits = words * 32 == width * bits and groups * group_size == width
    known = bits in _AFFINE_BITS and group_size in (32, 64, 128) if mode == "affine" else mode
    if not (fits and known and packed.tensor.dtype == "U32"):
        raise LoadError(
            f"{where}: {packed.tensor.name} {list(packed.shape)} with scales "
            f"{list(scales.shape)} is no quantisation of a matrix {width} wide that MLX knows"
        )
    if isinstance(stated, Mapping):
        wanted = {"group_size": 64, "bits": 4, "mode": "affine", **stated}
        for key, value in found.items():
            if wanted[key] != value:
                raise LoadError(
                    f"{checkpoint.where()}: quantization says {key} {wanted[key]} for {path}, "
                    f"but the tensors in {scales.tensor.file} are packed as {value}"
                )
    return found


def check(module: nn.Module, plan: Plan, checkpoint: Checkpoint) -> None:
    """Compares names, shapes and dtypes of `plan` with the module's parameters. Reads no data.
    Raises LoadError, one line that names the tensors."""
    expected: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    missing = [k for k in expected if k not in plan.parts]
    extra = [p.tensor.name for k, p in plan.parts.items() if k not in expected]
    if missing or extra:
        told = [f"{len(missing)} missing ({_few(missing)})"] if missing else []
        told += [f"{len(extra)} not known ({_few(extra)})"] if extra else []
        raise LoadError(f"{checkpoint.name}: the tensors do not match: {', '.join(told)}")
    for key, array in expected.items():
        part = plan.parts[key]
        if part.shape != array.shape or (part.half == 1 and part.tensor.shape[-2] % 2):
            wrong = f"has shape {list(part.shape)}, but the config asks for {list(array.shape)}"
            wrong += f" in {key}"
        elif part.tensor.dtype not in _dtypes(array):
            wrong = f"is stored as {part.tensor.dtype}, which cannot be used here"
        else:
            continue
        raise LoadError(f"{checkpoint.where(part.tensor.file)}: {part.tensor.name} {wrong}")


def _dtypes(array: mx.array) -> tuple[str, ...]:
    if mx.issubdtype(array.dtype, mx.floating):
        return _FLOATS
    if array.dtype == mx.uint8:
        return ("U8",)
    return ("U32",) if array.dtype == mx.uint32 else ("I32", "I64")


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
