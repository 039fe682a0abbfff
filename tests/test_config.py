"""Values of config.json that nobody should have to debug: one line naming the key."""

from __future__ import annotations

import pytest

from mlx_mtp.config import DrafterConfig, TargetConfig
from mlx_mtp.errors import LoadError

from .engine.pairs import target_config

GOOD = {
    "model_type": "gemma4_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("rms_norm_eps", [None, "x", 0, -1, [1], {}, True]),
        ("final_logit_softcapping", [0, -1, True, "x", [1], {}]),
        ("layer_types", [3, True, "sliding_attention", [1, 2], ["full_attention"]]),
        ("num_kv_shared_layers", ["x", [1], 1.5, -1, 2]),
        ("rope_parameters", ["x", 3, True, [1], {"full_attention": 5}]),
        ("hidden_size", [0, -1, "x", None, 1.5, True, 10**12]),
        ("vocab_size", [10**12, []]),
        ("head_dim", [10**12]),
        ("sliding_window", [0, None, 10**12]),
        ("eos_token_id", ["x", [1, "x"], -1, True]),
    ],
)
def test_a_value_that_makes_no_sense_is_named(key, values):
    TargetConfig.from_dict(GOOD)
    for value in values:
        with pytest.raises(LoadError, match=rf"config\.json: .*{key}"):
            TargetConfig.from_dict(GOOD | {key: value})


@pytest.mark.parametrize(
    "full",
    [
        {"rope_type": "yarn", "rope_theta": 1e6},
        {"rope_type": "proportional", "rope_theta": "x"},
        {"rope_type": "proportional", "rope_theta": 0},
        {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 2.0},
        {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": -1},
    ],
)
def test_rope_that_makes_no_sense_is_named(full):
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    rope = {"sliding_attention": sliding, "full_attention": full}
    with pytest.raises(LoadError, match=r"rope_parameters|rope_theta|partial_rotary_factor"):
        TargetConfig.from_dict(GOOD | {"rope_parameters": rope})


@pytest.mark.parametrize("text", ["x", 3, [], None])
def test_a_text_config_that_is_no_object_is_refused(text):
    nested = {"model_type": "gemma4", "text_config": text}
    with pytest.raises(LoadError, match="text_config is"):
        TargetConfig.from_dict(nested)
    with pytest.raises(LoadError, match="text_config is"):
        DrafterConfig.from_dict(nested | {"model_type": "gemma4_assistant"})


def test_both_spellings_of_the_full_layers_shape_are_one():
    short = target_config()
    per_layer = {"1": {"head_dim": 16}, "03": {"head_dim": 16, "num_key_value_heads": 2}}
    assert target_config(per_layer_config=per_layer, global_head_dim=None).text == short.text
    with pytest.raises(LoadError, match="per_layer_config names layer '0'"):
        target_config(per_layer_config={"0": {"head_dim": 16}})
