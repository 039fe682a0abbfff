"""Who wins a race, without a device: ways that take as long as the test says."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_mtp.kernels import race as racing
from mlx_mtp.kernels.race import Contest, race

RIGHT = mx.array([[1.0, 2.0], [3.0, 4.0]])


class Track:
    """A clock that moves by what the ways on it cost when they are evaluated."""

    def __init__(self, monkeypatch):
        self.now, self.pending = 0.0, 0.0
        self.calls: list[bool] = []  # of every call, whether it had to follow another
        monkeypatch.setattr(racing.mx, "eval", lambda _: self.settle(), raising=False)

    def settle(self) -> None:
        self.now, self.pending = self.now + self.pending, 0.0

    def clock(self) -> float:
        return self.now

    def way(self, seconds: float, result: mx.array = RIGHT):
        def run(_: int, after: mx.array | None = None) -> mx.array:
            self.pending += seconds
            self.calls.append(after is not None)
            return result

        return run


@pytest.fixture
def track(monkeypatch) -> Track:
    return Track(monkeypatch)


def contest(track: Track, stock: float, bound: float = 1e-3, **ways: float) -> Contest:
    made = {name: track.way(seconds) for name, seconds in ways.items()}
    return Contest("key", 2, track.way(stock), made, bound)


def winner(track: Track, entry: Contest) -> str:
    return race([lambda: entry], 1e9, track.clock).wins[entry.key][entry.rows]


def test_the_fastest_way_wins(track):
    assert winner(track, contest(track, 3.0, tile=2.0, matrix=1.0)) == "matrix"


def test_stock_wins_where_nothing_is_clearly_faster(track):
    assert winner(track, contest(track, 1.0, tile=0.98)) == "stock"
    assert winner(track, contest(track, 1.0, tile=0.9)) == "tile"


def test_a_wrong_way_does_not_race_and_is_named(track):
    entry = contest(track, 3.0, tile=1.0)
    entry.ways["tile"] = track.way(1.0, RIGHT + 0.1)
    outcome = race([lambda: entry], 1e9, track.clock)
    assert outcome.wins == {"key": {2: "stock"}}
    assert outcome.wrong == ["tile at key, 2 rows: off by 2.5e-02, 1e-03 is allowed"]


def test_nan_is_wrong(track):
    entry = contest(track, 3.0, tile=1.0)
    entry.ways["tile"] = track.way(1.0, RIGHT * mx.nan)
    assert winner(track, entry) == "stock"


def test_a_way_that_metal_refuses_does_not_race(track):
    entry = contest(track, 3.0, tile=1.0, matrix=2.0)

    def refused(_: int) -> mx.array:
        raise RuntimeError("unable to build metal library\nerror: ...")

    entry.ways["tile"] = refused
    outcome = race([lambda: entry], 1e9, track.clock)
    assert outcome.wins == {"key": {2: "matrix"}}
    assert outcome.wrong == ["tile at key, 2 rows: unable to build metal library"]


def test_a_call_follows_the_one_before_it_as_layers_do(track):
    entry = contest(track, 3.0, tile=1.0)
    racing._fastest(entry, ["tile"], track.clock)
    assert track.calls == ([False] + [True] * (racing.CALLS - 1)) * (2 + 1 + 2 * racing.TURNS)


def test_short_ways_are_called_more_often(track):
    racing._fastest(contest(track, 1e-4, tile=1e-4), ["tile"], track.clock)
    assert len(track.calls) == 3 * racing.CALLS + 2 * racing.TURNS * 20


def test_the_budget_ends_it_and_says_what_is_left(track):
    made = []

    def make() -> Contest:
        made.append(1)
        return contest(track, 0.1, tile=0.05)

    outcome = race([make] * 10, 10.0, track.clock)
    assert len(made) + outcome.left == 10
    assert 0 < outcome.left < 10
