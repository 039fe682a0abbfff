"""What a pass over the target promises beyond being Gemma 4 (for that see tests/oracle)."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_mtp.engine.kv import KVLayout

from ..engine.pairs import VOCAB, make_target

IDS = mx.array([[(7 * i) % VOCAB for i in range(21)]])


def run(target, tokens, keep=None):
    layout = KVLayout(target.config.text, mx.float32)
    view = layout.view(layout.allocate(1, 256), mx.array([0]), tokens, 0)
    return target(IDS[:, :tokens], view, keep), view.buffers


@pytest.mark.parametrize("tokens", [1, 5, 21])
@pytest.mark.parametrize("shared", [0, 2])
def test_keeping_the_last_position_gives_its_hidden_state(tokens, shared):
    """Layers that own no KV run for one position, with a block's view and with a prompt's."""
    target = make_target(num_kv_shared_layers=shared)
    every, kv = run(target, tokens)
    last, same_kv = run(target, tokens, keep=1)
    assert last.shape == (1, 1, 32)
    assert mx.allclose(last[0, 0], every[0, -1], atol=1e-5)
    for (k, v), (k2, v2) in zip(kv, same_kv, strict=True):
        assert mx.array_equal(k, k2)
        assert mx.array_equal(v, v2)


@pytest.mark.parametrize("shared", [0, 2])
def test_keeping_nothing_still_writes_kv(shared):
    target = make_target(num_kv_shared_layers=shared)
    nothing, kv = run(target, 21, keep=0)
    assert nothing.shape == (1, 0, 32)
    assert all(
        mx.allclose(a, b, atol=1e-5)
        for pair, full in zip(kv, run(target, 21)[1], strict=True)
        for a, b in zip(pair, full, strict=True)
    )


def test_layer_scalar_and_softcap_are_in_force():
    target = make_target()
    hidden, _ = run(target, 5)
    logits = target.logits(100 * hidden)
    assert mx.abs(logits).max() <= 30
    before = target.logits(hidden)
    target.layers[2].layer_scalar = target.layers[2].layer_scalar * 0.5
    assert not mx.allclose(target.logits(run(target, 5)[0]), before, atol=1e-3)


def test_activations_and_kv_are_in_the_norms_dtype():
    """Packed weights say nothing about it."""
    target = make_target()
    target.set_dtype(mx.bfloat16)
    assert target.dtype == mx.bfloat16
