"""What `mlx-mtp inspect` says of a checkpoint: from configs and headers, no weight is read."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.target import Target
from mlx_mtp.weights import fit
from mlx_mtp.weights.find import find_pair
from mlx_mtp.weights.planned import Planned

# The first that matches a parameter's name wins.
_PARTS = (
    ("per-layer embeddings", ("embed_tokens_per_layer.", "per_layer_")),
    ("embeddings", ("embed_tokens.",)),
    ("head", ("lm_head.", "masked_embedding.")),
    ("attention", (".self_attn.",)),
    ("mlp", (".mlp.",)),
    ("experts", (".experts.", ".router.")),
    ("norms and others", ("",)),
)


@dataclass(frozen=True)
class Part:
    """Parameters count packed weights unpacked; bytes are those of the files."""

    parameters: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """parts: name -> Part, the drafter as one of them. quantization: "4 bits affine, groups of
    64" -> how many tensors. drafter_why: how it was found. kv_bytes: for `fit.POSITIONS`."""

    name: str
    revision: str | None
    model_type: str
    architecture: dict[str, Any]
    parameters: int
    bytes: int
    parts: dict[str, Part]
    quantization: dict[str, int]
    drafter: str | None
    drafter_revision: str | None
    drafter_why: str
    kv_bytes: int
    device_bytes: int
    notices: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect_model(
    model: str | None = None,
    *,
    drafter: str | None = "auto",
    revision: str | None = None,
    drafter_revision: str | None = None,
) -> Inspection:
    """The same search and checks as `load_pair` short of memory. Raises LoadError, PairError."""
    found = find_pair(model, drafter, revision, drafter_revision)
    target, assistant = found.target, found.drafter
    parts = _parts(target)
    own = Part(sum(p.parameters for p in parts.values()), sum(p.bytes for p in parts.values()))
    if assistant is not None:
        of_drafter = _parts(assistant).values()
        parts["drafter"] = Part(
            sum(p.parameters for p in of_drafter), sum(p.bytes for p in of_drafter)
        )
    schemes = Counter(
        f"{q['bits']} bits {q['mode']}, groups of {q['group_size']}"
        for q in target.quantized.values()
    )
    text = target.text
    return Inspection(
        name=target.source.name,
        revision=target.source.revision,
        model_type=found.config.model_type,
        architecture={
            **{k: v for k, v in asdict(text).items() if k not in ("layer_types", "rope")},
            "sliding_layers": text.layer_types.count("sliding_attention"),
            "full_layers": text.layer_types.count("full_attention"),
            "kv_layers": text.num_owners,
        },
        parameters=own.parameters,
        bytes=own.bytes,
        parts=parts,
        quantization=dict(schemes),
        drafter=None if assistant is None else assistant.source.name,
        drafter_revision=None if assistant is None else assistant.source.revision,
        drafter_why="" if assistant is None else found.why,
        kv_bytes=fit.kv_bytes(text),
        device_bytes=fit.device_bytes(),
        notices=found.notices + target.notices + ([] if assistant is None else assistant.notices),
    )


def _parts(planned: Planned[Target] | Planned[Drafter]) -> dict[str, Part]:
    counts: dict[str, list[int]] = {}
    for name, part in planned.plan.parts.items():
        kind = next(k for k, marks in _PARTS if any(mark in name for mark in marks))
        size = math.prod(part.shape)
        path, _, leaf = name.rpartition(".")
        if (packed := planned.quantized.get(path)) is not None:
            size = size * 32 // packed["bits"] if leaf == "weight" else 0
        count = counts.setdefault(kind, [0, 0])
        count[0] += size
        count[1] += part.nbytes
    return {kind: Part(*counts[kind]) for kind, _ in _PARTS if kind in counts}
