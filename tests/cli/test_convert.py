"""`mlx-mtp convert`: the pair that it writes, what it prints, and every refusal's exit code."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mlx_mtp.weights.find import find_pair
from tests.checkpoints import drafter_config, target_config, write_drafter, write_target
from tests.cli.conftest import COMMAND, environment
from tests.cli.pairs import write_pair
from tests.text import folders


@pytest.fixture
def pair(tmp_path):
    """The target's folder of a pair of our own, its drafter beside it."""
    return write_pair(tmp_path / "source", positions=4096)


def text_of(generate, *arguments):
    done = generate("hello there", "--max-tokens", "40", "--temp", "0", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_bits_the_text_is_the_sources(generate, inside, model, tmp_path):
    out = tmp_path / "out"
    assert inside("convert", model, "-o", str(out), "--no-verify")[0] == 0
    wanted = text_of(generate)
    command = [*COMMAND, "generate", "hello there", "--max-tokens", "40", "--temp", "0"]
    done = subprocess.run(
        [*command, "--model", str(out)], capture_output=True, env=environment(), timeout=60
    )
    assert len(wanted) > 10
    assert (done.returncode, done.stdout) == (0, wanted)


def test_the_drafter_inside_is_found_first(inside, pair, tmp_path):
    out = tmp_path / "there" / "out"
    code, table, told = inside("convert", str(pair), "-o", str(out), "-q", "4", "--no-verify")
    assert code == 0
    sizes = r"[\d.]+ MB to [\d.]+ MB, \d+\.\d\d bits a weight"
    assert re.fullmatch(rf"target   {sizes}\ndrafter  {sizes}\n", table)
    place = rf"mlx-mtp: {re.escape(str(pair))} and .*: [\d.]+ MB, to [\d.]+ MB in {out} \(.* free"
    assert re.match(place, told)
    assert told.endswith(f'mlx-mtp: try it: mlx-mtp generate "Hello" --model {out}\n')
    assert "\r" not in told
    assert "\x1b" not in told
    write_drafter(
        tmp_path / "there" / "out-assistant", config=drafter_config("e2b", vocab_size=512)
    )
    found = find_pair(str(out))
    assert found.why == "inside the model's folder"
    assert found.drafter is not None
    assert found.drafter.source.where("") == str(out / "drafter")


@pytest.mark.parametrize("bits", [(), ("-q", "4")])
def test_the_listing_and_the_card(inside, pair, tmp_path, bits):
    out = tmp_path / "out"
    assert inside("convert", str(pair), "-o", str(out), *bits, "--no-verify")[0] == 0
    listed = json.loads((out / "mlx_mtp.json").read_text())
    found = {
        path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in out.rglob("*")
        if path.is_file() and path.name != "mlx_mtp.json"
    }
    assert listed["files"] == found
    assert listed["format"] == 1
    assert re.fullmatch(r"mlx-mtp \d+\.\d+\.\d+", listed["made_by"])
    assert listed["target"] == {"source": "model", "revision": None}
    assert listed["drafter"] == {"source": "model-assistant", "revision": None}
    assert (listed["recipe"] is None) == (not bits)
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: mlx-mtp\n")
    assert "base_model" not in card  # folders are no hub ids
    assert str(tmp_path) not in card + (out / "mlx_mtp.json").read_text()


def test_a_drafter_alone_and_a_target_alone(inside, pair, tmp_path):
    alone, target = tmp_path / "alone", tmp_path / "target"
    code, table, told = inside("convert", f"{pair}-assistant", "-o", str(alone), "-q", "8")
    assert code == 0
    assert table.startswith("drafter  ")
    assert told.endswith(f"--model TARGET --drafter {alone}\n")
    assert inside("convert", str(pair), "-o", str(target), "--no-drafter", "--no-verify")[0] == 0
    assert not (target / "drafter").exists()
    assert json.loads((target / "mlx_mtp.json").read_text())["drafter"] is None
    found = find_pair(str(target), str(alone))
    assert found.drafter is not None
    assert {scheme["bits"] for scheme in found.drafter.quantized.values()} == {8}
    again = tmp_path / "again"
    one = ("convert", str(target), "--drafter", str(alone), "-o", str(again), "--no-verify")
    assert inside(*one)[0] == 0
    assert find_pair(str(again)).why == "inside the model's folder"


def test_a_pair_that_does_not_fit_is_refused_before_writing(inside, pair, tmp_path):
    other = write_drafter(
        tmp_path / "other", config=drafter_config("e2b", backbone=128, vocab_size=512)
    )
    out = tmp_path / "out"
    code, table, told = inside("convert", str(pair), "--drafter", str(other), "-o", str(out))
    assert (code, table) == (3, "")
    assert told.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("-q", "7"), "bits are 7; they must be one of"),
        (("-q", "4", "--mode", "mxfp8"), "mxfp8 has 8 bits in groups of 32, nothing else"),
        (("-q", "4", "--group-size", "16"), "group size is 16; it must be one of"),
        (("--group-size", "32"), "give the bits, too (-q)"),
        (("--dtype", "int8"), "dtype is int8; it must be bfloat16, float16, float32"),
        (("-q", "4", "--recipe", "none.toml"), "none.toml cannot be read"),
        (("--drafter", "x", "--no-drafter"), "--drafter needs a drafter"),
        (("--no-drafter", "--drafter-revision", "x"), "a drafter revision was given"),
        (("--revision", "x"), "is a folder: it has no revision x"),
        (("-q", "four"), "Invalid value for '--bits'"),
    ],
)
def test_a_wrong_command_line(inside, pair, tmp_path, arguments, told):
    out = tmp_path / "out"
    code, table, line = inside("convert", str(pair), "-o", str(out), *arguments)
    assert (code, table) == (2, "")
    assert told in line
    assert line.count("\n") == 1
    assert not out.exists()


