"""`mlx-mtp bench`: what drafting brings on this machine, as a table, files and a picture."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_mtp.cli.options import WHICH_MODEL, DrafterBits, ForceFit, NoCalibrate, Revision, load
from mlx_mtp.cli.terminal import (
    OutputClosed,
    emit,
    launched,
    say,
    signals,
    speaks_ansi,
    write_stderr,
)
from mlx_mtp.errors import MtpError, UsageError

if TYPE_CHECKING:
    from mlx_mtp.measure.bench import Cell, Plan, Report, Runner
    from mlx_mtp.pair import Pair
    from mlx_mtp.weights.find import Found

PEERS = ("mlx-lm", "mlx-vlm", "ollama")
HELP = """Measure tokens/s of MODEL by draft length, beside plain decoding at the same time.

Ways to decode take turns on every prompt, --repeats times; figures are medians of these laps with
quartiles, prefill left out.
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
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 48,
    repeats: Annotated[int, typer.Option(help="Laps over the prompts.")] = 5,
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
    from mlx_mtp.cli.view import Loading

    def read(name: str) -> Pair:
        loading = Loading()
        try:
            return load(
                model,
                name,
                False,
                None,
                revision,
                None,
                drafter_bits,
                quiet=True,
                progress=loading,
                force_fit=force_fit,
                calibrate=not no_calibrate,
            )
        finally:
            loading.close()

    drafters = drafter or ["auto"]
    if launched() is not None and (len(drafters) > 1 or vs):
        raise UsageError("on several ranks bench takes one --drafter, and no --vs")
    if launched():
        read(drafters[0])  # and follows
    files = [path for path in (json_file, csv_file, chart) if path]
    if len({path.resolve() for path in files}) < len(files):
        raise UsageError("--json, --csv and --chart need a file each; two of them are the same")
    for path in files:
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"{path} cannot be written")
    if chart and chart.suffix not in (".svg", ".png"):
        raise UsageError(f"the chart is {chart}; it must end in .svg or .png")
    if chart and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "the chart needs matplotlib; run: python3 -m pip install 'mlx-mtp[chart]' (from a "
            "clone: '.[chart]')"
        )
    vs = list(dict.fromkeys(vs or ()))
    if unknown := [n for n in vs if n not in PEERS and not n.startswith("ollama=")]:
        raise UsageError(f"--vs is {unknown[0]}; it must be one of {', '.join(PEERS)}")
    if "mlx-vlm" in vs and importlib.util.find_spec("mlx_vlm") is None:
        raise UsageError("mlx-vlm is not installed; run: python3 -m pip install 'mlx-mtp[bench]'")

    from mlx_mtp.measure import bench as sweep
    from mlx_mtp.weights.find import find_pair

    plan = sweep.Plan(
        _prompts(kinds, prompts),
        tuple(None if n == "auto" else _integer("--draft-lens", n) for n in draft_lens.split(",")),
        tuple(dict.fromkeys(_integer("--batch", n) for n in batch.split(","))),
        tuple(dict.fromkeys(temp or (0.0,))),
        max_tokens,
        repeats,
        cool_down,
    )
    if vs and not (1 in plan.batches and 0 in plan.temps):
        raise UsageError("--vs compares at batch 1 and temperature 0: measure these, too")
    old = None if compare is None else _read_report(compare)
    found = {name: find_pair(model, name, revision) for name in drafters}
    known: list[Report] = []
    ended: list[bool] = []
    lock = threading.Lock()

    def finish(report: Report | None) -> bool:
        """Once, in whichever thread comes first. Whether all of it was written."""
        with lock:
            if ended:
                return True
            ended.append(True)
            if report is None:
                _progress(0, 0)
                kept = "what the finished laps gave" if known else "nothing, no lap has ended"
                say(f"interrupted; kept: {kept}")
                if not known:
                    return False
                report = replace(known[-1], notices=[*known[-1].notices, "interrupted"])
            return _written(report, old, json_file, csv_file, chart)

    def interrupted() -> None:
        scratch.cleanup()
        with suppress(OutputClosed):
            finish(None)

    scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(scratch))
        others = _others(vs, model, found.values(), plan, folder, stack)
        stack.enter_context(signals.deferred(interrupted))
        try:
            pairs = map(read, found)
            whole = finish(sweep.measure(pairs, plan, others, _progress, say, known.append))
        finally:
            if signals.caught is not None:
                interrupted()
    if not whole:
        raise typer.Exit(1)


