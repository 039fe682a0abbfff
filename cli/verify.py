"""`mlx-mtp verify`: whether a folder is whole, and everything that is wrong with it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_mtp.cli.options import Json
from mlx_mtp.cli.terminal import emit, say
from mlx_mtp.errors import UsageError

if TYPE_CHECKING:
    from mlx_mtp.weights.verify import Report

HELP = """Check a converted or downloaded FOLDER: configs, index, tensor shapes, hashes.

Nothing is loaded. Exit code 3 when something is wrong, a line for every problem."""


def verify(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="What to check.")],
    as_json: Json = False,
) -> int:
    from mlx_mtp.cli.view import Loading
    from mlx_mtp.weights.verify import check_folder

    if not folder:
        raise UsageError("the folder's name is empty")
    loading = Loading()
    try:
        report = check_folder(folder, loading)
    finally:
        loading.close()
    for notice in report.notices:
        say(visible(notice))
    if as_json:
        emit(json.dumps(report.to_dict()) + "\n")
    else:
        emit("".join(f"{visible(line)}\n" for line in describe(report)))
    return 0 if report.ok else 3


def describe(report: Report) -> list[str]:
    if not report.ok:
        return report.problems
    files = ", ".join(f"{part} {_files(n)}" for part, n in report.files.items())
    hashes = (
        f"hashes match ({_files(report.hashed)})" if report.hashed else "no hashes to compare with"
    )
    return [f"{report.folder} is whole: {files}, {hashes}"]


def visible(line: str) -> str:
    """The same in one line: a file's or tensor's name may hold anything."""
    from mlx_mtp.cli.view import VISIBLE

    return line.translate(VISIBLE | {ord("\n"): "␊", ord("\t"): "␉"})


def _files(count: int) -> str:
    return f"{count} file" + ("" if count == 1 else "s")
