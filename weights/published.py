"""The shapes of the five published pairs, so that they can be planned for without a download."""

from __future__ import annotations

from typing import Any, NamedTuple

from mlx_mtp.config import FULL, SLIDING, DrafterConfig, TargetConfig


class _Shape(NamedTuple):
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    more: dict[str, Any]
    full_kv_heads: int | None = None


_SHARED = {"num_kv_shared_layers": 20, "use_double_wide_mlp": True}
_EXPERTS = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
_SHAPES = {
    "e2b": _Shape(1536, 6144, 35, 8, 1, {**_SHARED, "layer_types": ([SLIDING] * 4 + [FULL]) * 7}),
    "e4b": _Shape(2560, 10240, 42, 8, 2, {"num_kv_shared_layers": 18}),
    "12b": _Shape(3840, 15360, 48, 16, 8, {}, 1),
    "26b": _Shape(2816, 2112, 30, 16, 8, {"enable_moe_block": True, **_EXPERTS}, 2),
    "31b": _Shape(5376, 21504, 60, 32, 16, {}, 4),
}


def configs(name: str) -> tuple[TargetConfig, DrafterConfig]:
    """Of a short name."""
    shape = _SHAPES[name]
    small = shape.full_kv_heads is None
    common: dict[str, Any] = {
        "vocab_size": 262144,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512 if small else 1024,
        "max_position_embeddings": 131072 if small else 262144,
        "attention_k_eq_v": not small,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_global_key_value_heads": shape.full_kv_heads,
    }
    text = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "hidden_size_per_layer_input": 256 if small else 0,
        "final_logit_softcapping": 30.0,
    }
    assistant = {
        "hidden_size": 256 if small else 1024,
        "intermediate_size": 2048 if small else 8192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4 if small else shape.heads,
    }
    drafter = {
        "model_type": "gemma4_unified_assistant" if name == "12b" else "gemma4_assistant",
        "backbone_hidden_size": shape.hidden,
        "use_ordered_embeddings": small,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "text_config": common | assistant,
    }
    kind = "gemma4_unified" if name == "12b" else "gemma4"
    return (
        TargetConfig.from_dict({"model_type": kind, "text_config": common | text | shape.more}),
        DrafterConfig.from_dict(drafter),
    )