def _written(
    report: Report,
    old: Report | None,
    as_json: Path | None,
    table_file: Path | None,
    chart: Path | None,
) -> bool:
    """Files first: stdout may be closed. What fails is said and stops nothing else."""
    from mlx_mtp.cli.chart import draw

    text = [*table(report), "", "for README's table:", markdown_row(report), ""]
    tasks: list[Callable[[], None]] = []
    if as_json:
        tasks.append(lambda: _write(as_json, json.dumps(report.to_dict(), indent=1) + "\n"))
    if table_file:
        tasks.append(lambda: _write(table_file, as_csv(report)))
    if chart:
        tasks.append(lambda: draw(report, chart))
    tasks.append(lambda: emit("\n".join(text)))
    if old is not None:
        tasks.append(lambda: emit("\n".join(["", *compared(old, report), ""])))
    whole = True
    for task in tasks:
        try:
            task()
        except MtpError as error:
            say(str(error))
            whole = False
    return whole


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
        if not (asked := split(read_prompt(None, file, raw=True))):
            raise UsageError(f"{file} has no prompt in it")
        return {file.stem: asked}
    chosen = KINDS if kinds is None else tuple(kinds.split(","))
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        raise UsageError(f"--kinds has {unknown[0]!r}; it must be of {', '.join(KINDS)}")
    return {kind: asked for kind, asked in prompts().items() if kind in chosen}


def _others(
    vs: list[str],
    model: str | None,
    found: Iterable[Found],
    plan: Plan,
    scratch: Path,
    stack: ExitStack,
) -> Callable[[Pair], Mapping[str, Runner]]:
    """Starts what is compared with; what does not run this pair is left out and says so."""
    from mlx_mtp.measure.bench import Question, contestant, served
    from mlx_mtp.measure.peers import Ollama, Worker
    from mlx_mtp.weights import known

    asked: dict[str, Runner] = {}
    for tag in (name.partition("=")[2] for name in vs if name.startswith("ollama")):
        tag = tag or f"gemma4:{model}" * (model in known.SHORT)
        if not tag:
            raise UsageError("--vs ollama needs its name for the model: --vs ollama=NAME")
        server = Ollama(tag, os.environ.get("OLLAMA_HOST"))
        say(f"Ollama {server.version} at {server.url} runs {tag}")
        asked["ollama"] = served(server, plan)

    def start(pair: Pair) -> Mapping[str, Runner]:
        running = dict(asked)
        its = next(f for f in found if (f.drafter and f.drafter.source.name) == pair.drafter_name)
        folders = [p.source.fetch(p.files, None) for p in (its.target, its.drafter) if p]
        hello = Question("", pair.tokenizer.encode("Hello", bos=True), raw=True)
        for name in (name for name in vs if not name.startswith("ollama")):
            lengths = {"mlx-lm": 0}
            if name == "mlx-vlm":
                lengths = {f"mlx-vlm {n}": n for n in plan.draft_lens if n}
            try:
                worker = Worker(name, folders[0], folders[-1], Path(tempfile.mkdtemp(dir=scratch)))
                stack.callback(worker.close)
                runners = {way: contestant(worker, n, plan, pair) for way, n in lengths.items()}
                for run in runners.values():
                    run([hello])
            except MtpError as error:
                say(f"left out: {error}")
                continue
            say(f"{name} {worker.version}")
            running |= runners
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
        f"{chip(report)}, {here['memory']}, {here['cores']} CPU cores, {here['system']}, on the "
        f"{here['device']}, MLX {here['mlx']}, mlx-mtp {here['mlx-mtp']}, {report.made}"
    )


def chip(report: Report) -> str:
    ranks = f"{report.machine['ranks']} ranks, each " if "ranks" in report.machine else ""
    return ranks + report.machine["chip"]


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
    names = [f"{chip(report)}, {here['memory']}", report.model, f"{here['mlx']}, {report.made}"]
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
    """A row a cell; its fields are named as in JSON."""
    rows = [_flat(report, cell) for cell in report.cells]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(report: Report, cell: Cell) -> dict[str, Any]:
    row = {"chip": report.machine["chip"], "model": report.model, **asdict(cell)}
    for name in ("tps", "ratio"):
        figures = row.pop(name)
        row |= {f"{name}_{at}": n for at, n in zip(("low", "median", "high"), figures, strict=True)}
    same, rates = row.pop("identical"), row.pop("acceptance")
    row |= {"identical": sum(same), "answers": len(same)}
    return row | {f"accepted_{i}": rate for i, rate in enumerate([*rates, *[""] * 8][:8], 1)}
