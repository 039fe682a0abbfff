"""The building blocks that target and drafter share. They hold weights and no state.

Keys and values are reached only through a view (`KVView`): the block hands over what it projected
and gets back what attention gave, whatever the layout behind it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from mlx_mtp.config import Rope, TextConfig
from mlx_mtp.kernels import experts, fused
from mlx_mtp.kernels.quantized import Packed
from mlx_mtp.models.shards import Ranks, Shards

KVKey = int | str  # a target's layer, or for a drafter the type of layer whose donor it reads
Rotate = Callable[[mx.array], mx.array]


class KVView(Protocol):
    """What one forward pass sees of the KV of its rows.

    offset: int32 [B], the position of each row's first token in this pass.
    """

    offset: mx.array

    def write(self, key: KVKey, keys: mx.array, values: mx.array) -> None:
        """Store [B, kv_heads, T, head_dim] at the pass's positions."""

    def attend(self, key: KVKey, queries: mx.array, seen: slice | None = None) -> mx.array:
        """Causal attention of [B, heads, T, head_dim] over everything stored so far, of all kv
        heads or of those `seen`."""

    def start(self, x: mx.array) -> None:
        """The pass got as far as `x`: the device may begin, while the rest is being described."""

    def last(self) -> KVView:
        """The same pass narrowed to each row's last position."""


def on_cpu() -> bool:
    """Whether operations run on the CPU, where MLX has neither fused kernels nor a fast BLAS."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


LINEAR, CUBIC = 1.5957691216057308, 0.07135481282052428  # 2 sqrt(2 / pi), and 0.044715 of it
GATE = CUBIC ** (1 / 3)


def gelu(x: mx.array) -> mx.array:
    """gelu_pytorch_tanh, as x * sigmoid(2 u) with 0.5 (1 + tanh u) = sigmoid(2 u).

    Written out because mlx.nn's is compiled, and a cold compile costs seconds on the CPU.
    """
    return x * mx.sigmoid(x * (LINEAR + CUBIC * (x * x)))


def scaled_gelu(x: mx.array) -> mx.array:
    """GATE * gelu(x / GATE): a quarter fewer operations."""
    return x * mx.sigmoid(x * (mx.square(x) + LINEAR / GATE))


def softcap(x: mx.array, cap: float | None) -> mx.array:
    return x if cap is None else mx.tanh(x / cap) * cap


def rotation(rope: Rope, head_dim: int, offset: mx.array, tokens: int) -> Rotate:
    """RoPE for `tokens` positions from `offset` [B], as a function of [B, heads, T, head_dim].

    Pairs are (i, i + head_dim / 2); of these the first `fraction` turn by theta^(-2i / head_dim)
    and the rest stand still. The exponent's denominator is the head dim even where only a part
    turns ('proportional'). The tables are made once a pass and serve all layers of a type.
    """
    half = head_dim // 2
    turning = int(rope.fraction * half)
    periods = [rope.theta ** (2 * i / head_dim) for i in range(turning)]
    if not on_cpu():
        freqs = mx.array(periods + [float("inf")] * (half - turning), dtype=mx.float32)
        return FusedRotation(freqs, offset)
    speeds = mx.array([1 / p for p in periods] + [0.0] * (half - turning), dtype=mx.float32)
    positions = (offset[:, None] + mx.arange(tokens)).astype(mx.float32)
    angles = positions[:, None, :, None] * speeds
    cos, sin = mx.cos(angles), mx.sin(angles)
    cos, sin = mx.concatenate([cos, cos], -1), mx.concatenate([-sin, sin], -1)

    def written_out(x: mx.array) -> mx.array:
        swapped = mx.concatenate([x[..., half:], x[..., :half]], -1)
        return x * cos.astype(x.dtype) + swapped * sin.astype(x.dtype)

    return written_out


@dataclass(frozen=True)
class FusedRotation:
    """`rotation` by MLX's own operation. freqs: float32 [head_dim / 2], offset: int32 [B]."""

    freqs: mx.array
    offset: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rope(
            x,
            2 * len(self.freqs),
            traditional=False,
            base=None,
            scale=1.0,
            offset=self.offset,
            freqs=self.freqs,
        )