def test_what_is_there_is_replaced_only_by_force(inside, pair, tmp_path):
    out = tmp_path / "my out"
    command = ("convert", str(pair), "-o", str(out), "--no-verify")
    assert inside(*command)[0] == 0
    code, _, told = inside(*command, "-q", "4")
    assert (code, told) == (2, f"mlx-mtp: {out} is there already; --force replaces it\n")
    assert json.loads((out / "mlx_mtp.json").read_text())["bits"] == {}
    code, _, told = inside(*command, "-q", "4", "--force")
    assert code == 0
    assert json.loads((out / "mlx_mtp.json").read_text())["bits"]
    assert told.endswith(f"--model '{out}'\n")
    code, _, told = inside("convert", str(out), "-o", str(out), "--force")
    assert (code, told.count("\n")) == (2, 1)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "letter").touch()
    code, _, told = inside("convert", str(pair), "-o", str(tmp_path / "own"), "--force")
    assert (code, (tmp_path / "own" / "letter").exists()) == (2, True)
    assert "letter was not written by convert" in told


def test_case_g13_packed_already(inside, pair, tmp_path):
    packed, out = tmp_path / "packed", tmp_path / "out"
    assert inside("convert", str(pair), "-o", str(packed), "-q", "8", "--no-verify")[0] == 0
    again = ("convert", str(packed), "-o", str(out), "-q", "4", "--no-verify")
    code, _, told = inside(*again)
    assert (code, told.count("\n"), out.exists()) == (3, 1, False)
    assert told.endswith("take the original weights, or give --requantize\n")
    assert inside(*again, "--requantize")[0] == 0


def test_float16_is_warned_of(inside, pair, tmp_path):
    code, _, told = inside(
        "convert", str(pair), "-o", str(tmp_path / "out"), "--dtype", "float16", "--no-verify"
    )
    assert code == 0
    assert "can overflow float16" in told


