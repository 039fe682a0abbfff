"""The profile of a model: kept, found again, and ignored in one line where it is of no use."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_mtp.engine.draft_length import Shape
from mlx_mtp.weights import tuned
from mlx_mtp.weights.find import find_pair
from mlx_mtp.weights.load import load_pair
from mlx_mtp.weights.tuned import BUFFERS, Tuned
from tests.cli.pairs import write_pair

MADE = Tuned(
    {n: 0.01 * (1 + n / 10) for n in range(9)},
    tuple(0.9 for _ in range(8)),
    False,
    True,
    0,
    None,
    "2026-11-30",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_pair(tmp_path_factory.mktemp("tuned")))


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "mlx-mtp"


@pytest.fixture
def key(model):
    return tuned.key_of(find_pair(model), True, "cpu")


def change(path, part, **values):
    raw = json.loads(path.read_text())
    raw[part] |= values
    path.write_text(json.dumps(raw))


def test_what_was_kept_is_found(tmp_path, key):
    path = tuned.save(tmp_path, "a/b", key, replace(MADE, buffer=(100, 100)))
    found, line = tuned.load(tmp_path, "a/b", key)
    assert found == replace(MADE, buffer=(100, 100))
    assert line == (
        "tuned on this machine on 2026-11-30 (mlx-mtp tune): rounds of 0 to 8 drafts take 10 to 18 "
        "ms"
    )
    assert list(path.parent.iterdir()) == [path]
    assert tuned.load(tmp_path, "a-b", key) == (None, None)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("gpu", "machine"),
        ("mlx", "MLX"),
        ("kernels", "version of mlx-mtp"),
        ("model", "model"),
        ("quantisation", "quantisation"),
        ("drafter", "drafter"),
        ("device", "device"),
    ],
)
def test_a_profile_of_something_else_is_ignored_with_a_line(tmp_path, key, part, named):
    path = tuned.save(tmp_path, "m", key, MADE)
    assert tuned.load(tmp_path, "m", key | {part: "x"}) == (
        None,
        f"{path} is of another {named} and is ignored; mlx-mtp tune makes a new one",
    )


def test_a_folder_is_itself_however_it_is_written_and_no_other(tmp_path, model, key, monkeypatch):
    tuned.save(tmp_path, model, key, MADE)
    monkeypatch.chdir(Path(model).parent)
    name = Path(model).name
    again = tuned.key_of(find_pair(name), True, "cpu")
    assert tuned.load(tmp_path, f"./{name}", again)[0] == MADE
    copy = shutil.copytree(model, tmp_path / "other" / name)
    monkeypatch.chdir(copy.parent)
    assert tuned.load(tmp_path, name, tuned.key_of(find_pair(name), True, "cpu")) == (None, None)


def test_weights_that_were_written_anew_are_others(tmp_path, model):
    copy = str(shutil.copytree(model, tmp_path / "copy"))
    tuned.save(tmp_path, copy, tuned.key_of(find_pair(copy), True, "cpu"), MADE)
    for weights in Path(copy).glob("*.safetensors"):
        os.utime(weights, ns=(1, 1))
    found, line = tuned.load(tmp_path, copy, tuned.key_of(find_pair(copy), True, "cpu"))
    assert (found, "is of another model" in line) == (None, True)


def test_plain_decoding_takes_what_was_measured_with_a_drafter(tmp_path, key):
    tuned.save(tmp_path, "m", key, MADE)
    assert tuned.load(tmp_path, "m", key | {"drafter": tuned.MISSING})[0] == MADE


def test_a_drafter_in_other_bits_was_not_measured(tmp_path, key):
    tuned.save(tmp_path, "m", key, MADE)
    found, line = tuned.load(tmp_path, "m", key, 4)
    assert (found, "in 0 bits" in line) == (None, True)


@pytest.mark.parametrize(
    "damage",
    [
        {"seconds": {"0": 1.0}},
        {"seconds": {str(n): -1.0 for n in range(9)}},
        {"seconds": {str(n): float("nan") for n in range(9)}},
        {"seconds": {str(n): True for n in range(9)}},
        {"seconds": {str(n): 1e9 for n in range(9)}},
        {"seconds": {str(n): 1000.0 if n == 8 else 0.01 for n in range(9)}},
        {"seconds": {str(n): 0.01 if n else 1e-300 for n in range(9)}},
        {"drafter_bits": 3},
        {"acceptance": [2.0] * 8},
        {"acceptance": [0.5]},
        {"compile": 1},
        {"drafter_bits": None},
        {"buffer": [0, 0]},
        {"made": "yesterday"},
        {"more": 1},
    ],
)
def test_a_profile_that_cannot_be_is_ignored_with_a_line(tmp_path, key, damage):
    path = tuned.save(tmp_path, "m", key, MADE)
    change(path, "tuned", **damage)
    found, line = tuned.load(tmp_path, "m", key)
    assert (found, line.count("\n")) == (None, 0)
    assert "cannot be read and is ignored" in line


@pytest.mark.parametrize("text", ["", "[]", "{", "1", '{"tuned": []}', "[" * 100000, "\udcff"])
def test_a_damaged_file_is_ignored_with_a_line(tmp_path, key, text):
    path = tuned.save(tmp_path, "m", key, MADE)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "cannot be read" in tuned.load(tmp_path, "m", key)[1]


def test_a_loaded_pair_goes_by_its_profile(data, model, key):
    tuned.save(data, model, key, MADE)
    pair = load_pair(model)
    assert MADE.line() in pair.notices
    engine = pair.engine()
    assert (engine.policy.compile, engine.policy.pipeline) == (False, True)
    described = engine.describe()["auto"]
    assert described["tuned"] is True
    assert described["seconds"]["8"] == pytest.approx(0.018, rel=0.02)
    assert pair.draft_length.choose() == Shape(8)  # at once, as the profile has it
    assert pair.engine(pipeline=False).policy.pipeline is False


def test_a_profile_can_be_left_alone(data, model, key):
    tuned.save(data, model, key, MADE)
    pair = load_pair(model, profile=False)
    assert pair.notices == []
    assert not pair.draft_length.tuned


def test_a_pair_loads_beside_a_profile_of_no_use(data, model, key):
    path = tuned.save(data, model, key, MADE)
    change(path, "key", gpu="another")
    pair = load_pair(model)
    assert [line for line in pair.notices if "another machine" in line]
    assert not pair.draft_length.tuned


def test_command_buffers_come_from_the_profile_unless_the_user_set_them(tmp_path, key, monkeypatch):
    for name in BUFFERS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "platform", "darwin")
    chip = SimpleNamespace(stdout="Apple M4 Pro\n")
    monkeypatch.setattr(tuned.subprocess, "run", lambda *_, **__: chip)
    made = replace(MADE, buffer=(100, 200))
    tuned.save(tmp_path, "m", key | {"gpu": "Apple M4 applegpu_g16g"}, made)
    tuned.set_buffers(tmp_path, "m")
    assert not any(name in tuned.os.environ for name in BUFFERS)
    tuned.save(tmp_path, "m", key | {"gpu": "Apple M4 Pro applegpu_g16s"}, made)
    tuned.set_buffers(tmp_path, "other")
    assert not any(name in tuned.os.environ for name in BUFFERS)
    tuned.set_buffers(tmp_path, "m")
    assert [tuned.os.environ[name] for name in BUFFERS] == ["100", "200"]
    monkeypatch.setenv(BUFFERS[0], "7")
    tuned.set_buffers(tmp_path, "m")
    assert tuned.os.environ[BUFFERS[0]] == "7"