class Stacked(nn.Module):
    """Linear maps of one input as a single one, whose rows are theirs in order. Maps that are
    packed differently stay apart and only their outputs are joined."""

    def __init__(self, *maps: nn.Module):
        super().__init__()
        packing = ("bits", "group_size", "mode")
        if len({(type(m), *(getattr(m, name, None) for name in packing)) for m in maps}) == 1:
            for name in maps[0].parameters():
                parts = [m[name] for m in maps]
                if on_cpu() and parts[0].dtype == mx.float32:
                    # As lay_out_for_cpu wants it, which then needs no second copy.
                    maps[0][name] = mx.concatenate([p.T for p in parts], -1).T
                else:
                    maps[0][name] = mx.concatenate(parts)
            maps = maps[:1]
        self.maps = list(maps)

    def __call__(self, x: mx.array) -> mx.array:
        parts = [m(x) for m in self.maps]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, -1)


class HeadNorm(nn.Module):
    """RMSNorm of [B, heads, T, head_dim] by a weight [heads, 1, head_dim]."""

    def __init__(self, weight: mx.array, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, None, self.eps) * self.weight


class Attention(nn.Module):
    """Attention at scale 1 (q_norm and k_norm carry it) with keys and values of its own or, with
    `own_kv` false, those of the layer that `kv_key` names. fused: numbers of rows whose norms and
    RoPE are one kernel. On several ranks the result is this one's part of a sum."""

    def __init__(
        self, config: TextConfig, kind: str, kv_key: KVKey, own_kv: bool, shards: Shards | None
    ):
        super().__init__()
        self.kind, self.kv_key, self.own_kv = kind, kv_key, own_kv
        self.heads, self.kv_heads = config.num_attention_heads, config.kv_heads_of(kind)
        self.seen: slice | None = None
        if shards is not None:
            held, seen = shards.held(int(kv_key)), shards.seen(kind)
            self.heads, self.kv_heads = len(shards.queries(kind)), len(held)
            self.seen = slice(seen.start, seen.stop) if len(seen) < len(held) else None
        self.head_dim, self.eps = config.head_dim_of(kind), config.rms_norm_eps
        self.fused = frozenset[int]()
        width = config.hidden_size
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=self.eps)
        if own_kv:
            self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
            if not config.k_eq_v(kind):
                self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=self.eps)

    def stack(self) -> None:
        """Once loaded: one product for queries, keys and values, and one norm of all heads."""
        names = [name for name in ("q_proj", "k_proj", "v_proj") if name in self]
        self.qkv_proj = Stacked(*(self.pop(name) for name in names))
        if self.own_kv:
            weights = [self.pop("q_norm").weight] * self.heads
            weights += [self.pop("k_norm").weight] * self.kv_heads
            if "v_proj" in names:
                weights += [mx.ones_like(weights[0])] * self.kv_heads
            self.q_norm = HeadNorm(mx.stack(weights)[:, None], self.eps)

    def __call__(self, x: mx.array, kv: KVView, rotate: Rotate) -> mx.array:
        queries, *new = self.heads_of(self.qkv_proj(x), len(kv.offset), rotate)
        if self.own_kv:
            kv.write(self.kv_key, *new)
        out = kv.attend(self.kv_key, queries, self.seen)
        return self.o_proj(out.swapaxes(1, 2).reshape(len(x), -1))

    def heads_of(self, raw: mx.array, B: int, rotate: Rotate) -> list[mx.array]:
        """What qkv_proj gave -> queries and, where they are its own, keys and values."""
        counts = self.heads, self.own_kv * self.kv_heads
        if len(raw) in self.fused and isinstance(rotate, FusedRotation):
            given = raw, self.q_norm.weight, rotate.freqs
            if fused.fits_heads(*given):
                return fused.heads_of(*given, rotate.offset, self.eps, *counts)
        raw = raw.reshape(B, len(raw) // B, -1, self.head_dim).swapaxes(1, 2)
        heads, turning = self.q_norm(raw), sum(counts)
        turned = rotate(heads[:, :turning])
        if not self.own_kv:
            return [turned]
        # V has a norm without weight, and no RoPE even where it is the raw key.
        values = heads[:, turning:]
        if not values.size:
            values = mx.fast.rms_norm(raw[:, self.heads :], None, self.eps)
        return [turned[:, : self.heads], turned[:, self.heads :], values]


class MLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.gelu = gelu

    def stack(self) -> None:
        """Once loaded: one product for gate and up."""
        self.gate_up_proj = Stacked(self.pop("gate_proj"), self.pop("up_proj"))

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = mx.split(self.gate_up_proj(x), 2, -1)
        return self.down_proj(self.gelu(gate) * up)


class ExpertLinear(nn.Module):
    """A stack of linear maps [E, out, in] of which every row uses a few."""

    COPIED = 64

    def __init__(self, experts: int, width: int, out: int):
        super().__init__()
        self.weight = mx.zeros((experts, out, width))

    def __call__(self, x: mx.array, chosen: mx.array, in_order: bool = False) -> mx.array:
        """x [..., 1 or n, 1, in] and int chosen [..., n] give [..., n, 1, out]."""
        if not on_cpu() or self.weight.dtype == mx.float32:
            weight = self.weight.swapaxes(-1, -2)
            return mx.gather_mm(x, weight, rhs_indices=chosen, sorted_indices=in_order)
        # MLX's gather_mm takes only float32 on the CPU: copy the chosen maps, a few at a time.
        blocks = [
            x[i : i + self.COPIED] @ self.weight[chosen[i : i + self.COPIED]].swapaxes(-1, -2)
            for i in range(0, len(chosen), self.COPIED)
        ]
        return mx.concatenate(blocks)

    def to_quantized(
        self, group_size: int | None = None, bits: int | None = None, mode: str = "affine", **_: Any
    ) -> QuantizedExpertLinear:
        packed = mx.quantize(self.weight, group_size, bits, mode=mode)
        return QuantizedExpertLinear(*packed, group_size=group_size, bits=bits, mode=mode)


class QuantizedExpertLinear(nn.Module):
    """ExpertLinear over packed weights: only the rows of the chosen experts are read."""

    def __init__(
        self,
        weight: mx.array,
        scales: mx.array,
        biases: mx.array | None = None,
        *,
        group_size: int | None,
        bits: int | None,
        mode: str,
    ):
        super().__init__()
        self.group_size, self.bits, self.mode = group_size, bits, mode
        self.weight, self.scales = weight, scales
        if biases is not None:
            self.biases = biases

    def __call__(self, x: mx.array, chosen: mx.array, in_order: bool = False) -> mx.array:
        return mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.get("biases"),
            rhs_indices=chosen,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=in_order,
        )