def test_into_the_folder_that_one_is_in(inside, pair, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert inside("convert", str(pair), "-o", ".", "--no-verify")[0] == 0
    monkeypatch.chdir(tmp_path / "here")  # another folder now, of the same name
    code, _, told = inside("convert", str(pair), "-o", ".", "--no-verify")
    assert (code, told) == (2, "mlx-mtp: . is there already; --force replaces it\n")
    assert (tmp_path / "here" / "drafter" / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_proof_at_the_end(inside, tmp_path):
    """From the default run: the table, and a folder that `verify` calls whole."""
    sizes = {"vocab_size": 512, "vocab_size_per_layer_input": 512}
    source = write_target(tmp_path / "a", config=target_config("e2b", **sizes))
    folders.gemma_like(source, chat_template=folders.TEMPLATE)
    write_drafter(tmp_path / "a-assistant", config=drafter_config("e2b", vocab_size=512))
    tables = {}
    for name, bits in (("plain", ()), ("packed", ("-q", "4"))):
        out = tmp_path / name
        code, tables[name], told = inside("convert", str(source), "-o", str(out), *bits)
        assert code == 0, told
        code, line, _ = inside("verify", str(out))
        assert code == 0
        assert re.fullmatch(rf"{out} is whole: .* hashes match \(\d+ files\)\n", line)
    values = {
        name: dict(re.split("  +", line, maxsplit=1) for line in table.splitlines())
        for name, table in tables.items()
    }
    assert float(values["plain"]["KL to the source, max"].split()[0]) < 1e-9
    assert values["plain"]["same next token"] == "100.0%"
    assert float(values["packed"]["KL to the source, mean"].split()[0]) > 1e-6
    for found in values.values():
        assert {"target", "drafter", "first drafts accepted before"} < found.keys()
    accepted = [values["plain"][f"first drafts accepted {when}"] for when in ("before", "after")]
    assert accepted[0] == accepted[1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("", "-q", "4"), "the model is empty"),
        (("PAIR", "--drafter", ""), "the drafter is empty"),
        (("PAIR", "--requantize"), "--requantize packs again: give the bits, too (-q)"),
    ],
)
def test_words_that_say_nothing(inside, pair, tmp_path, arguments, told):
    given = [str(pair) if word == "PAIR" else word for word in arguments]
    code, _, said = inside("convert", *given, "-o", str(tmp_path / "out"))
    assert (code, said) == (2, f"mlx-mtp: {told}\n")


def test_names_as_long_as_names_may_be(inside, pair, tmp_path):
    out = tmp_path / ("x" * 255)
    assert inside("convert", str(pair), "-o", str(out), "--no-verify")[0] == 0
    code, _, told = inside("convert", str(pair), "-o", f"{out}x", "--no-verify")
    assert (code, told.count("\n")) == (2, 1)
    assert "File name too long" in told


def test_a_file_of_the_source_that_cannot_be_read(inside, pair, tmp_path, monkeypatch):
    source = tmp_path / "of mine"
    shutil.copytree(pair, source)
    (source / "merges.txt").touch()

    def unreadable(path, mode="r", *rest, **named):
        if path.name == "merges.txt" and "r" in mode:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, mode, *rest, **named)

    opened = Path.open
    monkeypatch.setattr(Path, "open", unreadable)
    code, _, told = inside("convert", str(source), "-o", str(tmp_path / "out"), "--no-verify")
    assert (code, told.splitlines()[-1]) == (
        3,
        f"mlx-mtp: {source / 'merges.txt'} cannot be read: Permission denied",
    )
    assert not (tmp_path / "out").exists()


def test_a_name_neither_breaks_the_line_nor_steers_the_terminal(inside, tmp_path):
    code, _, told = inside("convert", "a\nb\x1b[2J", "-o", str(tmp_path / "out"))
    assert (code, told.count("\n")) == (3, 1)
    assert "a\\nb\\x1b[2J" in told
