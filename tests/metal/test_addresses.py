"""Address spaces of every kernel, by clang: Metal has no pointer without one."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_mtp.kernels import attention, experts, head, matmul
from mlx_mtp.kernels.attention import LongKV
from mlx_mtp.kernels.head import Adjustments
from tests.metal import addresses
from tests.metal.shapes import FORMATS, numbers, packed
from tests.metal.test_attention import block, long_kv
from tests.metal.test_experts import routed, stack

pytestmark = pytest.mark.skipif(addresses.missing() is not None, reason=str(addresses.missing()))
DTYPES = pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("scheme", FORMATS, ids=lambda s: f"{s[0]}{s[1]}")
def test_products(scheme, dtype):
    weights = packed(16, 128, scheme, dtype)
    x = numbers(5, 128, dtype=dtype)
    assert addresses.check(matmul.tile(x, weights)) == []
    assert addresses.check(matmul.matrix(x, weights)) == []
    order = experts.in_order(routed(5))
    assert addresses.check(experts.launch(x, stack(128, scheme, dtype), *order)) == []


@DTYPES
@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("rows", [1, 9])
def test_attention(dtype, bits, rows):
    kv: LongKV = long_kv(rows, 1, 64, dtype, bits)
    queries = block(rows, 4, 2, dtype)
    chunks = attention.launch_chunks(queries, kv, mx.array([20] * rows))
    assert addresses.check(chunks) == []
    parts, stats = (mx.zeros(shape) for shape in chunks.shapes)
    assert addresses.check(attention.launch_join(parts, stats, queries.shape, dtype)) == []


@DTYPES
@pytest.mark.parametrize("best", [True, False])
def test_heads(dtype, best):
    weights, x = packed(128, 64, FORMATS[0], dtype), numbers(9, 64, dtype=dtype)
    few = Adjustments(mx.zeros((9, 128)), mx.zeros((9, 128)), mx.zeros((9,), mx.int32))
    chosen, names = mx.zeros((9, 1), mx.int32), mx.zeros((128,), mx.int32)
    for given in ({}, {"cap": 30.0}, {"adjust": few}, {"chosen": chosen, "names": names}):
        if best or "chosen" in given:
            launch = head.score(x, weights, sequences=9, best=best, **given)
            assert addresses.check(launch) == []
