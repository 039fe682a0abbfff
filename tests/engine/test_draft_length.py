"""The controller of draft lengths, without a model: on simulated texts and machines, and alone."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.simulate import MACHINES, TEXTS, fixed, means, play, synthetic
from mlx_mtp.engine.draft_length import Acceptance, AutoLength, FixedLength, Outcome, Shape
from mlx_mtp.errors import UsageError


def outcome(shape, accepted, seconds=None, copied=False):
    """A round of one row; seconds: by default, what the CPU's rounds cost."""
    if seconds is None:
        seconds = MACHINES["CPU"].cost(shape)
    offered = shape.draft_len if copied else shape.steps
    return Outcome(shape, ((offered, min(accepted, offered)),), (copied,), seconds)


def rounds(auto, count, accepted, match=False, copied=None):
    """What is chosen in `count` rounds of which `accepted` drafts are right; copied: of copies."""
    shapes = []
    for _ in range(count):
        shape = auto.choose(match)
        copying = match and shape.copied > 0
        auto.learn(outcome(shape, copied if copying else accepted, copied=copying))
        shapes.append(shape)
    return shapes


@pytest.mark.parametrize("name", MACHINES)
def test_close_to_the_best_fixed_length_and_never_slower_than_plain_decoding(name):
    for text in TEXTS:
        *lengths, auto, _ = means(text, MACHINES[name], tokens=2000, seeds=6)
        assert auto >= 0.97 * max(lengths), (text, auto, lengths)
        assert auto >= 0.97 * lengths[0], (text, auto, lengths)


@pytest.mark.parametrize("name", MACHINES)
def test_a_drafter_that_is_never_right_costs_little_in_a_short_text(name):
    trace = synthetic("never right", 500, seed=0)
    auto = AutoLength()
    speed = play(lambda place, match: auto.choose(match), trace, MACHINES[name], auto.learn)
    assert speed >= 0.97 * play(fixed(0), trace, MACHINES[name])
    assert auto.chosen[Shape(0)] > 470


@pytest.mark.parametrize("name", ["M3 Max", "M3 Ultra", "M4 Pro", "M5 Max", "CPU"])
def test_copies_bring_more_than_the_drafter_alone_where_a_file_is_edited(name):
    *lengths, auto, _ = means("edits", MACHINES[name], tokens=2000, seeds=3)
    assert auto >= 1.1 * max(lengths)


def test_the_choice_follows_the_text():
    auto = AutoLength()
    assert max(rounds(auto, 60, accepted=8)[-8:]).steps >= 6
    prose = rounds(auto, 60, accepted=1)[-8:]
    assert {shape.steps for shape in prose} <= {0, 1, 2}
    assert rounds(auto, 80, accepted=0)[-20:].count(Shape(0)) >= 18
    assert max(rounds(auto, 400, accepted=8)[-8:]).steps >= 6


def test_the_next_request_starts_with_what_was_learnt():
    auto = AutoLength()
    rounds(auto, 100, accepted=0)
    assert rounds(auto, 20, accepted=0).count(Shape(0)) >= 19


def test_trials_become_rarer():
    auto = AutoLength()
    shapes = rounds(auto, 1200, accepted=0)
    trials = [i for i, shape in enumerate(shapes) if shape.steps]
    gaps = [b - a for a, b in pairwise(trials) if a > 10]
    assert gaps == sorted(gaps)
    assert gaps[0] <= 16
    assert gaps[-1] == 128


def test_an_accepted_trial_is_followed_by_another():
    auto = AutoLength()
    rounds(auto, 300, accepted=0)
    shapes = rounds(auto, 140, accepted=8)
    first = next(i for i, shape in enumerate(shapes) if shape.steps)
    assert sum(shape.steps > 0 for shape in shapes[first : first + 12]) == 12


def test_the_same_outcomes_give_the_same_choices():
    one, other = AutoLength(), AutoLength()
    for i in range(200):
        shape = one.choose(i % 3 == 0)
        assert other.choose(i % 3 == 0) == shape
        seen = outcome(shape, i * 7 % 5, seconds=0.01 + i * 13 % 7 / 1000, copied=shape.copied > 0)
        one.learn(seen)
        other.learn(seen)
    assert one.describe() == other.describe()


def test_rounds_without_seconds_teach_acceptance_but_no_costs():
    auto = AutoLength()
    for _ in range(20):
        shape = auto.choose()
        auto.learn(Outcome(shape, ((shape.steps, shape.steps),), (False,), None))
    assert auto.describe()["seconds"] == {}
    assert auto.drafted.rates[0] > 0.9


def test_a_shape_whose_first_round_was_not_timed_is_run_once_more():
    auto = AutoLength()
    for _ in range(6):
        auto.learn(Outcome(auto.choose(), ((0, 0),), (False,), None))
    assert auto.chosen == {Shape(2): 3, Shape(0): 3}


def test_one_hiccup_changes_nothing():
    one, other = AutoLength(), AutoLength()
    for auto, seconds in ((one, 1.0), (other, 100.0)):
        rounds(auto, 100, accepted=3)
        auto.learn(outcome(Shape(0), 0, seconds))
    assert rounds(one, 20, accepted=3) == rounds(other, 20, accepted=3)


