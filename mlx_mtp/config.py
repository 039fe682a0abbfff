"""What config.json says, checked: `TargetConfig`, `DrafterConfig`, and whether two of them fit.

Field names are those of the published configs. Both spellings of the full-attention layers' shape
are read: `global_head_dim` and `num_global_key_value_heads`, and the `per_layer_config` that
transformers 5.24 writes in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_mtp.errors import LoadError, PairError

SLIDING = "sliding_attention"
FULL = "full_attention"
TARGET_TYPES = ("gemma4", "gemma4_unified", "gemma4_text", "gemma4_unified_text")
DRAFTER_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one layer type: base `theta`; the rotated fraction of each head."""

    theta: float
    fraction: float


@dataclass(frozen=True)
class TextConfig:
    """The transformer itself: the `text_config` of a target or a drafter (or a flat config)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    global_head_dim: int
    num_global_key_value_heads: int
    layer_types: tuple[str, ...]
    sliding_window: int
    max_position_embeddings: int
    rope: Mapping[str, Rope]
    rms_norm_eps: float = 1e-6
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    enable_moe_block: bool = False
    num_experts: int = 0
    top_k_experts: int = 0
    moe_intermediate_size: int = 0
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = True

    @property
    def num_owners(self) -> int:
        """How many layers, from the first, write KV of their own."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    @property
    def donors(self) -> dict[str, int]:
        """Layer type -> the last layer of that type that owns KV; shared layers and drafters
        read its KV."""
        return {self.layer_types[i]: i for i in range(self.num_owners)}

    def kv_layer(self, layer: int) -> int:
        """The layer whose KV `layer` attends to: its own, or the donor of its type."""
        return layer if layer < self.num_owners else self.donors[self.layer_types[layer]]

    def head_dim_of(self, layer_type: str) -> int:
        return self.global_head_dim if layer_type == FULL else self.head_dim

    def kv_heads_of(self, layer_type: str) -> int:
        return self.num_global_key_value_heads if layer_type == FULL else self.num_key_value_heads

    def k_eq_v(self, layer_type: str) -> bool:
        """Whether such layers have no v_proj: V is the raw k_proj output under a bare norm."""
        return self.attention_k_eq_v and layer_type == FULL

    def mlp_width(self, layer: int) -> int:
        wide = self.use_double_wide_mlp and layer >= self.num_owners
        return self.intermediate_size * (2 if wide else 1)

    def kv_bytes_per_token(self, layer_type: str, itemsize: int) -> int:
        """Bytes that one position takes in one layer of that type, K and V together."""
        return 2 * self.kv_heads_of(layer_type) * self.head_dim_of(layer_type) * itemsize


