"""Weights that stay bf16 or packed on the CPU: every operation of every part has to run there."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mtp.engine.kv import KVLayout
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.sampling import Sampling
from mlx_mtp.engine.session import Engine
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.layers import ExpertLinear

from .pairs import PROMPT, drafter_config, forward, make_drafter, make_target, randomise, run

MOE = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
LONG = [(5 * i + 1) % 96 for i in range(70)]  # enough for experts to be sorted


def halve(model: nn.Module) -> nn.Module:
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("changes", [{}, MOE, {"attention_k_eq_v": True}], ids=["e", "moe", "kv"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=8, seed=4)], ids=str)
def test_bf16_weights_generate(changes, ordered, sampling):
    """Whatever MLX's CPU backend lacks for bf16 would raise here (gather_mm did)."""
    target, drafter = halve(make_target(**changes)), halve(make_drafter(ordered=ordered))
    engine = Engine(target, drafter)
    assert engine.layout.dtype == mx.bfloat16
    request = Request(LONG, 12, sampling)
    (tokens,) = run(engine, request)
    assert len(tokens) == 12
    assert request.stats.drafted > 0


@pytest.mark.parametrize("changes", [{}, MOE], ids=["e", "moe"])
def test_bf16_logits_are_near_float32s(changes):
    exact = forward(make_target(**changes), LONG)
    half = make_target(**changes)
    half.set_dtype(mx.bfloat16)
    layout = KVLayout(half.config.text, mx.bfloat16)
    view = layout.view(layout.allocate(1, 256), mx.array([0]), len(LONG), 0)
    rounded = half.logits(half(mx.array([LONG]), view))[0].astype(mx.float32)
    scale = mx.abs(exact).max()
    assert mx.abs(rounded - exact).mean() / scale < 0.03


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("ordered", [True, False])
def test_packed_weights_generate(dtype, ordered):
    """Quantised linear maps, embeddings, experts and both heads of the drafter, in 8 bits."""
    wide = {"hidden_size": 64, "hidden_size_per_layer_input": 32, "intermediate_size": 64}
    target = make_target(**wide, head_dim=32, global_head_dim=32, **MOE)
    raw = drafter_config(ordered, hidden_size=32, head_dim=32, global_head_dim=32)
    config = type(raw)(**{**raw.__dict__, "backbone_hidden_size": 64})
    drafter = randomise(Drafter(config), 2)
    for model in (target, drafter):
        model.set_dtype(dtype)
        nn.quantize(model, group_size=32, bits=8)
        mx.eval(model.parameters())
    request = Request(PROMPT, 12)
    (tokens,) = run(Engine(target, drafter), request)
    assert len(tokens) == 12
    assert request.stats.drafted > 0


def test_chosen_maps_are_copied_a_few_at_a_time():
    """The CPU's way for bf16 gives what float32 gives, over several blocks."""
    exact, half = ExpertLinear(5, 32, 16), ExpertLinear(5, 32, 16)
    exact.weight = mx.random.normal((5, 16, 32), key=mx.random.key(1))
    half.weight = exact.weight.astype(mx.bfloat16)
    x = mx.random.normal((150, 1, 1, 32), key=mx.random.key(2))
    chosen = mx.sort(mx.random.randint(0, 5, (150, 1), key=mx.random.key(3)), axis=0)
    wanted = exact(x, chosen, in_order=True)
    got = half(x.astype(mx.bfloat16), chosen, in_order=True)
    assert got.shape == wanted.shape == (150, 1, 1, 16)
    assert mx.abs(got.astype(mx.float32) - wanted).max() < 0.02 * mx.abs(wanted).max()
