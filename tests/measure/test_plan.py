"""Plans: memory against what is measured, the roofline against its own rules, and a golden file.

`python -m tests.measure.test_plan` writes the golden file anew.
"""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp.config import TargetConfig
from mlx_mtp.engine.session import Request
from mlx_mtp.measure import plan as plans
from mlx_mtp.measure.machine import Machine, named
from mlx_mtp.measure.plan import Weights, expected_tokens, pass_s, plan, published_pairs, reads
from mlx_mtp.models.layers import on_cpu
from mlx_mtp.weights.find import find_pair
from tests.checkpoints import SHAPES, target_config
from tests.cli.pairs import write_pair
from tests.weights.conversions import convert, headers, target

GOLDEN = Path(__file__).parents[1] / "golden/plan.json"
MACHINES = (
    ("M1", 16),
    ("M2 Pro", 16),
    ("M3 Max", 64),
    ("M3 Ultra", 96),
    ("M4", 24),
    ("M4 Pro", 24),
    ("M4 Max", 64),
    ("M5", 32),
    ("M5 Max", 128),
)
UNKNOWN = Machine("this machine", None, 64 << 30, 48 << 30)


@pytest.fixture(scope="module")
def pairs():
    return published_pairs()


@pytest.fixture(scope="module")
def made(pairs):
    """Machine -> (model, bits) -> plan."""
    return {
        machine: {(s.name, s.bits): plan(s, named(*machine)) for s in pairs} for machine in MACHINES
    }


def rows_of(made):
    return {
        f"{chip} {memory}": [p.to_dict() for p in of_machine.values()]
        for (chip, memory), of_machine in made.items()
    }


def test_plans_are_those_of_the_golden_file(made):
    assert rows_of(made) == json.loads(GOLDEN.read_text())


def test_more_memory_never_makes_a_fitting_pair_unfit(pairs):
    for sizes in pairs:
        fits = [plan(sizes, named("M3 Max", gb)).fits for gb in (8, 16, 24, 32, 36, 48, 64, 96)]
        assert fits == sorted(fits)
        snapshots = [plan(sizes, named("M3 Max", gb)).snapshots for gb in (24, 36, 64)]
        assert snapshots == sorted(snapshots)


def test_fewer_bits_are_smaller_and_faster(made):
    for of_machine in made.values():
        for model in ("e2b", "e4b", "12b", "26b", "31b"):
            four, eight, sixteen = (of_machine[model, bits] for bits in plans.BITS)
            assert four.weights < eight.weights < sixteen.weights
            assert four.plain_tps > eight.plain_tps > sixteen.plain_tps
            assert four.kv == eight.kv == sixteen.kv


def test_drafting_is_never_slower_than_what_it_is_chosen_against(made):
    for of_machine in made.values():
        for p in of_machine.values():
            assert p.mtp_tps >= p.plain_tps
            assert (p.mtp_tps > p.plain_tps) == (p.draft_len > 0)


def test_chips_that_read_packed_weights_for_every_row_draft_less(made):
    for model in ("e2b", "12b", "31b"):
        for bits in (4, 8):
            old, new = made["M1", 16][model, bits], made["M4 Pro", 24][model, bits]
            assert old.draft_len < new.draft_len
            assert old.mtp_tps / old.plain_tps < new.mtp_tps / new.plain_tps


def test_a_mixture_of_experts_gains_less_from_drafts(made):
    of_machine = made["M4 Pro", 24]
    assert of_machine["26b", 4].draft_len in (1, 2)
    gains = {m: of_machine[m, 4].mtp_tps / of_machine[m, 4].plain_tps for m in ("12b", "26b")}
    assert gains["26b"] < gains["12b"]


def test_a_longer_context_takes_memory_and_time(pairs):
    for sizes in pairs:
        short, long = (plan(sizes, named("M4 Max", 64), n) for n in (8192, 65536))
        assert short.kv < long.kv
        assert short.plain_tps > long.plain_tps
        most = plan(sizes, named("M4 Max", 64), 1 << 20)
        assert (short.context, most.context) == (8192, sizes.text.max_position_embeddings)
        assert most.kv <= 8 * long.kv


