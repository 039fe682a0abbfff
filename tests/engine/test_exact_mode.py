"""The exactness probe, and what exact mode makes of it."""

from __future__ import annotations

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp.engine.calibrate import Site, steady
from mlx_mtp.engine.exact import most_drafts, probe
from mlx_mtp.engine.kv import KVLayout
from mlx_mtp.engine.requests import Request
from mlx_mtp.errors import UsageError
from mlx_mtp.models.layers import MLP
from tests.engine.pairs import PROMPT, make_drafter, make_target, plain, run


@pytest.fixture
def rounding(monkeypatch):
    """Has MLPs round in another way from that many rows on."""

    def begin(rows: int) -> None:
        usual = MLP.__call__

        def rounded(self: MLP, x: mx.array) -> mx.array:
            out = usual(self, x)
            return out * (1 + 1e-6) if rows <= len(x) <= 9 else out

        monkeypatch.setattr(MLP, "__call__", rounded)

    return begin


def exact_pair(**changes) -> mlx_mtp.Pair:
    pair = mlx_mtp.load()
    pair.target, pair.drafter, pair.exact = make_target(**changes), make_drafter(), True
    return pair


@pytest.mark.parametrize("bits", [None, 8])
def test_on_this_cpu_in_float32_all_rows_are_bit_equal(bits):
    target = mlx_mtp.load().target
    found = probe(target, KVLayout(target.config.text, target.dtype, bits))
    assert found == dict.fromkeys(range(2, 10), 0.0)
    assert most_drafts(found) == 8


def test_a_pass_that_rounds_otherwise_is_found(rounding):
    target = make_target()
    rounding(4)
    found = probe(target, KVLayout(target.config.text, target.dtype))
    assert all(found[rows] == 0.0 for rows in (2, 3))
    assert all(0.0 < found[rows] < 1e-2 for rows in range(4, 10))
    assert most_drafts(found) == 2


def test_numbers_that_are_not_finite_are_not_equal():
    target = make_target()
    target.norm.weight = target.norm.weight * mx.nan
    found = probe(target, KVLayout(target.config.text, target.dtype))
    assert all(difference != difference for difference in found.values())
    assert most_drafts(found) == 0


def test_exact_mode_drafts_as_far_as_is_exact(rounding):
    rounding(4)
    pair = exact_pair()
    engine = pair.engine()
    with pytest.raises(
        UsageError, match=r"draft length of 3 .* 4 rows .* at most 2 can be drafted"
    ):
        engine.add(Request(PROMPT, 24, draft_len=3))
    free = Request(PROMPT, 24)
    assert run(engine, free) == [plain(pair.target, PROMPT, 24)]
    assert free.stats.drafted > 0
    assert max(int(name) for name in engine.describe()["auto"]["chosen"]) <= 2


def test_exact_mode_refuses_where_nothing_is(rounding):
    rounding(2)
    with pytest.raises(
        UsageError, match=r"2 rows differs .* nothing can be drafted; --draft-len 0"
    ):
        exact_pair().engine()


@pytest.mark.parametrize("drafting", [True, False])
def test_exact_mode_refuses_several_rows(drafting):
    pair = exact_pair()
    pair.drafter = pair.drafter if drafting else None
    with pytest.raises(UsageError, match="one request at a time"):
        pair.engine(rows=2)


def test_only_ways_that_do_not_change_with_the_rows_are_used():
    """'a' rounds otherwise from 4 rows on, 'b' never, stock always; one row takes stock."""

    def run_way(way: str | None, given: tuple[mx.array, ...]) -> mx.array:
        (x,) = given
        off = {None: len(x) > 1, "a": len(x) >= 4, "b": False}[way]
        return x * (1 + 1e-6) if off else x

    site = Site("key", ("a", "b"), lambda rows: (mx.ones((rows, 2)),), run_way)
    assert steady(site, {2: "a", 4: "a"}) == {n: "a" if n < 4 else "b" for n in range(2, 10)}
    assert steady(Site("key", (), site.sample, run_way), {}) == {}


def test_a_way_that_metal_refuses_is_passed_over():
    def run_way(way: str | None, given: tuple[mx.array, ...]) -> mx.array:
        if way == "a":
            raise RuntimeError("unable to build metal library")
        return given[0]

    site = Site("key", ("a",), lambda rows: (mx.ones((rows, 2)),), run_way)
    assert steady(site, dict.fromkeys(range(2, 10), "a")) == {}
