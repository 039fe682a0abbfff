"""`mlx-mtp plan`."""

from __future__ import annotations

import json

import pytest

from mlx_mtp.measure import machine


@pytest.fixture
def no_chip(monkeypatch):
    monkeypatch.setattr(machine, "_sysctl", lambda: None)


def test_a_table_for_another_chip(inside):
    code, out, err = inside("plan", "--chip", "m4 pro", "--memory", "24")
    assert (code, err) == (0, "")
    first, _, *rows = out.splitlines()
    assert first.startswith("M4 Pro, 24 GB, 17.2 GB of them for weights and KV; context 8192")
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


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--chip", "M9", "--memory", "16"], "known are M1, M1 Pro"),
        (["--chip", "M1"], "--chip and --memory go together"),
        (["--memory", "16"], "--chip and --memory go together"),
        (["--chip", "M1", "--memory", "nan"], "must be 1 to 4096"),
        (["--context", "0"], "must be 1 to 1048576"),
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
