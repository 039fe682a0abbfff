"""Gemma 4 itself: E2B, E4B, 12B, 26B-A4B and 31B, text only. Stateless."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.config import TargetConfig
from mlx_mtp.kernels.head import Shortlist
from mlx_mtp.models.layers import DecoderLayer, KVView, Rotate, head, rotation, softcap
from mlx_mtp.models.shards import Ranks, Shards


class Target(nn.Module):
    """shards: the part of it that this rank runs, where several run one model."""

    def __init__(self, config: TargetConfig, shards: Shards | None = None):
        super().__init__()
        self.config = config
        self.ranks = Ranks() if shards is None else shards.ranks
        # Of every layer that owns KV, how many heads of it lie here; None: all of them.
        owners = range(config.text.num_owners)
        self.kv_heads = None if shards is None else tuple(len(shards.held(i)) for i in owners)
        self.shortlist: Shortlist | None = None
        text = config.text
        self.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
        self.layers = [
            DecoderLayer(
                text, kind, text.mlp_width(i), text.kv_layer(i), i < text.num_owners, shards, i
            )
            for i, kind in enumerate(text.layer_types)
        ]
        self.norm = nn.RMSNorm(text.hidden_size, eps=text.rms_norm_eps)
        if text.hidden_size_per_layer_input:
            packed = text.num_hidden_layers * text.hidden_size_per_layer_input
            self.embed_tokens_per_layer = nn.Embedding(text.vocab_size_per_layer_input, packed)
            self.per_layer_model_projection = nn.Linear(text.hidden_size, packed, bias=False)
            self.per_layer_projection_norm = nn.RMSNorm(
                text.hidden_size_per_layer_input, eps=text.rms_norm_eps
            )
        if not text.tie_word_embeddings:
            self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)

    @property
    def dtype(self) -> mx.Dtype:
        """Of activations and KV; packed weights say nothing about it, norms do."""
        return self.norm.weight.dtype

    def embed(self, ids: mx.array) -> mx.array:
        """int [...] -> [..., H], times sqrt(H) rounded to the weights' dtype."""
        return self.embed_tokens(ids) * self.config.text.hidden_size**0.5

    def load_weights(self, file_or_weights: Any, strict: bool = True) -> Target:
        super().load_weights(file_or_weights, strict)
        for layer in self.layers:
            layer.stack()
        return self

    def __call__(self, ids: mx.array, kv: KVView, keep: int | None = None) -> mx.array:
        """int [B, T] -> the hidden state after the final norm [B, T, H]; writes KV through `kv`.

        keep=1 gives only the last position [B, 1, H] and keep=0 nothing [B, 0, H]: layers that
        own no KV then run for that many positions, which saves over half of E2B's prefill.
        Inside, rows of all sequences lie under each other, [B * T, H]: a product of two
        dimensions is a single operation.
        """
        text = self.config.text
        B, T = ids.shape
        x = self.embed(ids.flatten())
        per_layer = self._per_layer_inputs(ids.flatten(), x)
        rotate = self._rotations(kv, T)
        for i, layer in enumerate(self.layers):
            if i == text.num_owners and keep is not None:
                x = _last(x, B, keep)
                if keep == 0:
                    break
                per_layer = [p if p is None else _last(p, B, keep) for p in per_layer]
                kv, rotate = kv.last(), self._rotations(kv.last(), keep)
            x = layer(x, kv, rotate[layer.kind], per_layer[i])
            kv.start(x)
        if keep is not None:
            x = _last(x, B, keep)
        return self.norm(x).reshape(B, -1, text.hidden_size)

    def logits(self, hidden: mx.array) -> mx.array:
        """[B, T, H] after the final norm -> [B, T, vocabulary], softcapped."""
        return softcap(head(self, hidden), self.config.text.final_logit_softcapping)

    def scores(self, hidden: mx.array) -> tuple[mx.array, None]:
        """The logits, and that they are of all tokens; see `Drafter.scores`."""
        return self.logits(hidden), None

    def clusters_of(self, hidden: mx.array) -> None:
        """A target looks at its whole vocabulary."""

    def _rotations(self, kv: KVView, tokens: int) -> dict[str, Rotate]:
        text = self.config.text
        return {
            kind: rotation(text.rope[kind], text.head_dim_of(kind), kv.offset, tokens)
            for kind in text.donors
        }

    def _per_layer_inputs(self, ids: mx.array, x: mx.array) -> list[mx.array | None]:
        """[rows, width] for each layer: the token's own per-layer embedding plus one made from x;
        or None for each."""
        text = self.config.text
        layers, width = text.num_hidden_layers, text.hidden_size_per_layer_input
        if not width:
            return [None] * layers
        made = self.per_layer_model_projection(x) * text.hidden_size**-0.5
        made = self.per_layer_projection_norm(made.reshape(-1, layers, width)).flatten(1)
        own = self.embed_tokens_per_layer(ids) * width**0.5
        return list(mx.split((made + own) * 2.0**-0.5, layers, -1))


def _last(x: mx.array, sequences: int, keep: int) -> mx.array:
    """The last `keep` rows of each sequence: [B * T, n] -> [B * keep, n]."""
    tokens, width = len(x) // sequences, x.shape[1]
    return x.reshape(sequences, tokens, width)[:, tokens - keep :].reshape(-1, width)
