"""Small targets with random weights, and drafters whose acceptance the test decides.

A random drafter beside a random target accepts almost nothing, so every fault on the accepted
path would stay hidden: `ScriptedDrafter` proposes what plain decoding says, except where told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_mtp.config import FULL, SLIDING, DrafterConfig, TargetConfig
from mlx_mtp.engine import session
from mlx_mtp.engine.draft_length import Outcome, Shape
from mlx_mtp.engine.kv import KVLayout, capacity_for
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.sampling import SamplerState, Sampling, choose, kind_of
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.target import Target

# One round in flight, as on a GPU: a stop is then seen one round late, here too.
Engine = partial(session.Engine, pipeline=True)
M = TypeVar("M", bound=nn.Module)
VOCAB, WINDOW = 96, 8
PROMPT = [2, 17, 5, 44, 9]


def target_config(**changes: Any) -> TargetConfig:
    """E-like in miniature: sliding and full layers, kv sharing, per-layer embeddings."""
    layers = changes.get("num_hidden_layers", 4)
    raw = {
        "model_type": "gemma4_text",
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_kv_shared_layers": layers // 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "sliding_window": WINDOW,
        "layer_types": [FULL if i % 2 else SLIDING for i in range(layers)],
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 32768,
    }
    return TargetConfig.from_dict(raw | changes)


def drafter_config(
    ordered: bool = True, backbone: int = 32, centroids: int = 12, **changes: Any
) -> DrafterConfig:
    text = {
        "model_type": "gemma4_text",
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, FULL],
        "max_position_embeddings": 32768,
    }
    return DrafterConfig.from_dict(
        {
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": backbone,
            "use_ordered_embeddings": ordered,
            "num_centroids": centroids,
            "centroid_intermediate_top_k": 3,
            "text_config": text | changes,
        }
    )


def randomise(model: M, seed: int) -> M:
    """Seeded float32 weights; layer_scalar away from 1, as in real checkpoints."""
    mx.random.seed(seed)
    weights = []
    for name, old in tree_flatten(model.parameters()):
        if name.endswith("token_ordering"):
            new = mx.random.permutation(old.shape[0]).astype(mx.int32)
        elif name.endswith("layer_scalar"):
            new = mx.random.uniform(0.3, 0.9, old.shape)
        elif old.ndim == 1:
            new = mx.random.uniform(0.5, 1.5, old.shape)
        else:
            new = mx.random.normal(old.shape) * 0.3
        weights.append((name, new))
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model


def make_target(seed: int = 1, **changes: Any) -> Target:
    return randomise(Target(target_config(**changes)), seed)


def make_drafter(seed: int = 2, ordered: bool = True) -> Drafter:
    return randomise(Drafter(drafter_config(ordered)), seed)


class ScriptedDrafter:
    """Proposes `script[row][position]`, or the token after it where `wrong(row, position)`."""

    def __init__(self, script: Sequence[Sequence[int]], wrong: Callable[[int, int], bool]):
        tokens = [
            [(t + 1) % VOCAB if wrong(row, p) else t for p, t in enumerate(line)]
            for row, line in enumerate(script)
        ]
        longest = max(len(line) for line in tokens) + 32
        self.tokens = mx.array([line + [0] * (longest - len(line)) for line in tokens])
        self.script = script
        self.engine: session.Engine | None = None  # whose rows the script's lines are, if several
        self.view: object = None
        self.steps = 0
        self.shortlist = None

    def lines(self, rows: int) -> list[int]:
        """The script's line of every row of the batch: the one that starts with its prompt."""
        if self.engine is None:
            return list(range(rows))
        requests = [row.request for row in self.engine._batch.rows]
        starts = [r.prompt if r else [] for r in requests]
        return [
            next(i for i, line in enumerate(self.script) if list(line[: len(start)]) == start)
            for start in starts
        ]

    def rotations(self, view: Any) -> None:
        return None

    def __call__(self, embedding: mx.array, hidden: mx.array, view: Any, _: None) -> mx.array:
        self.steps = self.steps + 1 if view is self.view else 1
        self.view = view
        places = view.offset + 1 + self.steps
        tokens = self.tokens[mx.array(self.lines(places.shape[0]))]
        return mx.take_along_axis(tokens, places[:, None], 1)[:, 0]

    def next_hidden(self, out: mx.array) -> mx.array:
        return mx.zeros((out.shape[0], 1, 32))

    def scores(self, out: mx.array) -> tuple[mx.array, None]:
        return (mx.arange(VOCAB) == out[..., None]).astype(mx.float32) * 50, None


class Schedule:
    """A draft length that changes every round."""

    def __init__(self, lengths: Sequence[int]):
        self.lengths, self.used = lengths, 0

    def choose(self, match: bool = False) -> Shape:
        self.used += 1
        return Shape(self.lengths[self.used % len(self.lengths)])

    def learn(self, outcome: Outcome) -> None:
        pass


def run(engine: session.Engine, *requests: Request) -> list[list[int]]:
    """Add all, step until done; the emitted tokens of each."""
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    return [request.tokens for request in requests]


def forward(target: Target, ids: Sequence[int]) -> mx.array:
    """Logits [T, V] of one pass over all of `ids` with nothing in KV before it."""
    layout = KVLayout(target.config.text, mx.float32)
    buffers = layout.allocate(1, capacity_for(len(ids)))
    view = layout.view(buffers, mx.array([0]), len(ids), 0)
    return target.logits(target(mx.array([list(ids)]), view))[0]


def plain(target: Target, prompt: Sequence[int], tokens: int) -> list[int]:
    """What plain decoding (draft length 0) says."""
    return run(Engine(target), Request(list(prompt), tokens, draft_len=0))[0]


def follows(
    target: Target, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling | None = None
) -> bool:
    """Whether plain decoding says those tokens: each is what one pass over all before it chooses.
    In one pass, so that many texts can be checked."""
    if not tokens:
        return True
    sampling = sampling or Sampling()
    logits = forward(target, [*prompt, *tokens])[None, len(prompt) - 1 : -1]
    places = mx.arange(len(prompt), len(prompt) + len(tokens))[None]
    sampler = SamplerState.of([sampling])
    chosen = choose(logits, None, places, sampler, kind_of([sampling]))
    return chosen.tolist() == [list(tokens)]
