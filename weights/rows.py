"""Some rows of a tensor, straight from its place in the file: the rest is never read."""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx

from mlx_mtp.errors import LoadError
from mlx_mtp.weights.checkpoint import Tensor

DTYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "I64": mx.int64,
    "I32": mx.int32,
    "I16": mx.int16,
    "I8": mx.int8,
    "U32": mx.uint32,
    "U16": mx.uint16,
    "U8": mx.uint8,
    "BOOL": mx.bool_,
}


def read_rows(path: Path, tensor: Tensor, begin: int, end: int) -> mx.array:
    """Rows `begin` to `end` of a tensor whose leading dimensions are taken as one: [end - begin,
    last dimension]; a tensor of one dimension is one row.

    path: the safetensors file. tensor: as that file's own header has it, for a header that came
    over the network does not say where data begin. Raises LoadError.
    """
    width = tensor.shape[-1] if tensor.shape else 1
    count = math.prod(tensor.shape[:-1])
    assert 0 <= begin <= end <= count, f"{tensor.name}: rows {begin} to {end} of {count}"
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise LoadError(f"{path}: {tensor.name} is stored as {tensor.dtype}, which cannot be read")
    if begin == end or not width:
        return mx.zeros((end - begin, width), dtype)
    size = width * dtype.size
    raw = bytearray((end - begin) * size)
    try:
        with path.open("rb") as file:
            file.seek(tensor.start + begin * size)
            whole = file.readinto(raw) == len(raw)
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from None
    if not whole:
        raise LoadError(f"{path} is cut off: {tensor.name} ends after the file does")
    one_by_one = mx.array(memoryview(raw))  # type: ignore[arg-type]  # any buffer will do
    return one_by_one.view(dtype).reshape(end - begin, width)
