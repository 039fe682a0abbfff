"""`mlx-mtp convert`: checkpoints into a pair that loads at once."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from mlx_mtp.cli.options import DrafterId, DrafterRevision
from mlx_mtp.cli.terminal import emit, say
from mlx_mtp.errors import UsageError

HELP = """Make one folder of MODEL and its drafter, packed if asked, ready for --model.

MODEL is a folder, a hub id or a short name; a drafter is converted alone. Without -q the weights
are copied as they are. With -q BITS every matrix takes BITS, but the embedding table 6 at least,
per-layer embeddings, router and drafter 8, and a drafter's centroids stay floats. --recipe FILE has
lines of "pattern" = BITS, 0 for floats, that come first; patterns are those of shells, on paths
such as layers.0.mlp.up_proj, with drafter. before a drafter's. Memory stays at a few hundred MB
whatever the model's size, but the comparison at the end takes a layer in float32. OUT is written
under another name and renamed at the end, so that what is there is whole. Exit codes: 0, 2 usage, 3
loading or room, 1 anything else."""


def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, hub id or short name.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    bits: Annotated[
        int | None,
        typer.Option("--bits", "-q", help="Bits of a weight: 2, 3, 4, 5, 6, 8. [default: as is]"),
    ] = None,
    mode: Annotated[str, typer.Option(help="Packing: affine, mxfp4, mxfp8 or nvfp4.")] = "affine",
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Weights that share a scale: 32, 64, 128. [default: 64, or the mode's own]"
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of floats: bfloat16, float16, float32. [default: as stored]"),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help='TOML lines of "pattern" = bits. [default: none]')
    ] = None,
    drafter: DrafterId = None,
    no_drafter: Annotated[
        bool, typer.Option("--no-drafter", help="The target alone. [default: off]")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of MODEL. [default: main]")
    ] = None,
    drafter_revision: DrafterRevision = None,
    requantize: Annotated[
        bool,
        typer.Option("--requantize", help="Pack weights that are packed already. [default: off]"),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace OUT if convert wrote all in it. [default: off]")
    ] = False,
    no_verify: Annotated[
        bool,
        typer.Option("--no-verify", help="No comparison with the source. [default: off]"),
    ] = False,
) -> None:
    from mlx_mtp.cli.view import Loading
    from mlx_mtp.weights import recipe as recipes
    from mlx_mtp.weights.convert import How, check_place, plan, write

    if requantize and bits is None and dtype is None and mode == "affine":
        raise UsageError("--requantize packs again: give the bits, too (-q)")
    if no_drafter and drafter:
        raise UsageError("--drafter needs a drafter, which --no-drafter leaves out")
    how = How(recipes.make(bits, mode, group_size, recipe), dtype, requantize)
    out = out.expanduser()
    conversion = plan(
        model,
        how,
        drafter=None if no_drafter else "auto" if drafter is None else drafter,
        revision=revision,
        drafter_revision=drafter_revision,
    )
    for notice in conversion.notices:
        say(notice)
    check_place(out, conversion, force)
    say(conversion.summary(out))
    loading = Loading()
    try:
        known = len(conversion.notices)
        conversion = conversion.fetch(loading)
        for notice in conversion.notices[known:]:
            say(notice)
        check_place(out, conversion, force)
        rows = write(conversion, out, loading, force=force, proof=not no_verify)
    finally:
        loading.close()
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        emit(f"{name:<{width}}  {value}\n")
    model = shlex.quote(str(out))
    if conversion.target is None:
        model = f"TARGET --drafter {model}"
    say(f'try it: mlx-mtp generate "Hello" --model {model}')
