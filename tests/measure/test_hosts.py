"""`plan --hosts`: a rank's memory against what one loads, and the traffic of a round against what
ranks count, in one process where an all_sum gives back what it was given."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.config import TargetConfig
from mlx_mtp.engine.requests import Request
from mlx_mtp.engine.session import Engine
from mlx_mtp.errors import UsageError
from mlx_mtp.measure import hosts
from mlx_mtp.measure import plan as plans
from mlx_mtp.measure.hosts import (
    FAST_FENCE,
    FENCE,
    LINKS,
    RDMA,
    RDMA_STEP,
    TCP_STEP,
    TEN_GBE,
    Traffic,
)
from mlx_mtp.measure.machine import named
from mlx_mtp.models.shards import Ranks
from mlx_mtp.weights.find import find_pair
from mlx_mtp.weights.load import load_drafter, load_target
from mlx_mtp.weights.published import configs
from tests.checkpoints import SHAPES, target_config, write_drafter
from tests.weights.conversions import convert, target

THUNDERBOLT, FAST, ETHERNET = LINKS
M4_PRO, M3_ULTRA = named("M4 Pro", 24), named("M3 Ultra", 96)


@pytest.fixture(scope="module")
def pairs():
    """Hosts -> (model, bits) -> sizes."""
    made = [("e2b", 4), ("26b", 4), ("31b", 4), ("31b", 8)]
    alone = {(m, bits): plans.converted(m, "", *configs(m), bits) for m, bits in made}
    return {
        n: {key: plans.shared(sizes, n) if n > 1 else sizes for key, sizes in alone.items()}
        for n in (1, 2, 4)
    }


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_round_sends_what_the_formula_says(tmp_path, monkeypatch, shape, drafts):
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, group=None: x)
    ranks = Ranks(0, 2)
    model = load_target(target(tmp_path / "target", shape), ranks=ranks)
    drafter = load_drafter(write_drafter(tmp_path / "drafter", shape))
    engine = Engine(model, drafter, rows=2, pipeline=False)
    for prompt in ([2, 7, 9], [2, 5]):
        engine.add(Request(prompt, 60, draft_len=drafts))
    rounds = []
    for _ in range(12):
        before = ranks.messages, ranks.bytes
        engine.step()
        rounds.append(Traffic(ranks.messages - before[0], ranks.bytes - before[1]))
    said = hosts.of_round(model.config.text, 2, drafts, model.dtype.size)
    assert set(rounds[-4:]) == {said}


@pytest.mark.parametrize(("size", "bits"), [(2, 4), (2, 16), (4, 4)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_machine_takes_what_the_last_rank_loads_and_no_other_more(tmp_path, shape, size, bits):
    wide = {"head_dim": 64, "intermediate_size": 256}  # groups of 64 for each of four
    wide |= {"moe_intermediate_size": 256} if shape == "26b" else {}
    raw = target_config(shape, **wide)
    source = target(tmp_path / "model", config=raw)
    folder = source if bits == 16 else convert(source, tmp_path / "out", bits)
    stored, *_ = plans.of_checkpoint(find_pair(str(folder), None), cpu=False)
    stored = plans.shared(stored, size)
    shaped = plans.converted("", "", TargetConfig.from_dict(raw), None, bits)
    shaped = plans.shared(shaped, size)
    assert stored.target.total == shaped.target.total
    for rank in range(size):
        part = load_target(folder, float32=False, ranks=Ranks(rank, size))
        taken = sum(array.nbytes for _, array in tree_flatten(part.parameters()))
        assert taken <= stored.target.total * 1.02
    assert taken == pytest.approx(stored.target.total, rel=0.02)
    assert part.kv_heads == stored.module.kv_heads


def test_a_part_is_its_share_of_what_is_divided(pairs):
    """Embeddings, norms and what is looked up are whole on all."""
    for key, alone in pairs[1].items():
        table = alone.text.vocab_size * alone.text.hidden_size
        for n in (2, 4):
            part = pairs[n][key]
            assert part.drafter == alone.drafter
            numbers = part.target.packed_numbers + part.target.float_numbers - table
            whole = alone.target.packed_numbers + alone.target.float_numbers - table
            assert whole / n < numbers < whole / n + 0.12 * whole
            assert plans.plan(part, M4_PRO).kv <= plans.plan(alone, M4_PRO).kv


def test_what_is_too_large_for_one_fits_on_more(pairs):
    fits = [plans.plan(pairs[n]["31b", 8], M4_PRO).fits for n in (1, 2, 4)]
    assert fits == [False, False, True]


def test_a_link_takes_its_steps_its_fences_and_its_bytes():
    traffic = Traffic(10, 6_000_000)
    wait = 10 * (FENCE + RDMA_STEP)
    assert THUNDERBOLT.seconds(traffic, 2) == pytest.approx(wait + 6e6 / RDMA)
    assert THUNDERBOLT.seconds(traffic, 4) == THUNDERBOLT.seconds(traffic, 2)
    fast = 10 * (FENCE - FAST_FENCE)
    assert THUNDERBOLT.seconds(traffic, 2) - FAST.seconds(traffic, 2) == pytest.approx(fast)
    ring = 10 * (FENCE + 6 * TCP_STEP) + 1.5 * 6e6 / TEN_GBE
    assert ETHERNET.seconds(traffic, 4) == pytest.approx(ring)


def test_speeds_are_the_roofline_and_the_messages(pairs):
    sizes = pairs[2]["31b", 4]
    planned = plans.plan(sizes, M3_ULTRA)
    assert (planned.plain_tps, planned.mtp_tps, planned.draft_len) == (None, None, None)
    assert list(planned.links) == [link.name for link in LINKS]
    round_s = plans.round_s(sizes, M3_ULTRA.chip, 0, 8192)
    for speed, link in zip(planned.links.values(), LINKS, strict=True):
        seconds = round_s + link.seconds(hosts.of_round(sizes.text, 1, 0, 2), 2)
        assert speed.plain_tps == pytest.approx(1 / seconds, abs=0.05)
        assert (speed.messages, speed.bytes) == hosts.of_round(sizes.text, 1, speed.draft_len, 2)
    fastest = sorted(planned.links, key=lambda name: -planned.links[name].mtp_tps)
    assert fastest == [FAST.name, THUNDERBOLT.name, ETHERNET.name]


def test_drafts_gain_more_where_messages_cost_more(pairs):
    """A round of several tokens sends one message more than one of a single token."""
    for sizes in pairs[2].values():
        links = plans.plan(sizes, M4_PRO).links
        slow, fast = links[ETHERNET.name], links[FAST.name]
        assert slow.mtp_tps / slow.plain_tps > fast.mtp_tps / fast.plain_tps
        assert slow.draft_len >= fast.draft_len


def test_a_chip_without_thunderbolt_5_has_ethernet_alone(pairs):
    assert list(plans.plan(pairs[2]["e2b", 4], named("M4", 24)).links) == [ETHERNET.name]


def test_heads_that_cannot_be_divided_are_refused():
    with pytest.raises(UsageError, match="cannot be divided among 3 ranks"):
        plans.shared(plans.converted("e2b", "", *configs("e2b"), 4), 3)
