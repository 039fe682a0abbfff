"""The first steps of `mlx-mtp`: signals are heard before the imports that take their time."""

from __future__ import annotations

from typing import NoReturn

from mlx_mtp.cli.terminal import Interrupted, leave, signals


def run() -> NoReturn:
    signals.install()
    try:
        from mlx_mtp.cli.main import run as command

        command()
    except Interrupted as interrupt:
        leave(interrupt.code)
