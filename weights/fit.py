"""Whether a pair fits the device and the disk, decided from configs and headers alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_mtp.config import TextConfig
from mlx_mtp.engine.kv import KVLayout
from mlx_mtp.errors import FitError

FLOAT32_LIMIT = 2 << 30  # a float32 copy up to this size is worth it on the CPU
POSITIONS = 8192  # of KV that a loaded pair should have room for
DISK_RESERVE = 2 << 30
# Bits a weight takes at 4 and 8 bits in groups of 64, with each group's scale and bias.
_BITS_Q4, _BITS_Q8 = 4 + 32 / 64, 8 + 32 / 64


@dataclass(frozen=True)
class Size:
    """A published model: parameters of its text part, of these the per-layer embeddings (kept at
    8 bits by every sane conversion), those of its drafter, and the KV of POSITIONS in bf16."""

    parameters: float
    per_layer: float
    drafter: float
    kv: int

    @property
    def bytes_q4(self) -> float:
        """About what a 4-bit conversion, its drafter in bf16 and the KV take."""
        packed = (self.parameters - self.per_layer) * _BITS_Q4 + self.per_layer * _BITS_Q8
        return packed / 8 + self.drafter * 2 + self.kv


SIZES = {
    "e2b": Size(4.63e9, 2.35e9, 77.7e6, 57_016_320),
    "e4b": Size(7.46e9, 2.82e9, 78.5e6, 156_499_968),
    "12b": Size(11.9e9, 0.0, 423e6, 480_247_808),
    "26b": Size(25.2e9, 0.0, 420e6, 384_040_960),
    "31b": Size(30.7e9, 0.0, 470e6, 1_536_163_840),
}


def kv_bytes(
    text: TextConfig, dtype: mx.Dtype = mx.bfloat16, kv_heads: tuple[int, ...] | None = None
) -> int:
    """Bytes of KV for one row of POSITIONS; kv_heads as in `KVLayout`."""
    return KVLayout(text, dtype, kv_heads=kv_heads).nbytes(1, POSITIONS)


def device_bytes() -> int:
    """What weights and KV may take: the recommended working set on Metal, else physical memory,
    or the accelerator's where MLX tells it."""
    if mx.default_device().type == mx.DeviceType.gpu:
        info = mx.device_info()
        for key in ("max_recommended_working_set_size", "total_memory"):
            if info.get(key):
                return int(info[key])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check(
    weights: Sequence[int],
    text: TextConfig,
    float32: bool = False,
    *,
    available: int | None = None,
    others: int = 0,
    quantized: bool = True,
    kv_heads: tuple[int, ...] | None = None,
) -> None:
    """Raises FitError, one line, when weights (target, drafter) and 8k positions of KV exceed
    the device, of which other processes keep `others` bytes. `quantized`: whether the target is
    already packed."""
    available = max((device_bytes() if available is None else available) - others, 0)
    kv = kv_bytes(text, mx.float32 if float32 else mx.bfloat16, kv_heads)
    needed = sum(weights) + kv
    if needed <= available:
        return
    raise FitError(
        f"this needs {gb(needed)} (weights {gb(sum(weights))}, KV for {POSITIONS} positions "
        f"{gb(kv)}), but the device has {gb(available)}"
        f"{f' beside {gb(others)} of other mlx-mtp processes' if others else ''}; "
        f"{_what_fits(weights, kv, text, available, quantized)}; --force-fit loads it anyway"
    )


def _what_fits(
    weights: Sequence[int], kv: int, text: TextConfig, available: int, quantized: bool
) -> str:
    smaller = min(available, sum(weights) + kv)
    fitting = [name for name, size in SIZES.items() if size.bytes_q4 <= smaller]
    told = [f"`--model {fitting[-1]}`"] if fitting else []
    # The table of per-layer embeddings stays at 8 bits; what is not packed is taken for bf16.
    width = text.num_hidden_layers * text.hidden_size_per_layer_input
    per_layer = text.vocab_size_per_layer_input * width
    packed = ((weights[0] / 2 - per_layer) * _BITS_Q4 + per_layer * _BITS_Q8) / 8
    if not quantized and packed + sum(weights[1:]) + kv <= available:
        told.append("this model after `mlx-mtp convert -q 4`")
    return f"{' or '.join(told) or 'no published Gemma 4'} would fit"


def check_disk(download: int, folder: Path, *, free: int | None = None) -> None:
    """Raises FitError when a download would leave the disk of `folder` with under 2 GB."""
    if not download:
        return
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free if free is None else free
    if free - download < DISK_RESERVE:
        raise FitError(
            f"the download needs {gb(download)} and would leave {gb(max(free - download, 0))} of "
            f"{gb(free)} free on the disk of {folder}; free some space or set HF_HOME to another "
            "disk; --force-fit downloads anyway"
        )


def gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
