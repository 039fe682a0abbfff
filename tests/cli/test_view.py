"""What a terminal shows: a small one is played here, and a real one is asked through a pty."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
from contextlib import redirect_stdout
from itertools import accumulate

import pytest

from mlx_mtp.cli import view
from mlx_mtp.engine.requests import Stats
from mlx_mtp.generation import Piece
from tests.cli.conftest import COMMAND, environment


class Screen(io.StringIO):
    """The part of a VT100 that the live view uses. `lines` are all rows from the first on, the
    last `rows` of them on the screen; `colours` are the characters drawn in the drafted colour."""

    def __init__(self, columns=20, rows=5):
        super().__init__()
        self.columns, self.rows = columns, rows
        self.lines, self.top, self.row, self.column = [""], 0, 0, 0
        self.saved, self.colour, self.colours = (0, 0), False, []

    def isatty(self):
        return True

    def fileno(self):
        return 1

    def write(self, text):
        for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\x1b.|.|\n", text):
            self._take(part)

    def _take(self, part):
        at = self.top + self.row
        if part == "\n":
            self._down()
            self.column = 0
        elif part == "\r":
            self.column = 0
        elif part == "\x1bD":
            self._down()
            self.column = min(self.column, self.columns - 1)
        elif part == "\x1b[A":
            self.row = max(self.row - 1, 0)
            self.column = min(self.column, self.columns - 1)
        elif part == "\x1b[B":
            self.row = min(self.row + 1, self.rows - 1)
            self.column = min(self.column, self.columns - 1)
        elif part == "\x1b7":
            self.saved = self.row, self.column
        elif part == "\x1b8":
            self.row, self.column = self.saved
        elif part == "\x1b[J":
            self.lines[at] = self.lines[at][: min(self.column, self.columns - 1)]
            self.lines[at + 1 :] = []
        elif part[0] == "\x1b":
            self.colour = part == view.DRAFTED if part.endswith("m") else self.colour
        else:
            if self.column == self.columns:
                self._down()
                self.column = 0
            at = self.top + self.row
            self.lines += [""] * (at + 1 - len(self.lines))
            line = self.lines[at].ljust(self.column)
            self.lines[at] = line[: self.column] + part + line[self.column + 1 :]
            self.column += 1
            if self.colour:
                self.colours.append(part)

    def _down(self):
        if self.row == self.rows - 1:
            self.top += 1
        else:
            self.row += 1
        self.lines += [""] * (self.top + self.row + 1 - len(self.lines))


@pytest.fixture
def shown_on(monkeypatch):
    """Plays spans on a screen, closing the view unless told otherwise."""

    def play(*pieces, columns=20, close=True):
        screen = Screen(columns)
        monkeypatch.setattr(view.os, "get_terminal_size", lambda _: os.terminal_size((columns, 5)))
        live = view.Live(4)
        with redirect_stdout(screen):
            for piece in pieces:
                live.show(piece)
            if close:
                live.close()
        return screen

    return play


def piece(*spans, tokens=5):
    stats = Stats(prompt_tokens=9, completion_tokens=tokens, rounds=2, drafted=8, accepted=3)
    return Piece(list(spans), stats, 9)


def test_what_stays_on_the_screen_is_the_text_alone(shown_on):
    """Every width of piece against every column: lines that end at the margin, wrap, scroll."""
    text = "".join(chr(97 + i % 26) if i % 47 else "\n" for i in range(1, 700)) + "\n\nend"
    starts = accumulate(range(1, 60))
    pieces = [piece((text[at - n : at], n % 2 == 0)) for n, at in enumerate(starts, 1)]
    screen = shown_on(*(p for some in pieces for p in (some, piece())))
    rows = [line[i : i + 20] for line in text.split("\n") for i in range(0, max(len(line), 1), 20)]
    assert screen.lines == [*rows, ""]


def test_drafted_tokens_are_in_another_colour_and_the_line_says_so(shown_on):
    both = piece(("own ", False), ("drafted", True))
    screen = shown_on(both, columns=80, close=False)
    assert "".join(screen.colours) == "drafteddrafted"  # the token, then the legend
    assert screen.lines == [
        "own drafted",
        "0.0 tok/s · 38% accepted · 2.0 tokens/round · draft length 4 · drafted, own",
    ]
    assert shown_on(both, columns=80).lines == ["own drafted", ""]


def test_while_the_prompt_is_read_the_line_counts_its_tokens(shown_on):
    screen = shown_on(Piece([], Stats(prompt_tokens=900), 512), columns=60, close=False)
    assert screen.lines == ["", "reading the prompt: 512 of 900 tokens"]


def test_thoughts_are_dim_and_stand_before_the_answer(shown_on):
    thinking = piece()
    thinking.thoughts.append(("so it is", True))
    both = piece(("yes", False))
    both.thoughts.append((", or not", False))
    screen = shown_on(thinking, thinking, both, piece((" no", False)), columns=60)
    assert screen.lines == ["so it isso it is, or not", "", "yes no", ""]
    assert screen.colours == []


def test_control_characters_of_a_model_do_not_steer_the_terminal(shown_on):
    assert shown_on(piece(("a\x1b[2Jb\x9b\r\x00", False))).lines[0] == "a␛[2Jb�␍␀"


@pytest.mark.parametrize(
    ("text", "column"),
    [("ab", 2), ("a\tb", 9), ("漢字", 4), ("é", 1), ("a" * 20, 20), ("a" * 21, 1), ("漢" * 11, 2)],
)
def test_the_column_of_the_cursor(text, column):
    assert view.column_after(text, 0, 20) == column


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999 bytes"), (14_600_000, "14.6 MB"), (3.2e9, "3.2 GB")]
)
def test_bytes_for_people(count, text):
    assert view.human_bytes(count) == text


def test_acceptance_by_position():
    stats = Stats(drafted_by_position=[4, 4, 2] + [0] * 5, accepted_by_position=[4, 2, 0] + [0] * 5)
    assert view.by_position(stats) == "1.00 0.50 0.00"
    assert view.by_position(Stats()) == "-"


def test_loading_says_something_only_when_it_takes_long(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(view.time, "monotonic", lambda: now)
    loading = view.Loading()
    for now in (1.0, 1.9, 2.5, 3.0, 8.0):
        loading("load e2b", int(now * 1e8), 10**9)
    loading.close()
    assert capsys.readouterr().err.splitlines() == [
        "mlx-mtp: load e2b: 250.0 MB of 1.0 GB",
        "mlx-mtp: load e2b: 800.0 MB of 1.0 GB",
    ]


def on_a_terminal(model, **env):
    """What a terminal receives from a run on it."""
    master, slave = pty.openpty()
    command = [*COMMAND, "generate", "hi", "--max-tokens", "12", "--model", model]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment(**env)
    )
    os.close(slave)
    received = b""
    while True:
        try:
            received += os.read(master, 65536)
        except OSError:  # how a pty says that its other end has gone
            break
    os.close(master)
    assert process.wait() == 0
    return received.decode()


def test_a_real_terminal_keeps_the_text_and_a_summary(model, generate):
    received = on_a_terminal(model)
    assert "reading the prompt" in received
    assert "tokens/round" in received
    screen = Screen(80, 24)
    screen.write(received)
    text = generate("hi", "--max-tokens", "12").stdout.decode().translate(view.VISIBLE)
    *shown, prompt, decode, positions, memory, after = screen.lines
    assert "\n".join(shown) == text
    assert prompt.startswith("mlx-mtp: prompt 17 tokens, ")
    assert decode.startswith("mlx-mtp: decode 12 tokens, ")
    assert positions.startswith("mlx-mtp: accepted by position 0.00 0.00")
    assert memory.startswith("mlx-mtp: memory ")
    assert after == ""


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_h14_a_terminal_that_wants_no_ansi_gets_none(model, generate, env):
    received = on_a_terminal(model, **env)
    assert "\x1b" not in received
    text = generate("hi", "--max-tokens", "12").stdout.decode().translate(view.VISIBLE)
    assert received.replace("\r\n", "\n").startswith(text + "\n")
