"""How rounds are run on a device, and when their seconds say what they cost."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mlx_mtp.errors import UsageError
from mlx_mtp.models.layers import on_cpu


@dataclass(frozen=True)
class Policy:
    """compile: through compiled functions. pipeline: dispatch a round before the one before it is
    read. Both pay on a GPU; on the CPU a cold compile costs a minute of g++, and MLX runs nothing
    ahead there."""

    compile: bool
    pipeline: bool

    @classmethod
    def for_device(
        cls, compile: bool | None, pipeline: bool | None, beside: bool = False
    ) -> Policy:
        """None leaves the choice to the device. `beside`: the drafter runs on another device than
        the target. A trace across both would compile kernels for the CPU, and the host cannot run
        ahead of CPU work, so it is neither then; asked for, that raises UsageError."""
        if beside and (compile or pipeline):
            asked = "--compile" if compile else "--pipeline"
            raise UsageError(f"{asked} cannot be had with a drafter on another device")
        gpu = not on_cpu() and not beside
        return cls(gpu if compile is None else compile, gpu if pipeline is None else pipeline)


class Clock:
    """Seconds between two results becoming readable, where they say what a round costs: not if
    something else ran in between, nor if the caller kept the engine waiting for long."""

    OUTSIDE = 0.2  # of the time between two results

    def __init__(self) -> None:
        self._last: float | None = None
        self._left = 0.0
        self._outside = 0.0

    def enter(self) -> None:
        """A step begins."""
        self._outside += time.perf_counter() - self._left if self._left else 0.0

    def leave(self) -> None:
        """A step ends."""
        self._left = time.perf_counter()

    def disturb(self) -> None:
        """Something other than rounds took time."""
        self._last = None

    def read(self) -> float | None:
        """A result was read now: the seconds since the one before, or None."""
        now, last, outside = time.perf_counter(), self._last, self._outside
        self._last, self._outside = now, 0.0
        if last is None or outside > self.OUTSIDE * (now - last):
            return None
        return now - last
