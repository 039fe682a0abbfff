"""Gemma 4's text model and its MTP drafter in plain torch, small enough to train on one core.

Parameter names are those of Hugging Face checkpoints, so `state_dict()` is what is exported.
Shapes: B rows, T tokens, S KV slots, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6
SOFTCAP = 30.0
STOPS = (1, 106, 50)
KV = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of one stack of layers; `kinds` names each layer sliding or full."""

    hidden: int
    heads: int
    wide: tuple[int, ...]
    kinds: tuple[str, ...]
    owners: int
    per_layer: int = 0
    head_dim: int = 64
    global_head_dim: int = 128
    vocab: int = 2048
    window: int = 128
    positions: int = 32768

    def dim(self, layer: int) -> int:
        return self.global_head_dim if self.kinds[layer] == "full" else self.head_dim


TARGET = Shape(128, 4, (256,) * 6 + (512,) * 3, ("sliding", "sliding", "full") * 3, 6, 32)
DRAFTER = Shape(96, 2, (256,) * 2, ("sliding", "full"), 0)
CENTROIDS, TOP_CENTROIDS, BACKBONE = 64, 8, TARGET.hidden


class Norm(nn.Module):
    def __init__(self, dim: int, start: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), start))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), EPS)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rope(positions: Tensor, dim: int, full: bool) -> KV:
    """cos and sin [..., 1, T, D]; full layers turn only the first quarter of the pairs."""
    exponent = torch.arange(0, dim, 2).float() / dim
    frequency = (1e6 if full else 1e4) ** -exponent
    if full:
        frequency[dim // 8 :] = 0
    angle = positions[..., None, :, None].float() * torch.cat([frequency, frequency])
    return angle.cos(), angle.sin()


def rotate(x: Tensor, turn: KV) -> Tensor:
    """Rotate pairs (i, i + D/2)."""
    half = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)
    return x * turn[0] + half * turn[1]


def attend(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Causal attention of one KV head, heads folded into queries; window 0 means all slots.

    query [B, heads, T, D]; key and value [B, 1, T, D]. With a window, T is a multiple of it and
    every block of queries sees its own block and the one before.
    """
    rows, heads, length, dim = query.shape
    if not window and length > 512:
        key, value = (t.expand(-1, heads, -1, -1) for t in (key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
    block = window or length
    count = length // block
    if window:
        key, value = (
            F.pad(t, (0, 0, window, 0)).unfold(2, 2 * window, window).squeeze(1).mT
            for t in (key, value)
        )
    slots = key.shape[2]
    age = torch.arange(block)[:, None] + slots - block - torch.arange(slots)
    blocked = (age < 0) | (age >= (window or length))
    first = blocked | (torch.arange(slots) < slots - block)
    bias = torch.stack([first, *[blocked] * (count - 1)]).repeat(1, heads, 1) * -1e9
    query = query.view(rows, heads, count, block, dim).transpose(1, 2)
    scores = query.reshape(rows, count, heads * block, dim) @ key.mT
    weights = scores.add_(bias.to(scores.dtype)).softmax(-1, torch.float32)
    out = (weights.to(value.dtype) @ value).view(rows, count, heads, block, dim)
    return out.transpose(1, 2).reshape(rows, heads, length, dim)


class Attention(nn.Module):
    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        self.dim, self.heads = shape.dim(layer), shape.heads
        self.window = shape.window if shape.kinds[layer] == "sliding" else 0
        self.q_proj = linear(shape.hidden, self.heads * self.dim)
        self.q_norm = Norm(self.dim, self.dim**-0.25)
        if layer < shape.owners:
            self.k_proj, self.v_proj = (linear(shape.hidden, self.dim) for _ in "kv")
            self.k_norm = Norm(self.dim, self.dim**-0.25)
        self.o_proj = linear(self.heads * self.dim, shape.hidden)

    def keys(self, x: Tensor, turn: KV) -> KV:
        """Key and value [B, 1, T, D] of this layer's own tokens, normed and rotated."""
        key = rotate(self.k_norm(self.k_proj(x))[:, None], turn)
        return key, F.rms_norm(self.v_proj(x).float(), (self.dim,), None, EPS)[:, None]

    def forward(self, x: Tensor, turn: KV, kv: KV, mask: Tensor | None) -> Tensor:
        rows, length, _ = x.shape
        query = self.q_proj(x).view(rows, length, self.heads, self.dim)
        query = rotate(self.q_norm(query).transpose(1, 2), turn)
        if torch.is_autocast_enabled("cpu"):
            query, kv = query.bfloat16(), (kv[0].bfloat16(), kv[1].bfloat16())
        if mask is None:
            out = attend(query, *kv, self.window)
        else:
            key, value = (t.expand(-1, self.heads, -1, -1) for t in kv)
            out = F.scaled_dot_product_attention(query, key, value, mask, scale=1.0)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    def __init__(self, hidden: int, wide: int):
        super().__init__()
        self.gate_proj, self.up_proj = (linear(hidden, wide) for _ in range(2))
        self.down_proj = linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        self.self_attn = Attention(shape, layer)
        self.mlp = MLP(shape.hidden, shape.wide[layer])
        self.input_layernorm, self.pre_feedforward_layernorm = (
            Norm(shape.hidden) for _ in range(2)
        )
        self.post_attention_layernorm, self.post_feedforward_layernorm = (
            Norm(shape.hidden, 0.5) for _ in range(2)
        )
        if shape.per_layer:
            self.per_layer_input_gate = linear(shape.hidden, shape.per_layer)
            self.per_layer_projection = linear(shape.per_layer, shape.hidden)
            self.post_per_layer_input_norm = Norm(shape.hidden, 0.5)
        self.layer_scalar = nn.Parameter(torch.full((1,), 0.8))

    def forward(
        self, x: Tensor, turn: KV, kv: KV, mask: Tensor | None, extra: Tensor | None, normed: Tensor
    ) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(normed, turn, kv, mask))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        if extra is not None:
            gate = F.gelu(self.per_layer_input_gate(x), approximate="tanh")
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gate * extra))
        return x * self.layer_scalar


