"""Finding the two checkpoints of a pair, and refusing them by config and headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlx_mtp.config import DrafterConfig, TargetConfig, check_pair
from mlx_mtp.errors import LoadError, UsageError
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.target import Target
from mlx_mtp.weights import known
from mlx_mtp.weights.checkpoint import Checkpoint, Folder, Source, cache_folder, cached_snapshot
from mlx_mtp.weights.planned import Planned, plan_drafter, plan_target

TINY = Path(__file__).parent / "tiny"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass
class Found:
    """A pair that fits by what configs and headers say. `why`: how the drafter was found."""

    config: TargetConfig
    target: Planned[Target]
    drafter: Planned[Drafter] | None = None
    why: str = ""
    notices: list[str] = field(default_factory=list)


def find_pair(
    model: str | None,
    drafter: str | None = "auto",
    revision: str | None = None,
    drafter_revision: str | None = None,
) -> Found:
    """See `load.load_pair` for the arguments. Raises LoadError, PairError, UsageError."""
    if drafter is None and drafter_revision is not None:
        raise UsageError("a drafter revision was given, but no drafter")
    for what, name in (("model", model), ("drafter", drafter), ("revision", revision)):
        if name == "" or (name and len(name) > 4096):
            raise UsageError(f"the {what} is {'empty' if not name else 'no name: it is too long'}")
    notices = []
    why = "named by the user"
    short = known.SHORT.get(model.lower()) if model and not Path(model).exists() else None
    if short is not None:
        model, revision = short.target, revision or short.target_revision
        if drafter == "auto":
            drafter, why = short.drafter, "listed with the short name"
            drafter_revision = drafter_revision or short.drafter_revision
        untried = "" if short.tried else ", a pair that was not tried by us yet"
        notices.append(f"{model} with {drafter or 'no drafter'}{untried}")
    checkpoint = Checkpoint.open(_source(model, revision, "target"))
    config = TargetConfig.from_dict(checkpoint.config, checkpoint.where())
    checkpoint.need_tokenizer()
    named = None
    if drafter is not None and (drafter != "auto" or model is None):
        why = "embedded" if drafter == "auto" else why
        named = _source(None if drafter == "auto" else drafter, drafter_revision, "drafter")
        named_config = _fitting(Checkpoint.open(named), config)
    found = Found(config, plan_target(checkpoint, config), why=why, notices=notices)
    if named is not None:
        found.drafter = plan_drafter(*named_config)
    elif drafter == "auto":
        _search(found, drafter_revision)
    return found


def source_of(model: str, revision: str | None = None) -> Source:
    """Where a folder, a hub id or a short name leads. Raises LoadError, UsageError."""
    if not model:
        raise UsageError("the model is empty")
    short = known.SHORT.get(model.lower()) if not Path(model).exists() else None
    if short is not None:
        model, revision = short.target, revision or short.target_revision
    return _source(model, revision, "target")


def _source(model: str | None, revision: str | None, embedded: str) -> Source:
    if model is None:
        if not (TINY / embedded).is_dir():
            raise LoadError(f"{TINY / embedded} is missing: the embedded pair was not installed")
        return Folder(TINY / embedded, f"embedded {embedded}")
    if Path(model).expanduser().exists():
        return Folder.at(model, revision)
    if not _HUB_ID.fullmatch(model):
        raise LoadError(
            f"{model}: no such folder, and neither a hub id (owner/name) nor one of "
            f"{', '.join(known.SHORT)}"
        )
    from mlx_mtp.weights.hub import open_repo

    return open_repo(model, revision)


def _fitting(checkpoint: Checkpoint, target: TargetConfig) -> tuple[Checkpoint, DrafterConfig]:
    config = DrafterConfig.from_dict(checkpoint.config, checkpoint.where())
    check_pair(target, config)
    return checkpoint, config


def _search(found: Found, revision: str | None) -> None:
    """Fills in the first drafter that is there and fits; else says once how to get one."""
    troubles: list[str] = []
    for source, why in _candidates(found, revision, troubles):
        try:
            found.drafter = plan_drafter(*_fitting(Checkpoint.open(source), found.config))
        except LoadError as error:
            troubles.append(str(error))
            continue
        found.why = why
        return
    fits = known.drafter_by_shape(found.config.text)
    hint = f"; --drafter {fits} should fit" if fits else ""
    because = f" ({troubles[0]})" if troubles else ""
    found.notices.append(f"no drafter found, plain decoding{because}{hint}")


def _candidates(
    found: Found, revision: str | None, troubles: list[str]
) -> Iterator[tuple[Source, str]]:
    target = found.target.source
    by_name = known.drafters_by_name(target.name)
    by_shape = known.drafter_by_shape(found.config.text)
    ids = dict.fromkeys(by_name, "found by name")
    if by_shape is not None:
        ids.setdefault(by_shape, "found by shape")
    if isinstance(target, Folder):
        # A folder never sends us to the network: itself, its neighbours, then the hub cache.
        if (target.path / "drafter" / "config.json").is_file():
            yield Folder(target.path / "drafter"), "inside the model's folder"
        yield from _neighbours(target.path, by_name)
        for hub_id, why in ids.items():
            cached = cached_snapshot(cache_folder(hub_id), revision or "main")
            if cached is not None:
                yield Folder.at(cached), f"{why}, from the hub cache"
        return
    from mlx_mtp.weights.hub import Repo, open_repo

    if isinstance(target, Repo) and revision is None:
        inside = target.folder("drafter")
        if "config.json" in inside.files():
            yield inside, "inside the model's repository"
    for hub_id, why in ids.items():
        try:
            source = open_repo(hub_id, revision)
        except LoadError as error:
            troubles.append(str(error))
            continue
        yield source, why


def _neighbours(path: Path, by_name: tuple[str, ...]) -> Iterator[tuple[Source, str]]:
    names = [f"{path.name}-assistant", *(n.rpartition("/")[2] for n in by_name)]
    there: dict[str, Path] = {}
    with suppress(OSError):  # a parent folder that may not be listed has nothing for us
        there = {p.name.lower(): p for p in path.resolve().parent.iterdir() if p.is_dir()}
    for name in dict.fromkeys(n.lower() for n in names):
        if name in there:
            yield Folder(there[name]), "beside the model"
