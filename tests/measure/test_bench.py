"""The sweep: what its figures are made of, on the embedded pair, and what a damaged report is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import mlx_mtp
from mlx_mtp.errors import MtpError, UsageError
from mlx_mtp.measure import bench
from mlx_mtp.measure.bench import Plan, Question, Report, Run, cell_of, compare, leading, rotated
from mlx_mtp.measure.prompts import KINDS, prompts, split
from mlx_mtp.models.layers import on_cpu
from mlx_mtp.pair import Pair

CODE = prompts()["code"]
SHORT = prompts()["edit"][0]  # the embedded pair answers it in 8 tokens


@pytest.fixture(scope="module")
def pair() -> Pair:
    return mlx_mtp.load()


@pytest.fixture(scope="module")
def swept(pair: Pair) -> tuple[Report, list[list[Question]]]:
    """A small sweep, and what another program was asked in it."""
    asked: list[list[Question]] = []

    def other(turn: list[Question]) -> Run:
        asked.append(turn)
        return Run(counted=10, seconds=2.0)

    plan = Plan(
        {"code": CODE[:2], "more": CODE[2:3]},
        draft_lens=(3, None),
        batches=(1, 2),
        temps=(0.0, 0.8),
        max_tokens=12,
        repeats=1,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "ROUNDS", 2)
        report = bench.measure([pair], plan, lambda _: {"other": other})
    return report, asked


def test_every_cell_is_there_and_plain_decoding_is_what_ratios_are_to(swept) -> None:
    cells = {cell.key: cell for cell in swept[0].cells}
    ours = {
        ("embedded drafter", batch, temp, kind, way)
        for batch in (1, 2)
        for temp in (0.0, 0.8)
        for kind in ("code", "more", "all")
        for way in ("0", "3", "auto")
    }
    assert ours <= set(cells)
    others = {("embedded drafter", 1, 0.0, kind, "other") for kind in ("code", "more", "all")}
    assert set(cells) - ours == others
    assert cells["embedded drafter", 1, 0.0, "code", "0"].ratio == pytest.approx((1, 1, 1))
    assert cells["embedded drafter", 1, 0.0, "all", "other"].tps == pytest.approx((5, 5, 5))
    assert cells["embedded drafter", 1, 0.0, "all", "other"].agreement is None
    drafted = cells["embedded drafter", 1, 0.0, "code", "3"]
    assert len(drafted.acceptance) == 3
    assert 1 < drafted.tokens_per_round <= 4
    assert (drafted.laps, len(drafted.identical)) == (1, 2)


@pytest.mark.skipif(not on_cpu(), reason="elsewhere rows may round differently")
def test_the_text_is_plain_decodings_at_any_batch_and_temperature(swept) -> None:
    ours = [cell for cell in swept[0].cells if cell.way != "other"]
    assert all(cell.agreement == 1 and all(cell.identical) for cell in ours)


def test_a_contestant_gets_the_prompts_one_by_one(swept) -> None:
    asked = swept[1]
    assert {len(turn) for turn in asked} == {1}
    assert {turn[0].text for turn in asked} == {*CODE[:3]}


def test_a_round_is_timed_in_parts_for_every_length(swept) -> None:
    costs = swept[0].rounds
    assert [cost.drafts for cost in costs] == list(range(9))
    assert all(cost.verify > 0 and cost.host > 0 for cost in costs)
    assert costs[8].draft > costs[0].draft


def test_timing_a_round_takes_it_back(pair: Pair) -> None:
    engine = pair.engine()
    ids = pair.tokenizer.encode("def gcd(a, b):", bos=True)
    batch = bench.prefilled(engine, ids)
    (plain,) = bench.decode(pair, engine, 0, 0.0, 4, [Question("", ids, True)]).texts
    for drafts in (4, 0, 8):
        bench.round_parts(engine, batch, drafts)
        assert batch.state.length.tolist() == [len(ids)]
        assert batch.state.bonus.tolist() == plain[:1]


def test_a_report_survives_json(swept) -> None:
    written = json.loads(json.dumps(swept[0].to_dict()))
    assert Report.from_dict(written, "it") == swept[0]
    assert next(iter(swept[0].groups().values()))[0].kind == "all"


def test_another_program_that_fails_is_left_out(pair: Pair, monkeypatch) -> None:
    asked: list[int] = []
    said: list[str] = []
    monkeypatch.setattr(bench, "ROUNDS", 1)

    def other(turn: list[Question]) -> Run:
        asked.append(1)
        if len(asked) == 3:
            raise MtpError("it went away")
        return Run(counted=10, seconds=2.0)

    plan = Plan({"code": CODE[:1]}, draft_lens=(2,), max_tokens=16, repeats=3)
    report = bench.measure([pair], plan, lambda _: {"other": other}, say=said.append)
    assert [cell.way for cell in report.cells] == ["0", "2"]
    assert said == report.notices == ["left out: other: it went away"]
    assert len(asked) == 3


def change(*path: Any) -> Callable[[dict[str, Any]], Any]:
    *way, key, value = path

    def damage(raw: dict[str, Any]) -> dict[str, Any]:
        at = raw
        for step in way:
            at = at[step]
        at[key] = value
        return raw

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: [],
        lambda raw: None,
        lambda raw: {k: v for k, v in raw.items() if k != "cells"},
        change("format", 99),
        change("machine", "mine"),
        change("settings", 3),
        change("cells", {"a": 1}),
        change("cells", 0, "more", 1),
        change("cells", 0, "way", ["0"]),
        change("cells", 0, "batch", "1"),
        change("cells", 0, "tps", [1, 2]),
        change("cells", 0, "tps", 7),
        change("cells", 0, "tps", [1, 2, 10**400]),
        change("cells", 0, "ratio", [1, 0, 2]),
        change("cells", 0, "tps", [1, float("nan"), 2]),
        change("cells", 0, "acceptance", ["x"]),
        change("cells", 0, "identical", [1]),
        change("rounds", 0, "draft", None),
        change("rounds", 0, {}),
        change("notices", 1),
    ],
)
def test_a_damaged_report_is_one_line(swept, damage) -> None:
    raw = json.loads(json.dumps(swept[0].to_dict()))
    with pytest.raises(UsageError, match=r"^old\.json is no report .+ or it is damaged$"):
        Report.from_dict(damage(raw), "old.json")


def test_two_reports_meet_in_the_cells_that_both_have(swept) -> None:
    new = swept[0]
    machine = new.machine | {"chip": "M1", "mlx": "0.1"}
    old = replace(new, machine=machine, cells=[*new.cells[:2], replace(new.cells[2], way="7")])
    differs, both = compare(old, new)
    assert differs == [
        f"chip was M1, is {new.machine['chip']}",
        f"mlx was 0.1, is {new.machine['mlx']}",
    ]
    assert [now.key for _, now in both] == [cell.key for cell in new.cells[:2]]
    assert compare(new, new)[0] == []


def test_a_cell_sums_up_its_laps() -> None:
    texts = [[[1, 2, 3, 4]], [[5, 6]]]
    plain = [Run(8, 4.0, 8, 8), Run(2, 1.0, 2, 2)]  # 2 tokens/s
    drafting = [
        Run(8, 2.0, 8, 4, ([1, 2, 3, 4],), (4, 4), (4, 2)),
        Run(2, 0.5, 2, 1, ([5, 7],), (3, 0), (2, 0)),
    ]
    again = [replace(drafting[0], seconds=1.0), replace(drafting[1], seconds=0.25)]
    again[0] = replace(again[0], texts=([1, 2, 3],))
    laps = [{"0": plain, "2": drafting}, {"0": plain, "2": again}, {"0": plain, "2": drafting}]
    cell = cell_of(("d", 1, 0.0, "code", "2"), laps, texts)
    assert cell.laps == 3
    assert cell.tps == pytest.approx((4, 4, 6))
    assert cell.ratio == pytest.approx((2, 2, 3))
    assert cell.tokens_per_round == 2
    assert cell.acceptance == (18 / 21, 6 / 12)
    assert cell.identical == (False, False)
    assert cell.agreement == pytest.approx((1 + 0.5 + 0.75 + 0.5 + 1 + 0.5) / 6)
    none = cell_of(("d", 1, 0.0, "code", "0"), laps, texts)
    assert (none.agreement, none.identical, none.acceptance) == (None, (), ())


@pytest.mark.parametrize(
    ("text", "other", "share"),
    [([], [], 1), ([1], [], 0), ([1, 2], [1, 2], 1), ([1, 2, 3, 4], [1, 2, 9], 0.5)],
)
def test_agreement_is_the_share_of_leading_tokens(text, other, share) -> None:
    assert leading(text, other) == share


def test_everyone_comes_first_once() -> None:
    assert [rotated("abc", turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]
    assert rotated("abc", 1) == ["b", "c", "a"]


def test_answers_too_short_to_time_are_left_out(pair: Pair) -> None:
    said: list[str] = []
    plan = Plan({"edit": [SHORT, CODE[0]]}, max_tokens=20)
    (kept,) = bench.questions(pair, plan, 0.0, said.append).values()
    assert [question.text for question in kept] == [CODE[0]]
    assert said == [
        "edit, temperature 0: 1 of 2 prompts are left out, their answers have under 16 tokens"
    ]
    with pytest.raises(UsageError, match="no prompt has an answer of 16 tokens"):
        bench.questions(pair, replace(plan, prompts={"edit": [SHORT]}), 0.0, said.append)


def test_a_model_without_a_template_completes(pair: Pair) -> None:
    said: list[str] = []
    plan = Plan({"mine": ["def gcd(a, b):"]}, max_tokens=12)
    (kept,) = bench.questions(replace(pair, template=None), plan, 0.0, said.append).values()
    assert kept[0].ids == pair.tokenizer.encode("def gcd(a, b):", bos=True)
    assert said == ["embedded target has no chat template: prompts are completed as they are"]


def test_without_a_drafter_there_is_nothing_to_sweep(pair: Pair) -> None:
    with pytest.raises(UsageError, match="has no drafter here"):
        bench.measure([replace(pair, drafter=None)], Plan({"code": CODE}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"draft_lens": (0, 9)},
        {"batches": (17,)},
        {"batches": (0,)},
        {"temps": (-1.0,)},
        {"max_tokens": 1},
        {"repeats": 0},
        {"cool_down": -1.0},
        {"cool_down": float("nan")},
        {"prompts": {"code": []}},
    ],
)
def test_an_impossible_plan(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Plan(**({"prompts": {"code": CODE}} | wrong))


def test_prompts_of_every_kind() -> None:
    assert tuple(prompts()) == KINDS
    assert all(2 <= len(asked) <= 4 for asked in prompts().values())
    assert split("---\na\n\nb\n---\n---\n\n  c\n") == ["a\n\nb", "  c"]
