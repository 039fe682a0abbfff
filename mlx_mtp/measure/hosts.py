"""What machines that share a model send each other in a round, and how long that should take.

MLX's collectives run on the CPU: each waits for the GPU and the GPU for it, a fence, and takes
steps from machine to machine. Predictions from what others published, nothing measured by us. Rank
0's journal goes by while a round runs, and is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mlx_mtp.config import TextConfig
from mlx_mtp.measure.machine import Chip


class Traffic(NamedTuple):
    """What each machine hands to collectives: how many arrays, and their bytes in all."""

    messages: int
    bytes: int


def of_round(text: TextConfig, rows: int, drafts: int, itemsize: int) -> Traffic:
    """Of a round, as `models.shards.Ranks` counts it; itemsize: of activations. Every layer adds up
    what attention gave, then MLP and experts in one array, for all tokens of the block. Rank 0's
    drafts go to all before verify, and behind it its tokens, n and two flags, int32."""
    layers, tokens = text.num_hidden_layers, rows * (drafts + 1)
    width = (3 if text.enable_moe_block else 2) * text.hidden_size
    chosen = 4 * (rows * drafts + tokens + 3 * rows)
    return Traffic(2 * layers + (drafts > 0) + 1, layers * tokens * width * itemsize + chosen)


@dataclass(frozen=True)
class Link:
    """fence: seconds that CPU and GPU take for each other in an all_sum. step: seconds from one
    machine to the next. bandwidth: bytes/s. ring: 2 (hosts - 1) steps, each with its part of the
    array; else a mesh with a cable for each pair, by which all send all of it at once."""

    name: str
    fence: float
    step: float
    bandwidth: float
    ring: bool

    def seconds(self, traffic: Traffic, hosts: int) -> float:
        steps, share = (2 * (hosts - 1), 1 / hosts) if self.ring else (1, 1.0)
        sent = steps * share * traffic.bytes
        return traffic.messages * (self.fence + steps * self.step) + sent / self.bandwidth


# ml-explore/mlx issue 4438 (M3 Ultra, MLX 0.32.2): 180 us, with MLX_METAL_FAST_SYNCH=1 4 us; its
# pull request 1773 has 150-200 us an all-reduce, and fast 15-20, transport included.
FENCE, FAST_FENCE = 180e-6, 4e-6
# jundot/omlx pull request 3118, JACCL between an M3 Ultra and an M5 Max: 27-31 us, 6.1-6.5 GB/s.
RDMA_STEP, RDMA = 30e-6, 6e9
# Jeff Geerling, "1.5 TB of VRAM on Mac Studio", 2025-12: 300 us by TCP between Macs. ASSUMED to be
# a step of MLX's ring over 10 GbE, of which nothing is published; the bandwidth is nominal.
TCP_STEP, TEN_GBE = 300e-6, 1.25e9

LINKS = (
    Link("Thunderbolt 5", FENCE, RDMA_STEP, RDMA, ring=False),
    Link("Thunderbolt 5 fast", FAST_FENCE, RDMA_STEP, RDMA, ring=False),
    Link("10 GbE", FENCE, TCP_STEP, TEN_GBE, ring=True),
)
PREDICTED = (
    "tokens/s, plain / MTP (drafts), are predictions, nobody measured them: the roofline of a "
    "machine's part, and for each all_sum what others published of JACCL over Thunderbolt 5; fast "
    "is with MLX_METAL_FAST_SYNCH=1, which can hang MLX 0.32; the ring over 10 GbE is assumed"
)


def links_of(chip: Chip) -> list[Link]:
    """Those that machines with that chip have."""
    fast = chip.name in ("M3 Ultra", "M4 Pro", "M4 Max", "M5 Pro", "M5 Max")
    return [link for link in LINKS if link.ring or fast]
