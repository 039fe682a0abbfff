"""`mlx-mtp verify`."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(model, tmp_path):
    """The random pair in one folder, without hashes."""
    inside = shutil.copytree(model, tmp_path / "pair")
    shutil.copytree(f"{model}-assistant", inside / "drafter")
    return inside


def list_hashes(folder):
    files = [p for p in folder.rglob("*") if p.is_file()]
    hashes = {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    (folder / "mlx_mtp.json").write_text(json.dumps({"files": hashes}))


def test_a_whole_folder(inside, folder):
    parts = f"target {len([p for p in folder.iterdir() if p.is_file()])} files, drafter 2 files"
    whole = (0, f"{folder} is whole: {parts}, no hashes to compare with\n", "")
    assert inside("verify", str(folder)) == whole
    list_hashes(folder)
    code, out, err = inside("verify", str(folder))
    assert (code, err) == (0, "")
    assert "hashes match (" in out


def test_problems_are_lines_on_stdout(inside, folder):
    (folder / "tokenizer.json").unlink()
    (folder / "drafter" / "config.json").write_text("{")
    code, out, err = inside("verify", str(folder))
    assert (code, err) == (3, "")
    first, second = out.splitlines()
    assert first.startswith(f"{folder}/tokenizer.json is missing")
    assert second.startswith(f"{folder}/drafter/config.json is not JSON")


def test_names_cannot_break_lines(inside, folder):
    list_hashes(folder)
    (folder / "a\n\x1b[2J.safetensors").write_bytes(b"")
    code, out, _ = inside("verify", str(folder))
    assert code == 3
    assert out.splitlines()[-1] == f"{folder}/a␊␛[2J.safetensors is not listed in mlx_mtp.json"


def test_the_same_as_json(inside, folder):
    list_hashes(folder)
    code, out, _ = inside("verify", str(folder), "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["problems"], found["notices"]) == (0, True, [], [])
    assert found["folder"] == str(folder)
    assert found["hashed"] == found["files"] - 1
    with (folder / "model.safetensors").open("r+b") as f:
        f.truncate(1000)
    code, out, _ = inside("verify", str(folder), "--json")
    assert code == 3
    assert not json.loads(out)["ok"]
    assert all("model.safetensors" in line for line in json.loads(out)["problems"])


def test_notices_go_to_stderr(inside, folder):
    names = Path(folder / "model.safetensors").read_bytes()
    header = json.loads(names[8 : 8 + int.from_bytes(names[:8], "little")])
    weight_map = {k: "model.safetensors" for k in header if k != "__metadata__"}
    index = {"metadata": {"total_size": 7}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    code, out, err = inside("verify", str(folder))
    assert code == 0
    assert "is whole" in out
    assert "total_size is 7" in err


@pytest.mark.parametrize("name", ["none", "config.json", "x" * 300])
def test_no_folder(inside, folder, name):
    code, out, err = inside("verify", str(folder / name))
    assert (code, out, len(err.splitlines())) == (3, "", 1)


@pytest.mark.parametrize("arguments", [[], [""], ["a", "b"], ["a", "--fast"]])
def test_a_wrong_command_line(inside, arguments):
    code, out, err = inside("verify", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
