"""`mlx-mtp tune`: what pays on this machine, measured once and kept."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_mtp.cli.options import WHICH_MODEL, DrafterId, ForceFit, Json, Revision
from mlx_mtp.cli.terminal import emit, say, speaks_ansi, write_stderr

if TYPE_CHECKING:
    from mlx_mtp.measure.tune import Report

HELP = """Measure what MODEL's rounds take here, and keep it for generate, chat and stdio.

Measured are rounds with 0 to 8 drafts, pipelining, on a GPU compiled rounds and the drafter's bits,
on Metal kernels and command buffers, with the built-in code prompts. The profile holds for this
machine, MLX, version, model and drafter; anything else ignores it. Run it again after a change of
the machine, and with nothing else running: it takes seconds for a small model, minutes for a large
one."""


def tune(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=WHICH_MODEL)] = None,
    revision: Revision = None,
    drafter: DrafterId = None,
    force_fit: ForceFit = False,
    compile_rounds: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Measure compiled rounds, too. [default: on a GPU; on a CPU it takes minutes of "
            "g++]",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    from mlx_mtp.cli.verify import visible
    from mlx_mtp.cli.view import Loading
    from mlx_mtp.measure import tune as measuring

    loading = Loading()
    try:
        report = measuring.tune(
            model,
            drafter or "auto",
            revision,
            compile=compile_rounds,
            force_fit=force_fit,
            progress=_progress,
            loading=loading,
        )
    finally:
        loading.close()
        _progress("", 1, 1)
    for notice in report.notices:
        say(notice)
    if as_json:
        raw = asdict(report) | {"path": report.path and str(report.path)}
        emit(json.dumps(raw, ensure_ascii=False) + "\n")
    else:
        emit("".join(f"{visible(line)}\n" for line in table(report)))
    return 0 if report.path else 1


def _progress(what: str, done: int, total: int) -> None:
    if speaks_ansi(sys.stderr):
        line = f"{what}: {done} of {total}" if done < total else ""
        write_stderr(f"\r\x1b[K{line}")


def table(report: Report) -> list[str]:
    tuned, parts = report.tuned, report.parts
    step = parts[-1].draft / max(parts[-1].drafts, 1)
    low, high = report.context
    # The last draft's acceptance, where those before it were accepted.
    lines = [f"drafts  round ms  of plain's  if reached  verify ms (at {low} to {high} tokens)"]
    for n, seconds in tuned.seconds.items():
        rate = f"{tuned.acceptance[n - 1]:8.0%}" if n else " " * 8
        ratio = seconds / tuned.seconds[0]
        lines.append(
            f"{n:6}  {1e3 * seconds:8.2f}  {ratio:10.2f}  {rate:>10}  {1e3 * parts[n].verify:9.2f}"
        )
    lines.append(f"a draft step takes {1e3 * step:.2f} ms")
    for what, figures in (
        ("seconds of a round, relative", report.ways),
        ("tokens/s by drafter bits, relative", report.bits),
    ):
        if figures:
            listed = "; ".join(f"{name} {figure:.2f}" for name, figure in figures.items())
            lines.append(f"{what}: {listed}")
    chosen = f"{'compiled' if tuned.compile else 'eager'}{', pipelined' * tuned.pipeline}"
    buffer = "MLX's own" if tuned.buffer is None else "{} operations, {} MB".format(*tuned.buffer)
    used = "used from now on" if report.path else "not kept, would be used"
    lines.append(f"{used}: {chosen}; drafter bits {tuned.drafter_bits}; command buffers: {buffer}")
    return [*lines, *([f"kept in {report.path}"] if report.path else [])]
