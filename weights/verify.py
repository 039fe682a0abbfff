"""What is wrong with a folder on disk, all of it: by configs, headers and hashes.

Loading ends at the first problem; this goes on and collects them, a line each. No weight is loaded:
headers are read, and hashes are taken block by block.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_mtp.config import DRAFTER_TYPES, DrafterConfig, TargetConfig, check_pair
from mlx_mtp.errors import LoadError, PairError
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.target import Target
from mlx_mtp.weights import checkpoint as on_disk
from mlx_mtp.weights import layout
from mlx_mtp.weights.checkpoint import (
    INDEX,
    LISTING,
    Checkpoint,
    Folder,
    Progress,
    Tensor,
    read_json,
)

_WEIGHTS = (".safetensors", *on_disk.OTHER_FORMATS)
_BLOCK = 4 << 20
_SHA256 = re.compile("[0-9a-f]{64}")
Config = TargetConfig | DrafterConfig
Headers = dict[str, dict[str, Tensor]]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Report:
    """`problems`, `notices`: lines. files: "target" or "drafter" -> how many files it has.
    hashed: how many files were compared with a known sha256."""

    folder: str
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    hashed: int = 0

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok, "files": sum(self.files.values())}

    def note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def attempt(self, step: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """What `step` returns; None where it raises a LoadError, which is noted."""
        try:
            return step(*args, **kwargs)
        except LoadError as error:
            self.note(str(error))
            return None


def check_folder(given: str | Path, progress: Progress | None = None) -> Report:
    """Checks a target, a drafter, or a target with its drafter in `drafter/`. `progress` is called
    while hashes are taken. Raises LoadError where `given` is no folder."""
    try:
        top = Folder.at(given)
    except OSError as error:
        raise LoadError(f"{given}: {error.strerror}") from None
    report, parts = Report(str(top.path)), [top]
    config = _check_part(top, "target", report)
    if (top.path / "drafter").is_dir():
        parts.append(Folder(top.path / "drafter", revision=top.revision))
        drafter = _check_part(parts[1], "drafter", report)
        if isinstance(config, TargetConfig) and isinstance(drafter, DrafterConfig):
            try:
                check_pair(config, drafter)
            except PairError as error:
                report.note(f"{parts[1].where('config.json')}: {error}")
    _check_hashes(parts, report, progress or (lambda *_: None))
    return report


def _check_part(folder: Folder, kind: str, report: Report) -> Config | None:
    files = folder.files()
    for file in on_disk.SMALL_FILES:
        if file in files:
            report.attempt(_check_small, folder, file, files[file])
    checkpoint = Checkpoint(folder, {})
    whole = _check_headers(checkpoint, report)
    if config := report.attempt(_read_config, checkpoint, kind):
        kind = "target" if isinstance(config, TargetConfig) else "drafter"
        if kind == "target":
            report.attempt(checkpoint.need_tokenizer)
        report.attempt(_check_tensors, checkpoint, config, whole, report)
    report.files[kind] = len(files)
    return config


def _check_small(folder: Folder, file: str, size: int) -> None:
    if size < 200 and folder.text(file).startswith("version https://git-lfs"):
        raise LoadError(f"{folder.where(file)} is a Git LFS pointer; run `git lfs pull` there")
    if file.endswith(".json"):
        read_json(folder, file)


def _read_config(checkpoint: Checkpoint, kind: str) -> Config:
    if "config.json" not in checkpoint.source.files():
        on_disk.refuse_other_formats(checkpoint.source)
    checkpoint.config = raw = read_json(checkpoint.source, "config.json")
    is_drafter = kind == "drafter" or raw.get("model_type") in DRAFTER_TYPES
    on_disk.refuse_foreign_quantization(raw, checkpoint.where())
    of_kind = DrafterConfig if is_drafter else TargetConfig
    return of_kind.from_dict(raw, checkpoint.where())


def _check_headers(checkpoint: Checkpoint, report: Report) -> bool:
    """Gives `checkpoint` the tensors of every file that can be read; whether those are all."""
    source, files = checkpoint.source, checkpoint.source.files()
    names = [f for f in files if f.endswith(".safetensors") and not f.startswith(".")]
    headers: Headers = {}
    for file in names:
        if (header := report.attempt(source.header, file)) is not None:
            headers[file] = header
    if INDEX in files:
        used = report.attempt(_check_index, checkpoint, headers, report) or names
        whole = set(used) <= headers.keys()
    else:
        # Reading them as loading does refuses what is missing, and what is there twice.
        whole = report.attempt(lambda: checkpoint.tensors) is not None
        used = [f for f in names if f.startswith("model")] or names
    checkpoint.tensors = {n: t for f in used for n, t in headers.get(f, {}).items()}
    return whole and bool(used)


def _check_index(checkpoint: Checkpoint, headers: Headers, report: Report) -> list[str]:
    """The files that the index names."""
    source, where = checkpoint.source, checkpoint.where(INDEX)
    index = read_json(source, INDEX)
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{where}: weight_map is missing")
    weight_map = {name: str(file) for name, file in weight_map.items()}
    used = sorted(set(weight_map.values()))
    there, holds = source.files(), {n: f for f, header in headers.items() for n in header}
    if any("/" in file or "\\" in file or file.startswith("..") for file in used):
        raise LoadError(f"{where} names files outside its own folder")
    for file in used:
        if file not in there:
            told = f"is missing, but {INDEX} names it{source.incomplete()}"
            report.note(f"{checkpoint.where(file)} {told}")
    for name, file in weight_map.items():
        if file in headers and name not in headers[file]:
            other = f" but in {holds[name]}" if name in holds else ""
            report.note(f"{where} is stale: {name} is not in {file}{other}")
    for name, file in holds.items():
        if file in used and name not in weight_map:
            report.note(f"{where} does not know {name}, which is in {file}")
    for file in sorted(headers.keys() - set(used)):
        report.note(f"{checkpoint.where(file)} is not in {INDEX}; remove one of the two")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    found = sum(t.nbytes for f in used for t in headers.get(f, {}).values())
    if total is not None and total != found and set(used) <= headers.keys():
        report.notices.append(f"{where}: total_size is {total}, the tensors have {found} bytes")
    return used


def _check_tensors(checkpoint: Checkpoint, config: Config, whole: bool, report: Report) -> None:
    """Names, shapes and dtypes against the config. Raises LoadError for two that claim one name."""
    is_target = isinstance(config, TargetConfig)
    module: nn.Module = Target(config) if isinstance(config, TargetConfig) else Drafter(config)
    owners, tied = config.text.num_owners if is_target else 0, config.text.tie_word_embeddings
    plan = layout.plan(checkpoint, owners=owners, tied=tied)
    if plan.skipped:
        told = f"not compared with the config: {', '.join(plan.skipped)}"
        report.notices.append(f"{checkpoint.where()}: {told}")
    expected = _expected(module, plan, checkpoint, whole, report)
    for key, array in expected.items():
        if part := plan.parts.get(key):
            alone = nn.Module()
            alone[key] = array
            report.attempt(layout.check, alone, layout.Plan({key: part}, (), {}), checkpoint)
        elif whole:
            report.note(f"{checkpoint.where()} asks for {key}, which no weight file holds")
    for key, part in plan.parts.items():
        if key not in expected:
            told = f"{part.tensor.name} is not known, config.json has no place for it"
            report.note(f"{checkpoint.where(part.tensor.file)}: {told}")


def _expected(
    module: nn.Module, plan: layout.Plan, checkpoint: Checkpoint, whole: bool, report: Report
) -> dict[str, mx.array]:
    """The parameters of `module`, each layer packed as its tensors are. Layers that are packed
    wrongly or, where files are missing, half there are noted and left out, in `plan` too."""
    expected: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    for path, layer in module.named_modules():
        leaves = [f"{path}.{leaf}" for leaf in ("weight", "scales", "biases")]
        found = {key: plan.parts[key] for key in leaves if key in plan.parts}
        weight, scales = found.get(leaves[0]), found.get(leaves[1])
        is_packed = weight is not None and weight.tensor.dtype == "U32"
        drop = not whole and is_packed != (scales is not None)
        if scales is not None and not drop:
            alone = nn.Module()
            alone[path] = layer
            done = report.attempt(layout.quantize, alone, layout.Plan(found, (), {}), checkpoint)
            drop = done is None
            expected |= dict(tree_flatten(alone.parameters()))
        for key in leaves if drop else ():
            expected.pop(key, None)
            plan.parts.pop(key, None)
    return expected


def _check_hashes(parts: list[Folder], report: Report, progress: Progress) -> None:
    """Compares files with the sha256 that mlx_mtp.json or, in a hub cache, the blob's name has."""
    top, wanted = parts[0], dict[Path, dict[str, str]]()
    listed: dict[str, str] | None = None
    if (top.path / LISTING).is_file():
        listed = report.attempt(_read_listing, top)
    for name, sha256 in (listed or {}).items():
        path = top.path / name
        if path.is_file():
            wanted.setdefault(path, {})[f"{LISTING} has"] = sha256
        else:
            report.note(f"{path} is missing, but {LISTING} lists it{top.incomplete()}")
    for path in [part.path / file for part in parts for file in part.files()]:
        is_weight = path.name.endswith(_WEIGHTS) and not path.name.startswith(".")
        if listed is not None and is_weight and path.relative_to(top.path).as_posix() not in listed:
            report.note(f"{path} is not listed in {LISTING}")
        blob = path.resolve()
        if path.is_symlink() and blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
            wanted.setdefault(path, {})["its blob is called"] = blob.name
    done, total = 0, sum(path.stat().st_size for path in wanted)
    for path, claims in wanted.items():
        digest = hashlib.sha256()
        try:
            with path.open("rb", buffering=0) as f:
                while block := f.read(_BLOCK):
                    digest.update(block)
                    done += len(block)
                    progress(f"hash {top.name}", done, total)
        except OSError as error:
            report.note(f"{path} cannot be read: {error.strerror}")
            continue
        report.hashed += 1
        for whose, sha256 in claims.items():
            if sha256 != digest.hexdigest():
                told = f"its sha256 is {digest.hexdigest()}, {whose} {sha256}"
                report.note(f"{path} has changed or is damaged: {told}")


def _read_listing(folder: Folder) -> dict[str, str]:
    files = read_json(folder, LISTING).get("files")
    if not isinstance(files, dict) or not all(_SHA256.fullmatch(str(v)) for v in files.values()):
        raise LoadError(f"{folder.where(LISTING)}: files must give each file's sha256")
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise LoadError(f"{folder.where(LISTING)} lists {name}, which is outside its folder")
    return files
