"""`mlx-mtp plan`."""

from __future__ import annotations

import json
import shutil

import pytest

from mlx_mtp.measure import machine


@pytest.fixture
def no_chip(monkeypatch):
    monkeypatch.setattr(machine, "_sysctl", lambda: None)


def test_a_table_for_another_chip(inside):
    code, out, err = inside("plan", "--chip", "m4 pro", "--memory", "24")
    assert (code, err) == (0, "")
    first, _, *rows = out.splitlines()
    assert first.startswith("M4 Pro, 24 GiB, 16.0 GiB (17.2 GB) of them for weights and KV;")
    assert len(rows) == 17
    assert rows[0].split()[:3] == ["e2b", "4", "yes"]
    assert "largest that fits: 26b in 4 bits, mlx-mtp convert google/gemma-4-26B-A4B" in rows[-2]
    assert "a roofline, not measured" in rows[-1]


def test_as_json(inside):
    code, out, _ = inside("plan", "--chip", "M4 Pro", "--memory", "24", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["machine"], found["context"], len(found["pairs"])) == ("M4 Pro", 8192, 15)
    asked = {"model", "bits", "fits", "weights_gb", "kv_gb", "plain_tps", "mtp_tps", "draft_len"}
    assert all(asked <= pair.keys() for pair in found["pairs"])


def test_a_model_on_two_machines(inside, model):
    given = "plan", model, "--hosts", "2", "--chip", "M4 Pro", "--memory", "24"
    code, out, err = inside(*given)
    assert (code, err) == (0, "")
    first, titles, *rows, _, note = out.splitlines()
    assert first.startswith("each of 2: M4 Pro, 24 GiB")
    assert "  Thunderbolt 5  " in titles
    assert titles.endswith("10 GbE")
    assert all(row.count(" / ") == 3 for row in rows)
    assert "predictions, nobody measured them" in note
    found = json.loads(inside(*given, "--json")[1])
    assert (found["hosts"], "predictions" in found["note"]) == (2, True)
    for pair in found["pairs"]:
        assert pair["plain_tps"] is None
        speed = {"plain_tps", "mtp_tps", "draft_len", "messages", "bytes"}
        assert all(speed == link.keys() for link in pair["links"].values())
    alone = json.loads(inside("plan", model, "--json")[1])["pairs"][0]
    assert found["pairs"][0]["weights_gb"] < alone["weights_gb"]
    assert "links" not in alone


def test_nothing_fits_a_watch(inside):
    _, out, _ = inside("plan", "--chip", "M1", "--memory", "2")
    assert "nothing fits: the smallest needs 4.4 GB" in out


def test_an_unknown_machine_is_told_what_fits_and_that_speed_is_left_out(inside, no_chip):
    code, out, err = inside("plan", "--json")
    assert code == 0
    assert "tokens/s are left out" in err
    assert all(pair["plain_tps"] is None for pair in json.loads(out)["pairs"])
    assert all(type(pair["fits"]) is bool for pair in json.loads(out)["pairs"])


def test_a_model_as_it_is_stored_and_converted(inside, model):
    code, out, _ = inside("plan", model, "--chip", "M1", "--memory", "8", "--json")
    found = json.loads(out)["pairs"]
    assert code == 0
    assert [pair["bits"] for pair in found] == [16, 4, 8]
    assert {pair["model"] for pair in found} == {model}
    assert found[0]["drafter_gb"] > 0


def test_the_command_that_converts_names_the_drafter_that_was_named(inside, model):
    _, out, _ = inside("plan", model, "--drafter", f"{model}-assistant", "--json")
    stored, *made = json.loads(out)["pairs"]
    assert stored["convert"] is None
    assert all(f"{model} --drafter {model}-assistant -q" in pair["convert"] for pair in made)


def test_a_context_past_the_models_own_is_cut_and_told(inside, model):
    code, out, err = inside("plan", model, "--context", "70000", "--json")
    found = json.loads(out)
    assert (code, found["context"]) == (0, 70000)
    assert {pair["context"] for pair in found["pairs"]} == {60000}
    assert f"{model} is planned for at its own context of 60000" in err


def test_a_config_alone_is_planned_for(inside, model, tmp_path):
    shutil.copy(f"{model}/config.json", tmp_path)
    named = "--drafter", f"{model}-assistant", "--chip", "M1", "--memory", "8", "--json"
    code, out, err = inside("plan", str(tmp_path), *named)
    assert code == 0
    assert "what follows is from shapes alone" in err
    _, of_weights, _ = inside("plan", model, *named)
    four, *_ = json.loads(out)["pairs"]
    same = json.loads(of_weights)["pairs"][1]
    assert {k for k in four if four[k] != same[k]} == {"model", "convert"}


def test_a_short_name_without_a_hub_is_planned_for_by_its_shape(inside, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    code, out, err = inside("plan", "e2b", "--chip", "M1", "--memory", "8", "--json")
    assert code == 0
    assert [(p["model"], p["bits"]) for p in json.loads(out)["pairs"]] == [
        ("e2b", 4),
        ("e2b", 8),
        ("e2b", 16),
    ]
    assert "what follows is from shapes alone" in err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--chip", "M9", "--memory", "16"], "known are M1, M1 Pro"),
        (["--chip", "M1"], "--chip and --memory go together"),
        (["--memory", "16"], "--chip and --memory go together"),
        (["--chip", "M1", "--memory", "nan"], "must be 1 to 4096"),
        (["--context", "0"], "must be 1 to 1048576"),
        (["--hosts", "0"], "hosts are 0; they must be 1 to 32"),
        (["--hosts", "3"], "cannot be divided among 3 ranks; take fewer"),
        (["--drafter", "x"], "needs the MODEL"),
    ],
)
def test_what_cannot_be_planned_for_is_one_line(inside, arguments, line):
    code, out, err = inside("plan", *arguments)
    assert (code, out) == (2, "")
    assert line in err
    assert len(err.splitlines()) == 1


def test_a_folder_that_is_no_model(inside, tmp_path):
    code, out, err = inside("plan", str(tmp_path))
    assert (code, out) == (3, "")
    assert len(err.splitlines()) == 1
