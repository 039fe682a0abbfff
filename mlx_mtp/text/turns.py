"""Prompts that go on from the exact tokens of an earlier turn.

A history that a template renders again is never what the model read and wrote: thoughts are gone,
arguments are sorted, words fall into other tokens, and the KV of all that follows is lost. So the
ids of each turn are remembered by what its messages say, and only what comes after it is rendered:
in the whole history, with a stand-in for the one message, whose end is then found in the text.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

from mlx_mtp.text.chat import ChatTemplate, Message, Rendered, unused_character
from mlx_mtp.text.messages import checked_messages
from mlx_mtp.text.tokenizer import Tokenizer


class Prompt(NamedTuple):
    """`snapshots`: how many of the ids end the system turn, and how many the last turn before the
    model's. `key` stands for what the messages say, `spliced` counts remembered ids."""

    ids: list[int]
    snapshots: tuple[int, ...]
    key: bytes
    spliced: int


class TurnMemory:
    """The ids of the turns used last, up to `most_tokens` in all."""

    def __init__(self, most_tokens: int = 1 << 20) -> None:
        self._most = most_tokens
        self._held = 0
        self._turns: OrderedDict[bytes, array[int]] = OrderedDict()

    def prompt(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        enable_thinking: bool = False,
        preserve_thinking: bool = True,
    ) -> Prompt:
        """The ids for messages and tools as text/messages.py makes them. Without
        `preserve_thinking` no thoughts from before the last user message are among them."""
        render = partial(
            template.prompt, tokenizer=tokenizer, tools=tools, enable_thinking=enable_thinking
        )
        keys = _keys(messages, tools, enable_thinking)
        for i in reversed(range(len(messages))):
            turn = self._turns.get(keys[i])
            if turn is None or _open(turn, tokenizer):
                continue
            rest = _after(i, messages, tokenizer, render)
            if rest is None:
                continue
            ids = [*turn, *rest]
            snapshots = _snapshots(ids, tokenizer)
            past = ids[: snapshots[-1]] if snapshots else ids
            if preserve_thinking or not _thoughts(past, tokenizer):
                with suppress(KeyError):  # another thread may have let it go
                    self._turns.move_to_end(keys[i])
                return Prompt(ids, snapshots, keys[-1], len(turn))
        ids = render(messages).encode(tokenizer, bos=True)
        return Prompt(ids, _snapshots(ids, tokenizer), keys[-1], 0)

    def remember(self, prompt: Prompt, message: Mapping[str, Any], ids: Sequence[int]) -> None:
        """`message` is the answer to the prompt, as the client gets it; `ids` those of the prompt
        and the answer, without an EOS and with no more text than the message has."""
        [answer] = checked_messages([message])
        key = _chained(prompt.key, _said(answer))
        self._held += len(ids) - len(self._turns.pop(key, ()))
        self._turns[key] = array("i", ids)
        while self._held > self._most:
            self._held -= len(self._turns.popitem(last=False)[1])


def _keys(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, thinking: bool
) -> list[bytes]:
    """For each message, what stands for the conversation up to it and with it."""
    keys = [_chained(b"", [tools, thinking])]
    order: dict[str, int] = {}
    for message in messages:
        if message["role"] == "assistant":
            order = {call["id"]: n for n, call in enumerate(message.get("tool_calls", ()))}
        answered = order[message["tool_call_id"]] if message["role"] == "tool" else None
        keys.append(_chained(keys[-1], _said(message, answered)))
    return keys[1:]


def _said(message: Message, answered: int | None = None) -> list[Any]:
    """What a message says, however a client writes it; `answered`: a result's place among calls."""
    calls = [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls", ())
    ]
    # JavaScript has no 2.0: it sends 2.
    calls = json.loads(json.dumps(calls), parse_float=_number)
    return [message["role"], message["content"].strip(), calls, answered]


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _chained(key: bytes, value: Any) -> bytes:
    return blake2b(key + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()


def _after(
    i: int, messages: Sequence[Message], tokenizer: Tokenizer, render: Callable[..., Rendered]
) -> list[int] | None:
    """The ids of all that the template writes behind message `i`; None where that is not certain.

    The stand-in has no thoughts, and its text is a mark, or nothing beside calls: a template may
    write that behind the results. Its calls must come out in one piece, in Gemma's form.
    """
    mark, message = unused_character(messages), messages[i]
    calls = message.get("tool_calls", ())
    stand_in: dict[str, Any] = {"role": "assistant", "content": "" if calls else mark}
    written = mark
    if calls:
        functions = [{"name": call["function"]["name"], "arguments": {mark: 0}} for call in calls]
        written = "".join(
            f"<|tool_call>call:{f['name']}{{{mark}:0}}<tool_call|>" for f in functions
        )
        stand_in["tool_calls"] = [
            {**call, "function": f} for call, f in zip(calls, functions, strict=True)
        ]
    rendered = render([*messages[:i], stand_in, *messages[i + 1 :]])
    before, found, rest = rendered.text.partition(written)
    # Text right behind the turn could share a token with it. Nothing comes behind the last one.
    apart = rest.startswith(tuple(tokenizer.control)) if rest else message is messages[-1]
    if not found or mark in before + rest or not apart:
        return None
    return rendered._replace(text=rest).encode(tokenizer, bos=False)


def _snapshots(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    turn = tokenizer.control.get("<|turn>")
    starts = [i for i, token in enumerate(ids) if token == turn]
    ends = set(starts[-1:])
    if len(starts) > 1 and tokenizer.decode(ids[starts[0] : starts[0] + 16]).startswith("system\n"):
        ends.add(starts[1])
    return tuple(sorted(ends - {0}))


def _open(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the ids were cut off in the middle of thoughts or of a call."""
    for pair in (("<|channel>", "<channel|>"), ("<|tool_call>", "<tool_call|>")):
        opens, closes = map(tokenizer.control.get, pair)
        if next((token for token in reversed(ids) if token in (opens, closes)), closes) != closes:
            return True
    return False


def _thoughts(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    # Some templates write an empty channel where there is to be no thinking.
    text = "<|channel>thought\n<channel|>"
    empty = tokenizer.encode(text, bos=False, parse_special=True)
    starts = (i for i, token in enumerate(ids) if token == empty[0])
    return any(list(ids[i : i + len(empty)]) != empty for i in starts)
