"""`mlx-mtp doctor`: what is wrong here, in a report that can be pasted into an issue."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_mtp.cli.options import WHICH_MODEL, Json
from mlx_mtp.cli.terminal import emit

if TYPE_CHECKING:
    from mlx_mtp.measure.doctor import Check

HELP = """Test this machine, the installation and MODEL, and say what to do about what is wrong.

The report holds no personal data and can be pasted into an issue. Exit code 1 when something is
wrong; warnings are not."""


def doctor(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=WHICH_MODEL)] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not contact the hub. [default: off]")
    ] = False,
    as_json: Json = False,
) -> int:
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    from mlx_mtp.cli.view import Loading
    from mlx_mtp.measure.doctor import WRONG, examine

    loading, checks = Loading(), []
    for check in examine(model, offline=offline, progress=loading):
        loading.close()
        checks.append(check)
        if not as_json:
            emit("".join(f"{line}\n" for line in lines(check)))
    wrong = [check for check in checks if check.state == WRONG]
    if as_json:
        report = {"ok": not wrong, "checks": [asdict(check) for check in checks]}
        emit(json.dumps(report, ensure_ascii=False) + "\n")
    else:
        emit("\n" + "".join(f"{line}\n" for line in ending(wrong)))
    return 1 if wrong else 0


def lines(check: Check) -> list[str]:
    from mlx_mtp.cli.verify import visible

    shown = [f"{check.state:<9}{check.name:<13}{visible(check.found)}"]
    return shown + [f"{'':<22}-> {visible(check.advice)}"] * bool(check.advice)


def ending(wrong: list[Check]) -> list[str]:
    from mlx_mtp.cli.verify import visible

    if not wrong:
        return ["OK"]
    return ["What is wrong, and what to do:"] + [
        visible(f"{check.name}: {check.advice}") for check in wrong
    ]