def test_a_machine_that_becomes_slower_changes_nothing():
    auto = AutoLength()
    for slower in (1, 3):
        for _ in range(200):
            shape = auto.choose()
            auto.learn(outcome(shape, 3, seconds=slower * MACHINES["CPU"].cost(shape)))
    assert auto.chosen[Shape(3)] > 360


def test_a_budget_says_nothing_about_the_drafts_behind_it():
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.learn([(2, 2)])
    assert min(acceptance.rates) > 0.9
    acceptance.learn([(0, 0)])
    assert min(acceptance.rates) > 0.9
    for _ in range(50):
        acceptance.learn([(2, 1)])
    assert acceptance.rates[0] > 0.9 > 0.5 > acceptance.rates[1]


def test_in_a_batch_every_row_teaches():
    auto = AutoLength()
    for _ in range(3):
        auto.choose()
    rows = tuple((2, accepted) for accepted in (2, 2, 2, 0, 0, 0, 0, 0))
    for _ in range(40):
        auto.learn(Outcome(Shape(2), rows, (False,) * 8, 1.0))
    assert auto.drafted.rates[0] == pytest.approx(3 / 8, abs=0.02)
    assert auto.drafted.rates[1] > 0.9


def test_costs_are_learnt_for_each_size_of_the_batch():
    """Where the cost is in the rows, drafts pay for one row and not for eight."""
    auto = AutoLength()
    last = {}
    for size in (1, 8, 1):
        last[size] = []
        for _ in range(150):
            shape = auto.choose()
            last[size].append(shape)
            rows = ((shape.steps, min(shape.steps, 1)),) * size
            seconds = 4 + size * (1 + 2.2 * shape.steps)
            auto.learn(Outcome(shape, rows, (False,) * size, seconds))
    assert last[8].count(Shape(0)) > 100
    assert last[1].count(Shape(1)) > 135


def test_copies_are_made_where_there_is_a_match_and_they_were_right():
    auto = AutoLength()
    rounds(auto, 50, accepted=1)
    matched = rounds(auto, 30, accepted=1, match=True, copied=8)
    assert matched[-10:] == [Shape(0, 8)] * 10
    assert all(shape.copied == 0 for shape in rounds(auto, 200, accepted=1))
    assert all(shape.copied for shape in rounds(auto, 5, accepted=1, match=True, copied=8))
    wrong = rounds(auto, 100, accepted=1, match=True, copied=0)[-60:]
    assert sum(shape.copied > 0 for shape in wrong) <= 2


def test_a_batch_drafts_for_the_rows_without_a_match():
    auto = AutoLength()
    rounds(auto, 30, accepted=4)
    for _ in range(60):
        shape = auto.choose(match=True)
        rows = tuple((max(shape), max(shape)) if i < 2 else (shape.steps, 2) for i in range(4))
        copied = tuple(shape.copied > 0 and i < 2 for i in range(4))
        auto.learn(Outcome(shape, rows, copied, MACHINES["M3 Ultra"].cost(shape)))
    assert shape.steps >= 2
    assert shape.copied > shape.steps


def test_copies_can_be_left_out():
    auto = AutoLength(copy=False)
    assert all(shape.copied == 0 for shape in rounds(auto, 50, accepted=0, match=True, copied=8))


def test_a_calibration_saves_the_first_trials():
    costs = {n: MACHINES["M1"].cost(Shape(n)) / 100 for n in range(5)}
    assert AutoLength(costs).choose() == Shape(0)


@pytest.mark.parametrize("name", ["M1", "M3 Max", "CPU"])
@pytest.mark.parametrize(("text", "first"), [("code", 0.85), ("prose", 0.62)])
def test_from_a_profile_short_answers_are_close_to_the_best_fixed_length(name, text, first):
    machine, best, taken = MACHINES[name], [0.0] * 9, 0.0
    seconds = {n: machine.cost(Shape(n)) / 100 for n in range(9)}
    for seed in range(12):
        trace, auto = synthetic(text, 80, seed), AutoLength(seconds, acceptance=[first] * 8)
        taken += 1 / play(lambda place, match, a=auto: a.choose(match), trace, machine, auto.learn)
        for n in range(9):
            best[n] += 1 / play(fixed(n), trace, machine)
    assert min(best) >= 0.94 * taken


def test_from_a_profile_nothing_known_is_tried_and_what_changes_is_learnt():
    seconds = {n: MACHINES["CPU"].cost(Shape(n)) for n in range(9)}
    auto = AutoLength(seconds, acceptance=[0.0] * 8)
    assert rounds(auto, 31, accepted=0) == [Shape(0)] * 31
    assert max(rounds(auto, 400, accepted=8)[-8:]).steps >= 6
    auto = AutoLength(seconds, acceptance=[0.95] * 8)
    assert rounds(auto, 1, accepted=8)[0].steps >= 6
    assert rounds(auto, 100, accepted=0)[-20:].count(Shape(0)) >= 18
    assert auto.describe()["tuned"]


@pytest.mark.parametrize("most", range(9))
def test_no_more_drafts_than_allowed(most):
    shapes = rounds(AutoLength(max_draft=most), 100, accepted=8, match=True, copied=8)
    assert max(max(shape) for shape in shapes) == most


def test_fixed_lengths():
    assert {FixedLength(3).choose(match) for match in (False, True)} == {Shape(3)}
    for length in (-1, 9):
        with pytest.raises(UsageError, match="0 to 8"):
            FixedLength(length)