class Router(nn.Module):
    """Chooses each row's experts: norm, scale, proj, then softmax over the best in float32."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.top_k, self.eps = config.top_k_experts, config.rms_norm_eps
        self.root = config.hidden_size**-0.5
        self.proj = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.scale = mx.ones((config.hidden_size,))
        self.per_expert_scale = mx.ones((config.num_experts,))

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """[rows, H] -> (experts int [rows, k], their weights [rows, k])."""
        x = mx.fast.rms_norm(x, None, self.eps) * self.scale * self.root
        scores = self.proj(x).astype(mx.float32)
        chosen = mx.argpartition(-scores, self.top_k - 1, axis=-1)[..., : self.top_k]
        # Softmax over the chosen equals softmax over all, renormalised.
        weights = mx.softmax(mx.take_along_axis(scores, chosen, -1), -1)
        return chosen, weights.astype(x.dtype) * self.per_expert_scale[chosen]


class Experts(nn.Module):
    """once: numbers of rows whose products read every expert once for all rows that chose it."""

    SORT_FROM = 64  # row-expert pairs; from here on grouping the rows of an expert pays

    def __init__(self, config: TextConfig, inner: int):
        super().__init__()
        n, width = config.num_experts, config.hidden_size
        self.gate_proj = ExpertLinear(n, width, inner)
        self.up_proj = ExpertLinear(n, width, inner)
        self.down_proj = ExpertLinear(n, inner, width)
        self.top_k, self.once = config.top_k_experts, frozenset[int]()

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """[rows, H] through the experts [rows, k] of each row, added up by their weights."""
        rows, K = chosen.shape
        if rows in self.once:
            return self.read_once(x, chosen, weights)
        if rows * K < self.SORT_FROM:
            out = self._run(x[:, None, None, :], chosen)
            return (out.squeeze(-2) * weights[..., None]).sum(-2)
        order = mx.argsort(chosen.flatten())
        out = self._run(x[order // K][:, None, None, :], chosen.flatten()[order][:, None], True)
        out = out.reshape(rows * K, -1)[mx.argsort(order)].reshape(rows, K, -1)
        return (out * weights[..., None]).sum(-2)

    def read_once(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """The same by a kernel that reads every needed expert once for all rows."""
        order, expert = experts.in_order(chosen)
        maps = (self.gate_proj, self.up_proj, self.down_proj)
        gate, up, down = (cast(Packed, Packed.of(m)) for m in maps)
        inner = gelu(experts.multiply(x, gate, order, expert))
        inner = inner * experts.multiply(x, up, order, expert)
        out = experts.multiply(inner, down, order, expert).reshape(*chosen.shape, -1)
        return (weights[:, None] @ out).squeeze(1)

    def _run(self, x: mx.array, chosen: mx.array, in_order: bool = False) -> mx.array:
        inner = gelu(self.gate_proj(x, chosen, in_order)) * self.up_proj(x, chosen, in_order)
        return self.down_proj(inner, chosen, in_order)


class DecoderLayer(nn.Module):
    """One block: attention, MLP (beside experts where there are some), per-layer embedding, and
    the layer's own scalar on everything. fused: numbers of rows whose residuals and norms are one
    kernel. shards: this rank's part of it, where several run the model; place: the layer's."""

    def __init__(
        self,
        config: TextConfig,
        kind: str,
        mlp_width: int,
        kv_key: KVKey,
        own_kv: bool,
        shards: Shards | None = None,
        place: int = 0,
    ):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.kind, self.fused = kind, frozenset[int]()
        self.ranks = Ranks() if shards is None else shards.ranks
        expert_width = config.moe_intermediate_size
        if shards is not None:
            mlp_width = len(shards.inner(f"layers.{place}.mlp.down_proj", mlp_width))
            if config.enable_moe_block:
                expert_width = len(shards.inner(f"layers.{place}.experts.down_proj", expert_width))
        self.self_attn = Attention(config, kind, kv_key, own_kv, shards)
        self.mlp = MLP(width, mlp_width)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(width, eps=eps)
        if config.enable_moe_block:
            self.router = Router(config)
            self.experts = Experts(config, expert_width)
            self.post_feedforward_layernorm_1 = nn.RMSNorm(width, eps=eps)
            self.post_feedforward_layernorm_2 = nn.RMSNorm(width, eps=eps)
            self.pre_feedforward_layernorm_2 = nn.RMSNorm(width, eps=eps)
        if config.hidden_size_per_layer_input:
            inner = config.hidden_size_per_layer_input
            self.per_layer_input_gate = nn.Linear(width, inner, bias=False)
            self.per_layer_projection = nn.Linear(inner, width, bias=False)
            self.post_per_layer_input_norm = nn.RMSNorm(width, eps=eps)
        self.layer_scalar = mx.ones((1,))
        self.gelu = gelu

    def stack(self) -> None:
        """Once loaded: products of one input become one."""
        self.self_attn.stack()
        self.mlp.stack()

    def __call__(
        self, x: mx.array, kv: KVView, rotate: Rotate, per_layer: mx.array | None = None
    ) -> mx.array:
        """[B * T, H] -> the same; `per_layer` is [B * T, width of per-layer embeddings]."""
        attended = self.ranks.total(self.self_attn(self.input_layernorm(x), kv, rotate))
        x, normed = self._add(
            x, attended, self.post_attention_layernorm, then=self.pre_feedforward_layernorm
        )
        out = self.mlp(normed)
        if "experts" in self:
            chosen, weights = self.router(x)
            routed = self.experts(self.pre_feedforward_layernorm_2(x), chosen, weights)
            if self.ranks.size > 1:
                both = self.ranks.total(mx.concatenate([out, routed.astype(out.dtype)], -1))
                out, routed = mx.split(both, 2, -1)
            out = self.post_feedforward_layernorm_1(out)
            (out,) = self._add(out, routed, self.post_feedforward_layernorm_2)
        else:
            out = self.ranks.total(out)
        if per_layer is None:
            return self._add(x, out, self.post_feedforward_layernorm, self.layer_scalar)[0]
        (x,) = self._add(x, out, self.post_feedforward_layernorm)
        gated = self.gelu(self.per_layer_input_gate(x)) * per_layer
        embedded = self.per_layer_projection(gated)
        return self._add(x, embedded, self.post_per_layer_input_norm, self.layer_scalar)[0]

    def _add(
        self,
        x: mx.array,
        out: mx.array,
        norm: nn.Module,
        scale: mx.array | None = None,
        then: nn.Module | None = None,
    ) -> list[mx.array]:
        """(x + norm(out)) * scale and, where it is given, `then` of that."""
        if len(x) in self.fused:
            given = x, out, norm.weight, scale, None if then is None else then.weight
            if fused.fits_add(*given):
                return fused.add_norm(*given, eps=norm.eps)
        x = x + norm(out)
        x = x if scale is None else x * scale
        return [x] if then is None else [x, then(x)]


class ColumnLinear(nn.Module):
    """A linear map stored as [in, out]. MLX's CPU wheel multiplies through a reference BLAS whose
    fast loop runs along the stored rows: half the time of nn.Linear's [out, in].

    A product keeps one core busy. One of many multiplications is made in halves on two, which pays
    from HALVES on where the halves of a large map (SIZE numbers) lie ready, from WORK on where they
    do not: waking the other core takes 50 to 100 us. Each output is the same sum either way.
    """

    SIZE, HALVES, WORK = 1 << 20, 1 << 21, 1 << 23

    def __init__(self, weight: mx.array):
        super().__init__()
        parts = [weight]
        if weight.size >= self.SIZE and cores() > 1:
            parts = list(mx.split(weight, [len(weight) // 2]))
        self.parts = [mx.contiguous(part.T) for part in parts]

    def __call__(self, x: mx.array) -> mx.array:
        parts, rows = self.parts, x.size // x.shape[-1]
        work = rows * sum(part.size for part in parts)
        if len(parts) == 1:
            if work < self.WORK or cores() == 1:
                return x @ parts[0]
            parts = list(mx.split(parts[0], [parts[0].shape[1] // 2], -1))
        other = second_core() if work >= self.HALVES else None
        return mx.concatenate([mx.matmul(x, parts[0], stream=other), x @ parts[1]], -1)

    def scale(self, by: mx.array | float) -> None:
        """Multiplies the weight, by a number or [in, 1]."""
        self.parts = [part * by for part in self.parts]


def cores() -> int:
    return os.cpu_count() or 1


class SummedNorm(nn.Module):
    """An RMSNorm as x / sqrt(sum(x^2) + n eps) * (weight sqrt(n)): half the operations that
    mx.fast.rms_norm is on the CPU. folded: the maps behind have the weight in theirs."""

    def __init__(self, norm: nn.RMSNorm | HeadNorm):
        super().__init__()
        size = norm.weight.shape[-1]
        self.eps, self.weight = size * norm.eps, size**0.5 * norm.weight

        self.folded = False

    def __call__(self, x: mx.array) -> mx.array:
        x = x.astype(mx.float32)  # a packed table gives bfloat16 beside float32 norms
        x = x * mx.rsqrt(mx.square(x).sum(-1, keepdims=True) + self.eps)
        return x if self.folded else x * self.weight


@cache
def second_core() -> mx.ThreadLocalStream:
    """A CPU stream beside the default one, for each thread its own."""
    return mx.new_thread_local_stream(mx.cpu)


def head(model: nn.Module, hidden: mx.array) -> mx.array:
    """[..., H] -> [..., vocabulary], by `lm_head` where there is one, else by the tied table."""
    project = model.lm_head if "lm_head" in model else model.embed_tokens.as_linear
    return project(hidden)


def lay_out_for_cpu(model: nn.Module) -> None:
    """Store every float32 linear map and norm of `model` as the CPU computes it fastest, and fold
    factors into the maps: an operation costs 2 to 4 us there, whatever its size.

    A tied head becomes a map of its own beside the embedding table.
    """

    def replace_all(kind: type[nn.Module], make: Callable[[Any], nn.Module]) -> None:
        def replace(_: str, module: Any) -> Any:
            fits = type(module) is kind and module.weight.dtype == mx.float32
            return make(module) if fits else module

        leaves = tree_map_with_path(replace, model.leaf_modules(), is_leaf=nn.Module.is_module)
        model.update_modules(leaves)

    table = model.get("embed_tokens")
    if "lm_head" not in model and type(table) is nn.Embedding and table.weight.dtype == mx.float32:
        model.lm_head = ColumnLinear(table.weight)
    replace_all(nn.Linear, lambda linear: ColumnLinear(linear.weight))
    for kind in (nn.RMSNorm, HeadNorm):
        replace_all(kind, SummedNorm)
    for layer in model.layers:
        mlp, gate_up = layer.mlp, layer.mlp.gate_up_proj.maps
        _fold(layer.input_layernorm, layer.self_attn.qkv_proj.maps)
        _fold(layer.pre_feedforward_layernorm, gate_up)
        _fold_gelu(mlp, gate_up, mlp.down_proj, GATE**2)
        if "per_layer_input_gate" in layer:
            _fold_gelu(layer, [layer.per_layer_input_gate], layer.per_layer_projection, GATE)


def _fold(norm: nn.Module, behind: list[nn.Module]) -> None:
    """Gives the weight of a norm to the maps behind it."""
    if type(norm) is SummedNorm and all(type(m) is ColumnLinear for m in behind):
        norm.folded = True
        for m in behind:
            m.scale(norm.weight[:, None])


def _fold_gelu(
    owner: MLP | DecoderLayer, gates: list[nn.Module], out: nn.Module, by: float
) -> None:
    """Scales the maps before and behind a gelu as `scaled_gelu` takes and gives it."""
    if all(type(m) is ColumnLinear for m in (*gates, out)):
        owner.gelu = scaled_gelu
        for m in gates:
            m.scale(GATE)
        out.scale(1 / by)
