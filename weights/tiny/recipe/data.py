"""From documents to batches of token ids."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from chats import Document, Mix
from templates import Words, split_words
from tokenizers import Tokenizer
from torch import Tensor


def load(folder: Path) -> tuple[list[str], list[dict[str, str]], Words, Words]:
    """Training codes, held-out entries, and the slot words of both."""
    lines = (folder / "functions.jsonl").read_text("utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    codes = [e["code"] for e in entries if not e["held_out"]]
    held_out = [e for e in entries if e["held_out"]]
    return codes, held_out, *split_words(codes, [e["code"] for e in held_out])


def encode(
    tokenizer: Tokenizer, document: Document, rng: random.Random
) -> tuple[list[int], list[bool]]:
    """Ids and which of them count; now and then a text is cut in two first, as prompts are."""
    kind = rng.random()
    ids: list[int] = []
    learn: list[bool] = []
    for text, counts in document:
        cut = 0
        if counts and kind < 0.05:
            cut = rng.randrange(len(text))
        elif counts and kind < 0.15 and "\n" in text:
            cut = rng.choice([m.end() for m in re.finditer("\n *" if kind < 0.1 else "\n", text)])
        for piece in (text[:cut], text[cut:]):
            new = tokenizer.encode(piece).ids
            ids += new
            learn += [counts] * len(new)
    return ids, learn


def pack(
    draw: Callable[[], tuple[list[int], list[bool]]], rows: int, length: int
) -> tuple[Tensor, Tensor]:
    """(ids, learn) [rows, length]; every row starts a document and the last one is cut."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    learn = torch.zeros(rows, length, dtype=torch.bool)
    for row in range(rows):
        line: list[int] = []
        counts: list[bool] = []
        while len(line) < length:
            new, counted = draw()
            line += new
            counts += counted
        ids[row], learn[row] = torch.tensor(line[:length]), torch.tensor(counts[:length])
    return ids, learn


def batches(
    tokenizer: Tokenizer, mix: Mix, tokens: int, long_share: float = 0.15
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids, learn), each [B, T + 1] with B * T = tokens, or one long row."""
    while True:
        length = mix.rng.choice([1024, 2048]) if mix.rng.random() < long_share else 256
        rows = max(tokens // length, 1)
        yield pack(lambda: encode(tokenizer, mix.draw(), mix.rng), rows, length + 1)
