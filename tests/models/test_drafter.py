"""The drafter's heads, and that it costs what it should."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.config import DrafterConfig
from mlx_mtp.models.drafter import Drafter

from ..engine.pairs import VOCAB, drafter_config, make_drafter, make_target, randomise


def wide_drafter(vocab: int, bits: int | None) -> Drafter:
    """A centroid drafter with a wide vocabulary, packed or not."""
    raw = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": 64,
        "use_ordered_embeddings": True,
        "num_centroids": vocab // 64,
        "centroid_intermediate_top_k": 4,
        "text_config": {
            "model_type": "gemma4_text",
            "vocab_size": vocab,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "global_head_dim": 32,
            "sliding_window": 8,
            "layer_types": ["full_attention"],
        },
    }
    drafter = Drafter(DrafterConfig.from_dict(raw))
    weights = []
    mx.random.seed(4)
    for name, old in tree_flatten(drafter.parameters()):
        if name.endswith("token_ordering"):
            weights.append((name, mx.random.permutation(vocab).astype(mx.int32)))
        else:
            weights.append((name, mx.random.normal(old.shape) * 0.2))
    if bits:
        table = dict(weights)["embed_tokens.weight"]
        packed = mx.quantize(table, group_size=64, bits=bits)
        nn.quantize(drafter, 64, bits, class_predicate=lambda path, _: path == "embed_tokens")
        weights = [(n, w) for n, w in weights if not n.startswith("embed_tokens")]
        names = ("weight", "scales", "biases")
        weights += [(f"embed_tokens.{n}", w) for n, w in zip(names, packed, strict=True)]
    drafter.load_weights(weights)
    mx.eval(drafter.parameters())
    return drafter


def test_a_centroid_head_scores_its_best_clusters_only():
    """Each candidate's logit is its row of the table times the hidden state; the candidates are
    the tokens of the best centroids, and nothing else."""
    reference, drafter = Drafter(drafter_config()), make_drafter()
    reference.masked_embedding = drafter.masked_embedding
    # The table in token order, from the clusters that loading made of it.
    order = np.array(drafter.masked_embedding.token_ordering)
    table = np.zeros((VOCAB, 16), dtype=np.float32)
    table[order] = np.array(drafter.clusters.weight).reshape(VOCAB, 16)
    hidden = mx.random.normal((2, 16), key=mx.random.key(1))
    logits, ids = drafter.scores(hidden)
    assert logits.shape == ids.shape == (2, 24)
    scores = np.array(drafter.masked_embedding.centroids(hidden))
    for row in range(2):
        best = np.argsort(-scores[row])[:3]
        wanted = order.reshape(12, 8)[best].ravel()
        assert sorted(ids[row].tolist()) == sorted(wanted.tolist())
        exact = table[np.array(ids[row])] @ np.array(hidden[row])
        assert np.abs(np.array(logits[row]) - exact).max() < 1e-4


def test_a_dense_head_scores_the_vocabulary():
    drafter = make_drafter(ordered=False)
    hidden = mx.random.normal((2, 16), key=mx.random.key(1))
    logits, ids = drafter.scores(hidden)
    assert ids is None
    assert mx.allclose(logits, hidden @ drafter.embed_tokens.weight.T, atol=1e-5)


def test_loading_reorders_the_table_and_keeps_one_copy():
    drafter = make_drafter()
    assert "embed_tokens" not in drafter
    assert drafter.clusters.weight.shape == (12, 8, 16)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_centroid_head_never_builds_anything_as_wide_as_the_vocabulary(bits):
    """Packed rows are gathered as they are: one step's memory stays below one byte a token."""
    vocab = 1 << 17
    drafter = wide_drafter(vocab, bits)
    hidden = mx.random.normal((1, 64), key=mx.random.key(2))
    mx.eval(drafter.scores(hidden))
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(drafter.scores(hidden))
    assert mx.get_peak_memory() - before < vocab
    logits, ids = drafter.scores(hidden)
    if bits:
        rows = mx.dequantize(
            drafter.clusters.weight, drafter.clusters.scales, drafter.clusters.biases, 64, bits
        )
        order = drafter.masked_embedding.token_ordering
        table = mx.zeros((vocab, 64))
        table[order] = rows.reshape(vocab, 64)
        assert mx.allclose(logits[0], table[ids[0]] @ hidden[0], atol=1e-3)


def test_the_targets_embedding_table_is_shared():
    """A pair takes the bytes of its two checkpoints: no second table for the drafter's input."""
    mx.synchronize()
    target = make_target()
    drafter = randomise(Drafter(drafter_config()), 2)
    stored = sum(w.nbytes for m in (target, drafter) for _, w in tree_flatten(m.parameters()))
    widths = [w.shape for _, w in tree_flatten(drafter.parameters())]
    assert (VOCAB, 32) not in widths
    mx.clear_cache()
    before = mx.get_active_memory()
    out = drafter.pre_projection(
        mx.concatenate([target.embed(mx.array([[3]])), mx.zeros((1, 1, 32))], -1)
    )
    mx.eval(out)
    assert mx.get_active_memory() - before < 4096
    assert stored > 0
