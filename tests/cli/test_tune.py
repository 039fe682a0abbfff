"""`mlx-mtp tune`: a table or one JSON object, and where the profile lies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_mtp.engine import policy
from mlx_mtp.measure import tune as measuring
from mlx_mtp.measure.bench import RoundCost


@pytest.fixture
def tune(inside, model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(policy.Clock, "OUTSIDE", 1.0)  # something may run beside
    monkeypatch.setattr(measuring, "ANSWER", 24)
    monkeypatch.setattr(measuring, "prompts", lambda: {"code": ["def f(x):"]})
    costs = [RoundCost("", k, 0.002 * k, 0.01, 0.001) for k in range(9)]
    monkeypatch.setattr(measuring, "round_costs", lambda *_: costs)
    monkeypatch.setitem(measuring.tune.__kwdefaults__, "rounds", 1)
    return lambda *arguments: inside("tune", model, *arguments)


def test_a_table(tune, tmp_path):
    code, out, err = tune()
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("drafts  round ms")
    assert [line.split()[0] for line in lines[1:10]] == [str(n) for n in range(9)]
    assert lines[10] == "a draft step takes 2.00 ms"
    assert lines[-1].startswith(f"kept in {tmp_path / 'mlx-mtp' / 'tuned'}")
    assert "command buffers are Metal's" in err


def test_json(tune):
    code, out, _ = tune("--json")
    raw = json.loads(out)
    assert code == 0
    assert list(raw) == ["tuned", "path", "parts", "context", "ways", "bits", "notices"]
    assert list(raw["tuned"]["seconds"]) == [str(n) for n in range(9)]
    assert Path(raw["path"]).is_file()


def test_a_model_that_is_not_there_is_one_line(inside):
    code, out, err = inside("tune", "/not/there")
    assert (code, out, err.count("\n")) == (3, "", 1)
