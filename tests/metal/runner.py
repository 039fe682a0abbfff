"""A launch's outputs wherever the tests run: from the device itself, or from the emulator."""

from __future__ import annotations

import mlx.core as mx

from mlx_mtp.kernels.launch import Launch

from .emulator import emulate


def run(launch: Launch) -> list[mx.array]:
    """By Metal where there is a device, else by the emulator, in its even order."""
    return launch.run() if mx.metal.is_available() else emulate(launch).outputs
