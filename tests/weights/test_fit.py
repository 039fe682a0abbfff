"""What fits: bytes from configs, one line when they are too many, and the wired limit."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mtp.config import TargetConfig
from mlx_mtp.errors import FitError
from mlx_mtp.weights import fit
from tests.checkpoints import target_config

GB = 10**9


def text(**changes: object):  # type: ignore[no-untyped-def]
    return TargetConfig.from_dict(target_config("e2b", **changes)).text


def test_kv_of_8k_positions_counts_owners_rings_and_full_layers() -> None:
    # e2b in miniature: layers 0-2 own KV (sliding, sliding, full), one kv head, window 8.
    ring = 32  # 8 + 2 * (8 + 1), rounded up to 16
    sliding, full = 2 * 32 * 2, 2 * 64 * 2  # K and V of one position, two bytes a value
    assert fit.kv_bytes(text()) == 2 * ring * sliding + 8192 * full
    assert fit.kv_bytes(text(), mx.float32) == 2 * fit.kv_bytes(text())


@pytest.mark.parametrize("size", ["E2B", "E4B", "12B", "26B-A4B", "31B"])
def test_kv_of_the_published_sizes(size: str) -> None:
    file = Path(__file__).parents[3] / f"shared/configs/gemma-4-{size}-it.json"
    if not file.exists():
        pytest.skip("the published configs are not at hand")
    published = TargetConfig.from_dict(json.loads(file.read_text())).text
    assert fit.kv_bytes(published) == fit.SIZES[size.lower().partition("-")[0]].kv


def test_what_fits_is_silent_and_what_does_not_says_three_numbers() -> None:
    fit.check([GB, GB], text(), available=3 * GB)
    with pytest.raises(FitError) as error:
        fit.check([16 * GB, GB], text(), available=8 * GB, quantized=False)
    line = str(error.value)
    assert "\n" not in line
    for part in (
        "needs 17.0 GB",
        "has 8.0 GB",
        "`--model e4b` or this model after `mlx-mtp convert -q 4` would fit",
    ):
        assert part in line
    assert "--force-fit" in line


def test_an_already_packed_model_is_not_told_to_convert() -> None:
    with pytest.raises(FitError) as error:
        fit.check([20 * GB], text(), available=8 * GB, quantized=True)
    assert "convert" not in str(error.value)
    assert "--model e4b" in str(error.value)


def test_nothing_fits() -> None:
    with pytest.raises(FitError, match="no published Gemma 4 would fit"):
        fit.check([20 * GB], text(), available=GB)


def test_the_disk_keeps_two_gigabytes(tmp_path: Path) -> None:
    fit.check_disk(10 * GB, tmp_path / "not" / "made" / "yet", free=13 * GB)
    fit.check_disk(0, tmp_path, free=0)
    with pytest.raises(FitError) as error:
        fit.check_disk(10 * GB, tmp_path, free=11 * GB)
    assert "needs 10.0 GB" in str(error.value)
    assert "leave 1.0 GB" in str(error.value)


def test_device_bytes_is_the_memory_of_this_machine() -> None:
    assert fit.device_bytes() > GB
