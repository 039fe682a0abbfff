"""What the grammars of a batch allow, as masks for the places of a block."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_mtp.engine.requests import Request
from mlx_mtp.errors import MtpError


def masks_of(
    requests: Sequence[Request | None], drafts: Sequence[list[int]], vocabulary: int
) -> mx.array | None:
    """uint32 [B, k+1, ceil(V / 32)] as `permit` takes them; None: every token may come at every
    place of every row."""
    every = mx.full((len(drafts[0]) + 1, -(-vocabulary // 32)), 0xFFFFFFFF, mx.uint32)
    tables = []
    for request, ahead in zip(requests, drafts, strict=True):
        table = every
        if request and request.grammar:
            try:
                allowed = request.grammar.masks(ahead)
                table = every if allowed is None else mx.array(allowed)
            except MtpError as error:
                # Nothing may come, which ends this request.
                request.error, table = str(error), mx.zeros_like(every)
        tables.append(table)
    return None if all(table is every for table in tables) else mx.stack(tables)