@dataclass(frozen=True)
class TargetConfig:
    """A Gemma 4 target, text only. `quantization` is the config's block as it stands."""

    model_type: str
    text: TextConfig
    dtype: str
    eos_token_ids: tuple[int, ...]
    quantization: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> TargetConfig:
        """Raises LoadError naming `where` and the key."""
        kind = raw.get("model_type")
        if kind in DRAFTER_TYPES:
            raise LoadError(
                f"{where}: model_type {kind} is an MTP drafter, not a model that can answer alone; "
                "name the target with --model and this one with --drafter"
            )
        if kind not in TARGET_TYPES:
            raise LoadError(
                f"{where}: model_type {kind!r} is not Gemma 4 ({', '.join(TARGET_TYPES)})"
            )
        nested = raw.get("text_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise LoadError(f"{where}: text_config is not an object")
        if nested is None and not str(kind).endswith("_text"):
            raise LoadError(f"{where}: text_config is missing")
        text = _text_config(raw if nested is None else nested, where, drafter=False)
        return cls(
            model_type=str(kind),
            text=text,
            dtype=_dtype(raw, nested),
            eos_token_ids=_union(token_ids(raw, where), token_ids(nested or {}, where)),
            quantization=raw.get("quantization") or raw.get("quantization_config") or {},
        )


@dataclass(frozen=True)
class DrafterConfig:
    """A Gemma 4 assistant: `text` is its own small transformer, whose layers own no KV."""

    model_type: str
    text: TextConfig
    backbone_hidden_size: int
    use_ordered_embeddings: bool
    num_centroids: int
    centroid_intermediate_top_k: int
    dtype: str
    quantization: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> DrafterConfig:
        """Raises LoadError naming `where` and the key."""
        kind = raw.get("model_type")
        if kind not in DRAFTER_TYPES:
            raise LoadError(
                f"{where}: not an assistant checkpoint (model_type {kind!r}; "
                f"a drafter has {' or '.join(DRAFTER_TYPES)})"
            )
        nested = raw.get("text_config")
        if not isinstance(nested, Mapping):
            raise LoadError(f"{where}: text_config is missing")
        text = _text_config(nested, where, drafter=True)
        ordered = bool(raw.get("use_ordered_embeddings", False))
        config = cls(
            model_type=str(kind),
            text=text,
            backbone_hidden_size=_positive(raw, "backbone_hidden_size", where),
            use_ordered_embeddings=ordered,
            num_centroids=_positive(raw, "num_centroids", where) if ordered else 0,
            centroid_intermediate_top_k=(
                _positive(raw, "centroid_intermediate_top_k", where) if ordered else 0
            ),
            dtype=_dtype(raw, nested),
            quantization=raw.get("quantization") or raw.get("quantization_config") or {},
        )
        if ordered:
            if text.vocab_size % config.num_centroids:
                raise LoadError(
                    f"{where}: num_centroids {config.num_centroids} does not divide "
                    f"vocab_size {text.vocab_size}"
                )
            if config.centroid_intermediate_top_k > config.num_centroids:
                raise LoadError(
                    f"{where}: centroid_intermediate_top_k {config.centroid_intermediate_top_k} "
                    f"is more than num_centroids {config.num_centroids}"
                )
        return config


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """Raises PairError, one line with both values, where the two cannot work together."""
    t, d = target.text, drafter.text
    wanted: list[tuple[str, object, object]] = [
        ("hidden size", t.hidden_size, drafter.backbone_hidden_size),
        ("vocabulary", t.vocab_size, d.vocab_size),
    ]
    for kind in sorted(set(d.layer_types)):
        if kind not in t.donors:
            raise PairError(
                f"the drafter does not fit: it has {kind} layers, but no layer of the target "
                "that owns KV is of that type"
            )
        wanted.append((f"{kind} kv heads", t.kv_heads_of(kind), d.kv_heads_of(kind)))
        wanted.append((f"{kind} head dim", t.head_dim_of(kind), d.head_dim_of(kind)))
        wanted.append((f"{kind} rope", t.rope[kind], d.rope[kind]))
    if SLIDING in d.layer_types:
        wanted.append(("sliding window", t.sliding_window, d.sliding_window))
    for what, has, needs in wanted:
        if has != needs:
            raise PairError(
                f"the drafter does not fit: {what} is {has} in the target, {needs} in the drafter"
            )


def token_ids(raw: Mapping[str, Any], where: str, key: str = "eos_token_id") -> tuple[int, ...]:
    """`key` of a config as a tuple: it may be absent, null, one id or a list."""
    value = raw.get(key)
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
        raise LoadError(f"{where}: {key} is {value!r}; it must be a token id or a list of them")
    return tuple(values)


def _union(*groups: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(i for group in groups for i in group))


def _dtype(raw: Mapping[str, Any], nested: Mapping[str, Any] | None) -> str:
    for level in (raw, nested or {}):
        name = level.get("dtype") or level.get("torch_dtype")
        if name:
            return str(name)
    return "bfloat16"


def _positive(raw: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = raw.get(key, default)
    if value is None:
        raise LoadError(f"{where}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise LoadError(f"{where}: {key} is {value!r}; it must be a whole number, 1 to 2^31 - 1")
    return value


def _real(raw: Mapping[str, Any], key: str, where: str, default: float) -> float:
    """A finite number above 0."""
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise LoadError(f"{where}: {key} is {value!r}; it must be a number above 0")
    return float(value)


def _count(raw: Mapping[str, Any], key: str, where: str) -> int:
    """A whole number where absent and null mean 0."""
    return _positive(raw, key, where) if raw.get(key) else 0


def _text_config(raw: Mapping[str, Any], where: str, *, drafter: bool) -> TextConfig:
    if not isinstance(raw, Mapping):
        raise LoadError(f"{where}: text_config is not an object")
    layers = _positive(raw, "num_hidden_layers", where)
    types = raw.get("layer_types")
    if types is None:
        types = [FULL if (i + 1) % 6 == 0 or i == layers - 1 else SLIDING for i in range(layers)]
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise LoadError(f"{where}: layer_types is {types!r}; it must be a list of names")
    if len(types) != layers or not set(types) <= {SLIDING, FULL}:
        raise LoadError(f"{where}: layer_types must name {layers} layers, each {SLIDING} or {FULL}")
    if raw.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise LoadError(f"{where}: hidden_activation {raw['hidden_activation']!r} is not known")
    if raw.get("attention_bias"):
        raise LoadError(f"{where}: attention_bias is true, which no Gemma 4 has")
    heads = _positive(raw, "num_attention_heads", where)
    head_dim, kv_heads = (
        _positive(raw, "head_dim", where),
        _positive(raw, "num_key_value_heads", where),
    )
    k_eq_v = bool(raw.get("attention_k_eq_v", False))
    global_dim, global_heads = _full_layers(raw, where, head_dim, kv_heads, k_eq_v, types)
    for kind, kv in ((SLIDING, kv_heads), (FULL, global_heads)):
        if heads % kv:
            raise LoadError(f"{where}: {heads} attention heads cannot share {kv} kv heads ({kind})")
    shared = raw.get("num_kv_shared_layers") or 0
    if drafter:
        # An assistant owns no KV whatever the field says (its default differs by version).
        shared = layers
    elif type(shared) is not int:
        raise LoadError(f"{where}: num_kv_shared_layers is {shared!r}; it must be a whole number")
    elif not 0 <= shared < layers or set(types[: layers - shared]) != set(types):
        raise LoadError(
            f"{where}: num_kv_shared_layers {shared} of {layers} leaves a layer type without KV"
        )
    per_layer = _count(raw, "hidden_size_per_layer_input", where)
    moe = bool(raw.get("enable_moe_block", False))
    vocab = _positive(raw, "vocab_size", where)
    return TextConfig(
        vocab_size=vocab,
        hidden_size=_positive(raw, "hidden_size", where),
        intermediate_size=_positive(raw, "intermediate_size", where),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        global_head_dim=global_dim,
        num_global_key_value_heads=global_heads,
        layer_types=tuple(types),
        sliding_window=_positive(raw, "sliding_window", where),
        max_position_embeddings=_positive(raw, "max_position_embeddings", where, 131072),
        rope=_rope(raw, where),
        rms_norm_eps=_real(raw, "rms_norm_eps", where, 1e-6),
        attention_k_eq_v=k_eq_v,
        num_kv_shared_layers=shared,
        use_double_wide_mlp=bool(raw.get("use_double_wide_mlp", False)) and not drafter,
        hidden_size_per_layer_input=per_layer,
        vocab_size_per_layer_input=(
            _positive(raw, "vocab_size_per_layer_input", where, vocab) if per_layer else 0
        ),
        enable_moe_block=moe,
        num_experts=_positive(raw, "num_experts", where) if moe else 0,
        top_k_experts=_positive(raw, "top_k_experts", where) if moe else 0,
        moe_intermediate_size=_positive(raw, "moe_intermediate_size", where) if moe else 0,
        final_logit_softcapping=(
            None
            if raw.get("final_logit_softcapping") is None
            else _real(raw, "final_logit_softcapping", where, 0)
        ),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", True)),
    )


def _full_layers(
    raw: Mapping[str, Any], where: str, head_dim: int, kv_heads: int, k_eq_v: bool, types: list[str]
) -> tuple[int, int]:
    """(head dim, kv heads) of the full-attention layers, from either spelling."""
    overrides = raw.get("per_layer_config")
    if overrides:
        shapes = set()
        for key, value in overrides.items():
            index = int(key) if str(key).isdigit() else -1
            if not 0 <= index < len(types) or types[index] != FULL:
                raise LoadError(f"{where}: per_layer_config names layer {key!r}, not a full one")
            shapes.add(
                (
                    _positive(value, "head_dim", where, head_dim),
                    _positive(value, "num_key_value_heads", where, kv_heads),
                )
            )
        if len(shapes) != 1 or len(overrides) != types.count(FULL):
            raise LoadError(f"{where}: per_layer_config must give all full layers one shape")
        return shapes.pop()
    # transformers' own default for a missing global_head_dim is 512.
    dim = (
        _positive(raw, "global_head_dim", where, 512)
        if raw.get("global_head_dim", 512)
        else head_dim
    )
    own_heads = raw.get("num_global_key_value_heads")
    return dim, (own_heads if k_eq_v and own_heads else kv_heads)


def _rope(raw: Mapping[str, Any], where: str) -> dict[str, Rope]:
    given = raw.get("rope_parameters") or {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    }
    rope = {}
    for kind in (SLIDING, FULL):
        values = given.get(kind) if isinstance(given, Mapping) else None
        if not isinstance(values, Mapping) or values.get("rope_type") not in (
            "default",
            "proportional",
        ):
            raise LoadError(f"{where}: rope_parameters for {kind} are {values!r}")
        theta, fraction = _real(values, "rope_theta", where, 0), 1.0
        if values["rope_type"] == "proportional":
            fraction = _real(values, "partial_rotary_factor", where, 1.0)
        if fraction > 1 or theta <= 1:
            raise LoadError(f"{where}: rope_parameters for {kind} are {dict(values)!r}")
        rope[kind] = Rope(theta, fraction)
    return rope
