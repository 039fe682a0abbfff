"""`mlx-mtp generate` from outside: what it takes, what it writes where, and how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest

from tests.cli.conftest import COMMAND, environment
from tests.cli.pairs import write_pair

SHORT = ("--max-tokens", "6")


def one_line(stderr, *words):
    """The only line on stderr; `words` stand in it, and it is no traceback."""
    (line,) = stderr.decode().splitlines()
    assert line.startswith("mlx-mtp: ")
    assert all(word in line for word in words), line
    return True


def test_the_text_alone_on_stdout_and_one_line_on_stderr(generate):
    text = json.loads(generate("hi", *SHORT, "--json").stdout)["text"]
    done = generate("hi", *SHORT)
    assert (done.returncode, done.stdout.decode()) == (0, text)
    assert one_line(done.stderr, "tokens/s", "accepted by position", "a round", "draft length auto")
    assert generate("hi", *SHORT, "--no-stream").stdout == done.stdout


def test_h14_no_ansi_and_no_carriage_return_where_nobody_watches(generate):
    done = generate("hi", *SHORT)
    assert b"\x1b" not in done.stderr
    assert b"\r" not in done.stderr
    assert b"\x1b" not in done.stdout


def test_quiet_says_nothing(generate):
    assert generate("hi", *SHORT, "--quiet").stderr == b""


def test_the_summary_does_not_run_on_behind_the_text(generate):
    done = generate("hi", *SHORT, stderr=subprocess.STDOUT)
    *_, line = done.stdout.splitlines()
    assert line.startswith(b"mlx-mtp: ")


def test_json_is_one_object_with_the_settings_in_force(generate):
    asked = ("--temp", "0.7", "--seed", "3", "--stop", "<x>", "--draft-len", "2")
    done = generate("hi", *SHORT, "--json", *asked)
    assert done.stderr == b""
    found = json.loads(done.stdout)
    assert found["finish_reason"] == "length"
    assert found["settings"]["temperature"] == 0.7
    assert found["settings"]["stop"] == ["<x>"]
    assert len(found["speculation"]["accepted_by_position"]) == 2
    assert found["speculation"]["drafted"] > 0
    assert found["settings"]["seed"] == 3


def test_a_seed_that_was_not_given_is_drawn_and_shown(generate):
    seeds = {
        json.loads(generate("hi", "--max-tokens", "1", "--json").stdout)["settings"]["seed"]
        for _ in range(2)
    }
    assert len(seeds) == 2
    assert all(0 <= seed < 1 << 32 for seed in seeds)


def test_h18_an_argument_is_taken_as_it_is(generate, model):
    asked = generate("a\\nb", "--raw", *SHORT, "--json")
    assert len(json.loads(asked.stdout)["prompt_token_ids"]) == 1 + len(r"a\nb")


def test_h17_stdin_loses_one_newline_and_a_file_none(generate, tmp_path):
    def ids(*arguments, stdin=b""):
        done = generate(*arguments, "--raw", "--max-tokens", "0", "--json", stdin=stdin)
        return json.loads(done.stdout)["prompt_token_ids"]

    file = tmp_path / "prompt"
    file.write_bytes(b"a\n\nb\n")
    argument = ids("a\n\nb\n")
    assert ids("--prompt-file", str(file)) == argument
    assert ids("-", stdin=b"a\n\nb\n\n") == argument
    assert ids(stdin=b"a\n\nb\r\n") == ids("a\n\nb")


def test_h17_a_prompt_of_a_megabyte_is_read_and_refused_by_the_context(generate):
    done = generate(stdin=b"hello there " * 87400)
    assert done.returncode == 2
    assert one_line(done.stderr, "60000")


def test_an_endless_prompt_is_refused(generate):
    done = generate("--prompt-file", "/dev/zero")
    assert done.returncode == 2
    assert one_line(done.stderr, "/dev/zero", "64 MB")


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (["--draft-len", "9", "hi"], b"", ["9", "0 to 8"]),  # A17
        (["--draft-len", "-1", "hi"], b"", ["-1"]),
        (["--draft-len", "abc", "hi"], b"", ["--draft-len"]),
        (["--draft-len", "1000", "hi"], b"", ["1000"]),
        ([""], b"", ["empty"]),  # H24
        (["   "], b"", ["empty"]),
        (["-"], b" \n", ["empty"]),  # H17
        ([], b"", ["empty"]),  # H16
        (["-"], b"caf\xe9", ["UTF-8"]),
        (["--prompt-file", "/nowhere"], b"", ["/nowhere"]),
        (["--prompt-file", "/nowhere", "hi"], b"", ["both"]),
        (["hi", "--no-drafter", "--drafter", "x"], b"", ["--drafter"]),
        (["hi", "--no-drafter", "--draft-len", "3"], b"", ["--draft-len"]),
        (["hi", "--raw", "--system", "x"], b"", ["--system"]),
        (["hi", "--temp", "-1"], b"", ["temperature"]),
        (["hi", "--max-tokens", "-1"], b"", ["max-tokens"]),
        (["hi", "--stop", ""], b"", ["stop"]),
        (["hi", "--colour"], b"", ["--colour"]),
        (["hi", "there"], b"", ["there"]),
        (["hi", "--revision", "x"], b"", ["revision"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a17_h24_a_wrong_command_line_is_one_line_and_exit_2(inside, arguments, stdin, words):
    code, out, err = inside("generate", *arguments, stdin=stdin)
    assert (code, out) == (2, "")
    assert one_line(err.encode(), *words)


def test_h24_an_empty_prompt_from_outside(generate):
    done = generate("")
    assert (done.returncode, done.stdout) == (2, b"")
    assert one_line(done.stderr, "empty")


def test_json_is_json_whatever_bytes_an_argument_has(generate):
    done = generate("hi", *SHORT, "--json", "--stop", b"\xe9")
    assert json.loads(done.stdout)["settings"]["stop"] == ["\udce9"]


def test_h24_raw_and_nothing_is_the_bos_alone(generate):
    done = generate("", "--raw", *SHORT, "--json")
    assert json.loads(done.stdout)["prompt_token_ids"] == [2]


def test_a08_no_tokens_asked_for(generate):
    done = generate("hi", "--max-tokens", "0")
    assert (done.returncode, done.stdout) == (0, b"")


def test_a_model_that_is_not_there_is_exit_3(inside):
    code, out, err = inside("generate", "hi", "--model", "/nowhere")
    assert (code, out) == (3, "")
    assert one_line(err.encode(), "/nowhere")


def test_d07_a_drafter_that_is_missing_is_said(tmp_path):
    model = write_pair(tmp_path).rename(tmp_path / "alone")
    command = [*COMMAND, "generate", "hi", "--model", str(model), *SHORT, "--json"]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert one_line(done.stderr, "no drafter", "plain decoding")
    assert json.loads(done.stdout)["settings"]["draft_len"] == 0


def test_d15_plain_decoding_three_ways(generate, model):
    def run(*arguments):
        return json.loads(generate("hi", *SHORT, "--json", *arguments).stdout)

    none = run("--no-drafter")
    found = run("--draft-len", "0")
    named = run("--draft-len", "0", "--drafter", f"{model}-assistant")
    assert none["token_ids"] == found["token_ids"] == named["token_ids"]
    assert [r["speculation"]["drafted"] for r in (none, found, named)] == [0, 0, 0]
    assert named["settings"]["drafter"] == f"{model}-assistant"
    assert none["settings"]["drafter"] is None


def test_d06_a_useless_drafter_is_said_once_at_the_end(generate):
    lines = generate("hi", "--max-tokens", "40", "--draft-len", "4").stderr.decode().splitlines()
    assert len(lines) == 2
    assert "drafted tokens were accepted" in lines[1]


def test_e16_a_base_model_is_told_about_raw(tmp_path):
    model = write_pair(tmp_path)
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": "<bos>"}))
    command = [*COMMAND, "generate", "hi", "--model", str(model), *SHORT]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 2
    assert one_line(done.stderr, "--raw")
    assert subprocess.run([*command, "--raw"], capture_output=True, timeout=60).returncode == 0


def test_b04_a_seed_repeats_a_text(generate):
    first = generate("hi", *SHORT, "--temp", "1", "--seed", "7").stdout
    assert generate("hi", *SHORT, "--temp", "1", "--seed", "7").stdout == first
    assert generate("hi", *SHORT, "--temp", "1", "--seed", "8").stdout != first


@pytest.mark.parametrize("to", ["2>&-", "2>/dev/full"])
def test_h13_a_stderr_that_takes_nothing_changes_nothing(generate, model, to):
    shell = f'exec "$@" {to}'
    command = ["sh", "-c", shell, "sh", *COMMAND, "generate", "hi", *SHORT, "--model", model]
    done = subprocess.run(command, capture_output=True, env=environment(), timeout=60)
    assert (done.returncode, done.stdout) == (0, generate("hi", *SHORT).stdout)
    assert done.stderr == b""


@pytest.mark.parametrize("to", [">&-", ">/dev/full"])
def test_a_stdout_that_takes_nothing_is_an_error(model, to):
    shell = f'exec "$@" {to}'
    command = ["sh", "-c", shell, "sh", *COMMAND, "generate", "hi", *SHORT, "--model", model]
    done = subprocess.run(command, capture_output=True, env=environment(), timeout=60)
    assert done.returncode == 1
    assert one_line(done.stderr, "stdout")


def test_a_closed_pipe_ends_quietly(model):
    command = [*COMMAND, "generate", "hi", "--max-tokens", "3000", "--model", model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=20) == 0


def test_help_is_quick_and_imports_no_mlx():
    started = time.perf_counter()
    done = subprocess.run([*COMMAND, "generate", "--help"], capture_output=True)
    assert time.perf_counter() - started < 2  # 0.2 s where nothing else runs
    assert b"--draft-len" in done.stdout
    code = "import sys, mlx_mtp.cli.main; print(*{m.split('.')[0] for m in sys.modules})"
    imported = subprocess.run([COMMAND[0], "-c", code], capture_output=True).stdout.split()
    assert not {b"mlx", b"rich", b"tokenizers", b"jinja2", b"transformers"} & set(imported)


def test_version_and_no_command():
    done = subprocess.run([*COMMAND, "--version"], capture_output=True)
    assert done.stdout.startswith(b"mlx-mtp 0.")
    assert b"generate" in subprocess.run(COMMAND, capture_output=True).stdout


def test_the_embedded_pair_continues_a_function():
    started = time.perf_counter()
    command = [*COMMAND, "generate", "def add(a, b):", "--max-tokens", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = os.read(process.stdout.fileno(), 1)
        assert time.perf_counter() - started < 6  # under 1.5 s where nothing else runs
        text = first + process.stdout.read()
        demo, summary = process.stderr.read().decode().splitlines()
    assert b"return" in text
    assert "demo pair" in demo
    assert "--model" in demo
    assert "tokens a round" in summary


@pytest.mark.parametrize("prompt", ["def is_even(n):", "# Return the sum of prices.\n"])
def test_the_embedded_pair_says_the_same_with_and_without_drafts(prompt):
    def run(drafts):
        command = [*COMMAND, "generate", prompt, "--json", "--quiet", "--max-tokens", "60"]
        done = subprocess.run([*command, "--draft-len", drafts], capture_output=True, timeout=60)
        return json.loads(done.stdout)

    plain, drafted = run("0"), run("4")
    assert plain["token_ids"] == drafted["token_ids"]
    assert plain["speculation"]["drafted"] == 0
    assert drafted["speculation"]["accepted"] > 0
