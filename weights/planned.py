"""From headers to a loaded module: `plan_target` and `plan_drafter` check, `Planned.read` reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_mtp.config import DrafterConfig, TargetConfig, TextConfig
from mlx_mtp.errors import LoadError
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.layers import lay_out_for_cpu, on_cpu
from mlx_mtp.models.shards import Cut, Ranks, Shards
from mlx_mtp.models.target import Target
from mlx_mtp.weights import layout
from mlx_mtp.weights.checkpoint import SMALL_FILES, Checkpoint, Folder, Progress, Source, Tensor

PIECE = 256 << 20  # bytes that are read before they are evaluated
_LEAVES = ("weight", "scales", "biases")
Model = TypeVar("Model", Target, Drafter)


@dataclass
class Planned(Generic[Model]):
    """A checkpoint whose tensors are known to fit its config; none of their data is read yet.

    quantized: path of a layer -> its bits, group size and mode. packed: the same for layers that
    are stored as floats and quantised as they are read. cuts: which part of a parameter is read,
    where that is not all of it.
    """

    checkpoint: Checkpoint
    text: TextConfig
    plan: layout.Plan
    module: Model
    quantized: dict[str, dict[str, Any]]
    packed: dict[str, dict[str, Any]] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    @property
    def source(self) -> Source:
        return self.checkpoint.source

    @property
    def files(self) -> list[str]:
        """What has to be on disk: the small files, then the wanted weight files."""
        wanted = ("config.json",) if isinstance(self.module, Drafter) else SMALL_FILES
        small: set[str] = set(wanted) & set(self.source.files())
        return [*sorted(small), *self.plan.files]

    def pack(self, bits: int) -> None:
        """Has `read` quantise every matrix, the head included, as it comes in."""
        left = []

        def decide(path: str, layer: nn.Module) -> bool | dict[str, Any]:
            if not hasattr(layer, "to_quantized"):
                return False
            width = layer.weight.shape[-1]
            group = next((g for g in (64, 32) if width % g == 0), None)
            if group is None:
                left.append(path)
                return False
            self.packed[path] = {"group_size": group, "bits": bits, "mode": "affine"}
            return self.packed[path]

        nn.quantize(self.module, class_predicate=decide)
        if left:
            self.notices.append(
                f"{self.source.name}: {len(left)} matrices stay as stored, {left[0]} for one: no "
                "group size divides their width"
            )

    def nbytes(self, float32: bool) -> int:
        """Bytes in memory once loaded, floats as stored or (on the CPU) all in float32."""
        grown = {"I64": 0.5, **({"F16": 2, "BF16": 2} if float32 else {})}
        total = 0.0
        clusters = "masked_embedding.token_ordering" in self.plan.parts
        for name, part in self.plan.parts.items():
            size = int(part.nbytes * grown.get(part.tensor.dtype, 1))
            if scheme := self.packed.get(name.removesuffix(".weight")):
                # Each group has a scale and a bias in the dtype of the floats.
                size = 2 * size // scheme["group_size"]
                size += math.prod(part.shape) * scheme["bits"] // 8
            elif name == "embed_tokens.weight" and self.text.tie_word_embeddings:
                # lay_out_for_cpu gives a tied head a table of its own.
                own = float32 and "embed_tokens" not in self.quantized and not clusters
                size *= 2 if own else 1
            total += size * (self.cuts[name].share if name in self.cuts else 1)
        return int(total)

    def loaded_bytes(self) -> int:
        """Bytes that the module's arrays take."""
        arrays: dict[str, mx.array] = dict(tree_flatten(self.module.parameters()))
        return sum(array.nbytes for array in arrays.values())

    def read(self, *, float32: bool, progress: Progress | None = None) -> None:
        """Reads the weights into `module` and evaluates them, a piece at a time, so that memory
        peaks at the weights and one piece. Waits for the disk. Raises LoadError."""
        folder = self.source.fetch(self.files, progress)
        weights = []
        done, total = 0, self.plan.nbytes
        tell = progress or (lambda *_: None)
        what = f"load {self.source.name}"
        try:
            for piece, size in self._pieces(folder, float32):
                if not done:
                    tell(what, 0, total)
                mx.eval([array for _, array in piece])
                weights += piece
                done += size
                tell(what, done, total)
        except (RuntimeError, OSError) as error:
            raise LoadError(f"{self.source.name}: a weight file cannot be read: {error}") from None
        self.check_ordering(dict(weights))
        self.module.load_weights(weights)
        del weights, piece
        if on_cpu() and float32:
            lay_out_for_cpu(self.module)
        # One by one: each re-laid tensor frees the one it was made from, and Metal would keep that.
        arrays: dict[str, mx.array] = dict(tree_flatten(self.module.parameters()))
        for array in arrays.values():
            mx.eval(array)
            mx.clear_cache()
        if not self.head_is_tied(folder):
            self.notices.append(
                f"{self.source.name} ships an lm_head that differs from its embedding table, but "
                "its config ties the two: the table is used"
            )

    def check_ordering(self, weights: dict[str, mx.array]) -> None:
        """MLX reads out of bounds without an error, so ids that index a table are checked."""
        name = "masked_embedding.token_ordering"
        if name in weights:
            ids = mx.sort(weights[name])
            if not mx.array_equal(ids, mx.arange(ids.size)):
                raise LoadError(
                    f"{self.source.name}: {name} must hold every id from 0 to {ids.size - 1} once"
                )

    def _pieces(
        self, folder: Path, float32: bool
    ) -> Iterator[tuple[list[tuple[str, mx.array]], int]]:
        wanted: dict[str, dict[str, list[tuple[str, layout.Part]]]] = {}
        for name, part in self.plan.parts.items():
            of_file = wanted.setdefault(part.tensor.file, {})
            of_file.setdefault(part.tensor.name, []).append((name, part))
        # The first is large, as the tokenizer's parser holds Python's lock while it is read; where
        # tensors are converted, memory would peak.
        limit = PIECE if float32 or self.packed else 8 * PIECE
        for file, tensors in wanted.items():
            # Once more from disk: it may have come over the network, or changed since.
            if not tensors.keys() <= Folder(folder).header(file).keys():
                raise LoadError(f"{folder / file} changed while it was being loaded")
            lazy = mx.load(str(folder / file))
            assert isinstance(lazy, dict)
            piece: list[tuple[str, mx.array]] = []
            size = 0
            for name, parts in tensors.items():
                array = lazy.pop(name)
                for key, part in parts:
                    ready = _prepare(array, part, self.cuts.get(key), float32)
                    path = key.removesuffix(".weight")
                    if scheme := self.packed.get(path):
                        leaves = zip(_LEAVES, mx.quantize(ready, **scheme), strict=True)
                        piece += [(f"{path}.{leaf}", a) for leaf, a in leaves]
                    else:
                        piece.append((key, ready))
                    size += part.nbytes
                if size >= limit:
                    yield piece, size
                    piece, size, limit = [], 0, PIECE
            if piece:
                yield piece, size

    def head_is_tied(self, folder: Path) -> bool:
        """Whether a tied model's lm_head, if it ships one, repeats the table, compared byte by
        byte on disk."""
        for name, tensor in self.plan.head.items():
            part = self.plan.parts.get(name.replace("lm_head.", "embed_tokens."))
            if part is None or not _same_bytes(folder, tensor, part.tensor):
                return False
        return True


