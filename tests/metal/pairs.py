"""A quantised pair in miniature that every kernel takes, and a way to have all of them used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.engine.calibrate import attention_site, sites
from mlx_mtp.engine.kv import KVLayout
from mlx_mtp.engine.session import Engine
from mlx_mtp.kernels import attention, experts, fused, head, matmul
from mlx_mtp.kernels.launch import Launch
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.rows import wrap
from mlx_mtp.models.target import Target
from tests.engine.pairs import drafter_config, randomise, target_config
from tests.metal.emulator import emulate

VOCAB = 320  # five blocks of the head, and clusters of as many tokens
TARGET = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "global_head_dim": 512,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
}
MIXTURE = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
}
ALL_ROWS = range(1, 17)


def quantised(model: Any, seed: int, bits: int = 4) -> Any:
    """`model` with random weights, packed as conversions pack them."""
    randomise(model, seed)
    packable = (nn.Linear, nn.Embedding)

    def packs(_: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and (
            not isinstance(module, packable) or module.weight.shape[-1] % 64 == 0
        )

    nn.quantize(model, 64, bits, class_predicate=packs)
    return model


def make_pair(ordered: bool = False, **changes: Any) -> tuple[Target, Drafter]:
    target = quantised(Target(target_config(**(TARGET | changes))), 1)
    config = drafter_config(
        ordered,
        backbone=TARGET["hidden_size"],
        centroids=5,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_key_value_heads=1,
        head_dim=64,
        global_head_dim=512,
    )
    return target, quantised(Drafter(config), 2, 8)


def use_everything(target: Target, drafter: Drafter | None, bits: int | None = None) -> Engine:
    """An engine whose every site takes its last way at every number of rows."""

    def all_of(ways: tuple[str, ...]) -> Mapping[int, str]:
        return dict.fromkeys(ALL_ROWS, ways[-1]) if ways else {}

    models = [target] if drafter is None else [target, drafter]
    for model in models:
        wrap(model)
        for site in sites(model):
            site.take(all_of(site.ways))
    site = attention_site(KVLayout(target.config.text, target.dtype, bits))
    return Engine(target, drafter, kv_bits=bits, full_ways=all_of(site.ways))


def through_the_emulator(patch: Any) -> list[str]:
    """Every launch from now on is emulated at once; the names of the kernels that ran."""
    ran: list[str] = []
    on_metal = Launch.run

    def run(launch: Launch) -> list[mx.array]:
        ran.append(launch.kernel.name)
        with patch.context() as tracing:
            tracing.setattr(Launch, "run", on_metal)
            return emulate(launch).outputs

    patch.setattr(Launch, "run", run)
    for module in (attention, experts, fused, head, matmul):
        patch.setattr(module, "on_metal", lambda: True)
    return ran
