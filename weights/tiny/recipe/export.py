"""Write target.pt and drafter.pt as Hugging Face checkpoints in bf16.

python export.py OUT ../          fills ../target and ../drafter
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from gemma import BACKBONE, CENTROIDS, DRAFTER, SOFTCAP, STOPS, TARGET, TOP_CENTROIDS, Shape
from safetensors.torch import save_file


def text_config(shape: Shape, target: bool) -> dict[str, object]:
    """The `gemma4_text` part of a config.json."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": [1, 106] if target else 1,
        "final_logit_softcapping": SOFTCAP if target else None,
        "global_head_dim": shape.global_head_dim,
        "head_dim": shape.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": shape.hidden,
        "hidden_size_per_layer_input": shape.per_layer,
        "initializer_range": 0.02,
        "intermediate_size": shape.wide[0],
        "layer_types": [f"{kind}_attention" for kind in shape.kinds],
        "max_position_embeddings": shape.positions,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_attention_heads": shape.heads,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_hidden_layers": len(shape.kinds),
        "num_key_value_heads": 1,
        "num_kv_shared_layers": len(shape.kinds) - shape.owners,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "sliding_window": shape.window,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": target,
        "vocab_size": shape.vocab,
        "vocab_size_per_layer_input": shape.vocab if target else 0,
    }


def write(folder: Path, config: dict[str, object], state: Path, stops: list[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: t.bfloat16().contiguous() if t.is_floating_point() else t
        for name, t in torch.load(state).items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    generation = {"bos_token_id": 2, "do_sample": False, "eos_token_id": stops, "pad_token_id": 0}
    for name, content in (("config", config), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trained", type=Path)
    parser.add_argument("to", type=Path)
    options = parser.parse_args()
    trained = options.trained
    target = {"architectures": ["Gemma4ForCausalLM"], **text_config(TARGET, True)}
    write(options.to / "target", target, trained / "target.pt", list(STOPS))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(trained / name, options.to / "target" / name)
    drafter = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": BACKBONE,
        "centroid_intermediate_top_k": TOP_CENTROIDS,
        "dtype": "bfloat16",
        "model_type": "gemma4_assistant",
        "num_centroids": CENTROIDS,
        "text_config": text_config(DRAFTER, False),
        "tie_word_embeddings": True,
        "use_ordered_embeddings": True,
    }
    write(options.to / "drafter", drafter, trained / "drafter.pt", list(STOPS))


if __name__ == "__main__":
    main()
