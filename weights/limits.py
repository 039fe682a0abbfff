"""MLX's memory limits on Metal while a pair is loaded, shared with other mlx-mtp processes.

What each process keeps wired stands in a file of its own, which it holds a lock on as long as it
lives: a file without a lock is of one that ended, and goes.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_mtp.weights.fit import gb

# Bytes of freed buffers that MLX may keep, at the least: a prompt's chunks use them again.
LEAST_CACHE = 512 << 20


@dataclass(frozen=True)
class Limits:
    """Bytes: wired is what macOS may not take away, total the most that is used before freed
    buffers go, cache what is kept of those. notice: a line where less is wired than wanted."""

    wired: int
    total: int
    cache: int
    notice: str | None = None

    @classmethod
    def of(cls, weights: int, headroom: int, device: int, others: int = 0) -> Limits:
        """For a pair of so many bytes on a device of so many, of which other processes keep
        `others` wired."""
        wanted, left = weights + headroom, max(device - others, 0)
        notice = None
        if wanted > left:
            beside = f" less {gb(others)} of other mlx-mtp processes" if others else ""
            notice = (
                f"wired memory is limited to {gb(left)}, the device's {gb(device)}{beside}, "
                f"not {gb(wanted)}"
            )
        return cls(min(wanted, left), max(left, wanted), max(headroom, LEAST_CACHE), notice)

    def set(self) -> Callable[[], None]:
        """Puts them in force; gives back what restores those before."""
        before = (
            mx.set_wired_limit(self.wired),
            mx.set_memory_limit(self.total),
            mx.set_cache_limit(self.cache),
        )

        def restore() -> None:
            mx.set_wired_limit(before[0])
            mx.set_memory_limit(before[1])
            mx.set_cache_limit(before[2])

        return restore


def wired_by_others(folder: Path) -> int:
    """Bytes that other living processes keep wired, by their files in `folder`."""
    total = 0
    for path in folder.glob("[0-9]*") if folder.is_dir() else ():
        if path.name == str(os.getpid()):
            continue
        with suppress(OSError, ValueError), path.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                total += int(file.read())
            else:
                path.unlink()
    return total


def tell_others(folder: Path, wired: int) -> Callable[[], None]:
    """Say in `folder` what this process keeps wired, until it ends or calls what is given back.
    Where the folder cannot be written, others are not told."""
    path = folder / str(os.getpid())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Locked before it has its name: others take an unlocked file for one left behind.
        new = folder / f".{os.getpid()}"
        file = new.open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(str(wired))
        file.flush()
        new.replace(path)
    except OSError:
        return lambda: None

    def end() -> None:
        path.unlink(missing_ok=True)
        file.close()

    return end


def limit_memory(
    weights: int, headroom: int, folder: Path
) -> tuple[Callable[[], None], str | None]:
    """On Metal: sets the limits for a pair and tells other processes; elsewhere nothing. Gives back
    (a function that undoes both, a notice)."""
    if not mx.metal.is_available():
        return (lambda: None), None
    device = int(mx.device_info()["max_recommended_working_set_size"])
    limits = Limits.of(weights, headroom, device, wired_by_others(folder))
    restore, end = limits.set(), tell_others(folder, limits.wired)

    def undo() -> None:
        restore()
        end()

    return undo, limits.notice
