"""Gemma 4's MTP drafter (`gemma4_assistant`): four small layers over the target's KV. Stateless."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.config import DrafterConfig
from mlx_mtp.kernels.head import Shortlist
from mlx_mtp.models.layers import (
    DecoderLayer,
    ExpertLinear,
    KVView,
    QuantizedExpertLinear,
    Rotate,
    head,
    rotation,
)


class CentroidHead(nn.Module):
    """Which clusters of the vocabulary are worth scoring: a score per centroid, and the token ids
    of every cluster, in order of cluster."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.top_k = config.centroid_intermediate_top_k
        self.centroids = nn.Linear(config.text.hidden_size, config.num_centroids, bias=False)
        self.token_ordering = mx.zeros((config.text.vocab_size,), dtype=mx.int32)

    def choose(self, hidden: mx.array) -> mx.array:
        """[..., h] -> the best clusters, int [..., top_k]."""
        scores = self.centroids(hidden)
        return mx.argpartition(-scores, self.top_k - 1, axis=-1)[..., : self.top_k]


class Drafter(nn.Module):
    """`embed_tokens` is only the head: tokens come in through the target's embedding table.

    With a centroid head, loading reorders the table's rows into `clusters` [centroids, tokens of
    a cluster, h], so that a cluster is one slice, packed rows included.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.shortlist: Shortlist | None = None
        text = config.text
        self.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
        self.layers = [
            DecoderLayer(text, kind, text.intermediate_size, kv_key=kind, own_kv=False)
            for kind in text.layer_types
        ]
        self.norm = nn.RMSNorm(text.hidden_size, eps=text.rms_norm_eps)
        backbone = config.backbone_hidden_size
        self.pre_projection = nn.Linear(2 * backbone, text.hidden_size, bias=False)
        self.post_projection = nn.Linear(text.hidden_size, backbone, bias=False)
        if config.use_ordered_embeddings:
            self.masked_embedding = CentroidHead(config)

    def load_weights(self, file_or_weights: Any, strict: bool = True) -> Drafter:
        super().load_weights(file_or_weights, strict)
        for layer in self.layers:
            layer.stack()
        if "masked_embedding" in self:
            self._arrange_clusters()
        return self

    def rotations(self, kv: KVView) -> dict[str, Rotate]:
        """RoPE at `kv.offset`, where all queries of a round stand; made once a round."""
        text = self.config.text
        return {
            kind: rotation(text.rope[kind], text.head_dim_of(kind), kv.offset, 1)
            for kind in set(text.layer_types)
        }

    def __call__(
        self, embedding: mx.array, hidden: mx.array, kv: KVView, rotate: dict[str, Rotate]
    ) -> mx.array:
        """One draft step: the token's embedding from the target [B, 1, H] and the hidden state
        of the token before it [B, 1, H] give the normed output [B, h]."""
        x = self.pre_projection(mx.concatenate([embedding, hidden], -1).squeeze(1))
        for layer in self.layers:
            x = layer(x, kv, rotate[layer.kind])
        return self.norm(x)

    def next_hidden(self, out: mx.array) -> mx.array:
        """[B, h] -> what the next step takes in place of the target's hidden state, [B, 1, H]."""
        return self.post_projection(out)[:, None]

    def scores(self, out: mx.array) -> tuple[mx.array, mx.array | None]:
        """[..., h] -> (logits, the token ids they belong to).

        A dense head scores the whole vocabulary, [..., V], and gives no ids. A centroid head scores
        only its best clusters, [..., candidates] each: everything else is -inf by definition.
        """
        best = self.clusters_of(out)
        if best is None:
            return head(self, out), None
        logits = self.clusters(out[..., None, None, :], best)
        ids = self.masked_embedding.token_ordering.reshape(self.config.num_centroids, -1)[best]
        return logits.flatten(-3), ids.flatten(-2)

    def clusters_of(self, out: mx.array) -> mx.array | None:
        """[..., h] -> the clusters that a centroid head scores, int [..., top_k]; None for a dense
        head."""
        return self.masked_embedding.choose(out) if "masked_embedding" in self else None

    def _arrange_clusters(self) -> None:
        table = self.pop("embed_tokens")
        order = self.masked_embedding.token_ordering
        parts = {
            name: rows[order].reshape(self.config.num_centroids, -1, rows.shape[-1])
            for name, rows in table.parameters().items()
        }
        if isinstance(table, nn.QuantizedEmbedding):
            self.clusters: nn.Module = QuantizedExpertLinear(
                **parts, group_size=table.group_size, bits=table.bits, mode=table.mode
            )
        else:
            self.clusters = ExpertLinear(self.config.num_centroids, 1, 1)
            self.clusters.weight = parts["weight"]
