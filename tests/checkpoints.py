"""Small random checkpoints as Hugging Face, mlx-lm and mlx-vlm write them.

    folder = write_target(tmp_path / "target", "e2b")
    drafter = write_drafter(tmp_path / "drafter", "e2b")
    packed = write_quantized(folder, tmp_path / "packed", bits=4)

Names and shapes are spelled out here from the published layout, apart from the code under test.
`layer_scalar` is away from 1, as in real weights, so that leaving it out changes results.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

S, F = "sliding_attention", "full_attention"
VOCAB = 256
PREFIXES = ("model.language_model.", "language_model.model.", "model.")

_BASE: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "layer_types": [S, S, F, S, S, F],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "sliding_window": 8,
    "max_position_embeddings": 4096,
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        S: {"rope_type": "default", "rope_theta": 10000.0},
        F: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    },
}
_K_EQ_V = {"attention_k_eq_v": True, "num_key_value_heads": 2, "num_global_key_value_heads": 1}
# The five published shapes in miniature: what differs between them, and nothing else.
SHAPES: dict[str, dict[str, Any]] = {
    "e2b": {
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 32,
        "use_double_wide_mlp": True,
    },
    "e4b": {
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 32,
        "num_key_value_heads": 2,
    },
    "12b": {**_K_EQ_V},
    "26b": {
        **_K_EQ_V,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "31b": {**_K_EQ_V, "num_key_value_heads": 4, "num_global_key_value_heads": 2},
}


def target_config(shape: str = "e2b", *, flat: bool = False, **changes: Any) -> dict[str, Any]:
    """config.json of a target; `changes` go into its text config."""
    text = {**_BASE, **SHAPES[shape], **changes}
    common = {"dtype": "bfloat16", "eos_token_id": [1, 106]}
    if flat:
        return {**text, **common}
    kind = "gemma4_unified" if shape == "12b" else "gemma4"
    # mlx-lm reads the vocabulary from the outer level and otherwise takes 262144.
    return {
        "model_type": kind,
        "vocab_size": text["vocab_size"],
        "text_config": {**text, "model_type": f"{kind}_text"},
        **common,
    }


def drafter_config(
    shape: str = "e2b", *, ordered: bool | None = None, backbone: int = 64, **changes: Any
) -> dict[str, Any]:
    """config.json of the assistant for that shape of target."""
    target = {**_BASE, **SHAPES[shape]}
    full_heads = target["num_global_key_value_heads"] or target["num_key_value_heads"]
    text = {
        **_BASE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "layer_types": [S, S, S, F],
        "num_kv_shared_layers": 4,
        "num_key_value_heads": target["num_key_value_heads"],
        "num_global_key_value_heads": full_heads,
        "attention_k_eq_v": target["attention_k_eq_v"],
        "final_logit_softcapping": None,
        **changes,
    }
    ordered = shape in ("e2b", "e4b") if ordered is None else ordered
    return {
        "model_type": "gemma4_unified_assistant" if shape == "12b" else "gemma4_assistant",
        "backbone_hidden_size": backbone,
        "use_ordered_embeddings": ordered,
        "num_centroids": 16,
        "centroid_intermediate_top_k": 4,
        "text_config": text,
        "dtype": "bfloat16",
    }


def text_tensors(
    text: dict[str, Any], *, drafter: bool = False, kv_of_shared: bool = False, seed: int = 0
) -> dict[str, mx.array]:
    """HF names without prefix -> float32 arrays, for a text config."""
    keys = iter(mx.random.split(mx.random.key(seed), 1000))
    made: dict[str, mx.array] = {}

    def matrix(name: str, *shape: int) -> None:
        made[name] = mx.random.normal(shape, key=next(keys)) * shape[-1] ** -0.5

    def norm(name: str, size: int) -> None:
        made[f"{name}.weight"] = 1 + 0.1 * mx.random.normal((size,), key=next(keys))

    width, layers = text["hidden_size"], text["num_hidden_layers"]
    heads, ple = text["num_attention_heads"], text["hidden_size_per_layer_input"]
    owners = 0 if drafter else layers - text["num_kv_shared_layers"]
    matrix("embed_tokens.weight", text["vocab_size"], width)
    norm("norm", width)
    if ple:
        matrix("embed_tokens_per_layer.weight", text["vocab_size_per_layer_input"], layers * ple)
        matrix("per_layer_model_projection.weight", layers * ple, width)
        norm("per_layer_projection_norm", ple)
    for i, kind in enumerate(text["layer_types"]):
        at = f"layers.{i}"
        dim = text["global_head_dim"] if kind == F else text["head_dim"]
        k_eq_v = text["attention_k_eq_v"] and kind == F
        kv_heads = text["num_key_value_heads"]
        if k_eq_v and text["num_global_key_value_heads"]:
            kv_heads = text["num_global_key_value_heads"]
        matrix(f"{at}.self_attn.q_proj.weight", heads * dim, width)
        matrix(f"{at}.self_attn.o_proj.weight", width, heads * dim)
        norm(f"{at}.self_attn.q_norm", dim)
        if i < owners or kv_of_shared:
            matrix(f"{at}.self_attn.k_proj.weight", kv_heads * dim, width)
            if not k_eq_v:
                matrix(f"{at}.self_attn.v_proj.weight", kv_heads * dim, width)
            norm(f"{at}.self_attn.k_norm", dim)
        wide = text["use_double_wide_mlp"] and i >= owners and not drafter
        inner = text["intermediate_size"] * (2 if wide else 1)
        matrix(f"{at}.mlp.gate_proj.weight", inner, width)
        matrix(f"{at}.mlp.up_proj.weight", inner, width)
        matrix(f"{at}.mlp.down_proj.weight", width, inner)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        if text["enable_moe_block"]:
            n, moe = text["num_experts"], text["moe_intermediate_size"]
            matrix(f"{at}.router.proj.weight", n, width)
            made[f"{at}.router.scale"] = 1 + 0.1 * mx.random.normal((width,), key=next(keys))
            made[f"{at}.router.per_expert_scale"] = 0.5 + mx.random.uniform(
                shape=(n,), key=next(keys)
            )
            matrix(f"{at}.experts.gate_up_proj", n, 2 * moe, width)
            matrix(f"{at}.experts.down_proj", n, width, moe)
            norms += ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2"]
            norms += ["pre_feedforward_layernorm_2"]
        if ple:
            matrix(f"{at}.per_layer_input_gate.weight", ple, width)
            matrix(f"{at}.per_layer_projection.weight", width, ple)
            norms.append("post_per_layer_input_norm")
        for name in norms:
            norm(f"{at}.{name}", width)
        made[f"{at}.layer_scalar"] = 0.3 + 0.6 * mx.random.uniform(shape=(1,), key=next(keys))
    return made


def write_target(
    folder: Path,
    shape: str = "e2b",
    *,
    prefix: str = PREFIXES[0],
    dtype: mx.Dtype = mx.bfloat16,
    shards: int = 1,
    kv_of_shared: bool = False,
    vision: bool = False,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    change: Callable[[dict[str, mx.array]], None] | None = None,
) -> Path:
    """A target in the Hugging Face layout; `change` edits the named tensors before they go out."""
    config = config or target_config(shape, flat=prefix == "model.")
    text = config.get("text_config", config)
    tensors = text_tensors(text, kv_of_shared=kv_of_shared, seed=seed)
    tensors = {f"{prefix}{k}": v.astype(dtype) for k, v in tensors.items()}
    if vision:
        for name in ("vision_tower.blocks.0.weight", "embed_vision.proj.weight"):
            tensors[f"model.{name}"] = mx.ones((4, 4), dtype=dtype)
    if change is not None:
        change(tensors)
    return write(folder, config, tensors, shards=shards)


def write_drafter(
    folder: Path,
    shape: str = "e2b",
    *,
    dtype: mx.Dtype = mx.bfloat16,
    seed: int = 1,
    config: dict[str, Any] | None = None,
    change: Callable[[dict[str, mx.array]], None] | None = None,
) -> Path:
    """The assistant for `write_target(shape)`."""
    config = config or drafter_config(shape)
    text, backbone = config["text_config"], config["backbone_hidden_size"]
    tensors = {
        f"model.{k}": v.astype(dtype)
        for k, v in text_tensors(text, drafter=True, seed=seed).items()
    }
    width, vocab = text["hidden_size"], text["vocab_size"]
    keys = mx.random.split(mx.random.key(seed + 1), 4)

    def matrix(key: mx.array, out: int, inner: int) -> mx.array:
        return (mx.random.normal((out, inner), key=key) * inner**-0.5).astype(dtype)

    tensors["pre_projection.weight"] = matrix(keys[0], width, 2 * backbone)
    tensors["post_projection.weight"] = matrix(keys[1], backbone, width)
    if config["use_ordered_embeddings"]:
        head = "masked_embedding"
        tensors[f"{head}.centroids.weight"] = matrix(keys[2], config["num_centroids"], width)
        order = mx.random.permutation(vocab, key=keys[3])
        tensors[f"{head}.token_ordering"] = order.astype(mx.int64)
    if change is not None:
        change(tensors)
    return write(folder, config, tensors)


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, mx.array], *, shards: int = 1
) -> Path:
    """config.json and weights, in `shards` files with an index when there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        file = file if shards > 1 else "model.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    if shards > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def add_tokenizer(folder: Path, vocab: int = VOCAB) -> Path:
    """A tokenizer.json of single characters and the control tokens that chat needs."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokens += [chr(c) for c in range(32, 127)] + ["\n"]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in tokens[:4]])
    assert tokenizer.get_vocab_size() <= vocab
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_quantized(
    source: Path,
    folder: Path,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
    predicate: Callable[[str, nn.Module], bool | dict[str, Any]] | None = None,
) -> Path:
    """`source` converted by mlx-lm's own loader, quantiser and writers."""
    from mlx_lm.utils import load_config, load_model, quantize_model, save_config, save_model

    with contextlib.redirect_stdout(io.StringIO()):
        model, _ = load_model(source, lazy=True)
        config = load_config(source)
        model, config = quantize_model(
            model, config, group_size, bits, mode=mode, quant_predicate=predicate
        )
        save_model(folder, model)
        save_config(config, folder / "config.json")
    return folder