@dataclass
class Cache:
    """KV of the owning layers, written at each row's own positions."""

    slots: list[KV] = field(default_factory=list)

    @classmethod
    def empty(cls, shape: Shape, rows: int, length: int) -> Cache:
        blank = [torch.zeros(rows, 1, length, shape.dim(i)) for i in range(shape.owners)]
        return cls([(t, t.clone()) for t in blank])

    def write(self, layer: int, positions: Tensor, kv: KV) -> KV:
        for buffer, new in zip(self.slots[layer], kv, strict=True):
            index = positions[:, None, :, None].expand(*new.shape)
            buffer.scatter_(2, index, new.to(buffer.dtype))
        return self.slots[layer]


class Body(nn.Module):
    """Embeddings, layers and final norm (`model.*` of a checkpoint)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.04)
        if shape.per_layer:
            packed = shape.per_layer * len(shape.kinds)
            self.embed_tokens_per_layer = nn.Embedding(shape.vocab, packed)
            nn.init.normal_(self.embed_tokens_per_layer.weight, std=0.1)
            self.per_layer_model_projection = linear(shape.hidden, packed)
            self.per_layer_projection_norm = Norm(shape.per_layer)
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(len(shape.kinds)))
        self.norm = Norm(shape.hidden)

    def extras(self, ids: Tensor, x: Tensor) -> Tensor:
        """Per-layer inputs [B, T, layers, width]."""
        width = self.shape.per_layer
        table = self.embed_tokens_per_layer(ids) * width**0.5
        context = self.per_layer_model_projection(x) * self.shape.hidden**-0.5
        split = (*ids.shape, len(self.shape.kinds), width)
        return (self.per_layer_projection_norm(context.view(split)) + table.view(split)) * 0.5**0.5


class Target(nn.Module):
    def __init__(self, shape: Shape = TARGET):
        super().__init__()
        self.model = Body(shape)

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed_tokens(ids) * self.model.shape.hidden**0.5

    def head(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.model.embed_tokens.weight)
        return SOFTCAP * torch.tanh(logits.float() / SOFTCAP)

    def forward(
        self, ids: Tensor, cache: Cache | None = None, start: Tensor | None = None
    ) -> tuple[Tensor, dict[str, KV]]:
        """Final-norm hidden [B, T, H] and the donors' KV; `start` [B] is where each row begins."""
        shape, body = self.model.shape, self.model
        positions = torch.arange(ids.shape[1])[None]
        if start is not None:
            positions = positions + start[:, None]
        turns = {
            k: rope(positions, d, k == "full")
            for k, d in (("sliding", shape.head_dim), ("full", shape.global_head_dim))
        }
        held = torch.arange(cache.slots[0][0].shape[2]) if cache else positions[0]
        age = positions[:, :, None] - held
        masks: dict[str, Tensor | None] = {"sliding": None, "full": None}
        if cache or ids.shape[1] % shape.window:
            seen = (age >= 0)[:, None]
            masks = {"sliding": seen & (age < shape.window)[:, None], "full": seen}
        x = self.embed(ids)
        extras = body.extras(ids, x)
        donors: dict[str, KV] = {}
        for i, (layer, kind) in enumerate(zip(body.layers, shape.kinds, strict=True)):
            normed = layer.input_layernorm(x)
            if i < shape.owners:
                kv = layer.self_attn.keys(normed, turns[kind])
                donors[kind] = cache.write(i, positions, kv) if cache else kv
            x = layer(x, turns[kind], donors[kind], masks[kind], extras[:, :, i], normed)
        return body.norm(x), donors


