"""The parts of the JSON-RPC backend that need no model: lines, JSON, and the bounded writer."""

from __future__ import annotations

import json
import os
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.cli.backends.service import Busy, Cancelled, NotLoaded
from mlx_mtp.cli.backends.stdio import Line, Refused, Writer, encode, failure_of, lines, parse
from mlx_mtp.errors import ContextError, FitError, LoadError, MtpError, UsageError


def reader(*chunks):
    left = iter(chunks)
    return lambda: next(left, b"")


def test_h07_lines_with_and_without_an_end():
    assert list(lines(reader(b"a\nb", b"c\n\n", b"d"))) == [b"a", b"bc", b"", b"d"]
    assert list(lines(reader())) == []
    assert list(lines(reader(b"\n"))) == [b""]


def test_a_line_that_is_too_long_is_skipped_and_said():
    assert list(lines(reader(b"123", b"4\n12", b"3\nab\n"), 3)) == [None, b"123", b"ab"]
    assert list(lines(reader(b"12", b"34"), 3)) == [None]


@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_lines_are_the_same_however_they_come(content, cuts):
    cuts = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    chunks = [content[a:b] for a, b in pairwise(cuts)]
    whole = content.split(b"\n")
    assert list(lines(reader(*chunks))) == (whole if whole[-1] else whole[:-1])


@pytest.mark.parametrize(
    "line",
    [
        b'{"id":7,',  # H04
        b"\xff\xfe",  # H03
        b'"caf\xe9"',
        b"NaN",
        b"[-Infinity]",
        b"1e999",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 5000,
        b"\x00",
        b"hello",
        b'{"a":1} {"b":2}',
    ],
    ids=lambda line: repr(line[:12]),
)
def test_what_is_no_json(line):
    with pytest.raises(Refused) as refused:
        parse(line)
    assert failure_of(refused.value)["code"] == -32700


def test_h06_h07_what_is_json():
    assert parse(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    assert parse(b' {"a": 1.5} \r') == {"a": 1.5}
    assert parse(b'{"a": 1, "a": 2}') == {"a": 2}  # as every JSON reader has it
    assert parse(b"1" * 4000) == int("1" * 4000)


def test_what_is_written_is_utf8_on_one_line():
    assert encode({"id": "é\n"}) == '{"jsonrpc": "2.0", "id": "é\\n"}\n'.encode()
    assert json.loads(encode({"id": "\ud800"}).decode())["id"] == "\ud800"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Cancelled("x"), -32800),
        (Busy("x"), -32001),
        (NotLoaded(FitError("x")), -32002),
        (FitError("x"), -32003),
        (MemoryError("x"), -32003),
        (RuntimeError("[malloc] Unable to allocate 7 bytes"), -32003),
        (Refused(-32004, "x"), -32004),
        (UsageError("x"), -32602),
        (ContextError(7, 5), -32602),
        (MtpError("x"), -32603),
        (KeyError("x"), -32603),
    ],
    ids=repr,
)
def test_the_code_of_an_error(error, code):
    failure = failure_of(error)
    assert failure["code"] == code
    assert failure["message"]


def test_what_errors_tell():
    assert failure_of(ContextError(7, 5))["data"] == {"tokens": 7, "limit": 5}
    assert failure_of(Busy("x"))["data"]["retry_after_ms"] > 0
    assert failure_of(ValueError("a\nb"))["message"] == "ValueError: a b"
    assert NotLoaded(LoadError("x")).exit_code == NotLoaded(RuntimeError("x")).exit_code == 3


class Owner:
    answered = False


