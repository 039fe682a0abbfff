"""Which kernels a loaded pair uses on this machine: races for its shapes, and the winners put in.

What a race gives is kept for the next load (`kernels.profile`). Where nothing is known, MLX's own
operations are used.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import mlx.core as mx

from mlx_mtp.config import FULL, TextConfig
from mlx_mtp.engine.kv import BLOCK, KVLayout, LayerKV, attention, by_mlx
from mlx_mtp.kernels import attention as long_attention
from mlx_mtp.kernels import experts, fused, head, matmul
from mlx_mtp.kernels.head import Adjustments, Shortlist
from mlx_mtp.kernels.profile import Profile
from mlx_mtp.kernels.quantized import Packed
from mlx_mtp.kernels.race import BUDGET, STOCK, Contest, Way, race
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.layers import Attention, DecoderLayer, Experts, rotation
from mlx_mtp.models.rows import RowsLinear, wrap
from mlx_mtp.models.target import Target

# Rows of a pass, the likeliest draft lengths first: the budget may end the races early.
ROWS = (5, 3, 2, 4, 9, 7, 6, 8, 1)
STEP_ROWS = (1, *(rows for rows in ROWS if rows > 1))  # of a drafter, which goes token by token
BOUNDS = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 3e-2}
SLOTS = 2048  # of the KV that attention is raced over
COPIES = 8  # of a shape that take turns, so that weights come from memory and not from a cache

Inputs = tuple[mx.array, ...]  # each [rows, ...]
Model = Target | Drafter


@dataclass(frozen=True)
class Site:
    """A place in a pair where kernels may be used. ways: those that take its shape. sample: inputs
    for so many rows. run: (way, or None for stock; inputs) -> [rows, ...]. take: use these ways,
    by rows, from now on, where that is kept by a module. rows: in which order they are raced. Sites
    with the same key are alike."""

    key: str
    ways: tuple[str, ...]
    sample: Callable[[int], Inputs]
    run: Callable[[str | None, Inputs], mx.array]
    take: Callable[[Mapping[int, str]], None] | None = None
    rows: tuple[int, ...] = ROWS


@dataclass
class Calibration:
    """The races of one machine. folder: where their results are kept. racing: run those that are
    missing; else only what is known is used. exact: use nothing whose rows are not bit for bit
    what a row alone is. notices: lines for the user. seconds: left for races, of all that is asked
    of it together."""

    folder: Path
    racing: bool = True
    exact: bool = False
    notices: list[str] = field(default_factory=list)
    seconds: float = BUDGET

    def __post_init__(self) -> None:
        self.profile, ignored = Profile.load(self.folder)
        if ignored:
            self.notices.append(ignored)

    def prepare(self, target: Target, drafter: Drafter | None) -> None:
        """Race what is not known of this pair's shapes, for a few seconds at most, and install the
        winners. WAITS for the device."""
        found: list[Site] = []
        wrap(target)
        found += sites(target)
        if drafter is not None:
            wrap(drafter)
            found += (replace(site, rows=STEP_ROWS) for site in sites(drafter))
        found += attention_sites(KVLayout(target.config.text, target.dtype))
        self.settle(found)

    def attention(self, text: TextConfig, dtype: mx.Dtype, bits: int | None) -> dict[int, str]:
        """How blocks attend in full layers, for `KVLayout.full_ways`. WAITS for the device where
        this kind of KV was not raced yet."""
        alike = attention_sites(KVLayout(text, dtype, bits))
        self.settle(alike)
        return self._ways(alike[0])

    def settle(self, found: Iterable[Site]) -> None:
        """Race, keep and install for these sites."""
        alike: dict[str, list[Site]] = defaultdict(list)
        for site in found:
            alike[site.key].append(site)
        if self.racing:
            self._race(alike)
        for several in alike.values():
            ways = self._ways(several[0])
            for site in several:
                if site.take:
                    site.take(ways)

    def _ways(self, site: Site) -> dict[int, str]:
        won = self.profile.ways(site.key)
        return steady(site, won) if self.exact else won

    def _race(self, alike: Mapping[str, list[Site]]) -> None:
        todo = [
            (several[:COPIES], rows)
            for turn in range(len(ROWS))
            for key, several in alike.items()
            for rows in several[0].rows[turn : turn + 1]
            if several[0].ways and not self.profile.raced(key, rows)
        ]
        if not todo or self.seconds <= 0:
            return
        started = time.perf_counter()
        outcome = race((partial(contest, several, rows) for several, rows in todo), self.seconds)
        self.seconds -= time.perf_counter() - started
        self.profile.learn(outcome)
        won = sum(way != STOCK for rows in outcome.wins.values() for way in rows.values())
        line = f"raced kernels for {len(todo) - outcome.left} shapes of this model, {won} won"
        if outcome.left:
            line += f", {outcome.left} are left for the next load"
        try:
            self.profile.save(self.folder)
            line += f" (kept in {self.folder}; --no-calibrate skips this)"
        except OSError as error:
            line += f" (not kept: {error.strerror} in {self.folder})"
        if outcome.wrong:
            line += f"; {len(outcome.wrong)} are not used here: {outcome.wrong[0]}"
        self.notices.append(line)


def steady(site: Site, won: Mapping[int, str]) -> dict[int, str]:
    """Rows -> a way whose first row is bit for bit what one row alone gives: the winner, else
    stock, else another; where none does, stock. WAITS for the device."""
    ways = {1: won[1]} if 1 in won else {}
    for rows in range(2, BLOCK + 1) if site.ways else ():
        inputs = site.sample(rows)
        alone = site.run(won.get(1), tuple(part[:1] for part in inputs))
        for way in dict.fromkeys((won.get(rows), None, *site.ways)):
            with suppress(RuntimeError, ValueError):  # as Metal's compiler refuses a source
                if mx.array_equal(site.run(way, inputs)[:1], alone):
                    ways |= {rows: way} if way else {}
                    break
    return ways


def contest(alike: list[Site], rows: int) -> Contest:
    """The race at so many rows of sites that are alike, which take turns."""
    first = alike[0]
    inputs = first.sample(rows)
    mx.eval(inputs)

    def way(name: str | None, given: Inputs) -> Way:
        def run(sample: int, after: mx.array | None = None, /) -> mx.array:
            x, *others = given
            if after is not None:
                x = x + (after.flatten()[:1] * 0).astype(x.dtype)
            return alike[sample % len(alike)].run(name, (x, *others))

        return run

    return Contest(
        first.key,
        rows,
        way(None, inputs),
        {name: way(name, inputs) for name in first.ways},
        BOUNDS[inputs[0].dtype],
    )


def sites(model: Model) -> Iterator[Site]:
    """All sites of a wrapped model, but that of attention, which depends on the KV."""
    dtype, whole = model.norm.weight.dtype, model.get("lm_head")
    for _, module in model.named_modules():
        if isinstance(module, RowsLinear) and module is not whole:
            yield product_site(module, dtype)
        elif isinstance(module, Experts) and (site := experts_site(module, dtype)):
            yield site
        elif isinstance(module, DecoderLayer):
            yield norms_site(module, dtype)
            yield heads_site(module.self_attn, model.config.text, dtype)
    if site := head_site(model, dtype):
        yield site
    if isinstance(whole, RowsLinear):
        # Last, for it is large, and needed only where a short list will not do.
        yield product_site(whole, dtype)


def product_site(module: RowsLinear, dtype: mx.Dtype) -> Site:
    packed = module.packed
    able = {"tile": matmul.fits_tile, "matrix": matmul.fits_matrix}
    return Site(
        f"product {_shape(packed)} {_name(dtype)}",
        tuple(name for name, takes in able.items() if takes(max(ROWS), packed)),
        lambda rows: (_numbers(dtype, rows, packed.inputs),),
        lambda way, given: (
            packed.multiply(given[0]) if way is None else matmul.multiply(way, given[0], packed)
        ),
        lambda ways: module.take(dict(ways)),
    )


def experts_site(module: Experts, dtype: mx.Dtype) -> Site | None:
    gate, down = Packed.of(module.gate_proj), Packed.of(module.down_proj)
    if gate is None or down is None or not (experts.fits(gate) and experts.fits(down)):
        return None
    count, width, k = gate.weight.shape[0], gate.inputs, module.top_k

    def sample(rows: int) -> Inputs:
        chosen = mx.argsort(mx.random.uniform(shape=(rows, count)), -1)[:, :k]
        return _numbers(dtype, rows, width), chosen, mx.full((rows, k), 1 / k).astype(dtype)

    def take(ways: Mapping[int, str]) -> None:
        module.once = frozenset(ways)

    return Site(
        f"experts {count}x{_shape(gate)} {_shape(down)} top {k} {_name(dtype)}",
        ("once",),
        sample,
        lambda way, given: module(*given) if way is None else module.read_once(*given),
        take,
    )


def norms_site(layer: DecoderLayer, dtype: mx.Dtype) -> Site:
    """A residual between two norms."""
    width = layer.input_layernorm.weight.size
    before, then = layer.post_attention_layernorm, layer.pre_feedforward_layernorm

    def run(way: str | None, given: Inputs) -> mx.array:
        x, a = given
        make = fused.reference_add if way is None else fused.add_norm
        return mx.concatenate(make(x, a, before.weight, None, then.weight, eps=before.eps), -1)

    def take(ways: Mapping[int, str]) -> None:
        layer.fused = frozenset(ways)

    return Site(
        f"norms {width} {_name(dtype)}",
        ("fused",),
        lambda rows: (_numbers(dtype, rows, width), _numbers(dtype, rows, width)),
        run,
        take,
    )


def heads_site(attn: Attention, text: TextConfig, dtype: mx.Dtype) -> Site:
    """Norms and RoPE between the product for q, k and v and attention."""
    dim, counts = attn.head_dim, (attn.heads, attn.own_kv * attn.kv_heads)
    plain = (m.linear if isinstance(m, RowsLinear) else m for m in attn.qkv_proj.maps)
    width = sum(len(m.weight) for m in plain)

    def run(way: str | None, given: Inputs) -> mx.array:
        rotate = rotation(text.rope[attn.kind], dim, mx.array([SLOTS]), len(given[0]))
        attn.fused = frozenset(() if way is None else ROWS)
        parts = [part[0].swapaxes(0, 1) for part in attn.heads_of(given[0], 1, rotate)]
        return mx.concatenate(parts, 1)

    def take(ways: Mapping[int, str]) -> None:
        attn.fused = frozenset(ways)

    return Site(
        f"heads {counts[0]}+{counts[1]} of {width // dim}x{dim} {_name(dtype)}",
        ("fused",),
        lambda rows: (_numbers(dtype, rows, width),),
        run,
        take,
    )


def head_site(model: Model, dtype: mx.Dtype) -> Site | None:
    """The choice of the best token, by all logits or from a short list."""
    short = shortlist(model)
    if short is None:
        return None
    known = short

    def run(way: str | None, given: Inputs) -> mx.array:
        (x,) = given
        if way is None:
            logits, _ = model.scores(x)
            finite = mx.isfinite(logits.sum(-1))
            best = mx.take_along_axis(logits, mx.argmax(logits, -1, keepdims=True), -1)[:, 0]
        else:
            best, _, finite = known.candidates(x, len(x), Adjustments(), None, model.clusters_of(x))
            best = best.max(-1)
        return mx.where(finite, best, mx.nan)

    def take(ways: Mapping[int, str]) -> None:
        model.shortlist = Shortlist(known.table, known.cap, known.names, frozenset(ways))

    kind = "clusters" if known.names is not None else "head"
    return Site(
        f"{kind} {_shape(known.table)} {_name(dtype)}",
        ("short",),
        lambda rows: (_numbers(dtype, rows, known.table.inputs),),
        run,
        take,
    )


def shortlist(model: Model) -> Shortlist | None:
    """What the head kernel needs of a model; None where it does not take its head."""
    text, names = model.config.text, None
    if "clusters" in model:
        table, names = Packed.of(model.clusters), model.masked_embedding.token_ordering
    else:
        module = model.get("lm_head") or model.embed_tokens
        table = module.packed if isinstance(module, RowsLinear) else Packed.of(module)
    if table is None or not head.fits(max(ROWS), table):
        return None
    return Shortlist(table, text.final_logit_softcapping, names)


def attention_site(layout: KVLayout) -> Site:
    """Full layers of one KV layout, over SLOTS slots."""
    text, dtype = layout.text, layout.dtype
    heads, kv_heads, dim = text.num_attention_heads, text.kv_heads_of(FULL), text.head_dim_of(FULL)

    @cache
    def buffers() -> LayerKV:
        """Made where there is a race, and once, as a text's are."""
        shape = (1, kv_heads, SLOTS, dim)
        return layout.encode(FULL, mx.random.normal(shape), mx.random.normal(shape))

    def run(way: str | None, given: Inputs) -> mx.array:
        kv = buffers()
        queries = given[0].swapaxes(0, 1)[None]
        tokens = queries.shape[2]
        length = mx.array([SLOTS - BLOCK])
        if way == "kernel":
            out = long_attention.attend(queries, layout.long_kv(kv), length)
        else:
            at = length[:, None, None, None] + mx.arange(tokens)[:, None]
            mask = mx.arange(SLOTS) <= at
            if way is None and not layout.bits:
                out = by_mlx(queries, kv[0], kv[1], mask)
            else:
                out = attention(queries, kv_heads, *layout.products(kv), mask)
        return out[0].swapaxes(0, 1)

    # Packed KV has no stock way but the folded one.
    ways = ("kernel",) if layout.bits else ("folded", "kernel")
    fit = long_attention.fits(dim, layout.bits or 0)
    return Site(
        f"attention {heads}/{kv_heads}x{dim} kv {layout.bits or 'whole'} {_name(dtype)}",
        ways if fit else ways[:-1],
        lambda rows: (_numbers(dtype, rows, heads, dim) * dim**-0.25,),
        run,
    )


def attention_sites(layout: KVLayout) -> list[Site]:
    """As many as take turns, each with a KV of its own."""
    return [attention_site(layout) for _ in range(COPIES)]


def _shape(packed: Packed) -> str:
    return f"{packed.outputs}x{packed.inputs} {packed.mode}{packed.bits}/{packed.group_size}"


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _numbers(dtype: mx.Dtype, *shape: int) -> mx.array:
    return mx.random.normal(shape).astype(dtype)
