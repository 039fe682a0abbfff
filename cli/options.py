"""Options that several commands share: one spelling, one help text; and what they load."""

from __future__ import annotations

from functools import cache, partial
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_mtp.cli.terminal import farewells, launched, leave, say, signals
from mlx_mtp.errors import UsageError

if TYPE_CHECKING:
    from mlx_mtp import ranks
    from mlx_mtp.pair import Pair
    from mlx_mtp.weights.checkpoint import Progress

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
NoDrafter = Annotated[bool, typer.Option("--no-drafter", help="Decode plainly. [default: off]")]
ForceFit = Annotated[
    bool,
    typer.Option("--force-fit", help="Load although memory may not do. [default: off]"),
]
DraftLen = Annotated[
    str | None,
    typer.Option(
        metavar="N|auto",
        help="Drafted tokens a round, bonus not counted, 0..8, or auto: what pays, round by "
        "round. [default: auto]",
    ),
]
Temp = Annotated[
    float | None,
    typer.Option(help="Temperature, 0 is greedy. [default: generation_config, else 0]"),
]
TopK = Annotated[
    int | None,
    typer.Option(help="Keep the k likeliest tokens, 0 all. [default: generation_config, else 0]"),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Keep the likeliest tokens up to this probability. [default: generation_config, "
        "else 1]"
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Drop tokens below this share of the likeliest one's probability. "
        "[default: generation_config, else 0]"
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of sampling, 0 to 2^64 - 1. [default: random]")
]
System = Annotated[
    str | None, typer.Option(help="A system message before the prompt. [default: none]")
]
KvBits = Annotated[
    int | None,
    typer.Option(help="Keep keys and values of full layers in 8 or 4 bits. [default: off]"),
]
MaxKv = Annotated[
    int | None,
    typer.Option(
        help="Tokens of prompt and answer at most; longer prompts are refused. [default: the "
        "model's context]"
    ),
]
DrafterBits = Annotated[
    int | None,
    typer.Option(
        help="Quantise the drafter at load to 8, 6 or 4 bits; 0 keeps it as stored. [default: "
        "what mlx-mtp tune found, else 8 on a GPU, 0 on the CPU]"
    ),
]
NoCalibrate = Annotated[
    bool,
    typer.Option(
        "--no-calibrate",
        help="On Metal, race no kernels at the first load of a model (5 s at most); what "
        "earlier races and mlx-mtp tune gave is used. [default: off]",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Draft only what is verified bit for bit as plain decoding would, as a probe of a few "
        "seconds finds out; refuse where that is nothing. [default: off]",
    ),
]
CacheGb = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1 << 20,
        help="GB for the KV of conversations that may go on. [default: a quarter of what the "
        "weights leave]",
    ),
]
Parallel = Annotated[int, typer.Option(min=1, max=16, help="Requests at once.")]
MaxQueue = Annotated[int, typer.Option(min=0, help="Requests that may wait beside them.")]
IdleUnload = Annotated[
    float,
    typer.Option(
        min=0,
        max=1 << 20,
        help="Minutes without a request after which the weights are let go; the next request loads "
        "them again. 0: never.",
    ),
]


def draft_length(given: str | None) -> int | None:
    """None for auto. Raises UsageError for what is no number; its range is checked later."""
    if given is None or given == "auto":
        return None
    try:
        return int(given)
    except ValueError:
        raise UsageError(f"--draft-len is {given!r}; it must be 0 to 8, or auto") from None


def check(
    model: str | None,
    drafter: str | None,
    no_drafter: bool,
    draft_len: str | None,
    revision: str | None,
    drafter_revision: str | None,
    drafter_bits: int | None = None,
    drafter_device: str | None = None,
) -> None:
    """Raises UsageError for options that do not go together."""
    needs = {
        "--drafter": drafter,
        "--drafter-revision": drafter_revision,
        "--draft-len": draft_len not in (None, "0"),
        "--drafter-bits": drafter_bits is not None,
        "--drafter-device": drafter_device,
    }
    for name, given in needs.items():
        if no_drafter and given:
            raise UsageError(f"{name} needs a drafter, which --no-drafter leaves out")
    if model is None and (revision or (drafter_revision and not drafter)):
        raise UsageError("a revision needs the --model or the --drafter that it is of")


PATIENCE = 10  # seconds until it is said what is waited for


@cache
def joined() -> ranks.Link:
    """This process among those that mlx.launch started; the first call is the main thread's. WAITS
    until all are there. Raises MtpError."""
    from mlx_mtp import ranks

    patience = Timer(PATIENCE, say, ["waiting for the other ranks"])
    patience.daemon = True
    patience.start()
    with signals.unheard():
        link = ranks.Link(leave)
    patience.cancel()
    farewells.append(link.end)
    return link


def load(
    model: str | None,
    drafter: str | None,
    no_drafter: bool,
    draft_len: str | None,
    revision: str | None,
    drafter_revision: str | None,
    drafter_bits: int | None = None,
    drafter_device: str | None = None,
    *,
    quiet: bool = False,
    progress: Progress | None = None,
    **how: Any,
) -> Pair:
    """The pair that these options name; progress and a line about the demo pair on stderr unless
    `quiet`; `progress` is told instead. Raises UsageError as `check` and `load_pair` do."""
    check(
        model,
        drafter,
        no_drafter,
        draft_len,
        revision,
        drafter_revision,
        drafter_bits,
        drafter_device,
    )
    from mlx_mtp.cli.view import Loading, human_bytes
    from mlx_mtp.engine import lockstep
    from mlx_mtp.weights.load import load_pair

    # Nothing is drafted with 0, so a drafter that was not asked for need not be loaded.
    plain = no_drafter or (draft_length(draft_len) == 0 and drafter is None)
    rank = launched()
    if rank is not None:
        refused = {"--exact": how.get("exact"), "--drafter-device": drafter_device}
        for name, given in refused.items():
            if given:
                raise UsageError(f"{name} cannot be had on several ranks")
        link = joined()
        how["ranks"] = link.ranks
        quiet |= rank > 0
    loading = None if quiet else Loading()
    pair = load_pair(
        model,
        drafter=None if plain else "auto" if drafter is None else drafter,
        revision=revision,
        drafter_revision=drafter_revision,
        drafter_bits=None if plain else drafter_bits,
        drafter_device=None if plain else drafter_device,
        progress=None if rank else progress or loading,
        **how,
    )
    if rank is not None:
        if rank > 0:
            lockstep.follow(
                link, partial(lockstep.Follower, pair.target, pair.drafter, journal=link)
            )
        pair.journal = link
    if loading is not None:
        loading.close()
    if model is None and not quiet:
        say(
            f"no --model given: this is the demo pair, {human_bytes(pair.weights_bytes)}, which "
            "knows a little Python; --model e2b fetches a real one"
        )
    return pair
