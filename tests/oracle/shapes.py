"""The five published Gemma 4 shapes and their drafters, in miniature, as config.json contents.

Kept from the real configs: the layer pattern, which layers own KV and which share it, double-wide
MLPs, per-layer embeddings, k_eq_v, the unified model type, the experts beside a dense MLP, full
heads twice as wide as sliding ones, a quarter of them rotated, both thetas, the softcap, the kinds
of drafter head. Made small: hidden size 32 (drafters 16), head dims 8 and 16, window 8, 128 tokens,
two or three periods of layers, 8 experts (2 active), 16 centroids (4 active); the three large
shapes have half the real head counts.
"""

from __future__ import annotations

from typing import Any

VOCAB = 128
WINDOW = 8
HIDDEN = 32

Config = dict[str, Any]

_ROPE = {
    "full_attention": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
        "rope_type": "proportional",
    },
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}


def _text(model_type: str, period: int, periods: int, heads: int, **own: Any) -> Config:
    """A `text_config` whose every `period`-th layer attends to everything."""
    pattern = ["sliding_attention"] * (period - 1) + ["full_attention"]
    return {
        "model_type": model_type,
        "attention_bias": False,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "dtype": "float32",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 16,
        "head_dim": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": HIDDEN,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 40,
        "layer_types": pattern * periods,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": None,
        "num_attention_heads": heads,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_hidden_layers": period * periods,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": _ROPE,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": False,
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        **own,
    }


def _target(text: Config, model_type: str = "gemma4") -> Config:
    return {
        "model_type": model_type,
        "audio_config": None,
        "dtype": "float32",
        "eos_token_id": [1, 106],
        "text_config": text,
        "tie_word_embeddings": True,
        "vision_config": None,
    }


def _drafter(target: Config, heads: int, *, ordered: bool) -> Config:
    """Four layers that own no KV: three sliding, one full."""
    text = target["text_config"]
    shared = ("attention_k_eq_v", "num_key_value_heads", "num_global_key_value_heads")
    return {
        "model_type": target["model_type"] + "_assistant",
        "backbone_hidden_size": text["hidden_size"],
        "centroid_intermediate_top_k": 4,
        "dtype": "float32",
        "num_centroids": 16,
        "text_config": _text(
            text["model_type"],
            period=4,
            periods=1,
            heads=heads,
            final_logit_softcapping=None,
            hidden_size=16,
            intermediate_size=32,
            num_kv_shared_layers=4,
            vocab_size_per_layer_input=0,
            **{key: text[key] for key in shared},
        ),
        "tie_word_embeddings": True,
        "use_ordered_embeddings": ordered,
    }


TARGETS: dict[str, Config] = {
    "e2b": _target(
        _text(
            "gemma4_text",
            period=5,
            periods=3,
            heads=8,
            num_key_value_heads=1,
            num_kv_shared_layers=5,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=8,
        )
    ),
    "e4b": _target(
        _text(
            "gemma4_text",
            period=6,
            periods=2,
            heads=8,
            num_key_value_heads=2,
            num_kv_shared_layers=6,
            hidden_size_per_layer_input=8,
        )
    ),
    "12b": _target(
        _text(
            "gemma4_unified_text",
            period=6,
            periods=2,
            heads=8,
            num_key_value_heads=4,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            use_bidirectional_attention="vision",
        ),
        model_type="gemma4_unified",
    ),
    "26b": _target(
        _text(
            "gemma4_text",
            period=6,
            periods=2,
            heads=8,
            num_key_value_heads=4,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            use_bidirectional_attention="vision",
            enable_moe_block=True,
            intermediate_size=24,
            moe_intermediate_size=8,
            num_experts=8,
            top_k_experts=2,
        )
    ),
    "31b": _target(
        _text(
            "gemma4_text",
            period=6,
            periods=2,
            heads=16,
            num_key_value_heads=8,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            use_bidirectional_attention="vision",
        )
    ),
}

# The E models' drafters have half the target's heads and the centroid head.
DRAFTERS: dict[str, Config] = {
    "e2b": _drafter(TARGETS["e2b"], heads=4, ordered=True),
    "e4b": _drafter(TARGETS["e4b"], heads=4, ordered=True),
    "12b": _drafter(TARGETS["12b"], heads=8, ordered=False),
    "26b": _drafter(TARGETS["26b"], heads=8, ordered=False),
    "31b": _drafter(TARGETS["31b"], heads=16, ordered=False),
}


def flat(target: Config) -> Config:
    """The same target as a text-only checkpoint: its `text_config` is the whole config."""
    return {**target["text_config"], "eos_token_id": target["eos_token_id"]}