class Pipe:
    """A writer on a pipe, and its other end."""

    def __init__(self):
        self.read_end, self.write_end = os.pipe()
        self.gone = []
        self.ended = threading.Event()
        self.writer = Writer(self.write_end, self._gone)

    def _gone(self, error):
        self.gone.append(error)
        self.ended.set()

    def read(self):
        """All that is written until nothing waits."""
        found = bytearray()
        while True:
            done = not self.writer._lines
            os.set_blocking(self.read_end, False)
            try:
                found += os.read(self.read_end, 1 << 20)
            except BlockingIOError:
                if done:
                    return [json.loads(line) for line in found.splitlines()]
                time.sleep(0.01)

    def fill(self):
        """Lines that wait until there is no room, the first of them half written."""
        self.writer.put(Line({"filler": "x" * (1 << 18)}))
        for i in range(63):
            self.writer.put(Line({"filler": i}))


@pytest.fixture
def pipe():
    return Pipe()


def test_lines_come_in_order_and_none_behind_the_last(pipe):
    owner = Owner()
    pipe.writer.put(Line({"n": 1}, owner))
    over = []
    pipe.writer.put(Line({"n": 2}, owner), last=lambda: over.append(owner))
    pipe.writer.put(Line({"n": 3}, owner))
    pipe.writer.put(Line({"n": 4}, owner), last=lambda: over.append(owner))
    pipe.writer.put(Line({"n": 5}))
    assert [line["n"] for line in pipe.read()] == [1, 2, 5]
    assert over == [owner]


def test_a_full_writer_makes_the_model_wait_and_joins_its_text(pipe):
    owner, other = Owner(), Owner()
    pipe.writer.put(Line({"filler": "x" * (1 << 18)}))
    for who, name in ((owner, "owner"), (other, "other")):
        delta = {"content": "a"}
        pipe.writer.put(Line({"of": name, "delta": delta}, who, delta))
    for i in range(61):
        pipe.writer.put(Line({"filler": i}))
    for _ in range(3):  # joined, so this does not wait
        pipe.writer.put(Line({}, owner, {"content": "b"}))
    text = {"reasoning_content": "c"}  # another kind cannot be
    waiting = threading.Thread(
        target=pipe.writer.put, args=(Line({"of": "owner", "delta": text}, owner, text),)
    )
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    pipe.writer.put(Line({"answer": 1}), 100)  # the reader's answers have room of their own
    found = pipe.read()
    waiting.join(5)
    found += pipe.read()
    assert [line["delta"] for line in found if line.get("of") == "owner"] == [
        {"content": "abbb"},
        {"reasoning_content": "c"},
    ]
    assert [line["delta"] for line in found if line.get("of") == "other"] == [{"content": "a"}]
    assert {"jsonrpc": "2.0", "answer": 1} in found


def test_joined_text_has_an_end(pipe):
    owner = Owner()
    delta = {"content": "a" * 1000}
    pipe.writer.put(Line({"filler": "x" * (1 << 18)}))
    pipe.writer.put(Line({"delta": delta}, owner, delta))
    for i in range(62):
        pipe.writer.put(Line({"filler": i}))
    more = Line({"delta": 2}, owner, {"content": "b" * 100})
    waiting = threading.Thread(target=pipe.writer.put, args=(more,))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    pipe.read()
    waiting.join(5)
    assert not waiting.is_alive()


def test_a_reader_that_has_gone_is_noticed(pipe):
    os.close(pipe.read_end)
    assert pipe.ended.wait(2)  # nothing was written
    assert pipe.gone == [None]


def test_a_reader_that_goes_in_the_middle_of_a_line(pipe):
    pipe.fill()
    os.close(pipe.read_end)
    assert pipe.ended.wait(2)
    assert pipe.gone == [None]


def test_a_stdout_that_takes_nothing():
    full = os.open("/dev/full", os.O_WRONLY)
    gone = []
    Writer(full, gone.append).put(Line({"n": 1}))
    time.sleep(0.2)
    assert [type(error) for error in gone] == [OSError]


def test_a_stdout_that_does_not_block(pipe):
    os.set_blocking(pipe.write_end, False)
    pipe.writer.put(Line({"n": "x" * (1 << 20)}))
    time.sleep(0.1)
    (found,) = pipe.read()
    assert len(found["n"]) == 1 << 20
    pipe.writer.flush(1)
