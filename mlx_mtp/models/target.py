"""Gemma 4 itself: E2B, E4B, 12B, 26B-A4B and 31B, text only. Stateless."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.config import TargetConfig
from mlx_mtp.models.layers import DecoderLayer, KVView, Rotate, head, rotation, softcap


class Target(nn.Module):
    def __init__(self, config: TargetConfig):
        super().__init__()
        self.config = config
        text = config.text
        self.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
        self.layers = [
            DecoderLayer(
                text, kind, text.mlp_width(i), text.kv_layer(i), own_kv=i < text.num_owners
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
        """int [B, T] -> [B, T, H], times sqrt(H) rounded to the weights' dtype."""
        return self.embed_tokens(ids) * self.config.text.hidden_size**0.5

    def __call__(self, ids: mx.array, kv: KVView, keep: int | None = None) -> mx.array:
        """int [B, T] -> the hidden state after the final norm [B, T, H]; writes KV through `kv`.

        keep=1 gives only the last position [B, 1, H] and keep=0 nothing [B, 0, H]: layers that
        own no KV then run for that many positions, which saves over half of E2B's prefill.
        """
        text = self.config.text
        x = self.embed(ids)
        per_layer = self._per_layer_inputs(ids, x)
        rotate = self._rotations(kv, ids.shape[1])
        for i, layer in enumerate(self.layers):
            if i == text.num_owners and keep is not None:
                x, per_layer, kv = _narrow(x, per_layer, kv, keep)
                if keep == 0:
                    return x
                rotate = self._rotations(kv, keep)
            inputs = None if per_layer is None else per_layer[:, :, i]
            x = layer(x, kv, rotate[layer.kind], inputs)
        if keep is not None:
            x = x[:, x.shape[1] - keep :]
        return x if keep == 0 else self.norm(x)

    def logits(self, hidden: mx.array) -> mx.array:
        """[B, T, H] after the final norm -> [B, T, vocabulary], softcapped."""
        return softcap(head(self, hidden), self.config.text.final_logit_softcapping)

    def _rotations(self, kv: KVView, tokens: int) -> dict[str, Rotate]:
        text = self.config.text
        return {
            kind: rotation(text.rope[kind], text.head_dim_of(kind), kv.offset, tokens)
            for kind in text.donors
        }

    def _per_layer_inputs(self, ids: mx.array, x: mx.array) -> mx.array | None:
        """[B, T, layers, width]: the token's own per-layer embedding plus one made from x."""
        text = self.config.text
        width = text.hidden_size_per_layer_input
        if not width:
            return None
        shape = (*ids.shape, text.num_hidden_layers, width)
        made = self.per_layer_model_projection(x) * text.hidden_size**-0.5
        made = self.per_layer_projection_norm(made.reshape(shape))
        own = self.embed_tokens_per_layer(ids).reshape(shape) * width**0.5
        return (made + own) * 2.0**-0.5


def _narrow(
    x: mx.array, per_layer: mx.array | None, kv: KVView, keep: int
) -> tuple[mx.array, mx.array | None, KVView]:
    start = x.shape[1] - keep
    return (
        x[:, start:],
        None if per_layer is None else per_layer[:, start:],
        kv.last() if keep else kv,
    )
