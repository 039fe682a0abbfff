"""README's picture: a real run of `mlx-mtp generate` in a terminal, as SVG.

    python -m benchmarks.picture docs/generate.svg

The command runs in a pseudo-terminal; what it wrote is drawn by rich, with the last state of the
live line, which the command itself wipes when it ends.
"""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 92
COMMAND = ["generate", "def merge_sorted(left, right):", "--draft-len", "4"]
LIVE = re.compile(r"\x1bD\x1b\[A\x1b7\x1b\[B\r(.*?)\x1b8", re.DOTALL)


def record(arguments: list[str]) -> str:
    """All that the command wrote to a terminal of WIDTH columns."""
    chunks = []

    def read(descriptor: int) -> bytes:
        chunk = os.read(descriptor, 65536)
        chunks.append(chunk)
        return chunk

    os.environ |= {"COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    command = f"stty cols {WIDTH}; exec {sys.executable} -m mlx_mtp.cli.main "
    quoted = " ".join(f"'{a}'" for a in arguments)
    if pty.spawn(["sh", "-c", command + quoted], read):
        raise SystemExit("the command failed")
    return b"".join(chunks).decode().replace("\r\n", "\n")


def main() -> None:
    (path,) = sys.argv[1:]
    raw = record(COMMAND)
    live = LIVE.findall(raw)[-1]
    shown = re.sub(r"\x1b\[[JK]|\r", "", LIVE.sub("", raw)).rstrip("\n")
    cut = shown.index("\nmlx-mtp: prompt ")
    prompt = "$ mlx-mtp " + " ".join(f'"{a}"' if " " in a else a for a in COMMAND)
    picture = f"{prompt}\n{shown[:cut].rstrip()}\n\n{live}\x1b[0m\n{shown[cut:]}"
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    # Blanks go to the colour before them: some viewers shift a span that begins with one.
    console.print(Text.from_ansi(re.sub(r"((?:\x1b\[\d+m)+)([ \n]+)", r"\2\1", picture)))
    svg = console.export_svg(title="mlx-mtp")
    # The picture fetches no font.
    Path(path).write_text(re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
