"""The service that a front end's options ask for."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from mlx_mtp.cli import options
from mlx_mtp.cli.backends.service import Service
from mlx_mtp.cli.terminal import launched, leave, say
from mlx_mtp.errors import UsageError

if TYPE_CHECKING:
    from mlx_mtp.engine.session import Engine
    from mlx_mtp.pair import Pair
    from mlx_mtp.weights.checkpoint import Progress


def service(
    model: str | None,
    revision: str | None,
    drafter: str | None,
    drafter_revision: str | None,
    no_drafter: bool,
    force_fit: bool,
    draft_len: str | None,
    kv_bits: int | None,
    max_kv: int | None,
    drafter_bits: int | None,
    no_calibrate: bool,
    exact: bool,
    cache_gb: float | None,
    parallel: int,
    max_queue: int,
    idle_unload: float,
) -> tuple[Service, int | None]:
    """Loading, in a thread, what the command line names; and the draft length of requests that
    name none, None for auto. Raises UsageError; what only loading finds wrong with the options its
    requests are told. Another rank than 0 never returns from here."""
    from mlx_mtp.engine.draft_length import check_draft_len

    length = options.draft_length(draft_len)
    check_draft_len(length or 0)
    # Without no_drafter a request may draft where others do not.
    which = (model, drafter, no_drafter, draft_len if no_drafter else None)
    options.check(*which, revision, drafter_revision, drafter_bits)
    for name, given, known in (
        ("--drafter-bits", drafter_bits, (8, 6, 4, 0)),
        ("--kv-bits", kv_bits, (8, 4)),
    ):
        if given not in (None, *known):
            wanted = ", ".join(map(str, known))
            raise UsageError(f"{name} is {given}; it must be one of {wanted}")
    if max_kv is not None and max_kv < 2:
        raise UsageError(f"--max-kv is {max_kv}; it must be 2 tokens or more")

    several, loads = launched() is not None, count(1)

    def load(progress: Progress) -> Pair:
        if next(loads) > 1 and several:
            leave(1, "several ranks load a model once")
        pair = options.load(
            *which,
            revision,
            drafter_revision,
            drafter_bits,
            quiet=True,
            progress=progress,
            force_fit=force_fit,
            calibrate=not no_calibrate,
            exact=exact,
        )
        for notice in pair.notices:
            say(notice)
        return pair

    def make(pair: Pair) -> Engine:
        cache = pair.cache_bytes() if cache_gb is None else int(cache_gb * 1e9)
        return pair.engine(kv_bits=kv_bits, max_kv=max_kv, rows=parallel, cache_bytes=cache)

    if several:
        options.joined()
    if launched():
        load(lambda *_: None)
    if several and idle_unload:
        say("several ranks keep their weights: --idle-unload is off")
    idle_s = (not several) * 60 * idle_unload or None
    return Service(load, make, rows=parallel, most_waiting=max_queue, idle_s=idle_s), length
