"""What `tune` measures of a tiny pair, and how it chooses; nothing depends on a clock."""

from __future__ import annotations

import json
from itertools import count

import pytest

from mlx_mtp.engine import policy
from mlx_mtp.engine.draft_length import Outcome
from mlx_mtp.errors import MtpError
from mlx_mtp.measure import tune as measuring
from mlx_mtp.measure.tune import Recorder, choose_buffers, faster, rates, relative, tune
from mlx_mtp.weights.load import load_pair
from tests.cli.pairs import write_pair

LARGE = (100, 100)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_pair(tmp_path_factory.mktemp("tune")))


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(policy.Clock, "OUTSIDE", 1.0)  # something may run beside
    monkeypatch.setattr(measuring, "ANSWER", 24)
    monkeypatch.setattr(measuring, "prompts", lambda: {"code": ["def f(x):"]})
    monkeypatch.setattr(measuring, "round_costs", lambda *_: [])
    return tmp_path / "mlx-mtp"


def test_tuned_then_loaded(data, model):
    said = []
    report = tune(model, rounds=2, progress=lambda *step: said.append(step))
    assert sorted(report.tuned.seconds) == list(range(9))
    assert all(seconds > 0 for seconds in report.tuned.seconds.values())
    assert report.ways == {}, "a CPU has one way without compiling"
    assert report.path is not None
    assert report.path.parent == data / "tuned"
    assert {what for what, *_ in said} == {"rounds by draft length"}
    assert [line.split(":")[0] for line in report.notices[:1]] == ["command buffers are Metal's"]
    pair = load_pair(model)
    assert report.tuned.line() in pair.notices
    assert pair.draft_length.tuned
    assert pair.pipelined is report.tuned.pipeline


def test_where_nothing_can_be_kept_nothing_is_measured(data, model):
    data.mkdir()
    (data / "tuned").write_text("in the way")
    with pytest.raises(MtpError, match=r"tuned cannot be written: File exists$"):
        tune(model, progress=lambda *step: pytest.fail("measured"))


def test_medians_of_rounds_in_turn():
    """A machine that is three times as slow for a while changes nothing, nor does a hiccup."""
    recorder = Recorder((0, 2))
    for seconds in (2.0, 1.0, 2.0, 1.0, 6.0, 3.0, None, 1.0, 2.0, 9.0, 2.0, 1.0):
        shape = recorder.choose()
        recorder.learn(Outcome(shape, ((shape.steps, 1),), (False,), seconds))
    assert recorder.turn == 12
    assert len(recorder.cycles) == 5
    assert recorder.medians() == pytest.approx({2: 2.0, 0: 1.0})


def test_rounds_are_timed_by_the_engines_clock(data, model, monkeypatch):
    """Every look at the clock is a second later: the same for all lengths."""
    ticks = count()
    monkeypatch.setattr(policy.time, "perf_counter", lambda: float(next(ticks)))
    pair = load_pair(model, profile=False)
    monkeypatch.setattr(policy.Clock, "OUTSIDE", 1.0)
    ways = {"way": (pair, {"pipeline": False})}
    recorder = measuring.timed(pair, ways, (0, 1, 3), [[2, 5, 9, 4]], 3)["way"]
    assert set(recorder.medians()) == {0, 1, 3}
    assert len(set(recorder.medians().values())) == 1


def test_rates_by_position():
    assert rates([])[0] == measuring.PRIOR
    found = rates([(2, 2)] * 100 + [(1, 0)] * 100)
    assert found[0] == pytest.approx(0.5, abs=0.01)
    assert found[1] > 0.98
    assert found[7] == pytest.approx(found[1])


def test_only_what_saves_enough_replaces_the_usual_way():
    cycles = {"usual": [{0: 1.0, 2: 2.0}] * 3, "other": [{0: 0.7, 2: 2.0}, {0: 9.0, 2: 2.0}]}
    cycles["other"].append({0: 0.8, 2: 1.9})
    assert relative(cycles, "usual") == pytest.approx({"usual": 1.0, "other": 0.9})
    assert faster({"usual": 1.0, "other": 0.9}, "usual") == "other"
    assert faster({"usual": 1.0, "other": 0.98}, "usual") == "usual"


@pytest.mark.parametrize(
    ("took", "peak", "chosen"),
    [
        ((0.9, 0.9, 0.9), 100, LARGE),
        ((0.9, 0.9, 1.5), 100, LARGE),
        ((0.98, 0.98, 0.98), 100, None),
        ((0.9, 0.9, 0.9), 103, None),
    ],
)
def test_larger_command_buffers_must_pay_and_take_no_memory(took, peak, chosen):
    turns = [{None: (1.0, 100), LARGE: (seconds, peak)} for seconds in took]
    assert choose_buffers(turns) == chosen


def test_drafter_bits_that_bring_most_are_chosen(data, model, monkeypatch):
    """As on a GPU: every drafter is read anew and measured."""
    monkeypatch.setattr(measuring, "on_cpu", lambda: False)
    monkeypatch.setattr(measuring, "tokens_per_second", lambda *_: next(speeds))
    speeds = iter((1.0, 2.0, 3.0))
    pair, notices = load_pair(model, profile=False), []
    how = {"drafter": "auto", "revision": None}
    asked = [[2, 5, 9, 4]]
    best, brings = measuring._drafter_bits(pair, model, how, {}, asked, 1, lambda *_: None, notices)
    assert brings == {0: 1.0, 4: 2.0, 8: 3.0}
    assert best.drafter_bits == 8
    assert best.drafter is not pair.drafter
    assert notices == []


def test_a_childs_figures(data, model, monkeypatch, capsys):
    monkeypatch.setattr(measuring, "TRIALS", 1)
    how = {"drafter": "auto", "revision": None, "force_fit": False}
    monkeypatch.setattr(measuring.sys, "argv", ["-c", json.dumps([model, how])])
    original = measuring.timed
    eager = lambda pair, ways, *rest: original(pair, {0: (pair, {})}, *rest)  # noqa: E731
    monkeypatch.setattr(measuring, "timed", eager)
    measuring.child()
    took, peak = json.loads(capsys.readouterr().out)
    assert took > 0
    assert peak > 0


def test_compiled_rounds_on_a_cpu_need_gpp(monkeypatch):
    monkeypatch.setattr(measuring.shutil, "which", lambda _: None)
    with pytest.raises(measuring.UsageError, match=r"g\+\+"):
        measuring._ways(True, [])