def write_vlm_quantized(
    source: Path, folder: Path, *, bits: int = 4, group_size: int = 32, **bits_of: int
) -> Path:
    """`source` (target or drafter) as mlx-vlm's converter leaves it: its names, every matrix that
    divides packed, the towers as they were, and one override a layer for `bits_of` by name."""
    config = json.loads((source / "config.json").read_text())
    block: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": "affine"}
    tensors: dict[str, mx.array] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, array in mx.load(str(file)).items():  # type: ignore[union-attr]
            tensors.update(vlm_names(name, array))
    packed: dict[str, mx.array] = {}
    for name, array in tensors.items():
        path = name.removesuffix(".weight")
        plain = array.ndim < 2 or array.shape[-1] % group_size or "vision" in name
        if plain or not name.endswith(".weight"):
            packed[name] = array
            continue
        own = next((b for part, b in bits_of.items() if part in path), bits)
        if own != bits:
            block[path] = {"group_size": group_size, "bits": own}
        weight, scales, biases = mx.quantize(array, group_size=group_size, bits=own)
        packed |= {name: weight, f"{path}.scales": scales, f"{path}.biases": biases}
    config["quantization"] = config["quantization_config"] = block
    write(folder, config, packed)
    for other in source.glob("tokenizer*"):
        shutil.copy(other, folder)
    return folder


def vlm_names(name: str, array: mx.array) -> dict[str, mx.array]:
    name = name.replace("model.language_model.", "language_model.model.")
    base, _, leaf = name.rpartition(".experts.")
    if leaf == "gate_up_proj":
        gate, up = mx.split(array, 2, axis=-2)
        at = f"{base}.experts.switch_glu"
        return {f"{at}.gate_proj.weight": gate, f"{at}.up_proj.weight": up}
    if leaf == "down_proj":
        return {f"{base}.experts.switch_glu.down_proj.weight": array}
    return {name: array}
