"""What a pair would take and do on a machine, from configs alone: memory, and a roofline of speed.

Memory is counted tensor by tensor, as `convert -q` packs them, and KV as the engine allocates it.

Speed is what bandwidth, arithmetic and launches allow, no measurement. A pass over `rows` tokens
reads packed matrices as often as MLX does (`reads`) and floats once; of experts and of tables that
are looked up, what each row asks for; and, behind a full context, the keys and values that its
layers attend to. Arithmetic is two operations a weight and row, where floats count TILE rows from
two on. A pass takes the longer of the two, and the same time for every launch. A round is a pass of
the target over its drafts and one more token, and a pass of the drafter over one row for every
draft. Three numbers are fitted to a few measurements that others published of other programs:
FLOPS, LAUNCH and LAUNCH_BEFORE_M3; `python -m benchmarks.plan` shows them and the errors that are
left. Prompts, sampling and whatever the host makes the GPU wait for are not in it.

Of several machines that share a model the one with the largest part is planned for; their speed is
the roofline of that part, and their messages' time by `measure.hosts`.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_mtp.config import FULL, DrafterConfig, TargetConfig, TextConfig, check_pair
from mlx_mtp.engine.draft_length import MAX_DRAFT
from mlx_mtp.engine.kv import KVLayout, capacity_for
from mlx_mtp.measure.hosts import Link, links_of, of_round
from mlx_mtp.measure.machine import Chip, Machine
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.shards import Ranks, Shards
from mlx_mtp.models.target import Target
from mlx_mtp.weights import fit, known, published, recipe
from mlx_mtp.weights.checkpoint import Checkpoint, Folder
from mlx_mtp.weights.find import Found, source_of
from mlx_mtp.weights.planned import part_of

BITS = (4, 8, 16)
CONTEXT = 8192
M3 = 15  # its GPU's generation
TILE = 32  # rows that MLX computes of a product of floats, from two on
DRAFTER_BITS = 8  # as a drafter is packed when it is loaded on a GPU
# Assumed: the share of its bandwidth that a chip reaches; so few measurements cannot tell it from
# launches. Fitted: the share of its arithmetic, and seconds a launch, before M3 to one speed only.
BANDWIDTH = 0.9
FLOPS, LAUNCH, LAUNCH_BEFORE_M3 = 0.34, 7e-6, 18.5e-6
# Launches of a round as `benchmarks.launches` counts them, of MLX's operations: for a layer, more
# with per-layer embeddings, more with experts; for the head; for a drafter's layer, head included.
LAYER, PER_LAYER, EXPERTS, HEAD, DRAFTER_LAYER = 20, 3, 24, 25, 20

# Published for 4 drafts, the share of rounds that accept so many: vLLM's 31B and 26B-A4B. The first
# stands for 12B, too: its mean, 0.635, is that of code and prose published there. For E2B and E4B,
# and for what is no published shape, nothing is: the lower one stands.
_HIGH, _LOW = (0.86, 0.71, 0.55, 0.42), (0.84, 0.60, 0.39, 0.27)
ACCEPTED = {"12b": _HIGH, "31b": _HIGH}

ROOFLINE = (
    "tokens/s are a roofline, not measured: what bandwidth, arithmetic and launches allow behind a "
    "full context, one request, at published acceptances"
)


@dataclass(frozen=True)
class Weights:
    """total: bytes in memory. packed, floats: of these in matrices that a pass reads whole,
    quantised or not; by_row: what each of its rows reads of experts and tables. The others: how
    many weights these hold."""

    total: int
    packed: float
    floats: float
    by_row: float
    packed_numbers: float
    float_numbers: float
    by_row_numbers: float


@dataclass(frozen=True)
class Sizes:
    """A pair at a quantisation. bits: of most of the target's weights. module: its shapes, of what
    one machine has where several share it. dtype: of KV."""

    name: str
    bits: int
    text: TextConfig
    module: Target
    target: Weights
    drafter: Weights | None = None
    drafter_kinds: tuple[str, ...] = ()
    dtype: mx.Dtype = mx.bfloat16
    convert: str | None = None


@dataclass(frozen=True)
class Speed:
    """Predicted. messages, bytes: of a round of so many drafts."""

    plain_tps: float
    mtp_tps: float
    draft_len: int
    messages: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """Bytes; tokens/s are None where the chip is not known, and of several machines, whose are in
    `links`, by their names. snapshots: what conversations that may
    go on can take. draft_len: what is fastest, 0 for plain decoding. context: of KV, the model's
    own at most. convert: the command that makes such a pair, None where it is as stored."""

    model: str
    bits: int
    fits: bool
    weights: int
    drafter: int
    kv: int
    headroom: int
    snapshots: int
    plain_tps: float | None
    mtp_tps: float | None
    draft_len: int | None
    context: int
    convert: str | None
    links: Mapping[str, Speed] | None = None

    @property
    def needed(self) -> int:
        return self.weights + self.drafter + self.kv + self.headroom

    def to_dict(self) -> dict[str, Any]:
        made = {k: round(v, 1) if isinstance(v, float) else v for k, v in asdict(self).items()}
        if self.links is None:
            del made["links"]
        for key in ("weights", "drafter", "kv", "headroom", "snapshots"):
            made[f"{key}_gb"] = round(made.pop(key) / 1e9, 6)
        return made


def plan(sizes: Sizes, machine: Machine, context: int = CONTEXT) -> Plan:
    target, drafter = sizes.target, 0 if sizes.drafter is None else sizes.drafter.total
    context = min(context, sizes.text.max_position_embeddings)
    layout = KVLayout(sizes.text, sizes.dtype, kv_heads=sizes.module.kv_heads)
    kv = layout.nbytes(1, capacity_for(context))
    weights = target.total + drafter
    headroom = weights // 10  # as `load_pair` leaves it, for activations
    left = machine.limit - weights
    plain = best = length = links = None
    chip = machine.chip
    if sizes.module.ranks.size > 1:
        links = {k.name: over(k, sizes, chip, context) for k in links_of(chip)} if chip else {}
    elif chip is not None:
        plain, best, length = speeds_of(sizes, chip, context)
    return Plan(
        model=sizes.name,
        bits=sizes.bits,
        fits=kv + headroom <= left,
        weights=target.total,
        drafter=drafter,
        kv=kv,
        headroom=headroom,
        snapshots=max(min(left // 4, left - kv - headroom), 0),
        plain_tps=plain,
        mtp_tps=best,
        draft_len=length,
        context=context,
        convert=sizes.convert,
        links=links,
    )


def shared(sizes: Sizes, hosts: int) -> Sizes:
    """The same on the last of so many machines that share it: none has more. Raises UsageError
    where it cannot be divided."""
    packed = {
        path: {"group_size": m.group_size, "bits": m.bits, "mode": m.mode}
        for path, m in sizes.module.named_modules()
        if hasattr(m, "bits")
    }
    part, _ = part_of(sizes.module.config, packed, Ranks(hosts - 1, hosts))
    weights, whole = (of_target(module, sizes.dtype.size) for module in (part, sizes.module))
    total = sizes.target.total - whole.total + weights.total
    return replace(sizes, module=part, target=replace(weights, total=total))


def speeds_of(
    sizes: Sizes, chip: Chip, context: int, link: Link | None = None
) -> tuple[float, float, int]:
    """Tokens/s without drafts, at most, and with how many drafts a round that is."""
    tokens = expected_tokens(acceptance(sizes.text) if sizes.drafter else ())
    speeds = [n / round_s(sizes, chip, k, context, link) for k, n in enumerate(tokens)]
    return speeds[0], max(speeds), speeds.index(max(speeds))


def over(link: Link, sizes: Sizes, chip: Chip, context: int) -> Speed:
    plain, best, length = speeds_of(sizes, chip, context, link)
    traffic = of_round(sizes.text, 1, length, sizes.dtype.size)
    return Speed(round(plain, 1), round(best, 1), length, *traffic)


def expected_tokens(accepted: tuple[float, ...]) -> list[float]:
    """Of a round with 0, 1, .. drafts, the bonus token included. Past the published positions
    acceptance falls on at the rate of the last two."""
    if not accepted:
        return [1.0]
    rates = list(accepted)
    while len(rates) < MAX_DRAFT:
        rates.append(rates[-1] * rates[-1] / rates[-2])
    return list(accumulate(rates, initial=1.0))


def round_s(sizes: Sizes, chip: Chip, drafts: int, context: int, link: Link | None = None) -> float:
    """Seconds of a round, by the roofline; link: and of what goes over it."""
    text, shards = sizes.text, Shards(sizes.text, sizes.module.ranks)
    launches = len(text.layer_types) * (
        LAYER + PER_LAYER * bool(text.hidden_size_per_layer_input) + EXPERTS * text.enable_moe_block
    )
    kv = sum(
        _kv_read(sizes, [kind], context) * len(shards.seen(kind)) / text.kv_heads_of(kind)
        for kind in text.layer_types
    )
    seconds = pass_s(sizes.target, chip, drafts + 1, launches + HEAD, kv)
    if drafts and sizes.drafter is not None:
        kinds = sizes.drafter_kinds
        kv = _kv_read(sizes, kinds, context)
        seconds += drafts * pass_s(sizes.drafter, chip, 1, DRAFTER_LAYER * len(kinds), kv)
    if link is not None:
        seconds += link.seconds(of_round(text, 1, drafts, sizes.dtype.size), shards.ranks.size)
    return seconds


def pass_s(weights: Weights, chip: Chip, rows: int, launches: int, kv: float) -> float:
    """Seconds of a pass over `rows` tokens of one request."""
    packed = reads(rows, chip.generation) * weights.packed
    size = packed + weights.floats + rows * weights.by_row + kv
    numbers = rows * (weights.packed_numbers + weights.by_row_numbers)
    numbers += (TILE if rows > 1 else 1) * weights.float_numbers
    arithmetic = 2 * numbers / (FLOPS * chip.flops)
    launch = LAUNCH if chip.generation >= M3 else LAUNCH_BEFORE_M3
    return max(size / (BANDWIDTH * chip.bandwidth), arithmetic) + launches * launch


def reads(rows: int, generation: int) -> int:
    """How often MLX reads a packed matrix for so many rows: once for every 5 on M3 and newer; on M1
    and M2 for every row. (From 6 rows on they compute a tile of 32, and nobody published what that
    costs.)"""
    return -(-rows // 5) if generation >= M3 else rows


def weigh(module: nn.Module, shares: Mapping[str, float], width: int = 2) -> Weights:
    """Of a module that holds shapes only. shares: a part of a tensor's name -> which share of the
    tensor a row reads; others are read whole. width: bytes of a float; with 4 a tied head has a
    table of its own, as `lay_out_for_cpu` gives it."""
    bits = {path: m.bits for path, m in module.named_modules() if hasattr(m, "bits")}
    own = width == 4 and {"lm_head", "masked_embedding"}.isdisjoint(module)
    whole, numbers = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    by_row = by_row_numbers = size = 0.0
    for name, array in tree_flatten(module.parameters()):
        path, _, leaf = name.rpartition(".")
        nbytes = array.size * (width if mx.issubdtype(array.dtype, mx.floating) else array.itemsize)
        count = array.size * 32 // bits[path] if leaf == "weight" and path in bits else array.size
        count = 0 if leaf in ("scales", "biases") else count
        size += nbytes * (2 if own and name == "embed_tokens.weight" and path not in bits else 1)
        share = next((s for part, s in shares.items() if part in name), None)
        if share is None:
            whole[path in bits] += nbytes
            numbers[path in bits] += count
        else:
            by_row += share * nbytes
            by_row_numbers += share * count
    by_kind = (whole[True], whole[False], by_row, numbers[True], numbers[False], by_row_numbers)
    return Weights(int(size), *by_kind)


def of_target(module: Target, width: int = 2) -> Weights:
    text = module.config.text
    shares = {"embed_tokens_per_layer.": 1 / max(text.vocab_size_per_layer_input, 1)}
    if text.enable_moe_block:
        shares[".experts."] = text.top_k_experts / text.num_experts
    if not text.tie_word_embeddings:
        shares["embed_tokens."] = 1 / text.vocab_size
    return weigh(module, shares, width)


def of_drafter(module: Drafter, width: int = 2) -> Weights:
    config, shares = module.config, dict[str, float]()
    if config.use_ordered_embeddings:
        share = config.centroid_intermediate_top_k / config.num_centroids
        shares = {"embed_tokens.": share, "token_ordering": share}
    return weigh(module, shares, width)


def pack(module: nn.Module, bits: int, prefix: str = "") -> None:
    """Gives a module the packed layers that `convert -q bits` would write; none at 16."""
    rules = recipe.make(bits if bits < 16 else None)

    def decide(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if rules is None or not hasattr(layer, "to_quantized"):
            return False
        scheme = rules.scheme(prefix + path, layer.weight.shape[-1])
        return False if scheme is None else scheme.as_dict()

    nn.quantize(module, class_predicate=decide)


def published_pairs(cpu: bool = False, names: Iterable[str] = known.SHORT) -> list[Sizes]:
    """The five published pairs at each of BITS; for cpu see `converted`."""
    made = []
    for name in names:
        source = known.SHORT[name].drafter.removesuffix("-assistant")
        configs = published.configs(name)
        made += [converted(name, source, *configs, bits, cpu=cpu) for bits in BITS]
    return made


def converted(
    name: str,
    source: str | None,
    target: TargetConfig,
    drafter: DrafterConfig | None,
    bits: int,
    drafter_bits: int = DRAFTER_BITS,
    cpu: bool = False,
    options: Sequence[str] = (),
) -> Sizes:
    """What converting `source` gives; None or 16 bits: it is left as it is. cpu: as it is loaded
    there, floats in float32 where that pays, a drafter not packed. options: of convert."""
    stored = source is None or bits == 16
    module, of_assistant = Target(target), None
    pack(module, bits)
    float32 = cpu and of_target(module, width=4).total <= fit.FLOAT32_LIMIT
    width = 4 if float32 else 2
    if drafter is not None:
        assistant = Drafter(drafter)
        pack(assistant, 16 if cpu and stored else drafter_bits, recipe.DRAFTER)
        of_assistant = of_drafter(assistant, width=width)
    out = f"{Path(name).name}-{bits}bit"
    command = ["mlx-mtp", "convert", source or "", *options, "-q", str(bits), "-o", out]
    return Sizes(
        name=name,
        bits=32 if float32 and bits == 16 else bits,
        text=target.text,
        module=module,
        target=of_target(module, width=width),
        drafter=of_assistant,
        drafter_kinds=drafter.text.layer_types if drafter else (),
        dtype=mx.float32 if float32 else mx.bfloat16,
        convert=None if stored else shlex.join(command),
    )


def without_weights(model: str, drafter: str | None, cpu: bool, options: list[str]) -> list[Sizes]:
    """From shapes alone: those of a short name, or of a folder's config, packed as that says or at
    each of BITS, with the drafter that is named or the one published for that shape. Nothing
    where there are weights, whose headers say more. Raises LoadError."""
    if model.lower() in known.SHORT and not Path(model).exists():
        return [] if drafter else published_pairs(cpu, [model.lower()])
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file() or any(folder.glob("*.safetensors")):
        return []
    checkpoint, assistant = Checkpoint.open(Folder.at(model)), None
    config = TargetConfig.from_dict(checkpoint.config, checkpoint.where())
    if drafter is not None:
        other = Checkpoint.open(source_of(drafter))
        assistant = DrafterConfig.from_dict(other.config, other.where())
        check_pair(config, assistant)
    else:
        fits = known.drafter_by_shape(config.text)
        name = next((name for name, ids in known.SHORT.items() if ids.drafter == fits), None)
        assistant = published.configs(name)[1] if name else None
    scheme = checkpoint.config.get("quantization")
    packed = scheme.get("bits") if isinstance(scheme, dict) else None
    if packed in recipe.AFFINE_BITS:
        return [converted(model, None, config, assistant, packed, cpu=cpu)]
    return [converted(model, model, config, assistant, n, cpu=cpu, options=options) for n in BITS]


def of_checkpoint(found: Found, cpu: bool, options: Sequence[str] = ()) -> list[Sizes]:
    """A pair as it is stored, and where it is not packed, what conversions give; for cpu and
    options see `converted`."""
    target, drafter = found.target, found.drafter
    float32 = cpu and target.nbytes(float32=True) <= fit.FLOAT32_LIMIT
    assistant = None
    if drafter is not None:
        if not cpu and not drafter.quantized:
            drafter.pack(DRAFTER_BITS)
        assistant = replace(of_drafter(drafter.module), total=drafter.nbytes(float32))
    bits = Counter(scheme["bits"] for scheme in target.quantized.values())
    name = target.source.name
    stored = Sizes(
        name=name,
        bits=bits.most_common(1)[0][0] if bits else 32 if float32 else 16,
        text=target.text,
        module=target.module,
        target=replace(of_target(target.module), total=target.nbytes(float32)),
        drafter=assistant,
        drafter_kinds=drafter.text.layer_types if drafter else (),
        dtype=mx.float32 if float32 else mx.bfloat16,
    )
    if bits:
        return [stored]
    configs = found.config, None if drafter is None else drafter.module.config
    made = (converted(name, name, *configs, n, cpu=cpu, options=options) for n in BITS if n < 16)
    return [stored, *made]


def acceptance(text: TextConfig) -> tuple[float, ...]:
    """As published for a target of that shape, or one like it."""
    drafter = known.drafter_by_shape(text)
    return next((ACCEPTED[n] for n in ACCEPTED if known.SHORT[n].drafter == drafter), _LOW)


def _kv_read(sizes: Sizes, kinds: Iterable[str], context: int) -> float:
    """Bytes of keys and values that layers of these types attend to."""
    text, itemsize = sizes.text, sizes.dtype.size
    seen = {kind: context if kind == FULL else min(context, text.sliding_window) for kind in kinds}
    return sum(seen[kind] * text.kv_bytes_per_token(kind, itemsize) for kind in kinds)
