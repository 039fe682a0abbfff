"""`mlx-mtp bench`: its outputs, and what it refuses before anything runs."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mlx_mtp.cli import bench as bench_command
from mlx_mtp.cli import main
from mlx_mtp.cli.terminal import signals
from mlx_mtp.errors import MtpError
from mlx_mtp.measure import bench, peers
from mlx_mtp.measure.bench import Report

QUICK = ("--kinds", "code", "--draft-lens", "2", "--max-tokens", "8", "--repeats", "1")


@pytest.fixture
def run(inside, model, monkeypatch):
    """A small sweep of the random pair in this process."""
    monkeypatch.setattr(bench, "ROUNDS", 1)
    return lambda *arguments: inside("bench", model, *QUICK, *arguments)


def test_a_sweep_writes_a_table_and_files(run, model, tmp_path):
    report, table, picture = (tmp_path / f"it.{kind}" for kind in ("json", "csv", "svg"))
    code, out, err = run("--json", str(report), "--csv", str(table), "--chart", str(picture))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(model)
    drafts = [line.split()[0] for line in lines if line[:1].isdigit()]
    assert drafts == ["0", "2", *map(str, range(9))]
    assert lines[-1].startswith("| ")
    assert lines[-1].count("|") == 9
    made = Report.from_dict(json.loads(report.read_text()), "it")
    assert [cell.way for cell in made.cells] == ["0", "2"]
    rows = list(csv.DictReader(table.open()))
    assert [row["way"] for row in rows] == ["0", "2"]
    assert float(rows[1]["ratio_median"]) == made.cells[1].ratio[1]
    assert rows[1]["accepted_2"] == str(made.cells[1].acceptance[1])
    assert rows[1]["accepted_3"] == ""
    assert picture.read_text().startswith("<?xml")

    code, out, err = run("--compare", str(report), "--max-tokens", "9")
    assert code == 0
    assert "not the same: max_tokens was 8, is 9" in err
    compared = out.splitlines()[-2:]
    assert [line.split()[-7] for line in compared] == ["0", "2"]
    assert compared[0].endswith("1.00          1.00  1.000")

    made = json.loads(report.read_text())
    report.write_text(json.dumps(made | {"cells": []}))
    code, out, _ = run("--compare", str(report))
    assert (code, out.splitlines()[-1]) == (0, "no figure is in both reports")


def test_prompts_from_a_file(run, inside, model, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("Tell me more.\n---\nAnd now?\n")
    code, out, _ = inside("bench", model, *QUICK[2:], "--prompts", str(file), "--temp", "0.5")
    assert code == 0
    assert "batch 1, temperature 0.5" in out
    assert "2 of 2" in out


class Server:
    """Ollama's API, as far as it is asked."""

    def __init__(self, answer):
        server = self
        self.asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply(200, {"version": "0.9"})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append((self.path, body))
                self.reply(*answer)

            def reply(self, status, content):
                text = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def host(self):
        return f"127.0.0.1:{self.server.server_port}"


@pytest.fixture
def ollama(monkeypatch):
    made = []

    def serve(*answer):
        made.append(Server(answer))
        monkeypatch.setenv("OLLAMA_HOST", made[-1].host)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        return made[-1]

    yield serve
    for each in made:
        each.server.shutdown()
        each.server.server_close()


