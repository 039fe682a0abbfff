"""`mlx-mtp doctor`: what is wrong here, in a report that can be pasted into an issue."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer

from mlx_mtp.cli.options import WHICH_MODEL, DrafterId, Json
from mlx_mtp.cli.terminal import emit

HELP = """Test this machine, the installation and MODEL, and say what to do about what is wrong.

The report holds no personal data and can be pasted into an issue. Exit code 1 when something is
wrong; warnings are not."""


def doctor(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=WHICH_MODEL)] = None,
    drafter: DrafterId = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not contact the hub. [default: off]")
    ] = False,
    as_json: Json = False,
) -> int:
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    from mlx_mtp.cli.verify import visible
    from mlx_mtp.cli.view import Loading
    from mlx_mtp.measure.doctor import WRONG, examine

    loading, checks = Loading(), []
    for check in examine(model, drafter, offline=offline, progress=loading):
        loading.close()
        checks.append(check)
        if not as_json:
            emit(visible(f"{check.state:<9}{check.name:<13}{check.found}") + "\n")
    wrong = [check for check in checks if check.state == WRONG]
    if as_json:
        report = {"ok": not wrong, "checks": [asdict(check) for check in checks]}
        emit(json.dumps(report, ensure_ascii=False) + "\n")
    else:
        to_do = [f"{c.state}: {c.name}: {c.found}; {c.advice}" for c in checks if c.advice]
        lines = ["", *to_do, *([] if wrong else ["OK"])]
        emit("".join(f"{visible(line)}\n" for line in lines))
    return 1 if wrong else 0
