"""Gemma's way of writing a call of a tool: `call:NAME{key:value,...}`.

Strings stand between two `<|"|>` tokens and hold anything, with no escapes; the rest is JSON whose
keys need no quotes. Models leave quotes out now and then, so a value of no other kind is read as a
string. Any text is read in one pass.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

QUOTE = "\U0010fffd"  # private use: stands for the token <|"|>

_HEAD = re.compile(rf"\s*call:\s*([^\s{{}}{QUOTE}]+)\s*(?={{)")
_KEY = re.compile(rf"[^:,{{}}\[\]{QUOTE}]+")
_SPACE = re.compile(r"\s*")
_BARE = re.compile(rf"([^,}}\]{QUOTE}]*)([,}}\]{QUOTE}])")
_ATOM = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_DEEPEST = 64


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


def parse(text: str) -> ToolCall | None:
    """The call in the text between `<|tool_call>` and `<tool_call|>`, with QUOTE for each
    `<|"|>`; None where it is not a call, or not a whole one."""
    head = _HEAD.match(text)
    if head is None:
        return None
    reader = _Reader(text, head.end())
    try:
        arguments = reader.value()
    except _NotACallError:
        return None
    return None if text[reader.at :].strip() else ToolCall(head[1], arguments)


class _NotACallError(Exception):
    pass


class _Reader:
    """Recursive descent over `text`; `at` is where the next thing is looked for."""

    def __init__(self, text: str, at: int) -> None:
        self._text = text
        self._depth = 0
        self._quote = 0
        self.at = at

    def value(self) -> Any:
        if self._found("{"):
            return dict(self._items("}"))
        if self._found("["):
            return [item for _, item in self._items("]")]
        return self._string() if self._found(QUOTE) else self._bare()

    def _items(self, close: str) -> list[tuple[str, Any]]:
        """(key, value) of all that stands before `close`; in a list the keys are empty."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _NotACallError
        items: list[tuple[str, Any]] = []
        more = True
        while not self._found(close):
            if not more:
                raise _NotACallError
            items.append((self._key() if close == "}" else "", self.value()))
            more = self._found(",")
        self._depth -= 1
        return items

    def _key(self) -> str:
        if self._found(QUOTE):
            key = self._string()
        else:
            found = _KEY.match(self._text, self.at)
            key = found[0].rstrip() if found else ""
            self.at += len(found[0]) if found else 0
        if not key or not self._found(":"):
            raise _NotACallError
        return key

    def _string(self) -> str:
        """What follows an opening quote, up to the closing one."""
        start, end = self.at, self._text.find(QUOTE, self.at)
        if end < 0:
            raise _NotACallError
        self.at = end + 1
        return self._text[start:end]

    def _bare(self) -> Any:
        """A number, true, false, null, or a string that lacks its opening quote or both."""
        found = _BARE.match(self._text, self.at)
        if found is None:
            raise _NotACallError
        word, end = found[1].rstrip(), found[2]
        if end != QUOTE and _ATOM.fullmatch(word):
            self.at = found.end(1)
            return _atom(word)
        if self._quote < self.at:
            self._quote = self._text.find(QUOTE, self.at) % (len(self._text) + 1)
        # A quote opens a string behind one of these, and closes one anywhere else.
        if self._text[self._quote - 1] not in ":,[{ \n" and self._quote < len(self._text):
            return self._string()
        if end == QUOTE:
            raise _NotACallError
        self.at = found.end(1)
        return word

    def _found(self, char: str) -> bool:
        """Whether `char` comes next, but for white space; goes past it."""
        space = _SPACE.match(self._text, self.at)
        self.at = space.end() if space else self.at
        found = self._text.startswith(char, self.at)
        self.at += found
        return found


def _atom(word: str) -> Any:
    try:
        value = json.loads(word)
    except ValueError:  # an integer of thousands of digits
        return word
    return word if value in (math.inf, -math.inf) else value
