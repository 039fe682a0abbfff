"""How much KV memory has room for, decided before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_mtp.engine.kv import BLOCK, KVLayout, capacity_for
from mlx_mtp.errors import FitError


@dataclass
class Memory:
    """limit: bytes that weights and KV may take together, None for no limit."""

    layout: KVLayout
    limit: int | None

    def positions(
        self,
        prompt: int,
        answer: int,
        *,
        rows: int,
        held: int,
        least: int,
        used: int,
        context: int,
    ) -> int:
        """How many positions there is room for in `rows` rows, as far as `prompt` and `answer`
        need it. KV is new memory unless the buffers, of `held` slots, are long enough already:
        while they grow, the old ones stand beside the new. least: slots that other rows need, for
        all have as many. used: bytes that are taken for good.
        Raises FitError if the prompt alone does not fit."""
        if self.limit is None:
            return context
        free = max(self.limit - used, 0)

        def needed(*capacities: int) -> int:
            return sum(self.layout.nbytes(rows, c) for c in capacities if c > held)

        capacity = max(capacity_for(prompt + BLOCK), least)
        if needed(capacity) > free:
            raise FitError(
                f"a prompt of {prompt} tokens needs {needed(capacity) / 1e6:.1f} MB of KV, but "
                f"only {free / 1e6:.1f} of {self.limit / 1e6:.1f} MB are free; shorten it, "
                "use --kv-bits 8, or a smaller model or quantisation"
            )
        while capacity < prompt + answer + 2 * BLOCK:
            if needed(capacity, 2 * capacity) > free:
                return min(max(capacity - 2 * BLOCK, prompt + 1), context)
            capacity *= 2
        return context

    def left(self, positions: int, *, rows: int, used: int) -> int | None:
        """Bytes that are left beside new buffers of so many positions; None for no limit."""
        if self.limit is None:
            return None
        return max(self.limit - used - self.layout.nbytes(rows, capacity_for(positions)), 0)