def test_ollama_counts_for_itself(run, ollama, tmp_path):
    server = ollama(200, {"eval_count": 30, "eval_duration": 2_000_000_000})
    report = tmp_path / "it.json"
    code, out, err = run("--vs", "ollama=gemma4:e2b", "--json", str(report))
    assert code == 0
    assert f"Ollama 0.9 at http://{server.host} runs gemma4:e2b" in err
    (row,) = [line for line in out.splitlines() if line.startswith("ollama")]
    assert row.split()[1] == "15.0"
    assert row.endswith("not known")
    path, body = server.asked[-1]
    assert path == "/api/chat"
    assert body["model"] == "gemma4:e2b"
    assert body["messages"][0]["content"].startswith("Write a ")
    assert body["options"] == {"temperature": 0, "num_predict": 8}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((404, {"error": "model not found" + 999 * "x"}), "refuses x: "),
        ((200, {"eval_count": 3}), "does not answer as Ollama does: it gives no counts"),
        (
            (200, {"eval_count": 0, "eval_duration": 5}),
            "does not answer as Ollama does: it gives no counts",
        ),
        ((200, {"eval_count": -3, "eval_duration": -5}), "it gives no counts"),
        ((200, {"eval_count": 3, "eval_duration": 10**400}), "it gives no counts"),
        ((200, ["no"]), "does not answer as Ollama does: no JSON object"),
        ((200, "x" * (1 << 20)), "does not answer as Ollama does: over 1 MB"),
        ((200, b"<p>no\njson"), "does not answer as Ollama does: <p>no json"),
        ((200, b"[" * 100_000), "does not answer as Ollama does: [[["),
    ],
)
def test_an_ollama_that_is_of_no_use(run, ollama, answer, says):
    ollama(*answer)
    code, out, err = run("--vs", "ollama=x")
    assert (code, out) == (1, "")
    assert says in err
    assert len(err.splitlines()) == 1
    assert len(err) < 300


@pytest.mark.parametrize("host", ["file:///etc/passwd", "ftp://a", "http://[", "a:b:c", "a\nb"])
def test_an_address_that_is_none(run, monkeypatch, host):
    monkeypatch.setenv("OLLAMA_HOST", host)
    code, out, err = run("--vs", "ollama=x")
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(("mlx-mtp: OLLAMA_HOST is ", "mlx-mtp: Ollama "))


def test_a_server_that_never_answers(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = object.__new__(peers.Ollama)
        server.url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(MtpError, match=r"does not answer as Ollama does: no answer in 0.1 s"):
            server._ask("version", None, 0.1)


def test_no_ollama_is_one_line(run, monkeypatch):
    monkeypatch.setenv("OLLAMA_HOST", "http://127.0.0.1:9/")
    code, out, err = run("--vs", "ollama=x")
    assert (code, out) == (1, "")
    assert err.startswith("mlx-mtp: Ollama cannot be reached at http://127.0.0.1:9")
    assert run("--vs", "ollama")[2].startswith("mlx-mtp: --vs ollama needs its name")


class FakeWorker:
    version = "1.0"

    def __init__(self, name, target, drafter, scratch):
        if name == "mlx-vlm":
            raise MtpError("mlx-vlm ended: KeyError: 'vision'")
        assert target.name == "model"
        assert drafter.name == "model-assistant"
        self.closed = False

    def ask(self, prompt, max_tokens, eos, draft_len, compiled):
        return {"tokens": [1] * max_tokens, "counted": 7, "seconds": 0.5, "rounds": 7}

    def close(self):
        self.closed = True


def test_contestants_take_part_or_are_left_out(run, monkeypatch):
    monkeypatch.setattr(peers, "Worker", FakeWorker)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: n if n == "mlx_vlm" else real(n))
    code, out, err = run("--vs", "mlx-lm", "--vs", "mlx-vlm")
    assert code == 0
    assert "mlx-mtp: mlx-lm 1.0" in err
    assert "mlx-mtp: left out: mlx-vlm ended: KeyError: 'vision'" in err
    (row,) = [line for line in out.splitlines() if line.startswith("mlx-")]
    assert row.split()[:2] == ["mlx-lm", "14.0"]
    assert "0 of 4" in row


