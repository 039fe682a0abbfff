"""The building blocks against plain statements of what they compute."""

from __future__ import annotations

import math
import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mtp.config import Rope
from mlx_mtp.models import layers
from mlx_mtp.models.layers import (
    ColumnLinear,
    ExpertLinear,
    Experts,
    Router,
    Stacked,
    lay_out_for_cpu,
)

from ..engine.pairs import make_target, randomise, target_config
from .test_target import run


def close(a: mx.array, b: mx.array, tolerance: float = 1e-5) -> bool:
    return bool(mx.allclose(a, b, rtol=tolerance, atol=tolerance))


def test_gelu_is_gelu_pytorch_tanh():
    x = mx.linspace(-6, 6, 1001)
    wanted = 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert close(layers.gelu(x), wanted, 2e-6)
    assert close(layers.scaled_gelu(layers.GATE * x) / layers.GATE, wanted, 2e-6)


def test_softcap_bounds_and_absence():
    x = mx.array([-1e4, -1.0, 0.0, 1e4])
    assert close(layers.softcap(x, 30.0), 30 * mx.tanh(x / 30))
    assert layers.softcap(x, None) is x


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_rope_turns_the_pairs_it_should(fraction):
    """GEMMA: pairs (i, i + D/2); frequencies theta^(-2i/D) with the head dim as denominator, the
    rest of a proportional rope standing still."""
    head_dim, theta = 16, 1e4
    x = mx.random.normal((2, 3, 1, head_dim), key=mx.random.key(1))
    rotate = layers.rotation(Rope(theta, fraction), head_dim, mx.array([5, 900]), 3)
    got = np.array(rotate(x.swapaxes(1, 2)).swapaxes(1, 2))
    given = np.array(x, dtype=np.float64)
    wanted = given.copy()
    for row, start in enumerate((5, 900)):
        for t in range(3):
            for i in range(int(head_dim // 2 * fraction)):
                angle = (start + t) * theta ** (-2 * i / head_dim)
                a, b = given[row, t, 0, i], given[row, t, 0, i + head_dim // 2]
                wanted[row, t, 0, i] = a * math.cos(angle) - b * math.sin(angle)
                wanted[row, t, 0, i + head_dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    assert np.abs(got - wanted).max() < 1e-4


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_the_gpus_fused_rope_is_the_same(fraction, monkeypatch):
    """MLX runs the fused operation on the CPU too, by its fallback."""
    x = mx.random.normal((2, 3, 4, 32), key=mx.random.key(2))
    ways = []
    for cpu in (True, False):
        monkeypatch.setattr(layers, "on_cpu", lambda cpu=cpu: cpu)
        ways.append(layers.rotation(Rope(1e6, fraction), 32, mx.array([0, 4000]), 4)(x))
    assert close(*ways, 1e-3)


@pytest.fixture(scope="module")
def moe():
    config = target_config(
        enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=24
    ).text
    return randomise(Experts(config, config.moe_intermediate_size), 3), randomise(Router(config), 4)


def test_experts_add_up_by_weight(moe):
    experts, router = moe
    x = mx.random.normal((3, 32), key=mx.random.key(5))
    chosen, weights = router(x)
    got = experts(x, chosen, weights)
    for t in range(3):
        wanted = mx.zeros((32,))
        for expert, weight in zip(chosen[t].tolist(), weights[t], strict=True):
            inner = layers.gelu(x[t] @ experts.gate_proj.weight[expert].T)
            inner = inner * (x[t] @ experts.up_proj.weight[expert].T)
            wanted = wanted + weight * (inner @ experts.down_proj.weight[expert].T)
        assert close(got[t], wanted, 1e-4)


def test_many_rows_go_by_expert_and_come_back_in_order(moe, monkeypatch):
    experts, router = moe
    x = mx.random.normal((40, 32), key=mx.random.key(6))
    chosen, weights = router(x)
    assert chosen.size >= Experts.SORT_FROM
    by_expert = experts(x, chosen, weights)
    monkeypatch.setattr(Experts, "SORT_FROM", 1 << 30)
    assert close(by_expert, experts(x, chosen, weights), 1e-4)


def test_the_router_renormalises_the_best(moe):
    """Softmax over all experts in float32, the best two, renormalised, times each one's scale."""
    _, router = moe
    x = mx.random.normal((5, 32), key=mx.random.key(7))
    normed = x * mx.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * router.scale * 32**-0.5
    probs = np.array(mx.softmax(router.proj(normed), -1))
    chosen, weights = router(x)
    for t in range(5):
        best = np.argsort(-probs[t])[:2]
        assert set(chosen[t].tolist()) == set(best.tolist())
        for expert, weight in zip(chosen[t].tolist(), weights[t].tolist(), strict=True):
            share = probs[t, expert] / probs[t, best].sum()
            assert weight == pytest.approx(share * router.per_expert_scale[expert].item(), rel=1e-4)


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4", "mxfp8"])
def test_packed_experts_are_their_dequantised_selves(mode):
    """Case G11: only the chosen experts' packed rows are read, and they mean the same."""
    dense = ExpertLinear(6, 64, 32)
    dense.weight = mx.random.normal((6, 32, 64), key=mx.random.key(8))
    packed = dense.to_quantized(mode=mode)
    unpacked = ExpertLinear(6, 64, 32)
    unpacked.weight = mx.dequantize(
        packed.weight, packed.scales, packed.get("biases"), mode=mode, dtype=mx.float32
    )
    x = mx.random.normal((1, 2, 1, 1, 64), key=mx.random.key(9))
    chosen = mx.array([[[0, 5, 2], [3, 3, 1]]])
    assert close(packed(x, chosen), unpacked(x, chosen), 1e-3)


def test_the_cpus_layout_changes_no_result():
    stored, laid_out = make_target(), make_target()
    lay_out_for_cpu(laid_out)
    assert type(laid_out.layers[0].mlp.down_proj) is ColumnLinear
    assert type(laid_out.lm_head) is ColumnLinear
    hidden = [run(target, 9)[0] for target in (stored, laid_out)]
    assert close(*hidden, 1e-4)
    assert close(stored.logits(hidden[0]), laid_out.logits(hidden[0]), 1e-4)


@pytest.mark.parametrize("bits", [(None, None), (4, 4), (4, 8), (4, None)], ids=str)
def test_stacked_maps_give_their_outputs_side_by_side(bits):
    """One product where both are stored alike, else two."""
    maps, wanted = [], []
    x = mx.random.normal((3, 64), key=mx.random.key(11))
    for i, b in enumerate(bits):
        dense = nn.Linear(64, 32 * (i + 1), bias=False)
        maps.append(nn.QuantizedLinear.from_linear(dense, 64, b) if b else dense)
        wanted.append(maps[-1](x))
    stacked = Stacked(*maps)
    assert len(stacked.maps) == (1 if bits[0] == bits[1] else 2)
    assert close(stacked(x), mx.concatenate(wanted, -1), 1e-4)


@pytest.mark.parametrize("limits", [(1, 1 << 23), (1 << 30, 1), (1 << 30, 1 << 30)], ids=str)
def test_a_product_on_two_cores_is_the_same(limits, monkeypatch):
    """Bit for bit, for an odd number of outputs, in another thread and in a trace too."""
    monkeypatch.setattr(layers, "cores", lambda: 2)
    monkeypatch.setattr(ColumnLinear, "SIZE", limits[0])
    monkeypatch.setattr(ColumnLinear, "WORK", limits[1])
    monkeypatch.setattr(ColumnLinear, "HALVES", 1)
    weight = mx.random.normal((33, 16), key=mx.random.key(12))
    x = mx.random.normal((2, 5, 16), key=mx.random.key(13))
    product = ColumnLinear(weight)
    wanted = x @ mx.contiguous(weight.T)
    mx.eval(product.parameters(), wanted)
    assert len(product.parts) == (2 if limits[0] == 1 else 1)
    same = []

    def work():
        same.extend(bool(mx.array_equal(f(x), wanted)) for f in (product, mx.compile(product)))

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert same == [True] * 4


def test_the_cpus_layout_leaves_packed_and_half_weights_alone():
    half = make_target()
    half.set_dtype(mx.bfloat16)
    lay_out_for_cpu(half)
    assert type(half.layers[0].mlp.down_proj) is nn.Linear
    assert "lm_head" not in half