def test_what_fits_leaves_room_for_activations_and_snapshots(pairs):
    sizes = next(s for s in pairs if (s.name, s.bits) == ("12b", 4))
    needed = plan(sizes, UNKNOWN).needed
    exact = plan(sizes, replace(UNKNOWN, limit=needed))
    assert (exact.fits, exact.snapshots) == (True, 0)
    assert not plan(sizes, replace(UNKNOWN, limit=needed - 1)).fits
    ample = plan(sizes, replace(UNKNOWN, limit=4 * needed))
    assert ample.snapshots == (4 * needed - ample.weights - ample.drafter) // 4


def test_without_a_known_chip_memory_is_still_answered(pairs):
    found = plan(pairs[0], UNKNOWN).to_dict()
    assert found["fits"] is True
    assert (found["plain_tps"], found["mtp_tps"], found["draft_len"]) == (None, None, None)


def test_the_five_pairs_take_no_network(monkeypatch):
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("a socket was opened"))
    assert len(published_pairs()) == 15


def test_how_often_packed_weights_are_read():
    assert [reads(rows, 15) for rows in (1, 2, 5, 6, 9)] == [1, 1, 1, 2, 2]
    assert [reads(rows, 14) for rows in (1, 2, 5, 9)] == [1, 2, 5, 9]


def test_a_pass_takes_the_longer_of_reading_and_arithmetic_and_its_launches():
    chip = named("M4 Pro", 24).chip
    reading = 273e9 * plans.BANDWIDTH
    launch = 100 * plans.LAUNCH
    packed = Weights(0, reading, 0, 0, 0, 0, 0)  # a second's worth
    assert pass_s(packed, chip, 5, 100, 0) == pytest.approx(1 + launch)
    assert pass_s(packed, chip, 6, 100, 0) == pytest.approx(2 + launch)
    floats = Weights(0, 0, reading, 0, 0, 0, 0)
    assert pass_s(floats, chip, 9, 0, reading) == pytest.approx(2)  # and KV
    experts = Weights(0, 0, 0, reading, 0, 0, 0)
    assert pass_s(experts, chip, 3, 0, 0) == pytest.approx(3)
    arithmetic = Weights(0, reading, 0, 0, chip.flops * plans.FLOPS / 2, 0, 0)
    assert pass_s(arithmetic, chip, 4, 0, 0) == pytest.approx(4)
    tile = Weights(0, 0, reading, 0, 0, chip.flops * plans.FLOPS / 2, 0)
    assert [pass_s(tile, chip, rows, 0, 0) for rows in (1, 2, 9)] == pytest.approx([1, 32, 32])


def test_expected_tokens_follow_the_published_positions():
    tokens = expected_tokens((0.84, 0.60, 0.39, 0.27))
    assert tokens[:5] == pytest.approx([1, 1.84, 2.44, 2.83, 3.10])
    assert len(tokens) == 9
    assert tokens[5] - tokens[4] == pytest.approx(0.27 * 0.27 / 0.39)
    assert expected_tokens(()) == [1.0]


def test_a_tables_rows_and_the_chosen_experts_are_all_that_a_row_reads(pairs):
    e2b = next(s for s in pairs if (s.name, s.bits) == ("e2b", 4)).target
    assert e2b.packed + e2b.floats < 0.4 * e2b.total  # its per-layer table is looked up
    assert e2b.by_row < 1e5
    moe = next(s for s in pairs if (s.name, s.bits) == ("26b", 4)).target
    assert moe.by_row == pytest.approx((moe.total - moe.packed - moe.floats) * 8 / 128)
    drafter = next(s for s in pairs if s.name == "e2b").drafter
    assert drafter.packed + drafter.floats + drafter.by_row < 0.35 * drafter.total


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_that_convert_writes(tmp_path, shape, bits):
    out = convert(target(tmp_path / "source", shape), tmp_path / "out", bits)
    written = sum(tensor.nbytes for tensor in headers(out).values())
    config = TargetConfig.from_dict(target_config(shape))
    assert plans.converted("", "", config, None, bits).target.total == written


