"""Options that several commands share: one spelling, one help text."""

from __future__ import annotations

from typing import Annotated

import typer

WHICH_MODEL = "Folder, hub id or e2b, e4b, 12b, 26b, 31b. [default: the demo pair]"

Model = Annotated[str | None, typer.Option(help=WHICH_MODEL)]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of the model. [default: main]")
]
DrafterId = Annotated[
    str | None, typer.Option(help="Folder or hub id. [default: the one that fits]")
]
DrafterRevision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of the drafter. [default: main]")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead. [default: off]")]
