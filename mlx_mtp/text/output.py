"""What a model says, taken apart while its tokens come: content, thoughts, calls of tools.

    <|channel>thought
    ...
    <channel|>content<|tool_call>call:NAME{...}<tool_call|>

Only control tokens part them: the same characters written out are text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mlx_mtp.text.detokenize import Detokenizer
from mlx_mtp.text.stopping import Span, TextStream
from mlx_mtp.text.tokenizer import Tokenizer
from mlx_mtp.text.tool_calls import QUOTE, ToolCall, parse

_THOUGHT, _THOUGHT_END = "<|channel>", "<channel|>"
_CALL, _CALL_END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CHANNEL_NAME = "thought\n"


class Said(NamedTuple):
    content: list[Span]
    thoughts: list[Span]
    calls: list[ToolCall]
    broken: list[str]


@dataclass
class _Delta:
    """What one token brings."""

    content: str = ""
    thoughts: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


@dataclass
class _OpenCall:
    """A call in the making. `lost`: its end came where a string was open, and it made no sense."""

    parts: list[str] = field(default_factory=list)
    in_string: bool = False
    lost: bool = False


class OutputStream:
    """Token ids in, what they say out, each part of text with the flag of its token.

    `stops` are looked for in content only. parse: False takes everything as content. tools: False
    takes calls as content. in_thought: the prompt leaves the thought channel open. most_calls: end
    after so many. A call is released whole; one that cannot be read, or is cut off, becomes the
    text it was written as, with the flag of the token that decided it, and is in `broken` beside.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        parse: bool = True,
        tools: bool = False,
        in_thought: bool = False,
        most_calls: int | None = None,
    ) -> None:
        markers = (_THOUGHT, _THOUGHT_END, _CALL, _CALL_END, _QUOTE) if parse else ()
        control = tokenizer.control
        self._markers = {control[text]: text for text in markers if text in control}
        self._tools = tools
        self._detokenizer = Detokenizer(tokenizer)
        self._content = TextStream(stops)
        self._deltas: deque[_Delta] = deque()
        self._now = _Delta()
        self._in_thought = self._named = in_thought and parse
        self._unsure = ""  # part of the channel's name, or a newline that may be the last
        self._said = self._trim = False
        self._call: _OpenCall | None = None
        self._calls, self._most_calls = 0, most_calls

    @property
    def stopped(self) -> bool:
        return self._content.stopped or self._calls == self._most_calls

    @property
    def cut(self) -> bool:
        """Whether a stop string ended it, so that the tokens say more than the text."""
        return self._content.stopped

    def add(self, token: int) -> bool:
        """Takes the next token; True when it completes a stop string in the content, or the last
        call that is wanted."""
        self._now = _Delta()
        if marker := self._markers.get(token):
            self._text(self._detokenizer.flush())
            self._marker(marker)
        else:
            self._text(self._detokenizer.add(token))
        self._content.add(self._now.content)
        self._deltas.append(self._now)
        return self.stopped

    def release(self, drafted: Sequence[bool]) -> Said:
        """What became sure; `drafted` has a flag for each token added since the last call."""
        deltas = [(self._deltas.popleft(), flag) for flag in drafted]
        return Said(
            self._content.release(drafted),
            [(delta.thoughts, flag) for delta, flag in deltas if delta.thoughts],
            [call for delta, _ in deltas for call in delta.calls],
            [text for delta, _ in deltas for text in delta.broken],
        )

    def finish(self) -> Said:
        """What was still held back at the end of the generation."""
        self._now = _Delta()
        self._text(self._detokenizer.flush())
        if self._call is not None and not self.stopped:
            self._end_call(self._call, None)
        self._content.add(self._now.content)
        self._deltas.append(self._now)
        said = self.release([False] * len(self._deltas))
        return said._replace(content=said.content + self._content.finish())

    def _marker(self, marker: str) -> None:
        if self._call is not None and self._in_call(self._call, marker):
            return
        if marker == _THOUGHT:
            self._in_thought, self._named, self._unsure = True, False, ""
        elif marker == _THOUGHT_END:
            self._in_thought, self._trim = False, not self._said
        elif not self._tools:
            self._text(marker)
        elif marker == _CALL:
            self._call = _OpenCall()

    def _in_call(self, call: _OpenCall, marker: str) -> bool:
        """Whether the marker is part of the open call; any that is not ends it.

        A string may hold every marker but the quote. Where the model left a quote out, though, the
        end of the call seems to stand in a string: it counts if that makes a call, and otherwise
        the start of the next one ends it.
        """
        if marker == _QUOTE:
            call.in_string = not call.in_string
            call.parts.append(QUOTE)
            return True
        if not call.in_string or marker == (_CALL if call.lost else _CALL_END):
            made = parse("".join(call.parts))
            if made or call.lost or not call.in_string:
                self._end_call(call, made, _CALL_END if marker == _CALL_END else "")
                return marker == _CALL_END
        call.lost = call.lost or marker == _CALL_END
        call.parts.append(marker)
        return True

    def _end_call(self, call: _OpenCall, made: ToolCall | None, end: str = "") -> None:
        self._call = None
        if made is None:
            self._now.broken.append(_CALL + "".join(call.parts).replace(QUOTE, _QUOTE) + end)
            self._text(self._now.broken[-1])
        else:
            self._now.calls.append(made)
            self._calls += 1

    def _text(self, text: str) -> None:
        if self._call is not None:
            self._call.parts.append(text)
        elif self._in_thought:
            self._think(self._unsure + text)
        else:
            text = text.lstrip() if self._trim else text
            self._trim = self._trim and not text
            self._said = self._said or bool(text.strip())
            self._now.content += text

    def _think(self, text: str) -> None:
        if not self._named:
            self._unsure = text
            if _CHANNEL_NAME.startswith(text):
                return
            self._named, text = True, text.removeprefix(_CHANNEL_NAME)
        self._unsure = "\n" if text.endswith("\n") else ""
        self._now.thoughts += text.removesuffix("\n")


def in_thought(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether a prompt leaves the thought channel open."""
    start, *ends = (tokenizer.control.get(text) for text in (_THOUGHT, _THOUGHT_END, "<|turn>"))
    last = next((token for token in reversed(ids) if token == start or token in ends), None)
    return last is not None and last == start
