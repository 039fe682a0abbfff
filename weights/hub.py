"""Checkpoints on the Hugging Face hub, the only host that mlx-mtp ever contacts.

`open_repo` asks for a revision's commit and file list (one request); configs and safetensors
headers come next, weights only after every check. Without a network, or under HF_HUB_OFFLINE, the
cache answers. huggingface_hub does all the talking; a token stays between it and the hub.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from logging import ERROR
from pathlib import Path
from typing import Any

from mlx_mtp.errors import LoadError
from mlx_mtp.weights.checkpoint import (
    Folder,
    Progress,
    Source,
    Tensor,
    cache_folder,
    cache_root,
    cached_snapshot,
)

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when huggingface_hub is imported

TIMEOUT_S = 10.0


def open_repo(name: str, revision: str | None = None) -> Source:
    """The checkpoint `name` at a branch, tag or commit (default main). Without a network it is
    what the cache has of it. Raises LoadError."""
    from huggingface_hub import HfApi, constants

    wanted = revision or "main"
    cached = cached_snapshot(cache_folder(name), wanted)
    if constants.HF_HUB_OFFLINE:
        if cached is None:
            raise LoadError(
                f"{name} at {wanted} is not in the hub cache {cache_root()} and HF_HUB_OFFLINE is "
                "set; unset it and run once with a network"
            )
        return Folder(cached, name, cached.name)
    try:
        with _explained(name, wanted):
            info = HfApi(endpoint=_endpoint()).model_info(
                name, revision=wanted, files_metadata=True, timeout=TIMEOUT_S
            )
    except _NoNetwork as error:
        if cached is None:
            raise LoadError(f"{error}; it is not in the cache {cache_root()} either") from None
        note = f"{name}: the hub cannot be reached, the cached {cached.name[:12]} is used"
        return Folder(cached, name, cached.name, note)
    files = {s.rfilename: s.size or 0 for s in info.siblings or ()}
    return Repo(name, str(info.sha), files, wanted)


class Repo:
    """A commit of a hub repository, found under `wanted`, or a folder of it; see
    `checkpoint.Source`. files: all of the repository's, by path."""

    note = ""

    def __init__(
        self, repo: str, revision: str, files: dict[str, int], wanted: str, folder: str = ""
    ) -> None:
        self.repo, self.revision, self._wanted = repo, revision, wanted
        self.name = f"{repo}/{folder}".rstrip("/")
        self._all, self._inside = files, f"{folder}/" if folder else ""
        own = {path: path.removeprefix(self._inside) for path in files}
        self._files = {
            name: files[path]
            for path, name in own.items()
            if path.startswith(self._inside) and "/" not in name
        }

    def folder(self, name: str) -> Repo:
        """A folder of the same repository."""
        return Repo(self.repo, self.revision, self._all, self._wanted, name)

    @property
    def disk(self) -> Path:
        return cache_root()

    def where(self, file: str) -> str:
        return f"{self.name}/{file}"

    def files(self) -> dict[str, int]:
        return self._files

    def text(self, file: str) -> str:
        if file not in self._files:
            raise LoadError(f"{self.where(file)} is missing{self.incomplete()}")
        return Folder(self.fetch([file], None), self.name, self.revision).text(file)

    def header(self, file: str) -> dict[str, Tensor]:
        """From the cache, else by a ranged request: the file's first kilobytes."""
        if (cached := self._cached(file)) is not None:
            return Folder(cached.parent).header(file)
        from huggingface_hub import HfApi
        from huggingface_hub.errors import SafetensorsParsingError

        try:
            with _explained(self.repo, self.revision):
                found = HfApi(endpoint=_endpoint()).parse_safetensors_file_metadata(
                    self.repo, self._inside + file, revision=self.revision
                )
        except SafetensorsParsingError:
            raise LoadError(f"{self.where(file)} is not a safetensors file") from None
        return {
            name: Tensor(
                name,
                str(t.dtype),
                tuple(t.shape),
                file,
                t.data_offsets[0],
                t.data_offsets[1] - t.data_offsets[0],
            )
            for name, t in found.tensors.items()
        }

    def fetch(self, files: list[str], progress: Progress | None) -> Path:
        """Downloads what is missing; complete files are kept when it is interrupted."""
        from huggingface_hub import hf_hub_download

        total, done = sum(self._files[f] for f in files), 0
        folder = self.disk
        for file in files:
            with _explained(self.repo, self.revision, self._inside + file):
                path = hf_hub_download(
                    self.repo,
                    self._inside + file,
                    revision=self.revision,
                    cache_dir=cache_root(),
                    endpoint=_endpoint(),
                    tqdm_class=_bar(f"download {self.name}", done, total, progress),
                )
            done += self._files[file]
            folder = Path(path).parent
        if self._wanted != self.revision:
            # Files are fetched by commit, so the branch or tag is noted here, for offline use.
            ref = cache_folder(self.repo) / "refs" / self._wanted
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(self.revision, encoding="utf-8")
        return folder

    def to_download(self, files: list[str]) -> int:
        return sum(self._files[f] for f in files if self._cached(f) is None)

    def incomplete(self) -> str:
        return " from the repository"

    def _cached(self, file: str) -> Path | None:
        path = cache_folder(self.repo) / "snapshots" / self.revision / self._inside / file
        return path if path.exists() else None


