"""Apple's chips, and the machine at hand: what a plan has to know of them.

Bandwidth and GPU cores are Apple's own figures for each chip's largest GPU; the clocks are what
others report, as Apple names none. A Max of the smaller kind is known by its memory.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_mtp.errors import UsageError
from mlx_mtp.weights import fit

FAMILY = 12  # an M1's GPU is of Apple's 13th generation
_GHZ = {13: 1.28, 14: 1.40, 15: 1.38, 16: 1.58, 17: 1.58}
_LANES = 128  # multiply-adds of a core in one clock


@dataclass(frozen=True)
class Chip:
    """generation: of the GPU, 13 for M1 to 17 for M5. bandwidth: bytes/s. cores: of the GPU."""

    name: str
    generation: int
    bandwidth: float
    cores: int

    @property
    def flops(self) -> float:
        """Floating-point operations a second at most, in float32 and bfloat16 alike, without the
        matrix units of an M5."""
        return self.cores * _LANES * 2 * _GHZ[self.generation] * 1e9


def _chip(name: str, gb_per_s: float, cores: int) -> Chip:
    return Chip(name, FAMILY + int(name[1]), gb_per_s * 1e9, cores)


CHIPS = (
    _chip("M1", 68.25, 8),
    _chip("M1 Pro", 200, 16),
    _chip("M1 Max", 400, 32),
    _chip("M1 Ultra", 800, 64),
    _chip("M2", 100, 10),
    _chip("M2 Pro", 200, 19),
    _chip("M2 Max", 400, 38),
    _chip("M2 Ultra", 800, 76),
    _chip("M3", 100, 10),
    _chip("M3 Pro", 150, 18),
    _chip("M3 Max", 400, 40),
    _chip("M3 Ultra", 819, 80),
    _chip("M4", 120, 10),
    _chip("M4 Pro", 273, 20),
    _chip("M4 Max", 546, 40),
    _chip("M5", 153, 10),
    _chip("M5 Pro", 307, 20),
    _chip("M5 Max", 614, 40),
)
# (chip, memory in GB) that come with the smaller GPU only: its GB/s and cores.
_SMALLER = {
    ("M3 Max", 36): (300, 30),
    ("M3 Max", 96): (300, 30),
    ("M4 Max", 36): (410, 32),
    ("M5 Max", 36): (460, 32),
}


@dataclass(frozen=True)
class Machine:
    """memory: physical bytes. limit: bytes of it that weights and KV may take. chip: None where
    it is not Apple's, or newer than the table."""

    name: str
    chip: Chip | None
    memory: int
    limit: int


def this_machine() -> Machine:
    told = _sysctl()
    if told is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        name = str(mx.device_info().get("device_name", "this machine")).strip()
        return Machine(name, None, memory, fit.device_bytes())
    name, memory = told
    return Machine(name, chip_of(name, memory), memory, fit.device_bytes())


def named(chip: str, memory_gb: float) -> Machine:
    """Raises UsageError, naming the known chips, or where that is no memory."""
    if not 1 <= memory_gb <= 4096:
        raise UsageError(f"memory is {memory_gb:g} GB; it must be 1 to 4096")
    memory = int(memory_gb * (1 << 30))
    found = chip_of(chip, memory)
    if found is None:
        known = ", ".join(c.name for c in CHIPS)
        raise UsageError(f"the chip {chip!r} is not known; known are {known}")
    # What Metal recommends as a working set; newer versions of macOS recommend more.
    share = 2 / 3 if memory_gb < 36 else 3 / 4
    return Machine(found.name, found, memory, int(share * memory))


def chip_of(name: str, memory: int) -> Chip | None:
    """The chip that goes by that name, "Apple M4 Pro" or "m4pro", in a machine of that memory."""
    wanted = "".join(name.lower().replace("apple", "").split())
    found = next((c for c in CHIPS if c.name.lower().replace(" ", "") == wanted), None)
    smaller = found and _SMALLER.get((found.name, memory >> 30))
    if found and smaller:
        return replace(found, bandwidth=smaller[0] * 1e9, cores=smaller[1])
    return found


def _sysctl() -> tuple[str, int] | None:
    """What macOS calls the chip, and the bytes of memory; None elsewhere."""
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string", "hw.memsize"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        name, memory = asked.stdout.splitlines()
        return name.strip(), int(memory)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
