"""`mlx-mtp inspect`: what a checkpoint is, from its configs and headers alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_mtp.cli.options import WHICH_MODEL, DrafterId, DrafterRevision, Json, Revision
from mlx_mtp.cli.terminal import emit, say

if TYPE_CHECKING:
    from mlx_mtp.weights.inspect import Inspection

HELP = """Show architecture, parameters, bytes by part, and the drafter that fits MODEL.

Only configs and file headers are read: no memory is needed and, from the hub, a few kilobytes."""


def inspect(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=WHICH_MODEL)] = None,
    revision: Revision = None,
    drafter: DrafterId = None,
    drafter_revision: DrafterRevision = None,
    as_json: Json = False,
) -> None:
    from mlx_mtp.weights.inspect import inspect_model

    found = inspect_model(
        model,
        drafter="auto" if drafter is None else drafter,
        revision=revision,
        drafter_revision=drafter_revision,
    )
    for notice in found.notices:
        say(notice)
    if as_json:
        emit(json.dumps(found.to_dict(), ensure_ascii=False) + "\n")
    else:
        emit("".join(f"{line}\n" for line in describe(found)))


def describe(found: Inspection) -> list[str]:
    from mlx_mtp.cli.view import human_bytes
    from mlx_mtp.weights.fit import POSITIONS

    shape = found.architecture
    shared = shape["num_hidden_layers"] - shape["kv_layers"]
    drafter = "none found" if found.drafter is None else f"{found.drafter} ({found.drafter_why})"
    rows = [
        ("model", _at(found.name, found.revision)),
        ("type", found.model_type),
        (
            "layers",
            f"{shape['num_hidden_layers']}: {shape['sliding_layers']} sliding (window "
            f"{shape['sliding_window']}), {shape['full_layers']} full; {shared} share KV",
        ),
        (
            "shape",
            f"hidden {shape['hidden_size']}, mlp {shape['intermediate_size']}, "
            f"{shape['num_attention_heads']} heads, vocabulary {shape['vocab_size']}, "
            f"context {shape['max_position_embeddings']}",
        ),
        ("weights", f"{_count(found.parameters)} parameters, {human_bytes(found.bytes)}"),
        *(
            (f"  {name}", f"{_count(part.parameters)} parameters, {human_bytes(part.bytes)}")
            for name, part in found.parts.items()
        ),
        *(("quantised", f"{scheme}: {n} tensors") for scheme, n in found.quantization.items()),
        ("KV", f"{human_bytes(found.kv_bytes)} for {POSITIONS} tokens"),
        ("this machine", f"{human_bytes(found.device_bytes)} for weights and KV"),
        ("drafter", _at(drafter, found.drafter_revision)),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _at(name: str, revision: str | None) -> str:
    return name if revision is None else f"{name} at {revision}"


def _count(parameters: int) -> str:
    for scale, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= scale:
            return f"{parameters / scale:.2f} {unit}"
    return str(parameters)