@pytest.mark.parametrize("missing", ["matplotlib", "mlx_vlm"])
def test_a_missing_extra_is_named_before_anything_runs(inside, monkeypatch, tmp_path, missing):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = ["--chart", str(tmp_path / "a.svg")] if missing == "matplotlib" else ["--vs", "mlx-vlm"]
    code, out, err = inside("bench", *asked)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "run: python3 -m pip install 'mlx-mtp[" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--draft-lens", "1,x"], "--draft-lens has 'x'; it must be numbers with commas"),
        (["--draft-lens", "9"], "draft length is 9; it must be 0 to 8"),
        (["--batch", "0"], "it must have 1 to 16 rows"),
        (["--temp", "-1"], "temperature is -1.0"),
        (["--repeats", "0"], "repeats 0"),
        (["--kinds", "poems"], "--kinds has 'poems'; it must be of code, prose, json, edit"),
        (["--kinds", "code", "--prompts", __file__], "--kinds and --prompts were both given"),
        (["--prompts", "/no/such"], "/no/such cannot be read"),
        (["--vs", "llama"], "--vs is llama; it must be one of mlx-lm, mlx-vlm, ollama"),
        (["--vs", "mlx-lm=3"], "--vs is mlx-lm=3; it must be one of mlx-lm, mlx-vlm, ollama"),
        (["--prompts", os.devnull], "/dev/null has no prompt in it"),
        (["--json", "it.x", "--csv", "./it.x"], "two of them are the same"),
        (["--vs", "mlx-lm", "--batch", "2"], "--vs compares at batch 1 and temperature 0"),
        (["--chart", "a.pdf"], "the chart is a.pdf; it must end in .svg or .png"),
        (["--json", "/no/such/it.json"], "/no/such/it.json cannot be written"),
        (["--csv", "/"], "/ cannot be written"),
        (["--compare", "/no/such.json"], "/no/such.json cannot be read"),
        (["--compare", __file__], "is no JSON"),
        (["--drafter", "/no/such"], "/no/such: no such folder"),
        (["/no/such"], "/no/such: no such folder"),
    ],
)
def test_bad_input_is_one_line(inside, arguments, says):
    code, out, err = inside("bench", *arguments)
    assert code == (3 if "no such folder" in says else 2)
    assert out == ""
    assert says in err
    assert len(err.splitlines()) == 1


def test_a_damaged_report_to_compare_with(inside, tmp_path):
    for content in (b"[]", b'{"format": 1}', b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "old.json").write_bytes(content)
        code, out, err = inside("bench", "--compare", str(tmp_path / "old.json"))
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1


def test_what_cannot_be_written_stops_nothing_else(run, tmp_path, monkeypatch):
    table, picture = tmp_path / "it.csv", tmp_path / "it.svg"
    asked = ("--json", "/dev/full", "--csv", str(table), "--chart", str(picture))
    monkeypatch.setattr(main.sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115
    code, _, err = run(*asked, "--temp", "0", "--temp", "0", "--temp", "0.5")
    assert code == 1
    assert err.splitlines() == [
        "mlx-mtp: /dev/full cannot be written: No space left on device",
        "mlx-mtp: the text cannot be written to stdout: No space left on device",
    ]
    assert [row["temp"] for row in csv.DictReader(table.open())] == ["0.0", "0.0", "0.5", "0.5"]
    assert "temperature 0 (1 of 2; the others are in the table)" in picture.read_text()


@pytest.mark.parametrize("laps", [0, 1])
def test_an_interrupted_sweep_keeps_its_finished_laps(run, tmp_path, monkeypatch, laps):
    turns = iter(range(99))
    monkeypatch.setattr(signals, "caught", None)

    def turn(done, total):
        if next(turns) == laps * 4:
            signals._handle(signal.SIGTERM, None)
            raise MtpError("and more goes wrong")

    left = []
    monkeypatch.setattr(bench_command, "_progress", turn)
    monkeypatch.setattr(main, "leave", lambda code: left.append(code))
    report = tmp_path / "it.json"
    _, out, err = run("--repeats", "3", "--json", str(report))
    assert left == [143]
    assert report.exists() == ("tokens/s" in out) == bool(laps)
    if laps:
        made = json.loads(report.read_text())
        assert made["notices"][-1] == "interrupted"
        assert {cell["laps"] for cell in made["cells"]} == {1}
        assert "interrupted; kept: what the finished laps gave" in err
    else:
        assert "interrupted; kept: nothing, no lap has ended" in err
