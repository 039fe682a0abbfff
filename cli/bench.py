"""`mlx-mtp bench`: what drafting brings on this machine, as a table, files and a picture."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_mtp.cli.options import WHICH_MODEL, DrafterBits, ForceFit, NoCalibrate, Revision
from mlx_mtp.cli.terminal import emit, say, speaks_ansi, write_stderr
from mlx_mtp.errors import MtpError, UsageError

if TYPE_CHECKING:
    from mlx_mtp.measure.bench import Cell, Plan, Report, Runner
    from mlx_mtp.pair import Pair
    from mlx_mtp.weights.find import Found

PEERS = ("mlx-lm", "mlx-vlm", "ollama")
HELP = """Measure tokens/s of MODEL by draft length, beside plain decoding in the same turn.

Ways to decode take turns on every prompt; figures are medians with quartiles, prefill left out.
The table goes to stdout; docs/bench.md says how to read it and how to send a report. --vs runs
mlx-lm (plain) and mlx-vlm (its MTP) on the same weights and token ids in processes of their own,
and asks Ollama at OLLAMA_HOST for its own counts of its own model: ollama=NAME. They take part at
batch 1 and temperature 0."""


def bench(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=WHICH_MODEL)] = None,
    revision: Revision = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Folder or hub id; may be repeated. [default: the one that fits]"),
    ] = None,
    drafter_bits: DrafterBits = None,
    draft_lens: Annotated[
        str, typer.Option(help="Drafted tokens a round, 0..8 or auto; 0 is always measured.")
    ] = "0,1,2,4,6,8,auto",
    batch: Annotated[str, typer.Option(help="Rows decoded at once, 1..16.")] = "1",
    temp: Annotated[
        list[float] | None,
        typer.Option(help="Temperature, 0 is greedy; may be repeated. [default: 0]"),
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option(help="Built-in prompts to use. [default: code,prose,json,edit]"),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Use the prompts in FILE, lines --- between them. [default: none]"
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 64,
    repeats: Annotated[int, typer.Option(help="Turns a prompt.")] = 3,
    cool_down: Annotated[float, typer.Option(help="Seconds of rest before each turn.")] = 0.0,
    vs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="mlx-lm|mlx-vlm|ollama[=NAME]",
            help="Compare with it; may be repeated. [default: none]",
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="OLD.json", help="Show this report's figures beside it. [default: none]"
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the report there. [default: none]"),
    ] = None,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write a row a figure there. [default: none]"),
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg|png", help="Draw a picture; needs the extra chart. [default: none]"
        ),
    ] = None,
    force_fit: ForceFit = False,
    no_calibrate: NoCalibrate = False,
) -> None:
    for path in filter(None, (json_file, csv_file, chart)):
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"{path} cannot be written")
    if chart and chart.suffix not in (".svg", ".png"):
        raise UsageError(f"the chart is {chart}; it must end in .svg or .png")
    if chart and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "the chart needs matplotlib; run: python3 -m pip install 'mlx-mtp[chart]' (from a "
            "clone: '.[chart]')"
        )
    wanted = [name.partition("=")[0] for name in vs or ()]
    if unknown := [name for name in wanted if name not in PEERS]:
        raise UsageError(f"--vs is {unknown[0]}; it must be one of {', '.join(PEERS)}")
    if "mlx-vlm" in wanted and importlib.util.find_spec("mlx_vlm") is None:
        raise UsageError("mlx-vlm is not installed; run: python3 -m pip install 'mlx-mtp[bench]'")

    from mlx_mtp.cli.view import Loading
    from mlx_mtp.measure import bench as sweep
    from mlx_mtp.weights.find import find_pair
    from mlx_mtp.weights.load import load_pair

    plan = sweep.Plan(
        _prompts(kinds, prompts),
        tuple(None if n == "auto" else _integer("--draft-lens", n) for n in draft_lens.split(",")),
        tuple(_integer("--batch", n) for n in batch.split(",")),
        tuple(temp or (0.0,)),
        max_tokens,
        repeats,
        cool_down,
    )
    if vs and not (1 in plan.batches and 0 in plan.temps):
        raise UsageError("--vs compares at batch 1 and temperature 0: measure these, too")
    old = None if compare is None else _read_report(compare)
    found = {name: find_pair(model, name, revision) for name in drafter or ["auto"]}

    def pairs() -> Iterator[tuple[str, Pair]]:
        for name in found:
            loading = Loading()
            pair = load_pair(
                model,
                drafter=name,
                revision=revision,
                drafter_bits=drafter_bits,
                force_fit=force_fit,
                calibrate=not no_calibrate,
                progress=loading,
            )
            loading.close()
            yield pair.drafter_name or "none", pair

    with ExitStack() as stack:
        others = _others(vs or [], model, found, plan, stack)
        report = sweep.measure(pairs(), plan, others, _progress, say)
    emit("\n".join([*table(report), "", "for README's table:", markdown_row(report), ""]))
    if old is not None:
        emit("\n".join(["", *compared(old, report), ""]))
    if json_file:
        _write(json_file, json.dumps(report.to_dict(), indent=1) + "\n")
    if csv_file:
        _write(csv_file, as_csv(report))
    if chart:
        from mlx_mtp.cli.chart import draw

        draw(report, chart)


def _integer(option: str, given: str) -> int:
    try:
        return int(given)
    except ValueError:
        raise UsageError(f"{option} has {given!r}; it must be numbers with commas") from None


def _prompts(kinds: str | None, file: Path | None) -> dict[str, list[str]]:
    from mlx_mtp.cli.generate import read_prompt
    from mlx_mtp.measure.prompts import KINDS, prompts, split

    if file is not None:
        if kinds is not None:
            raise UsageError("--kinds and --prompts were both given; leave one out")
        return {file.stem: split(read_prompt(None, file, raw=False))}
    chosen = KINDS if kinds is None else tuple(kinds.split(","))
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        raise UsageError(f"--kinds has {unknown[0]!r}; it must be of {', '.join(KINDS)}")
    return {kind: asked for kind, asked in prompts().items() if kind in chosen}


def _others(
    vs: list[str], model: str | None, found: Mapping[str, Found], plan: Plan, stack: ExitStack
) -> Callable[[str, Pair], Mapping[str, Runner]]:
    """Starts what is compared with; what does not run this pair is left out and says so."""
    from mlx_mtp.measure.bench import Run, contestant
    from mlx_mtp.measure.peers import Ollama, Worker
    from mlx_mtp.weights import known

    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    asked: dict[str, Runner] = {}
    for name in vs:
        peer, _, tag = name.partition("=")
        if peer == "ollama":
            tag = tag or f"gemma4:{model}" * (model in known.SHORT)
            if not tag:
                raise UsageError("--vs ollama needs its name for the model: --vs ollama=NAME")
            server = Ollama(tag, os.environ.get("OLLAMA_HOST"))
            say(f"Ollama {server.version} at {server.url} runs {tag}")
            asked["ollama"] = lambda turn, server=server: Run(
                *server.run(turn[0].text, plan.max_tokens, raw=turn[0].raw)
            )

    def start(drafter: str, pair: Pair) -> Mapping[str, Runner]:
        running = dict(asked)
        its = next(f for f in found.values() if f.drafter and f.drafter.source.name == drafter)
        assert its.drafter is not None
        folders = [p.source.fetch(p.files, None) for p in (its.target, its.drafter)]
        for name in vs:
            if name == "ollama" or name.startswith("ollama="):
                continue
            try:
                worker = Worker(name, *folders, scratch / f"{len(list(scratch.iterdir()))}")
            except MtpError as error:
                say(f"left out: {error}")
                continue
            stack.callback(worker.close)
            say(f"{name} {worker.version}")
            if name == "mlx-lm":
                running[name] = contestant(worker, 0, plan, pair)
            else:
                for n in filter(None, plan.draft_lens):
                    running[f"{name} {n}"] = contestant(worker, n, plan, pair)
        return running

    return start


def _progress(done: int, total: int) -> None:
    if speaks_ansi(sys.stderr):
        write_stderr("\r\x1b[K" + (f"turn {done + 1} of {total}" if done < total else ""))


def _read_report(path: Path) -> Report:
    from mlx_mtp.measure.bench import Report

    try:
        return Report.from_dict(json.loads(path.read_text("utf-8")), str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is no JSON") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise MtpError(f"{path} cannot be written: {error.strerror}") from None


def table(report: Report) -> list[str]:
    """A block for each drafter, batch and temperature, and one for the parts of a round."""
    lines = [f"{report.model}, {title(report)}"]
    for group, cells in report.groups().items():
        drafter, batch, temp = group
        kinds = list(dict.fromkeys(cell.kind for cell in cells))
        most = kinds[0]  # what the others are parts of
        head = ["drafts", "tokens/s", "x plain", *kinds[1:], "a round", "accepted", "same text"]
        rows = [head]
        for cell in (cell for cell in cells if cell.kind == most):
            by_kind = {c.kind: f"{c.ratio[1]:.2f}" for c in cells if c.way == cell.way}
            rows.append(
                [
                    cell.way,
                    f"{cell.tps[1]:.1f} ({cell.tps[0]:.0f}-{cell.tps[2]:.0f})",
                    f"{cell.ratio[1]:.2f} ({cell.ratio[0]:.2f}-{cell.ratio[2]:.2f})",
                    *(by_kind[kind] for kind in kinds[1:]),
                    "" if cell.tokens_per_round is None else f"{cell.tokens_per_round:.2f}",
                    " ".join(f"{rate:.2f}".removeprefix("0") for rate in cell.acceptance),
                    same_text(cell),
                ]
            )
        lines += ["", f"drafter {drafter}, batch {batch}, temperature {temp:g}", *aligned(rows)]
    for drafter in dict.fromkeys(cost.drafter for cost in report.rounds):
        rows = [["drafts", "draft", "verify", "host"]]
        for cost in report.rounds:
            if cost.drafter == drafter:
                parts = (cost.draft, cost.verify, cost.host)
                rows.append([str(cost.drafts), *(f"{1000 * part:.2f}" for part in parts)])
        lines += ["", f"parts of a round with {drafter}, ms, one by one", *aligned(rows)]
    return lines


def title(report: Report) -> str:
    here = report.machine
    return (
        f"{here['chip']}, {here['memory']}, {here['cores']} CPU cores, {here['system']}, on the "
        f"{here['device']}, MLX {here['mlx']}, mlx-mtp {here['mlx-mtp']}, {report.made}"
    )


def same_text(cell: Cell) -> str:
    if cell.agreement is None:
        return "not known"
    return f"{sum(cell.identical)} of {len(cell.identical)} ({cell.agreement:.0%} of tokens)"


def aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{text:<{n}}" for text, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def markdown_row(report: Report) -> str:
    """Of the first group: machine, model, plain, best fixed length, auto, tokens, text."""
    cells = next(iter(report.groups().values()))
    ways = {cell.way: cell for cell in cells if cell.kind == cells[0].kind}
    best = max((c for way, c in ways.items() if way.isdigit()), key=lambda c: c.ratio[1])
    auto = f"{ways['auto'].ratio[1]:.2f}" if "auto" in ways else ""
    here = report.machine
    figures = [f"{ways['0'].tps[1]:.1f}", f"{best.tps[1]:.1f} ({best.way})"]
    names = [f"{here['chip']}, {here['memory']}", report.model, f"{here['mlx']}, {report.made}"]
    row = [*names, *figures, f"{best.ratio[1]:.2f}", auto, same_text(best)]
    return f"| {' | '.join(row)} |"


def compared(old: Report, new: Report) -> list[str]:
    from mlx_mtp.measure.bench import compare

    differs, both = compare(old, new)
    for line in differs:
        say(f"not the same: {line}")
    if not both:
        return ["no figure is in both reports"]
    head = ["drafter", "batch", "temp", "kind", "drafts"]
    rows = [[*head, "tokens/s, old", "new", "new/old", "x plain, old", "new", "new/old"]]
    for before, now in both:
        figures = [
            text
            for a, b in ((before.tps[1], now.tps[1]), (before.ratio[1], now.ratio[1]))
            for text in (f"{a:.2f}", f"{b:.2f}", f"{b / a:.3f}")
        ]
        rows.append([*map(str, now.key), *figures])
    return aligned(rows)


def as_csv(report: Report) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _csv_row(report, report.cells[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_csv_row(report, cell) for cell in report.cells)
    return text.getvalue()


def _csv_row(report: Report, cell: Cell) -> dict[str, Any]:
    quartiles = ("low", "median", "high")
    rates = [*cell.acceptance, *[""] * 8][:8]
    return {
        "chip": report.machine["chip"],
        "model": report.model,
        "drafter": cell.drafter,
        "batch": cell.batch,
        "temperature": cell.temp,
        "kind": cell.kind,
        "drafts": cell.way,
        "turns": cell.turns,
        **{f"tokens_per_s_{name}": n for name, n in zip(quartiles, cell.tps, strict=True)},
        **{f"x_plain_{name}": n for name, n in zip(quartiles, cell.ratio, strict=True)},
        "tokens_per_round": cell.tokens_per_round,
        "agreement": cell.agreement,
        "identical": sum(cell.identical),
        "answers": len(cell.identical),
        **{f"accepted_{i}": rate for i, rate in enumerate(rates, 1)},
    }
