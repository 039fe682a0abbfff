"""Grammars in llguidance's Lark: Gemma's call of a tool as one, and what none may name."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mlx_mtp.text.tool_calls import QUOTE, ToolCall, parse

_DEEPEST = 24  # far less than `parse` can follow
_SEEN = 64  # a rule's parameter has so many bits

# Strings hold any text; numbers are short enough to stay numbers; the parameter counts levels.
_WORD = rf'[^\s\x00-\x1f:,{{}}\[\]"{QUOTE}]+'
_VALUES = rf"""
value::_: quote TEXT quote | ATOM
  | "[" (value::incr(_) ("," value::incr(_))*)? "]" %if lt(_, {_DEEPEST})
  | "{{" (pair::incr(_) ("," pair::incr(_))*)? "}}" %if lt(_, {_DEEPEST})
pair::_: KEY ":" value::_
TEXT: /[^{QUOTE}]*/
ATOM: /true|false|null|-?(0|[1-9][0-9]{{0,30}})(\.[0-9]{{1,30}})?([eE][+-]?[0-9]{{1,2}})?/
KEY: /{_WORD}( {_WORD})*/
"""

# One that is left open goes on to the end, so that any text is read in one pass.
_STRING, _REGEX, _COMMENT = r'"(?:\\.|[^"\\])*"?', r"/(?:\\.|[^/\\])*/?", r"(?://|#)[^\n]*"
_TOKEN = re.compile(rf"{_STRING}|{_COMMENT}|{_REGEX}|(<[^<>\s]+>)", re.DOTALL)
_RANGE = r"\d{1,9}(?:-\d{1,9})?"
_RANGES = re.compile(rf"<\[(\^?)({_RANGE}(?:,{_RANGE})*|\*)\]>")


def call_grammar(
    tools: Sequence[Mapping[str, Any]], control: Mapping[str, int], most_calls: int | None
) -> str:
    """One call or more of these tools, which are in OpenAI's form.

    Each argument that a tool's schema lists may come once, and those that it requires must, as far
    as they are bare names, and with no such check behind the first 64. Where it lists none, any
    may come.
    """
    names = [f"tool{i}" for i in range(len(tools))]
    opener, closer, quote = (
        f"<[{control[token]}]>" for token in ("<|tool_call>", "<tool_call|>", '<|"|>')
    )
    lines = [
        f"start: call{{1,{most_calls or ''}}}",
        f"call: {opener} ({' | '.join(names)}) {closer}",
        f"quote: {quote}",
    ]
    for name, tool in zip(names, tools, strict=True):
        lines += _tool(name, tool["function"])
    return "\n".join(lines) + _VALUES


def _tool(rule: str, function: Mapping[str, Any]) -> Iterator[str]:
    schema = function.get("parameters") or {}
    listed = [key for key in schema.get("properties") or () if _bare(key)]
    required = [key for key in listed if key in (schema.get("required") or ())]
    begin = json.dumps(f"call:{function['name']}{{")
    if not listed:
        yield f'{rule}: {begin} (pair::0 ("," pair::0)*)? "}}"'
        return
    # Bit i of the parameter: argument i was given.
    end = f" %if is_ones([0:{min(len(required), _SEEN)}])" if required else ""
    yield f"{rule}: {begin} {rule}-first::0"
    for place, comma in (("first", ""), ("more", ",")):
        yield f'{rule}-{place}::_: "}}"{end}'
        for i, key in enumerate(dict.fromkeys([*required, *listed])):
            seen, once = (f"set_bit({i})", f"%if bit_clear({i})") if i < _SEEN else ("_", "")
            yield f"  | {json.dumps(f'{comma}{key}:')} value::0 {rule}-more::{seen} {once}"


def _bare(key: str) -> bool:
    """Whether a key can be written as it is."""
    unicode = key.encode(errors="ignore").decode() == key
    return unicode and parse(f"call:it{{{key}:0}}") == ToolCall("it", {key: 0})


def named(grammar: str, control: Mapping[str, int], tokens: Collection[int]) -> str | None:
    """What in a Lark grammar is one of the tokens, or a range of ids with one of them."""
    for found in filter(None, _TOKEN.findall(grammar)):
        ranges = _RANGES.fullmatch(found)
        if control.get(found) in tokens or (ranges and _within(ranges, tokens)):
            return found
    return None


def _within(ranges: re.Match[str], tokens: Collection[int]) -> bool:
    spans = [part.partition("-") for part in ranges[2].replace("*", "0-999999999").split(",")]
    inside = [any(int(a) <= token <= int(b or a) for a, _, b in spans) for token in tokens]
    return not all(inside) if ranges[1] else any(inside)
