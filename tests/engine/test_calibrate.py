"""Races of a pair's own sites. Without Metal both sides are MLX's operations; who wins is then up
to the test, and what is used is told by the modules."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlx_mtp.engine import calibrate
from mlx_mtp.engine.calibrate import Calibration, contest, sites
from mlx_mtp.kernels.race import STOCK, Contest, Outcome
from mlx_mtp.models.rows import RowsLinear, wrap
from tests.metal.pairs import MIXTURE, make_pair


@pytest.fixture
def decided(monkeypatch) -> list[Contest]:
    """Every contest that was made; the last way wins at 2 to 5 rows, stock elsewhere."""
    seen: list[Contest] = []

    def decide(makers: Callable, _: float) -> Outcome:
        outcome = Outcome()
        for make in makers:
            entry = make()
            seen.append(entry)
            name = list(entry.ways)[-1] if 2 <= entry.rows <= 5 else STOCK
            outcome.wins.setdefault(entry.key, {})[entry.rows] = name
        return outcome

    monkeypatch.setattr(calibrate, "race", decide)
    return seen


def kinds(entries: list[Contest]) -> set[str]:
    return {entry.key.split()[0] for entry in entries}


def test_winners_are_used_where_they_won(decided, tmp_path):
    target, drafter = make_pair(ordered=True, **MIXTURE)
    Calibration(tmp_path).prepare(target, drafter)
    wanted = {"product", "experts", "norms", "heads", "head", "clusters", "attention"}
    assert kinds(decided) == wanted
    won = frozenset({2, 3, 4, 5})
    assert target.shortlist.rows == drafter.shortlist.rows == won
    layer = target.layers[0]
    assert layer.experts.once == layer.fused == layer.self_attn.fused == won
    assert isinstance(layer.mlp.down_proj, RowsLinear)
    assert isinstance(target.lm_head, RowsLinear)
    assert target.lm_head.linear is target.embed_tokens


def test_every_way_gives_what_stock_gives_at_every_number_of_rows():
    target, drafter = make_pair(ordered=True, **MIXTURE)
    for model in (target, drafter):
        wrap(model)
        for site in sites(model):
            for rows in (1, 2, 9):
                entry = contest([site], rows)
                wanted = entry.stock(0)
                assert wanted.shape[0] == rows
                for name, way in entry.ways.items():
                    assert mx.allclose(way(0), wanted, rtol=1e-4, atol=1e-5), (site.key, name)


@pytest.mark.parametrize("bits", [None, 8])
def test_attention_is_raced_for_the_kv_that_is_used(decided, tmp_path, bits):
    target, _ = make_pair()
    ways = Calibration(tmp_path).attention(target.config.text, target.dtype, bits)
    assert ways == dict.fromkeys((2, 3, 4, 5), "kernel")
    (key,) = {entry.key for entry in decided}
    assert key == f"attention 2/1x512 kv {bits or 'whole'} float32"
    for entry in decided:
        assert mx.allclose(entry.ways["kernel"](0), entry.stock(0), rtol=1e-3, atol=1e-4)


def test_alike_sites_race_once_and_known_ones_never_again(decided, tmp_path):
    first = Calibration(tmp_path)
    first.prepare(*make_pair())
    raced = [(entry.key, entry.rows) for entry in decided]
    assert len(raced) == len(set(raced))
    assert first.notices == [
        f"raced kernels for {len(raced)} shapes of this model, {len(raced) * 4 // 9} won (kept in "
        f"{tmp_path}; --no-calibrate skips this)"
    ]
    decided.clear()
    second = Calibration(tmp_path)
    target, drafter = make_pair()
    second.prepare(target, drafter)
    assert not decided
    assert second.notices == []
    assert target.shortlist.rows == {2, 3, 4, 5}


def test_what_a_drafter_runs_at_is_raced_first(decided, tmp_path):
    target, drafter = make_pair()
    Calibration(tmp_path).prepare(target, drafter)
    first = {entry.key: entry.rows for entry in reversed(decided)}
    own = {site.key for site in sites(drafter)} - {site.key for site in sites(target)}
    assert {first[key] for key in own} == {1}
    assert {rows for key, rows in first.items() if key not in own} == {5}


def test_all_races_of_a_load_share_their_time(decided, tmp_path):
    calibration = Calibration(tmp_path, seconds=0.0)
    target, drafter = make_pair()
    calibration.prepare(target, drafter)
    assert calibration.attention(target.config.text, target.dtype, 8) == {}
    assert not decided
    assert calibration.notices == []
    calibration.seconds = 1.0
    calibration.attention(target.config.text, target.dtype, 8)
    assert decided
    assert calibration.seconds < 1.0


def test_no_calibrate_uses_what_is_known_and_races_nothing(decided, tmp_path):
    target, drafter = make_pair()
    Calibration(tmp_path, racing=False).prepare(target, drafter)
    assert not decided
    assert target.shortlist.rows == frozenset()
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_said(decided, tmp_path):
    place = tmp_path / "file"
    place.write_text("")
    calibration = Calibration(place / "folder")
    calibration.prepare(*make_pair())
    assert "not kept: " in calibration.notices[-1]
