"""What a checkpoint says about itself before a single weight is read.

A checkpoint lies in a `Folder` or, through `hub.Repo`, on the hub; both answer the same four
questions (which files, one file's JSON, one safetensors header, where the files can be read).
`Checkpoint.open` asks them and holds the configuration and every tensor's name, dtype and shape.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from mlx_mtp.errors import LoadError, UsageError

Progress = Callable[[str, int, int], None]
INDEX = "model.safetensors.index.json"
LISTING = "mlx_mtp.json"  # what a conversion of ours says about itself
# Everything but weights that a pair is loaded from.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_ITEMSIZE = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "U8": 1}
OTHER_FORMATS = (".gguf", ".litertlm", ".task", ".tflite", ".bin", ".pt", ".pth", ".onnx", ".npz")
_LFS_POINTER = b"version https://git-lfs"
_MAX_HEADER = 100 << 20  # the format's own limit
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors$")


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header. `start` is its first byte in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int


class Source(Protocol):
    """Where a checkpoint lies."""

    name: str
    note: str  # something the user should know about how it was found, or ""

    @property
    def revision(self) -> str | None:
        """A commit, or None for a plain folder."""

    @property
    def disk(self) -> Path:
        """A folder on the disk that downloads go to."""

    def where(self, file: str) -> str:
        """How error messages call that file."""

    def files(self) -> dict[str, int]:
        """Names in the checkpoint's top folder and their sizes in bytes."""

    def text(self, file: str) -> str:
        """A small file's text; raises LoadError."""

    def header(self, file: str) -> dict[str, Tensor]:
        """The tensors of a safetensors file; raises LoadError."""

    def fetch(self, files: list[str], progress: Progress | None) -> Path:
        """The folder in which those files can be read, after a download where needed."""

    def to_download(self, files: list[str]) -> int:
        """Bytes of those files that are not on this disk yet."""

    def incomplete(self) -> str:
        """What to do about a missing file, for the end of an error line."""


