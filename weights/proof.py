"""How far a conversion is from what it was made of, on a short text, in little memory.

Both models read the same text in float32, all positions at once and a layer at a time (`streamed`),
so that neither is ever in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.engine.kv import KVLayout, View
from mlx_mtp.errors import LoadError
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.layers import softcap
from mlx_mtp.text.tokenizer import Tokenizer
from mlx_mtp.weights.checkpoint import Progress
from mlx_mtp.weights.find import Found
from mlx_mtp.weights.planned import Planned
from mlx_mtp.weights.streamed import stream

TEXT = """\
def area(radius):
    return 3.14159 * radius ** 2

The area of a circle grows with the square of its radius, its length only with the radius itself.
"""
TOKENS = 32


@dataclass(frozen=True)
class Proof:
    """What `prove` found at `positions` places of the text.

    kl: KL(source || written) of the next token's distribution, in nats. agreement: share of places
    where both find the same token the likeliest. accepted_before, accepted_after: share of places
    where the first draft of source's and written's drafter is what their own target chooses there;
    None without a drafter.
    """

    positions: int
    kl_mean: float
    kl_max: float
    agreement: float
    accepted_before: float | None
    accepted_after: float | None

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for a table."""
        shares = {
            "same next token": self.agreement,
            "first drafts accepted before": self.accepted_before,
            "first drafts accepted after": self.accepted_after,
        }
        return [
            ("KL to the source, mean", f"{self.kl_mean:.4g} nats"),
            ("KL to the source, max", f"{self.kl_max:.4g} nats"),
            *((name, f"{share:.1%}") for name, share in shares.items() if share is not None),
        ]


def prove(source: Found, written: Found, progress: Progress | None = None) -> Proof:
    """Compares two pairs on TEXT, in the tokens of `source`. Waits for the device; of the first
    pair only logits, a float32 [TOKENS, vocabulary], are kept. Raises LoadError."""
    a, b = source.config.text, written.config.text
    if a.vocab_size != b.vocab_size:
        raise LoadError(
            f"{written.target.source.name} has a vocabulary of {b.vocab_size} tokens and cannot be "
            f"compared with {source.target.source.name}, which has {a.vocab_size}"
        )
    tokenizer = Tokenizer.from_folder(source.target.source.fetch(source.target.files, progress))
    known = min(t.vocab_size_per_layer_input or t.vocab_size for t in (a, b))
    ids = [i for i in tokenizer.encode(TEXT, bos=True) if i < min(known, a.vocab_size)][:TOKENS]
    if len(ids) < 2:
        raise LoadError(f"{source.target.source.name}: its tokenizer knows next to no token")
    before, after = (read_text(found, ids, progress) for found in (source, written))
    p, q = before.logits, after.logits
    kl = [_divergence(*rows) for rows in zip(p, q, strict=True)]
    return Proof(
        positions=len(ids),
        kl_mean=sum(kl) / len(kl),
        kl_max=max(kl),
        agreement=_share(p.argmax(-1) == q.argmax(-1)),
        accepted_before=before.accepted,
        accepted_after=after.accepted,
    )


class Reading(NamedTuple):
    """What a pair makes of a text: its logits float32 [T, vocabulary] and, where it has a drafter,
    the first drafts int [T - 1] of rounds whose bonus token is the second, third, ... token."""

    logits: mx.array
    drafts: mx.array | None

    @property
    def accepted(self) -> float | None:
        """The share of drafts that are what the target chooses there."""
        if self.drafts is None:
            return None
        return _share(self.drafts == self.logits[1:].argmax(-1))


def read_text(found: Found, ids: list[int], progress: Progress | None = None) -> Reading:
    """The pair on the text `ids`. Waits for the device. Raises LoadError."""
    text = found.config.text
    # No longer rings than the text needs. With a window of less than the text they have room for
    # two more blocks, and nothing of a text of TOKENS is overwritten that an early draft needs.
    text = replace(text, sliding_window=min(text.sliding_window, len(ids)))
    layout = KVLayout(text, mx.float32)
    assert len(ids) <= layout.ring
    target, weights = stream(found.target, progress)
    view = layout.view(layout.allocate(1, len(ids)), mx.array([0]), len(ids), 0)
    hidden = target(mx.array([ids]), view)[0]
    logits = softcap(weights.product(hidden), text.final_logit_softcapping)
    if not mx.isfinite(logits).all().item():
        raise LoadError(f"{found.target.source.name} is broken: its logits are not finite")
    if found.drafter is None:
        return Reading(logits, None)
    embedding = target.embed(mx.array(ids[1:]))
    drafts = _first_drafts(found.drafter, view, embedding, hidden[:-1], progress)
    mx.eval(drafts)
    return Reading(logits, drafts)


def _first_drafts(
    planned: Planned[Drafter],
    view: View,
    embedding: mx.array,
    hidden: mx.array,
    progress: Progress | None,
) -> mx.array:
    """The first draft int [n] of n rounds, all at once: in round i the bonus token, of which the
    target gives `embedding` [n, H], stands at position i + 1, `hidden` [n, H] is from position i,
    and KV is committed up to there."""
    drafter, weights = stream(planned, progress)
    n = len(hidden)
    buffers = [
        tuple(mx.broadcast_to(part, (n, *part.shape[1:])) for part in layer)
        for layer in view.buffers
    ]
    donors = view.layout.donor_view(buffers, mx.arange(1, n + 1), n)
    out = drafter(embedding[:, None], hidden[:, None], donors, drafter.rotations(donors))
    scores, clusters = weights.product(out), drafter.clusters_of(out)
    if clusters is None:
        return scores.argmax(-1)
    ordering = drafter.masked_embedding.token_ordering
    planned.check_ordering({"masked_embedding.token_ordering": ordering})
    ids = ordering.reshape(drafter.config.num_centroids, -1)[clusters].flatten(1)
    best = mx.take_along_axis(scores, ids, -1).argmax(-1, keepdims=True)
    return mx.take_along_axis(ids, best, -1)[:, 0]


def _share(true: mx.array) -> float:
    return int(true.sum()) / true.size


def _divergence(p: mx.array, q: mx.array) -> float:
    """KL of two rows of logits, in nats: in float64, where tiny ones do not drown in rounding."""
    with mx.stream(mx.cpu):
        a, b = (row.astype(mx.float64) for row in (p, q))
        a, b = a - mx.logsumexp(a), b - mx.logsumexp(b)
        return max(0.0, float((mx.exp(a) * (a - b)).sum()))
