"""How an answer looks: plain text, a live view on a terminal, and the summaries."""

from __future__ import annotations

import os
import sys
import time
import unicodedata
from typing import TYPE_CHECKING, Protocol

from mlx_mtp.cli.terminal import emit, say, speaks_ansi, write_stderr

if TYPE_CHECKING:
    from mlx_mtp.engine.requests import Stats
    from mlx_mtp.generation import Piece, Result

# Control characters as pictures: a model's text must not steer the terminal.
VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
VISIBLE |= {0x7F: "␡"} | dict.fromkeys(range(0x80, 0xA0), "�")
DRAFTED, DIM, RESET = "\x1b[36m", "\x1b[2m", "\x1b[0m"


class View(Protocol):
    def show(self, piece: Piece) -> None:
        """Called for every piece."""

    def close(self) -> None:
        """Called once, after the last piece."""

    def abandon(self) -> None:
        """Called, from another thread, if the process must end in the middle of a step."""


def view_for(*, stream: bool, live: bool, draft_len: int | str) -> View:
    if stream and live and speaks_ansi(sys.stdout):
        return Live(draft_len)
    return Plain() if stream else Whole()


class Plain:
    """The text as it comes, and nothing else; on a terminal a line end behind it."""

    def __init__(self) -> None:
        self._terminal = sys.stdout is not None and sys.stdout.isatty()

    def show(self, piece: Piece) -> None:
        if piece.text:
            emit(piece.text.translate(VISIBLE) if self._terminal else piece.text)

    def close(self) -> None:
        if self._terminal:
            emit("\n")

    def abandon(self) -> None:
        pass