def measured(pair, tokens):
    """(bytes of weights, of KV) after a prompt of so many tokens."""
    engine = pair.engine()
    engine.add(Request([2] * tokens, 1))
    while engine.busy:
        engine.step()
    return pair.weights_bytes, engine.kv_bytes


@pytest.mark.parametrize("tokens", [200, 900])
def test_memory_is_what_the_embedded_pair_takes(tokens):
    (stored, *_) = plans.of_checkpoint(find_pair(None), cpu=on_cpu())
    planned = plan(stored, UNKNOWN, tokens)
    weights, kv = measured(mlx_mtp.load(), tokens)
    assert planned.weights + planned.drafter == pytest.approx(weights, rel=0.05)
    assert planned.kv == pytest.approx(kv, rel=0.05)


@pytest.mark.parametrize("tokens", [200, 900])
def test_memory_is_what_a_pair_of_e2bs_shape_takes(tmp_path, tokens):
    folder = str(write_pair(tmp_path))
    stored, four, eight = plans.of_checkpoint(find_pair(folder), cpu=on_cpu())
    planned = plan(stored, UNKNOWN, tokens)
    weights, kv = measured(mlx_mtp.load(folder), tokens)
    assert planned.weights + planned.drafter == pytest.approx(weights, rel=0.05)
    assert planned.kv == pytest.approx(kv, rel=0.05)
    assert four.target.total < eight.target.total < stored.target.total
    assert (four.convert, stored.convert) == (
        f"mlx-mtp convert {folder} -q 4 -o model-4bit",
        None,
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_memory_is_what_a_conversion_takes_on_this_machine(tmp_path, bits):
    folder = write_pair(tmp_path)
    of_checkpoint = plans.of_checkpoint(find_pair(str(folder)), cpu=on_cpu())
    planned = plan(next(s for s in of_checkpoint if s.bits == bits), UNKNOWN, 200)
    out = convert(folder, tmp_path / "out", bits, drafter="auto")
    weights, kv = measured(mlx_mtp.load(str(out)), 200)
    assert planned.weights + planned.drafter == pytest.approx(weights, rel=0.05)
    assert planned.kv == pytest.approx(kv, rel=0.05)


@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_cpu_a_config_takes_what_its_weights_would(tmp_path, shape):
    folder = target(tmp_path / "model", shape)
    stored, *made = plans.of_checkpoint(find_pair(str(folder), None), cpu=True)
    (folder / "model.safetensors").unlink()
    *packed, floats = plans.without_weights(str(folder), None, True, [])
    assert floats.target.total == pytest.approx(stored.target.total, rel=0.01)
    assert (floats.bits, floats.dtype) == (stored.bits, mx.float32) == (32, stored.dtype)
    assert [s.target.total for s in packed] == [s.target.total for s in made]


def test_what_does_not_pay_in_float32_is_planned_for_in_bfloat16(pairs):
    for here, mac in zip(published_pairs(cpu=True), pairs, strict=True):
        assert (here.target, here.dtype) == (mac.target, mx.bfloat16)
        assert (here.drafter == mac.drafter) == (here.bits < 16)  # else as stored


def test_a_packed_config_is_planned_for_in_its_bits(tmp_path):
    config = target_config("e2b") | {"quantization": {"group_size": 64, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (only,) = plans.without_weights(str(tmp_path), None, False, [])
    assert (only.bits, only.convert) == (4, None)


def test_a_packed_checkpoint_is_planned_for_as_it_is(tmp_path):
    out = convert(target(tmp_path / "source"), tmp_path / "out", 4)
    (only,) = plans.of_checkpoint(find_pair(str(out), None), cpu=False)
    assert (only.bits, only.drafter) == (4, None)
    planned = plan(only, named("M4", 24))
    assert planned.draft_len == 0
    assert planned.mtp_tps == planned.plain_tps


if __name__ == "__main__":
    golden = {
        m: {(s.name, s.bits): plan(s, named(*m)) for s in published_pairs()} for m in MACHINES
    }
    parts = [
        f'"{machine}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]"
        for machine, rows in rows_of(golden).items()
    ]
    GOLDEN.write_text("{\n" + ",\n".join(parts) + "\n}\n")