class _NoNetwork(LoadError):
    pass


@contextmanager
def _explained(name: str, revision: str, file: str = "") -> Iterator[None]:
    """Turns huggingface_hub's errors into one line each, and keeps its own remarks off stderr.
    Their texts are left out: they are long, and nothing of a request belongs on a screen."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging

    what = f"{name}/{file}" if file else name
    again = "run the same command again, files that are complete are not fetched twice"
    http_error: Any = errors.HfHubHTTPError.__bases__[0]  # httpx's, under whichever name it is used
    endpoint = _endpoint() or constants.ENDPOINT
    verbosity = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    except errors.GatedRepoError:
        raise LoadError(
            f"{name} is gated: accept its licence at {endpoint}/{name}, then set HF_TOKEN (or run "
            "`hf auth login`)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise LoadError(
            f"{name} is not on the hub, or it is private: check the id, or set HF_TOKEN to a token "
            "that may read it"
        ) from None
    except errors.RevisionNotFoundError:
        raise LoadError(f"{name} has no revision {revision} on the hub") from None
    except (errors.LocalEntryNotFoundError, http_error) as error:
        # A file's failed look-up arrives as "not in the cache", with the answer as its cause.
        status = _status(error) or _status(error.__cause__)
        if status == 401:
            raise LoadError(f"{what}: the hub refused the token; check HF_TOKEN") from None
        if status == 403:
            raise LoadError(f"{what}: the token may not read this; check its permissions") from None
        said = f"the hub answered {status}" if status else "the hub cannot be reached"
        raise _NoNetwork(f"{what}: {said}; {again}") from None
    except errors.HFValidationError:
        raise LoadError(f"{name} is no hub id (owner/name)") from None
    except (ValueError, KeyError, TypeError, AttributeError):  # what parsing a wrong answer raises
        raise LoadError(f"{what}: {endpoint} is no hub; check HF_ENDPOINT") from None
    except OSError as error:
        if error.errno is None:  # huggingface_hub's check of a file's size
            raise _NoNetwork(f"{what}: the download broke off; {again}") from None
        raise LoadError(f"{what}: {error.strerror} ({error.filename or cache_root()})") from None
    finally:
        logging.set_verbosity(verbosity)


def _status(error: BaseException | None) -> int | None:
    from huggingface_hub.errors import HfHubHTTPError

    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _bar(what: str, before: int, total: int, progress: Progress | None) -> type:
    """A tqdm that draws nothing and reports bytes to `progress`."""
    tqdm: Any = import_module("tqdm.auto").tqdm

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("name", None)
        tqdm.__init__(self, *args, **{**kwargs, "file": io.StringIO(), "disable": False})

    def update(self: Any, n: float | None = 1) -> Any:
        shown = tqdm.update(self, n)
        if progress is not None:
            progress(what, min(before + int(self.n), total), total)
        return shown

    return type("Bar", (tqdm,), {"__init__": init, "update": update})


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None
