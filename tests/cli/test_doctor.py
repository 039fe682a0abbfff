"""`mlx-mtp doctor`."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.cli.conftest import COMMAND

NAMES = ["machine", "python", "versions", "install", "metal", "data folder", "hub cache", "hub"]
NAMES += ["pair", "weights", "memory", "exactness", "texts", "acceptance", "kernels"]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", ""))  # is put back
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def test_a_healthy_machine(inside):
    code, out, err = inside("doctor", "--offline")
    loading = "mlx-mtp: load embedded "  # where it takes long
    assert [line for line in err.splitlines() if not line.startswith(loading)] == []
    assert code == 0, out
    lines = out.splitlines()
    assert [line[9:22].strip() for line in lines[: len(NAMES)]] == NAMES
    assert {line.split()[0] for line in lines[: len(NAMES)]} <= {"ok", "skipped", "warning"}
    assert lines[-1] == "OK"


def test_what_is_wrong_ends_the_report(inside, tmp_path):
    (tmp_path / "hf").write_text("")
    code, out, err = inside("doctor", str(tmp_path / "models" / "none"), "--offline")
    assert (code, err) == (1, "")
    cache, pair = out.splitlines()[len(NAMES) + 1 :]
    assert cache.startswith("wrong: hub cache: $HF_HOME/hub: ")
    assert "set HF_HOME" in cache
    assert pair.startswith("wrong: pair: ...: no such folder")


def test_the_same_as_json(inside, tmp_path):
    code, out, err = inside("doctor", str(tmp_path / "none"), "--offline", "--json")
    report = json.loads(out)
    assert (code, err, report["ok"]) == (1, "", False)
    assert [check["name"] for check in report["checks"]] == NAMES
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert (states["pair"], states["weights"], states["hub"]) == ("wrong", "skipped", "skipped")
    assert all({"name", "state", "found", "advice"} == set(check) for check in report["checks"])


def test_an_mlx_that_cannot_be_imported(tmp_path):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("")
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libmlx.so: no such file')")
    run = subprocess.run(
        [*COMMAND, "doctor", "--offline"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (1, "")
    lines = run.stdout.splitlines()
    assert [line[9:22].strip() for line in lines[: len(NAMES)]] == NAMES
    assert lines[1].startswith("ok       python")
    assert run.stdout.count("libmlx.so") == 2  # in the list and at the end
    told = "wrong: machine: ImportError: libmlx.so: no such file; in the clone of mlx-mtp: "
    assert lines[-1] == f"{told}.venv/bin/pip install --force-reinstall ."
