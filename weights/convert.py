"""Checkpoints into a pair that loads at once, packed on the way if asked.

Nothing is held but a few blocks of rows: the headers say what every output will be and where it
lies (`jobs`), so blocks go from file to file through MLX's quantiser, on a thread for every core. A
folder is written under another name and renamed at the end; its config.json comes last, so that
what a kill leaves does not load.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mlx_mtp.config import DRAFTER_TYPES, TargetConfig
from mlx_mtp.errors import FitError, LoadError, MtpError, UsageError
from mlx_mtp.models.layers import cores
from mlx_mtp.text.tokenizer import Tokenizer
from mlx_mtp.weights import fit, listing
from mlx_mtp.weights.checkpoint import INDEX, LISTING, Checkpoint, Folder, Progress
from mlx_mtp.weights.find import Found, find_pair, source_of
from mlx_mtp.weights.jobs import DTYPES, Job, Side, Slot, side_of
from mlx_mtp.weights.planned import Planned, plan_drafter, plan_target
from mlx_mtp.weights.proof import prove
from mlx_mtp.weights.recipe import Recipe

SHARD = 4 << 30  # bytes of a weight file at most, but for a larger tensor


@dataclass(frozen=True)
class How:
    """What is asked of a conversion. dtype: of floats, a key of DTYPES, None as stored.
    requantize: pack what is packed already. Raises UsageError."""

    recipe: Recipe | None = None
    dtype: str | None = None
    requantize: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in (None, *DTYPES):
            raise UsageError(f"dtype is {self.dtype}; it must be {', '.join(DTYPES)}")

    def side(self, planned: Planned[Any], place: str) -> Side:
        dtype = DTYPES[self.dtype] if self.dtype else None
        return side_of(planned, place, self.recipe, dtype, self.requantize)


@dataclass(frozen=True)
class Conversion:
    """Sides to write, and how; target is None for a drafter alone."""

    how: How
    target: Side | None
    drafter: Side | None
    notices: list[str] = field(default_factory=list)

    @property
    def sides(self) -> list[Side]:
        return [side for side in (self.target, self.drafter) if side is not None]

    @property
    def nbytes(self) -> int:
        return sum(side.nbytes for side in self.sides)

    @property
    def to_download(self) -> int:
        return sum(side.planned.source.to_download(side.files) for side in self.sides)

    def summary(self, out: Path) -> str:
        """One line before anything is done."""
        names = " and ".join(side.planned.source.name for side in self.sides)
        read = fit.gb(sum(side.read for side in self.sides))
        load = f", {fit.gb(self.to_download)} to download" if self.to_download else ""
        free = fit.gb(shutil.disk_usage(_existing(out)).free)
        return f"{names}: {read}{load}, to {fit.gb(self.nbytes)} in {out} ({free} free there)"

    def fetch(self, progress: Progress | None) -> Conversion:
        """The same from files on this disk, after a download where needed. Their own headers say
        where data begin, and the data whether they lie on a grid. Raises LoadError."""
        sides: list[Side] = []
        notices = list(self.notices)
        for side in self.sides:
            source = side.planned.source
            folder = source.fetch(side.files, progress)
            checkpoint = Checkpoint.open(Folder(folder, source.name, source.revision))
            make = plan_target if side is self.target else plan_drafter
            if side is self.target:
                Tokenizer.from_folder(folder)  # before hours of work, not behind them
            sides.append(self.how.side(make(checkpoint), side.place))
            if not sides[-1].as_is and not sides[-1].planned.head_is_tied(folder):
                notices.append(
                    f"{source.name} ships an lm_head that differs from its embedding table, but "
                    "its config ties the two: the head is left out"
                )
        target = sides[0] if self.target else None
        return Conversion(self.how, target, sides[-1] if self.drafter else None, notices)


def plan(
    model: str,
    how: How,
    *,
    drafter: str | None = "auto",
    revision: str | None = None,
    drafter_revision: str | None = None,
) -> Conversion:
    """What to write, from configs and headers. Arguments as `load.load_pair` takes them; model may
    be a drafter, which is then converted alone. Raises LoadError, PairError, UsageError."""
    first = Checkpoint.open(source_of(model, revision))
    if first.config.get("model_type") in DRAFTER_TYPES:
        if drafter not in (None, "auto"):
            raise UsageError(f"{first.name} is a drafter itself; a drafter has none")
        alone = plan_drafter(first)
        conversion = Conversion(how, None, how.side(alone, ""), alone.notices)
    else:
        found = find_pair(model, drafter, revision, drafter_revision)
        own = how.side(found.drafter, "drafter") if found.drafter else None
        notices = [*found.notices, *found.target.notices]
        notices += found.drafter.notices if found.drafter else []
        conversion = Conversion(how, how.side(found.target, ""), own, notices)
    if how.recipe is not None:
        how.recipe.check_used()
    if how.dtype == "float16":
        conversion.notices.append(
            "Gemma 4's activations can overflow float16; bfloat16 is as small and safer"
        )
    return conversion


def check_place(out: Path, conversion: Conversion, force: bool) -> None:
    """Raises UsageError where `out` is there already or cannot be, FitError where a disk has too
    little room for it and for what is still to be downloaded."""
    for side in conversion.sides:
        source = side.planned.source.disk.resolve()
        if source.is_relative_to(out.resolve()) or out.resolve().is_relative_to(source):
            raise UsageError(f"{out} may not hold the source {source}, nor lie in it")
    check_free(out, force)
    parent = _existing(out.parent)
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise UsageError(f"{out} cannot be written: {parent} is no folder that may be written to")
    needed: dict[int, list[tuple[Path, int]]] = {}  # of each disk
    for side in conversion.sides:
        disk = _existing(side.planned.source.disk)
        load = side.planned.source.to_download(side.files)
        for place, size in ((parent, side.nbytes), (disk, load)):
            if size:
                needed.setdefault(place.stat().st_dev, []).append((place, size))
    for places in needed.values():
        place, size = places[0][0], sum(size for _, size in places)
        free = shutil.disk_usage(place).free
        if free - size < fit.DISK_RESERVE:
            raise FitError(
                f"the conversion needs {fit.gb(size)} and would leave "
                f"{fit.gb(max(free - size, 0))} of {fit.gb(free)} free on the disk of {place}; "
                "2 GB are to stay free"
            )


def check_free(out: Path, force: bool) -> None:
    """Raises UsageError where something is at `out` that must stay: without `force` all but an
    empty folder; with it all but a conversion of ours in which there is nothing else."""
    try:
        os.lstat(out)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from None
    if not out.is_dir():
        raise UsageError(f"{out} is there already, and is no folder")
    if not any(out.iterdir()):
        return
    foreign = listing.foreign(out)
    if foreign is not None:
        raise UsageError(
            f"{out} is there already and is not replaced: {foreign} was not written by convert"
        )
    if not force:
        raise UsageError(f"{out} is there already; --force replaces it")


def write(
    conversion: Conversion,
    out: Path,
    progress: Progress | None = None,
    *,
    force: bool = False,
    proof: bool = False,
) -> list[tuple[str, str]]:
    """Writes `out` from a conversion that was fetched, once all is there and, with `proof`, was
    compared with its source; gives the rows of a table. force: what `check_free` allows is
    replaced. Raises LoadError, UsageError, FitError for a full disk, MtpError for one that fails.
    """
    tell = progress or (lambda *_: None)
    out = Path(os.path.realpath(out))  # a link stays one; "." and ".." have no name
    try:
        with _staged(out, force) as stage:
            hashes: dict[str, str] = {}
            total = sum(side.read for side in conversion.sides)
            done = 0
            for side in conversion.sides:
                folder = side.planned.source.disk
                place = stage / side.place
                place.mkdir(exist_ok=True)
                for count in _write_weights(side, folder, place):
                    done += count
                    tell(f"write {out.name}", min(done, total), total)
                _write_beside(side, folder, place)
            _write_text(stage / "README.md", listing.card(conversion, out.name))
            for path in sorted(p for p in stage.rglob("*") if p.is_file()):
                hashes[path.relative_to(stage).as_posix()] = sha256(path)
            _write_json(stage / LISTING, listing.manifest(conversion, hashes))
            rows = _compare(conversion, stage, tell if proof else None)
            for side in reversed(conversion.sides):
                place = stage / side.place
                (place / "config.json.part").rename(place / "config.json")
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        kind = FitError if full else MtpError
        raise kind(f"{out} cannot be written: {error.strerror or error}{where}") from None
    return rows


def _beside(out: Path, kind: str) -> str:
    """How names of hidden folders for `out` begin."""
    return f".{os.fsencode(out.name)[:180].decode(errors='ignore')}.{kind}-"


@contextmanager
def _staged(out: Path, force: bool) -> Iterator[Path]:
    """A folder beside `out` that becomes it at the end, and is gone if there was none."""
    out.parent.mkdir(parents=True, exist_ok=True)
    stage, old = (out.parent / f"{_beside(out, kind)}{os.getpid()}" for kind in ("part", "old"))
    _clear(out, "part")
    stage.mkdir()
    try:
        yield stage
        _clear(out, "old")
        check_free(out, force)  # it may have come meanwhile
        if os.path.lexists(out):
            out.rename(old)
        stage.rename(out)
        _clear(out, "old")
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(out):
            old.rename(out)
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _clear(out: Path, kind: str) -> None:
    """Removes what conversions to `out` left that were killed."""
    begin = _beside(out, kind)
    for left in list(out.parent.iterdir()):
        pid = left.name.removeprefix(begin)
        if not (left.name.startswith(begin) and pid.isdecimal()):
            continue
        if pid != str(os.getpid()) and _runs(pid):
            continue
        if left.is_symlink():
            left.unlink()
        shutil.rmtree(left, ignore_errors=True)


def _runs(pid: str) -> bool:
    """Whether another process of that number may still be writing."""
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _write_weights(side: Side, folder: Path, place: Path) -> Iterator[int]:
    """Writes all shards and the index; gives the bytes of source that are done, as they come."""
    shards = _shards(side.jobs)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    weight_map: dict[str, str] = {}
    for name, jobs in zip(names, shards, strict=True):
        yield from _write_shard(side, jobs, folder, place / name)
        weight_map.update((slot.name, name) for job in jobs for slot in job.slots)
    index = {"metadata": {"total_size": side.nbytes}, "weight_map": weight_map}
    _write_json(place / INDEX, index)


def _shards(jobs: list[Job]) -> list[list[Job]]:
    """Jobs in files of at most SHARD bytes."""
    shards: list[list[Job]] = [[]]
    size = 0
    for job in jobs:
        own = sum(slot.nbytes for slot in job.slots)
        if shards[-1] and size + own > SHARD:
            shards.append([])
            size = 0
        shards[-1].append(job)
        size += own
    return shards


def _write_shard(side: Side, jobs: list[Job], folder: Path, path: Path) -> Iterator[int]:
    slots = [slot for job in jobs for slot in job.slots]
    header, starts = _header(slots, "pt" if side.as_is and not side.bits else "mlx")
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(slot.nbytes for slot in slots))
        file.flush()
        descriptor = file.fileno()

        def work(job: Job, begin: int, end: int, row: int) -> int:
            for slot, data in zip(job.slots, job.convert(folder, begin, end), strict=True):
                _write_at(descriptor, data, len(header) + starts[slot.name] + row * slot.row_bytes)
            rows = end - begin
            return sum(t.nbytes * rows // job.rows for t in job.sources)

        running: set[Future[int]] = set()
        try:
            for job in jobs:
                for block in job.blocks():
                    running.add(_pool().submit(work, job, *block))
                    if len(running) > 2 * cores():
                        done, running = wait(running, return_when=FIRST_COMPLETED)
                        yield sum(future.result() for future in done)
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield sum(future.result() for future in done)
        finally:
            wait([future for future in running if not future.cancel()])  # before the file closes
        os.fsync(descriptor)


@cache
def _pool() -> ThreadPoolExecutor:
    """One for all: of every thread that there ever was, MLX keeps a stream."""
    return ThreadPoolExecutor(cores())


def _write_at(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


def _header(slots: list[Slot], form: str) -> tuple[bytes, dict[str, int]]:
    """A safetensors header, and where each tensor begins behind it."""
    entries: dict[str, Any] = {"__metadata__": {"format": form}}
    starts, at = {}, 0
    for slot in slots:
        starts[slot.name] = at
        entries[slot.name] = {
            "dtype": slot.dtype,
            "shape": list(slot.shape),
            "data_offsets": [at, at + slot.nbytes],
        }
        at += slot.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts


def _write_beside(side: Side, folder: Path, place: Path) -> None:
    """The other files of the checkpoint, byte for byte, and its config under another name."""
    for name in side.beside:
        _copy(folder / name, place / name)
    config = place / "config.json.part"
    if side.as_is and side.dtype is None:
        _copy(folder / "config.json", config)
    else:
        _write_json(config, _config(side))


def _config(side: Side) -> dict[str, Any]:
    """What the source says, with the packing and the dtype that it has now."""
    blocks = ("quantization", "quantization_config")
    raw = dict(side.planned.checkpoint.config)
    if not side.as_is:
        raw = {key: value for key, value in raw.items() if key not in blocks}
    if side.quantization is not None:
        raw |= dict.fromkeys(blocks, side.quantization)
    if side.dtype is not None:
        said = {value: key for key, value in DTYPES.items()}[side.dtype]
        for level in ("", "text_config"):
            inner = raw.get(level) if level else raw
            if isinstance(inner, dict):
                now = inner | {key: said for key in ("dtype", "torch_dtype") if key in inner}
                raw = raw | {level: now} if level else now
    return raw


def _copy(source: Path, to: Path) -> None:
    try:
        opened = source.open("rb")
    except OSError as error:
        raise LoadError(f"{source} cannot be read: {error.strerror}") from None
    with opened, to.open("wb") as written:
        shutil.copyfileobj(opened, written)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: Any) -> None:
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, "utf-8", "backslashreplace")  # a folder's name may be no UTF-8


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _compare(
    conversion: Conversion, stage: Path, progress: Progress | None
) -> list[tuple[str, str]]:
    """Rows of a table: what was written and, with `progress`, how far it is from its source, by
    reading both again. Raises LoadError."""
    rows = []
    for what, side in (("target", conversion.target), ("drafter", conversion.drafter)):
        if side is not None:
            bits = side.nbytes * 8 / side.numbers
            size = f"{fit.gb(side.read)} to {fit.gb(side.nbytes)}"
            rows.append((what, f"{size}, {bits:.2f} bits a weight"))
    if progress is not None and conversion.target is not None:
        drafter = conversion.drafter
        config = TargetConfig.from_dict(conversion.target.planned.checkpoint.config)
        source = Found(config, conversion.target.planned, drafter.planned if drafter else None)
        # Their configs have not got their names yet.
        target = plan_target(_written(conversion.target, stage))
        own = plan_drafter(_written(drafter, stage)) if drafter else None
        rows += prove(source, Found(config, target, own), progress).rows()
    return rows


def _written(side: Side, stage: Path) -> Checkpoint:
    return Checkpoint(Folder(stage / side.place), _config(side))