class CentroidHead(nn.Module):
    token_ordering: Tensor

    def __init__(self, shape: Shape):
        super().__init__()
        self.centroids = linear(shape.hidden, CENTROIDS)
        self.register_buffer("token_ordering", torch.arange(shape.vocab))

    def allowed(self, hidden: Tensor) -> Tensor:
        """Bool [..., vocab]: tokens that lie in the best centroids of each hidden state."""
        best = self.centroids(hidden).topk(TOP_CENTROIDS, -1).indices
        chosen = torch.zeros(*hidden.shape[:-1], CENTROIDS, dtype=torch.bool)
        chosen = chosen.scatter(-1, best, True)
        cluster = torch.empty_like(self.token_ordering)
        size = len(self.token_ordering) // CENTROIDS
        cluster[self.token_ordering] = torch.arange(CENTROIDS).repeat_interleave(size)
        return chosen[..., cluster]


class Drafter(nn.Module):
    def __init__(self, shape: Shape = DRAFTER):
        super().__init__()
        self.model = Body(shape)
        self.pre_projection = linear(2 * BACKBONE, shape.hidden)
        self.post_projection = linear(shape.hidden, BACKBONE)
        self.masked_embedding = CentroidHead(shape)

    def step(self, embedded: Tensor, hidden: Tensor, donors: dict[str, KV]) -> Tensor:
        """One draft step for the anchors at every position: normed hidden [B, T, h].

        Anchor a has a+1 committed slots, 0..a: its query stands at position a in every step.
        T is a multiple of the window.
        """
        shape = self.model.shape
        positions = torch.arange(hidden.shape[1])[None]
        x = self.pre_projection(torch.cat([embedded, hidden], -1))
        for i, (layer, kind) in enumerate(zip(self.model.layers, shape.kinds, strict=True)):
            turn = rope(positions, shape.dim(i), kind == "full")
            x = layer(x, turn, donors[kind], None, None, layer.input_layernorm(x))
        return self.model.norm(x)

    def unroll(
        self, target: Target, ids: Tensor, hidden: Tensor, donors: dict[str, KV], steps: int = 4
    ) -> list[Tensor]:
        """Normed hidden states [B, T, h] of steps 1..steps; the last `step` anchors mean nothing.

        Step j is fed the text's token a+j, which is the drafted one wherever drafts are right,
        and predicts token a+j+1.
        """
        states = []
        for j in range(1, steps + 1):
            states.append(self.step(target.embed(ids.roll(-j, 1)), hidden, donors))
            hidden = self.post_projection(states[-1])
        return states

    def head(self, state: Tensor) -> Tensor:
        """Logits over the whole vocabulary, as no decoder computes them."""
        return F.linear(state, self.model.embed_tokens.weight).float()

    def masked_head(self, state: Tensor) -> Tensor:
        """Logits with -inf outside the best centroids, as decoding has them."""
        return self.head(state).masked_fill(~self.masked_embedding.allowed(state), -torch.inf)


@torch.no_grad()
def generate(
    target: Target, prompts: list[list[int]], limit: int, temperature: float = 0.0
) -> list[list[int]]:
    """The continuations of all prompts in one batch, each ending with its stop token if it came."""
    lengths = torch.tensor([len(p) for p in prompts])
    longest = int(lengths.max())
    ids = torch.tensor([p + [0] * (longest - len(p)) for p in prompts])
    cache = Cache.empty(target.model.shape, len(prompts), longest + limit)
    hidden, _ = target(ids, cache)
    last = hidden[torch.arange(len(prompts)), lengths - 1]
    out: list[list[int]] = [[] for _ in prompts]
    stopped = [False] * len(prompts)
    for _ in range(limit):
        logits = target.head(last)
        if temperature:
            token = torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]
        else:
            token = logits.argmax(-1)
        for row, value in enumerate(token.tolist()):
            if not stopped[row]:
                out[row].append(value)
                stopped[row] = value in STOPS
        if all(stopped):
            break
        hidden, _ = target(token[:, None], cache, lengths)
        last, lengths = hidden[:, 0], lengths + 1
    return out