class Whole(Plain):
    """The text at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""

    def show(self, piece: Piece) -> None:
        self._text += piece.text

    def close(self) -> None:
        emit(self._text.translate(VISIBLE) if self._terminal else self._text)
        super().close()

    def abandon(self) -> None:
        self.close()


class Silent(Plain):
    """Nothing: the result is printed afterwards."""

    def show(self, piece: Piece) -> None:
        pass

    def close(self) -> None:
        pass


class Live:
    """The text as it comes, thoughts dim before it, drafted tokens in colour, with a line of
    numbers below it.

    The text goes to the terminal as it is, which wraps it and lets it be copied. The line below is
    wiped before text is written and drawn again behind it, with the cursor saved and restored.
    """

    def __init__(self, draft_len: int | str) -> None:
        self._draft_len = draft_len
        self._column = 0
        self._thinking = False
        self._drawn = False
        self._next_draw = 0.0

    def show(self, piece: Piece) -> None:
        now = time.monotonic()
        said = [(text, DIM) for text, _ in piece.thoughts]
        self._thinking |= bool(said)
        if piece.text and self._thinking:
            said.append(("\n\n", ""))
            self._thinking = False
        said += [(text, DRAFTED if drafted else "") for text, drafted in piece.spans]
        if not said and now < self._next_draw:
            return
        out = [self._wipe()]
        for text, colour in said:
            visible = text.translate(VISIBLE)
            out.append(f"{colour}{visible}{RESET}" if colour else visible)
        columns = os.get_terminal_size(sys.stdout.fileno()).columns or 80
        self._column = column_after("".join(text for text, _ in said), self._column, columns)
        self._next_draw = now + 0.1
        out.append(self._draw(piece, columns))
        emit("".join(out))

    def close(self) -> None:
        emit(self._wipe() + "\n")

    def abandon(self) -> None:
        os.write(sys.stdout.fileno(), (self._wipe() + RESET + "\n").encode())

    def _wipe(self) -> str:
        drawn, self._drawn = self._drawn, False
        return "\x1b[J" if drawn else ""

    def _draw(self, piece: Piece, columns: int) -> str:
        # With the last column written, the cursor waits behind it for the next character to wrap;
        # any movement would lose that, so the line stays away until then.
        if self._column >= columns:
            return ""
        self._drawn = True
        line, legend = self._status(piece), ""
        room = columns - 1 - len(" · drafted, own")
        if piece.stats.rounds and self._draft_len and len(line) <= room:
            legend = f" · {RESET}{DRAFTED}drafted{RESET}{DIM}, own"
        # Index and up: makes sure of a row below, whose number the saved position then keeps.
        return f"\x1bD\x1b[A\x1b7\x1b[B\r{DIM}{line[: columns - 1]}{legend}{RESET}\x1b8"

    def _status(self, piece: Piece) -> str:
        stats = piece.stats
        if not stats.completion_tokens:
            return f"reading the prompt: {piece.prefilled} of {stats.prompt_tokens} tokens"
        parts = [f"{stats.decode_tps:.1f} tok/s"]
        if self._draft_len:
            parts.append(f"{stats.acceptance:.0%} accepted")
            parts.append(f"{stats.tokens_per_round:.1f} tokens/round")
        return " · ".join([*parts, f"draft length {self._draft_len}"])


def column_after(text: str, column: int, columns: int) -> int:
    """The column a terminal's cursor is in after `text`; `columns` when it waits for the wrap."""
    _, newline, tail = text.rpartition("\n")
    column = 0 if newline else column
    for char in tail:
        if char == "\t":
            column = min(column // 8 * 8 + 8, columns - 1)
            continue
        if unicodedata.combining(char) or unicodedata.category(char) in ("Cf", "Mn", "Me"):
            continue
        width = 2 if unicodedata.east_asian_width(char) in "WF" else 1
        column = column + width if column + width <= columns else width
    return column


class Loading:
    """Progress on stderr: one line that changes on a terminal; elsewhere lines, and only when
    loading takes longer than two seconds."""

    def __init__(self) -> None:
        self._ansi = speaks_ansi(sys.stderr)
        self._next = time.monotonic() + (0.3 if self._ansi else 2.0)
        self._drawn = False

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (0.1 if self._ansi else 5.0)
        line = f"{what}: {human_bytes(done)} of {human_bytes(total)}"
        if self._ansi:
            self._drawn = True
            write_stderr(f"\r\x1b[K{line}")
        else:
            say(line)

    def close(self) -> None:
        if self._drawn:
            write_stderr("\r\x1b[K")


def summarise(result: Result) -> None:
    """The end of a run: a few lines where somebody watches, one line elsewhere."""
    if sys.stdout is None or sys.stdout.isatty():
        for line in summary_lines(result):
            say(line)
        return
    if _same_file() and not result.text.endswith("\n"):
        write_stderr("\n")
    stats, draft_len = result.stats, result.settings["draft_len"]
    say(
        f"{stats.decode_tps:.1f} tokens/s, accepted by position {by_position(stats)}, "
        f"{stats.tokens_per_round:.2f} tokens a round, draft length {draft_len}"
    )


def summary_lines(result: Result) -> list[str]:
    stats, memory, draft_len = result.stats, result.memory, result.settings["draft_len"]
    rounds = f"{stats.tokens_per_round:.2f} tokens a round, draft length {draft_len}"
    lines = [
        f"prompt {stats.prompt_tokens} tokens, {stats.prompt_tps:.1f} tok/s, "
        f"first token after {stats.first_token_s:.2f} s",
        f"decode {stats.completion_tokens} tokens, {stats.decode_tps:.1f} tok/s, {rounds}",
        f"accepted by position {by_position(stats)}",
        f"memory {human_bytes(memory['peak_bytes'])} at most: weights "
        f"{human_bytes(memory['weights_bytes'])}, KV {human_bytes(memory['kv_bytes'])}",
    ]
    return lines if draft_len else [lines[0], lines[1], lines[3]]


def by_position(stats: Stats) -> str:
    """How often the i-th draft of a round was accepted, ".86 .71"; "-" where none was made."""
    pairs = zip(stats.accepted_by_position, stats.drafted_by_position, strict=True)
    shares = [f"{accepted / drafted:.2f}" for accepted, drafted in pairs if drafted]
    return " ".join(shares) or "-"


def human_bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _same_file() -> bool:
    """Whether stdout and stderr are one file, so that a line would run on behind the text."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False
