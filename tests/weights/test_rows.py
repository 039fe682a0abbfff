"""Rows of a tensor from its place in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mtp.errors import LoadError
from mlx_mtp.weights.checkpoint import Folder
from mlx_mtp.weights.rows import DTYPES, read_rows

FILE = "model.safetensors"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (7, 3), (2, 3, 8)])
def test_rows_are_those_that_mlx_reads(
    tmp_path: Path, shape: tuple[int, ...], dtype: mx.Dtype
) -> None:
    array = (mx.random.normal(shape) * 50).astype(dtype)
    before = mx.ones((3,), mx.uint8)  # so that data begin at an odd place
    mx.save_safetensors(str(tmp_path / FILE), {"a": before, "b": array})
    tensor = Folder(tmp_path).header(FILE)["b"]
    rows = array.reshape(-1, shape[-1] if shape else 1)
    for begin, end in ((0, len(rows)), (len(rows) - 1, len(rows)), (len(rows) // 3, len(rows))):
        got = read_rows(tmp_path / FILE, tensor, begin, end)
        assert (got.dtype, got.shape) == (dtype, rows[begin:end].shape)
        assert mx.array_equal(got, rows[begin:end])
    assert read_rows(tmp_path / FILE, tensor, 0, 0).shape == (0, rows.shape[1])


def test_only_those_rows_are_read(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / FILE), {"a": mx.zeros((1 << 20, 4))})
    tensor = Folder(tmp_path).header(FILE)["a"]
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(read_rows(tmp_path / FILE, tensor, 1000, 2000))
    assert mx.get_peak_memory() - before < 100_000


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / FILE
    mx.save_safetensors(str(path), {"a": mx.zeros((64, 64))})
    tensor = Folder(tmp_path).header(FILE)["a"]
    with pytest.raises(LoadError, match="a is stored as F8_E4M3, which cannot be read"):
        read_rows(path, replace(tensor, dtype="F8_E4M3"), 0, 1)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(LoadError, match="is cut off"):
        read_rows(path, tensor, 0, 64)
    assert read_rows(path, tensor, 0, 32).shape == (32, 64)
    with pytest.raises(LoadError, match=r"gone\.safetensors cannot be read: No such file"):
        read_rows(tmp_path / "gone.safetensors", tensor, 0, 1)
