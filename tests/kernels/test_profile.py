from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_mtp.kernels.profile import Profile
from mlx_mtp.kernels.race import Outcome


def learnt(folder: Path) -> Profile:
    profile = Profile()
    profile.learn(Outcome({"a": {2: "tile", 5: "stock"}}))
    profile.learn(Outcome({"a": {3: "matrix"}}))
    profile.save(folder)
    return profile


def test_what_was_learnt_is_there_at_the_next_load(tmp_path):
    learnt(tmp_path / "new")
    profile, notice = Profile.load(tmp_path / "new")
    assert notice is None
    assert profile.ways("a") == {2: "tile", 3: "matrix"}
    assert profile.raced("a", 5)
    assert not profile.raced("a", 4)
    assert not profile.raced("b", 5)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["kernels.json"]


def test_none_yet_is_no_news(tmp_path):
    assert Profile.load(tmp_path) == (Profile(), None)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"wins": 1}', '{"wins": {"a": {"x": "y"}}}'])
def test_a_damaged_profile_is_ignored_with_a_line(tmp_path, text):
    (tmp_path / "kernels.json").write_text(text)
    profile, notice = Profile.load(tmp_path)
    assert profile == Profile()
    assert notice == f"{tmp_path / 'kernels.json'} cannot be read and is ignored"


@pytest.mark.parametrize("what", ["gpu", "mlx", "kernels"])
def test_a_profile_of_something_else_is_ignored_with_a_line(tmp_path, what):
    learnt(tmp_path)
    raw = json.loads((tmp_path / "kernels.json").read_text())
    raw["machine"][what] += "x"
    (tmp_path / "kernels.json").write_text(json.dumps(raw))
    profile, notice = Profile.load(tmp_path)
    assert profile == Profile()
    assert notice is not None
    assert "another machine" in notice