def plan_target(checkpoint: Checkpoint, config: TargetConfig | None = None) -> Planned[Target]:
    """Raises LoadError where config and headers do not agree, naming tensor, shapes and file."""
    config = config or TargetConfig.from_dict(checkpoint.config, checkpoint.where())
    return _plan(checkpoint, config.text, Target(config), config.text.num_owners)


def plan_drafter(checkpoint: Checkpoint, config: DrafterConfig | None = None) -> Planned[Drafter]:
    """Raises LoadError where config and headers do not agree, naming tensor, shapes and file."""
    config = config or DrafterConfig.from_dict(checkpoint.config, checkpoint.where())
    return _plan(checkpoint, config.text, Drafter(config), 0)


def _plan(checkpoint: Checkpoint, text: TextConfig, module: Model, owners: int) -> Planned[Model]:
    plan = layout.plan(checkpoint, owners=owners, tied=text.tie_word_embeddings)
    quantized = layout.quantize(module, plan, checkpoint)
    layout.check(module, plan, checkpoint)
    planned = Planned(checkpoint, text, plan, module, quantized)
    if checkpoint.source.note:
        planned.notices.append(checkpoint.source.note)
    if plan.skipped:
        planned.notices.append(f"{checkpoint.name}: text only, skipped {', '.join(plan.skipped)}")
    if any(p.tensor.dtype == "F16" for p in plan.parts.values()):
        planned.notices.append(
            f"{checkpoint.name} is stored in float16, which Gemma 4's activations can overflow; "
            "a bfloat16 checkpoint is safer"
        )
    if "auto_map" in checkpoint.config:
        planned.notices.append(f"{checkpoint.where()}: auto_map names code, which is never run")
    return planned


def part_of(
    config: TargetConfig, quantized: dict[str, dict[str, Any]], ranks: Ranks
) -> tuple[Target, Shards]:
    """A rank's part of a target, without its weights; quantized as in `Planned`, of the whole
    target. Raises UsageError."""
    groups = {path: scheme["group_size"] for path, scheme in quantized.items()}
    shards = Shards(config.text, ranks, groups)
    module = Target(config, shards)
    nn.quantize(module, class_predicate=lambda path, _: quantized.get(path, False))
    return module, shards


def shard(planned: Planned[Target], ranks: Ranks) -> None:
    """Has `read` make and read only this rank's part of a target. Raises UsageError."""
    if ranks.size == 1:
        return
    planned.module, shards = part_of(planned.module.config, planned.quantized, ranks)
    planned.cuts = {name: cut for name in planned.plan.parts if (cut := shards.cut(name))}


def _prepare(array: mx.array, part: layout.Part, cut: Cut | None, float32: bool) -> mx.array:
    if part.half is not None:
        array = mx.contiguous(mx.split(array, 2, axis=-2)[part.half])
    if cut is not None:
        array = cut.of(array)
    if array.dtype == mx.int64:
        return array.astype(mx.int32)
    if float32 and mx.issubdtype(array.dtype, mx.floating):
        return array.astype(mx.float32)
    return array


def _same_bytes(folder: Path, a: Tensor, b: Tensor, block: int = 16 << 20) -> bool:
    if (a.shape, a.dtype, a.nbytes) != (b.shape, b.dtype, b.nbytes):
        return False
    on_disk = Folder(folder)  # a header that came over the network does not say where data begin
    a, b = on_disk.header(a.file)[a.name], on_disk.header(b.file)[b.name]
    with (folder / a.file).open("rb") as fa, (folder / b.file).open("rb") as fb:
        fa.seek(a.start)
        fb.seek(b.start)
        for at in range(0, a.nbytes, block):
            size = min(block, a.nbytes - at)
            if fa.read(size) != fb.read(size):
                return False
    return True
