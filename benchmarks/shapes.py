"""Two pairs of random weights, written into a folder: one bound by overhead, one by arithmetic.

A random model has near ties that two implementations break differently, and a random drafter is
never right. So a next token is planted: token t's embedding is a vector turned t times, and the
target's last MLP turns once more, far above the noise of all other layers. The drafter's head looks
for the same turn and is blind to some tokens, which sets its acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests import checkpoints
from tests.checkpoints import F, S

NOISE = 0.05  # what a random layer adds, against an embedding of 1
TURN = 8.0  # what the planted map adds
BLIND = 0.3  # tokens that the drafter never finds


@dataclass(frozen=True)
class Shape:
    """kind: which of `checkpoints.SHAPES`. target, drafter, shared: changes of the text configs,
    `shared` of both."""

    kind: str
    target: dict[str, Any]
    drafter: dict[str, Any]
    shared: dict[str, Any] = field(default_factory=dict)


SHAPES = {
    # E2B's 35 layers, 20 of them on shared KV, and per-layer embeddings, with little arithmetic.
    "overhead": Shape(
        "e2b",
        {
            "hidden_size": 64,
            "num_hidden_layers": 35,
            "layer_types": [S, S, S, S, F] * 7,
            "num_kv_shared_layers": 20,
            "vocab_size_per_layer_input": 2048,
        },
        {"hidden_size": 64},
        {"vocab_size": 2048, "sliding_window": 512},
    ),
    "compute": Shape(
        "31b",
        {
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "layer_types": [S, S, S, S, S, F] * 2,
        },
        {"hidden_size": 256, "intermediate_size": 1024},
        {
            "vocab_size": 32768,
            "num_attention_heads": 8,
            "head_dim": 64,
            "global_head_dim": 128,
            "sliding_window": 512,
        },
    ),
}


def write_pair(folder: Path, shape: Shape, blind: float = BLIND) -> tuple[Path, Path]:
    """The folders of target and drafter, float32."""
    config = checkpoints.target_config(shape.kind, **shape.target, **shape.shared)
    text = config["text_config"]
    width, vocab = text["hidden_size"], text["vocab_size"]
    turns = mx.random.uniform(0.1, 3.1, (width // 2 - 1,), key=mx.random.key(7))
    table = embeddings(turns, vocab)
    prefix, last = checkpoints.PREFIXES[0], f"layers.{text['num_hidden_layers'] - 1}"

    def plant(tensors: dict[str, mx.array]) -> None:
        quieten(tensors)
        tensors[f"{prefix}embed_tokens.weight"] = table
        at = f"{prefix}{last}.mlp"
        inner = tensors[f"{at}.gate_proj.weight"].shape[0]
        # Column 0 of every embedding is constant, so that this gate is one too: the MLP is linear.
        tensors[f"{at}.gate_proj.weight"] = mx.zeros((inner, width)).at[:, 0].add(4.0)
        tensors[f"{at}.up_proj.weight"] = mx.eye(inner, width)
        tensors[f"{at}.down_proj.weight"] = mx.pad(turn(turns), [(0, 0), (0, inner - width)])
        norm = f"{prefix}{last}.post_feedforward_layernorm.weight"
        tensors[norm] = mx.full((width,), TURN)
        tensors[f"{prefix}norm.weight"] = mx.ones((width,))

    def shadow(tensors: dict[str, mx.array]) -> None:
        quieten(tensors)
        narrow = tensors["pre_projection.weight"][:, :width] * 2**0.5
        tensors["pre_projection.weight"] = mx.concatenate([narrow, NOISE * narrow], -1)
        before = table[(mx.arange(vocab) - 1) % vocab] @ narrow.T
        seen = mx.random.uniform(shape=(vocab, 1), key=mx.random.key(8)) >= blind
        tensors["model.embed_tokens.weight"] = before * seen
        tensors["model.norm.weight"] = mx.ones((before.shape[1],))

    target = checkpoints.write_target(
        folder / "target", config=config, dtype=mx.float32, change=plant
    )
    drafting = checkpoints.drafter_config(
        shape.kind, ordered=False, backbone=width, **shape.drafter, **shape.shared
    )
    drafter = checkpoints.write_drafter(
        folder / "drafter", config=drafting, dtype=mx.float32, change=shadow
    )
    return target, drafter


def turn(turns: mx.array) -> mx.array:
    """[width, width]: columns 0 and 1 stay, each further two turn by an angle of their own."""
    cos, sin = mx.diag(mx.cos(turns)), mx.diag(mx.sin(turns))
    planes = mx.concatenate([mx.concatenate([cos, -sin], 1), mx.concatenate([sin, cos], 1)])
    return mx.pad(planes, (2, 0))


def embeddings(turns: mx.array, vocab: int) -> mx.array:
    """[vocab, width], rows of length 1: row t is row 0 turned t times, behind its constant."""
    angles = (mx.arange(vocab)[:, None] * turns) % (2 * mx.pi)
    turned = mx.concatenate([mx.cos(angles), mx.sin(angles)], -1) * (2 * len(turns)) ** -0.5
    constant = mx.full((vocab, 2), 0.5)
    return mx.concatenate([constant, turned * 0.5**0.5], -1)


def quieten(tensors: dict[str, mx.array]) -> None:
    """What each layer adds to the stream is a norm's output: scaled down by that norm's weight."""
    for name, array in tensors.items():
        if name.endswith("layer_scalar"):
            tensors[name] = mx.ones_like(array)
        elif "layers." in name and ".post_" in name:
            tensors[name] = array * NOISE