class Folder:
    """A checkpoint on disk: a plain folder, or a snapshot in a hub cache."""

    def __init__(
        self, path: Path, name: str | None = None, revision: str | None = None, note: str = ""
    ) -> None:
        self.path, self.note = path, note
        self.name = name or str(path)
        self.revision: str | None = revision

    @classmethod
    def at(cls, given: str | Path, revision: str | None = None) -> Folder:
        """The folder `given`; `models--owner--name` of a hub cache means its snapshot `revision`
        (default main). Raises LoadError, UsageError."""
        path = Path(given).expanduser()
        if path.is_file() and path.suffix in OTHER_FORMATS:
            refuse_other_formats(cls(path.parent), path.name)
        if path.is_file():
            raise LoadError(f"{path} is a file; give the folder that holds config.json")
        if not path.is_dir():
            raise LoadError(f"{path}: no such folder")
        if path.name.startswith("models--") and (path / "snapshots").is_dir():
            snapshot = cached_snapshot(path, revision or "main")
            if snapshot is None:
                raise LoadError(f"{path}: revision {revision or 'main'} is not in this hub cache")
            return cls(snapshot, "/".join(path.name.split("--")[1:]), snapshot.name)
        if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
            if revision not in (None, path.name):
                raise UsageError(f"{path} is revision {path.name}, not {revision}")
            return cls(path, "/".join(path.parent.parent.name.split("--")[1:]), path.name)
        if revision is not None:
            raise UsageError(f"{path} is a folder: it has no revision {revision}")
        return cls(path)

    @property
    def disk(self) -> Path:
        return self.path

    def where(self, file: str) -> str:
        return str(self.path / file)

    def files(self) -> dict[str, int]:
        try:
            return {p.name: p.stat().st_size for p in sorted(self.path.iterdir()) if p.is_file()}
        except OSError as error:
            raise LoadError(f"{self.path} cannot be read: {error.strerror}") from None

    def text(self, file: str) -> str:
        try:
            if (self.path / file).is_fifo():
                raise FileNotFoundError  # one would wait for ever
            return (self.path / file).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise LoadError(f"{self.where(file)} is missing{self.incomplete()}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError(f"{self.where(file)} cannot be read: {error}") from None

    def header(self, file: str) -> dict[str, Tensor]:
        path = self.path / file
        try:
            size = path.stat().st_size
            with path.open("rb") as f:
                start = f.read(8)
                length = int.from_bytes(start, "little")
                if start and _LFS_POINTER.startswith(start):
                    raise LoadError(
                        f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` there"
                    )
                if len(start) < 8 or length + 8 > size or length > _MAX_HEADER:
                    raise LoadError(f"{path} is not a safetensors file, or is cut off")
                return parse_header(f.read(length), file, str(path), length + 8, size)
        except OSError as error:
            raise LoadError(f"{path} cannot be read: {error.strerror}") from None

    def fetch(self, files: list[str], progress: Progress | None) -> Path:
        return self.path

    def to_download(self, files: list[str]) -> int:
        return 0

    def incomplete(self) -> str:
        if self.revision is None:
            return ""
        return "; the download was not finished: run once with a network to fetch the rest"


def cache_root() -> Path:
    """The hub cache, as huggingface_hub's environment variables place it (it need not be
    imported to look there)."""
    env = os.environ
    home = env.get("HF_HOME") or f"{env.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    cache = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(cache).expanduser()


def cache_folder(hub_id: str) -> Path:
    return cache_root() / f"models--{hub_id.replace('/', '--')}"


def cached_snapshot(repo_folder: Path, revision: str) -> Path | None:
    """The snapshot that a branch, tag or commit names in a hub cache's `models--...` folder."""
    ref = repo_folder / "refs" / revision
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    snapshot = repo_folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def parse_header(
    raw: bytes, file: str, where: str, data_start: int, size: int | None
) -> dict[str, Tensor]:
    """The tensors that a safetensors header names. `size`: bytes of the whole file, if known;
    raises LoadError when the header asks for more."""
    try:
        entries = json.loads(raw)
        tensors = {}
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end:
                raise ValueError
            shape = tuple(int(n) for n in entry["shape"])
            # MLX goes by the shape alone, and a read past the end would end the process.
            size_of_one = _ITEMSIZE.get(entry["dtype"])
            if size_of_one is not None and end - begin != math.prod(shape) * size_of_one:
                raise ValueError
            tensors[name] = Tensor(
                name, entry["dtype"], shape, file, data_start + begin, end - begin
            )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise LoadError(f"{where} is not a safetensors file: its header cannot be read") from None
    in_order = sorted(tensors.values(), key=lambda t: (t.start, t.nbytes))
    for a, b in pairwise(in_order):
        if a.start + a.nbytes > b.start:
            raise LoadError(f"{where} is broken: {a.name} and {b.name} overlap; fetch it again")
    needed = max((t.start + t.nbytes for t in in_order), default=0)
    if size is not None and needed > size:
        raise LoadError(
            f"{where} is cut off: it has {size} bytes, its header needs {needed}; fetch it again"
        )
    return tensors


class Checkpoint:
    """A checkpoint before its weights are read: its configs at once, its headers when asked."""

    def __init__(
        self, source: Source, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> None:
        self.source, self.config, self.generation = source, config, generation or {}

    @classmethod
    def open(cls, source: Source) -> Checkpoint:
        """Reads the configs. Raises LoadError."""
        files = source.files()
        if "config.json" not in files:
            refuse_other_formats(source)
        config = read_json(source, "config.json")
        refuse_foreign_quantization(config, source.where("config.json"))
        there = "generation_config.json" in files
        return cls(source, config, read_json(source, "generation_config.json") if there else None)

    def need_tokenizer(self) -> None:
        """Raises LoadError where there is none."""
        if not {"tokenizer.json", "tokenizer.model"} & set(self.source.files()):
            raise LoadError(
                f"{self.where('tokenizer.json')} is missing (and so is tokenizer.model)"
                f"{self.source.incomplete()}"
            )

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of every weight file, from the headers. Raises LoadError."""
        return _tensors(self.source, self.source.files())

    @property
    def name(self) -> str:
        return self.source.name

    def where(self, file: str = "config.json") -> str:
        return self.source.where(file)


def read_json(source: Source, file: str) -> dict[str, Any]:
    """A JSON object; raises LoadError naming the file."""
    try:
        value = json.loads(source.text(file))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{source.where(file)} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{source.where(file)} is not a JSON object")
    return value


def refuse_other_formats(source: Source, named: str | None = None) -> None:
    """Raises LoadError naming the file, else the first weight file, that is not safetensors."""
    for file in [named] if named else source.files():
        if file.endswith(OTHER_FORMATS):
            raise LoadError(
                f"{source.where(file)}: {Path(file).suffix} weights cannot be read; mlx-mtp needs "
                "config.json and .safetensors"
            )


def refuse_foreign_quantization(config: Mapping[str, Any], where: str) -> None:
    """Raises LoadError for weights packed by something other than MLX, named."""
    if isinstance(config.get("quantization"), Mapping):
        return
    for level in (config, config.get("text_config")):
        block = level.get("quantization_config") if isinstance(level, Mapping) else None
        if isinstance(block, Mapping) and (method := block.get("quant_method")):
            raise LoadError(
                f"{where}: the weights are quantised with {method}, which MLX cannot read; "
                "use an MLX conversion or the original weights"
            )


def _tensors(source: Source, files: Mapping[str, int]) -> dict[str, Tensor]:
    if INDEX in files:
        return _indexed(source, files)
    names = [f for f in files if f.startswith("model") and f.endswith(".safetensors")]
    names = names or [f for f in files if f.endswith(".safetensors")]
    if not names:
        refuse_other_formats(source)
        raise LoadError(
            f"{source.where('model.safetensors')} is missing: no weights{source.incomplete()}"
        )
    gone = _missing_shards(names)
    if gone:
        raise LoadError(f"{source.where(gone[0])} is missing{_more(gone)}{source.incomplete()}")
    tensors: dict[str, Tensor] = {}
    for file in names:
        for name, tensor in source.header(file).items():
            if name in tensors:
                raise LoadError(
                    f"{source.where(file)} and {tensors[name].file} both hold {name}, and no "
                    f"{INDEX} says which one counts; remove one"
                )
            tensors[name] = tensor
    return tensors


def _indexed(source: Source, files: Mapping[str, int]) -> dict[str, Tensor]:
    where = source.where(INDEX)
    weight_map = read_json(source, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{where}: weight_map is missing")
    names = sorted(set(map(str, weight_map.values())))
    if any("/" in n or "\\" in n or n.startswith("..") for n in names):
        raise LoadError(f"{where} names files outside its own folder")
    gone = [n for n in names if n not in files]
    if gone:
        others = [f for f in files if f.endswith(".safetensors") and f not in names]
        stale = f"; if {others[0]} is the whole model, delete the index" if others else ""
        raise LoadError(
            f"{source.where(gone[0])} is missing{_more(gone)}, but {INDEX} names it"
            f"{stale or source.incomplete()}"
        )
    tensors: dict[str, Tensor] = {}
    for file in names:
        tensors.update(source.header(file))
    for name, file in weight_map.items():
        if name not in tensors:
            raise LoadError(f"{where} is stale: {name} is not in {file}; delete the index")
    return tensors


def _missing_shards(names: list[str]) -> list[str]:
    """Files of `a-00001-of-00003.safetensors` sets that are not among `names`."""
    gone = []
    for match in filter(None, map(_SHARD.match, names)):
        stem, total = match[1], match[3]
        gone += [f"{stem}-{i:05d}-of-{total}.safetensors" for i in range(1, int(total) + 1)]
    return sorted(set(gone) - set(names))


def _more(names: list[str]) -> str:
    return f" (and {', '.join(names[1:])})" if len(names) > 1 else ""
