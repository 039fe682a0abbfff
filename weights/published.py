"""The shapes of the five published pairs, so that they can be planned for without a download."""

from __future__ import annotations

from typing import Any

from mlx_mtp.config import FULL, SLIDING, DrafterConfig, TargetConfig

_VOCABULARY = 262144
_COMMON: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "head_dim": 256,
    "global_head_dim": 512,
}
_SMALL: dict[str, Any] = {
    "sliding_window": 512,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "hidden_size_per_layer_input": 256,
}
_LARGE: dict[str, Any] = {
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "attention_k_eq_v": True,
}
# Short name -> what a target's text config says beside _COMMON.
_TARGETS: dict[str, dict[str, Any]] = {
    "e2b": {
        **_SMALL,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
    },
    "e4b": {
        **_SMALL,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
    },
    "12b": {
        **_LARGE,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
    },
    "26b": {
        **_LARGE,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "31b": {
        **_LARGE,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
}
_OF_TARGET = (
    "sliding_window",
    "max_position_embeddings",
    "attention_k_eq_v",
    "num_attention_heads",
    "num_key_value_heads",
    "num_global_key_value_heads",
)


def configs(name: str) -> tuple[TargetConfig, DrafterConfig]:
    """Of a short name."""
    target, small = _TARGETS[name], name in ("e2b", "e4b")
    drafter = _COMMON | {key: target[key] for key in _OF_TARGET if key in target}
    drafter |= {
        "hidden_size": 256 if small else 1024,
        "intermediate_size": 2048 if small else 8192,
        "num_hidden_layers": 4,
    }
    if small:
        drafter["num_attention_heads"] = 4
    kind = "gemma4_unified" if name == "12b" else "gemma4"
    text = _COMMON | {"final_logit_softcapping": 30.0} | target
    return (
        TargetConfig.from_dict({"model_type": kind, "text_config": text}),
        DrafterConfig.from_dict(
            {
                "model_type": f"{kind}_assistant",
                "backbone_hidden_size": target["hidden_size"],
                "use_ordered_embeddings": small,
                "num_centroids": 2048,
                "centroid_intermediate_top_k": 32,
                "text_config": drafter,
            }
        ),
    )
