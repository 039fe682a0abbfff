"""`mlx-mtp plan`: what fits a machine and how fast it could be, before a download."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_mtp.cli.options import DrafterId, DrafterRevision, Json, Revision
from mlx_mtp.cli.terminal import emit, say
from mlx_mtp.errors import LoadError, UsageError

if TYPE_CHECKING:
    from mlx_mtp.measure.machine import Machine
    from mlx_mtp.measure.plan import Plan, Sizes

MOST_CONTEXT, MOST_HOSTS = 1 << 20, 32
HELP = """Say which pairs fit this machine, or another, and how fast they could be.

Without MODEL the five published pairs in 4, 8 and 16 bits, from shapes alone: nothing is contacted.
With MODEL that one, from its configs and file headers, as stored and as conversions would have it.
Fitting means weights, drafter, KV of --context and a tenth of the weights for activations, in what
Metal recommends, or all memory where MLX runs on a CPU; snapshots of conversations take a quarter
of what is left, or less. Sizes are as this machine loads them, with --chip as a Mac does. Tokens/s
are a roofline: what bandwidth, arithmetic and launches allow at acceptances that others published,
not a measurement.

With --hosts N as many machines of that kind share each model by mlx.launch: sizes are those of the
largest part, and tokens/s a prediction for JACCL over Thunderbolt 5 and for a ring over 10 GbE."""


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            show_default=False,
            help="Folder, hub id or e2b, e4b, 12b, 26b, 31b. [default: all five]",
        ),
    ] = None,
    chip: Annotated[
        str | None,
        typer.Option(help='Plan for another chip, say "M4 Pro". [default: this machine]'),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Its memory in GB, as sold (GiB). [default: this machine]")
    ] = None,
    context: Annotated[
        int,
        typer.Option(
            help="Tokens of prompt and answer to have KV for, the model's context at most. "
            "[default: 8192]",
            show_default=False,
        ),
    ] = 8192,
    hosts: Annotated[
        int,
        typer.Option(
            help="How many such machines share a model by mlx.launch. [default: 1]",
            show_default=False,
        ),
    ] = 1,
    revision: Revision = None,
    drafter: DrafterId = None,
    drafter_revision: DrafterRevision = None,
    as_json: Json = False,
) -> None:
    if (chip is None) != (memory is None):
        raise UsageError("--chip and --memory go together: both are of the machine to plan for")
    if not 1 <= context <= MOST_CONTEXT:
        raise UsageError(f"the context is {context} tokens; it must be 1 to {MOST_CONTEXT}")
    if not 1 <= hosts <= MOST_HOSTS:
        raise UsageError(f"hosts are {hosts}; they must be 1 to {MOST_HOSTS}")
    if model is None and (drafter is not None or revision is not None or drafter_revision):
        raise UsageError("a drafter or a revision needs the MODEL that it belongs to")

    from mlx_mtp.measure import hosts as between
    from mlx_mtp.measure import machine as machines
    from mlx_mtp.measure import plan as plans
    from mlx_mtp.models.layers import on_cpu
    from mlx_mtp.weights.find import find_pair

    if chip is not None and memory is not None:
        machine = machines.named(chip, memory)
    else:
        machine = machines.this_machine()
    cpu = chip is None and on_cpu()
    if model is None:
        pairs = plans.published_pairs(cpu)
    else:
        named = {
            "--drafter": drafter,
            "--revision": revision,
            "--drafter-revision": drafter_revision,
        }
        options = [part for name, value in named.items() if value for part in (name, value)]
        which = "auto" if drafter is None else drafter
        try:
            found = find_pair(model, which, revision, drafter_revision)
            for notice in found.notices:
                say(notice)
            pairs = plans.of_checkpoint(found, cpu, options)
        except LoadError as error:
            pairs = plans.without_weights(model, drafter, cpu, options)
            if not pairs:
                raise
            say(f"{error}; what follows is from shapes alone")
    if hosts > 1:
        pairs = list(_shared(pairs, hosts))
    if machine.chip is None:
        say(
            f"tokens/s are left out: {machine.name} is no Apple chip that is known; another is "
            'planned for by --chip "M4 Pro" --memory 24'
        )
    made = [plans.plan(sizes, machine, context) for sizes in pairs]
    for name, most in {p.model: p.context for p in made if p.context < context}.items():
        say(f"{name} is planned for at its own context of {most}")
    if as_json:
        about = {
            "machine": machine.name,
            "limit_gb": round(machine.limit / 1e9, 6),
            "context": context,
            "note": plans.ROOFLINE,
        }
        if hosts > 1:
            about |= {"hosts": hosts, "note": between.PREDICTED}
        emit(json.dumps({**about, "pairs": [p.to_dict() for p in made]}) + "\n")
    else:
        emit("".join(f"{line}\n" for line in describe(machine, context, made, hosts)))


def _shared(pairs: list[Sizes], hosts: int) -> Iterator[Sizes]:
    """Each machine's part of those that can be divided. Raises UsageError where none can."""
    from mlx_mtp.measure import plan as plans

    refused: dict[tuple[str, str], list[str]] = {}
    for sizes in pairs:
        try:
            yield plans.shared(sizes, hosts)
        except UsageError as error:
            refused.setdefault((sizes.name, str(error)), []).append(str(sizes.bits))
    told = [f"{name} in {', '.join(bits)} bits: {why}" for (name, why), bits in refused.items()]
    if sum(map(len, refused.values())) == len(pairs):
        raise UsageError(told[0])
    for line in told:
        say(f"left out: {line}")


def describe(machine: Machine, context: int, made: list[Plan], hosts: int) -> list[str]:
    from mlx_mtp.cli.view import human_bytes
    from mlx_mtp.measure.hosts import LINKS, PREDICTED
    from mlx_mtp.measure.plan import ROOFLINE

    def speed(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    titles = ["plain tok/s", "MTP", "drafts"] if hosts == 1 else [link.name for link in LINKS]
    rows = [["model", "bits", "fits", "weights", "drafter", "KV", *titles]]
    for p in made:
        sizes = (human_bytes(size) for size in (p.weights, p.drafter, p.kv))
        length = "-" if p.draft_len is None else str(p.draft_len)
        speeds = [speed(p.plain_tps), speed(p.mtp_tps), length]
        if p.links is not None:
            told = {n: f"{s.plain_tps} / {s.mtp_tps} ({s.draft_len})" for n, s in p.links.items()}
            speeds = [told.get(title, "-") for title in titles]
        rows.append([p.model, str(p.bits), "yes" if p.fits else "no", *sizes, *speeds])
    each = "" if hosts == 1 else f"each of {hosts}: "
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{each}{machine.name}, {machine.memory / 2**30:.0f} GiB, {machine.limit / 2**30:.1f} GiB "
        f"({human_bytes(machine.limit)}) of them for weights and KV; context {context}",
        *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
    ]
    fitting = [p for p in made if p.fits]
    if fitting:
        models = [p.model for p in made]
        largest = max(fitting, key=lambda p: (models.index(p.model), p.bits))
        how = largest.convert or "as it is stored"
        lines.append(f"largest that fits: {largest.model} in {largest.bits} bits, {how}")
    else:
        needed = min(p.needed for p in made)
        lines.append(f"nothing fits: the smallest needs {human_bytes(needed)}")
    return [*lines, *([] if machine.chip is None else [ROOFLINE if hosts == 1 else PREDICTED])]
