"""`mlx-mtp inspect`."""

from __future__ import annotations

import json


def test_a_table_of_what_the_checkpoint_is(inside, model):
    code, out, err = inside("inspect", model)
    assert (code, err) == (0, "")
    rows = dict(line.strip().split("  ", 1) for line in out.splitlines())
    assert rows["type"].strip() == "gemma4"
    assert "4 sliding (window 8), 2 full; 3 share KV" in rows["layers"]
    assert "parameters" in rows["weights"]
    assert rows["drafter"].strip() == f"{model}-assistant (beside the model)"


def test_the_same_as_json(inside, model):
    _, out, _ = inside("inspect", model, "--json")
    found = json.loads(out)
    assert found["model_type"] == "gemma4"
    assert found["parts"]["drafter"]["bytes"] > 0


def test_a_folder_that_is_no_model(inside, tmp_path):
    code, out, err = inside("inspect", str(tmp_path))
    assert (code, out) == (3, "")
    assert len(err.splitlines()) == 1
