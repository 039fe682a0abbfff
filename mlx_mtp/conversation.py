"""Chat: messages in, one turn of the model out, with its thoughts and its calls of tools apart.

conversations = Conversations(pair)
turn = conversations.start(engine, Ask([{"role": "user", "content": "Hello"}]))
while engine.busy:
    for event in engine.step():
        print(turn.take(event).text, end="")
print(turn.message())

Whoever chats sends the whole history with every turn. The tokens of the turns that were generated
here are remembered, and put in where the history holds them, so that KV goes on from them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mlx_mtp.engine.requests import Event, Grammar
from mlx_mtp.engine.session import Engine
from mlx_mtp.errors import ContextError, UsageError
from mlx_mtp.generation import Answer, Options, Piece
from mlx_mtp.pair import Pair
from mlx_mtp.text.chat import ChatTemplate, Message
from mlx_mtp.text.grammar import GrammarFactory
from mlx_mtp.text.messages import checked_messages, checked_tools
from mlx_mtp.text.output import OutputStream, Said, in_thought
from mlx_mtp.text.tokenizer import Tokenizer
from mlx_mtp.text.tool_calls import ToolCall
from mlx_mtp.text.turns import Prompt, TurnMemory

# Tokens that a user's or a tool's message has beside its text: <|turn>user, a line, <turn|>.
TURN = 4


@dataclass(frozen=True)
class Ask:
    """What a turn goes on from, in the form of OpenAI's API.

    thinking: whether the model thinks first. preserve_thinking: thoughts of earlier turns, as far
    as they were generated here, stay in the prompt; without, it is read anew from the first of
    them on. tool_choice: "auto", "none", "required", or the name of the tool to call.
    parallel_calls: several calls in one turn. response_format: see `GrammarFactory`. session: a
    name under which this conversation's KV is kept.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    thinking: bool = False
    preserve_thinking: bool = True
    tool_choice: str = "auto"
    parallel_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    session: str | None = None


class Ready(NamedTuple):
    """An ask's prompt as tokens, and its tools as templates read them."""

    prompt: Prompt
    tools: list[dict[str, Any]] | None


def prepare(
    ask: Ask, template: ChatTemplate | None, tokenizer: Tokenizer, memory: TurnMemory
) -> Ready:
    """Reads messages and tools, which may take seconds; in any thread. Raises UsageError,
    ContextError for so many messages that they need not be rendered."""
    if template is None:
        raise UsageError(
            "the model has no chat template, as base models have none: complete a prompt, or use "
            "its -it version"
        )
    messages, tools = checked_messages(ask.messages), checked_tools(ask.tools)
    least = TURN * sum(message["role"] in ("user", "tool") for message in messages)
    if tokenizer.most_tokens is not None and least > tokenizer.most_tokens:
        raise ContextError(least, tokenizer.most_tokens, counted=False)
    prompt = memory.prompt(
        template,
        tokenizer,
        messages,
        tools,
        enable_thinking=ask.thinking,
        preserve_thinking=ask.preserve_thinking,
    )
    return Ready(prompt, tools)


class Conversations:
    """The chats of one pair."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.memory = TurnMemory()
        # A turn of calls ends where the client has to answer, whatever the checkpoint lists.
        ends = (pair.tokenizer.control.get(name) for name in ("<turn|>", "<|tool_response>"))
        listed = pair.defaults.eos_token_ids
        self.eos = frozenset(token for token in (*ends, *listed) if token is not None)
        vocabulary = pair.target.config.text.vocab_size
        self.grammars = GrammarFactory(pair.tokenizer, vocabulary, self.eos)

    def start(
        self,
        engine: Engine,
        ask: Ask,
        options: Options | None = None,
        ready: Ready | None = None,
    ) -> Turn:
        """Queue a turn; `ready` is what `prepare` made of the ask, where that was done before.
        Raises UsageError, as the template and `Engine.add` do, and FitError."""
        return Turn(self, engine, ask, options or Options(), ready)


class Turn(Answer):
    """One turn of the model in the making; `calls` as far as they are complete, with their ids."""

    def __init__(
        self,
        conversations: Conversations,
        engine: Engine,
        ask: Ask,
        options: Options,
        ready: Ready | None = None,
    ) -> None:
        pair = conversations.pair
        prompt, tools = ready or prepare(ask, pair.template, pair.tokenizer, conversations.memory)
        opener = pair.tokenizer.control.get("<|tool_call>")
        callable_tools = bool(tools) and ask.tool_choice != "none"
        if tools and not callable_tools and opener is not None:
            # The prompt keeps its tools, so that KV of other turns fits it.
            options = replace(options, suppress=(*options.suppress, opener))
        open_thought = in_thought(prompt.ids, pair.tokenizer)
        text = OutputStream(
            pair.tokenizer,
            options.stop,
            tools=callable_tools,
            in_thought=open_thought,
            most_calls=None if ask.parallel_calls else 1,
        )
        super().__init__(
            pair,
            prompt.ids,
            options,
            engine,
            text=text,
            grammar=_grammar(conversations.grammars, ask, tools, open_thought),
            snapshots=prompt.snapshots,
            session=ask.session,
            eos=conversations.eos,
        )
        self._memory, self._prompt = conversations.memory, prompt
        self._thoughts: list[str] = []
        self.calls: list[tuple[str, ToolCall]] = []

    def take(self, event: Event) -> Piece:
        piece = super().take(event)
        if event.finish_reason is not None:
            self._remember()
        return piece

    def cancel(self) -> Piece:
        piece = super().cancel()
        self._remember()
        return piece

    @property
    def finish_reason(self) -> str | None:
        """As OpenAI has it: "stop", "length", "tool_calls"; or "cancelled", "error"."""
        reason = self.request.finish_reason
        return "tool_calls" if reason == "stop" and self.calls else reason

    def message(self) -> dict[str, Any]:
        """The assistant's message, as far as it got."""
        content = "".join(self._shown)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self.calls:
            message["content"] = content or None
            message["tool_calls"] = [tool_call(name, call) for name, call in self.calls]
        return message

    def _piece(self, said: Said, prefilled: int | None = None) -> Piece:
        self._thoughts += [text for text, _ in said.thoughts]
        self.calls += [(f"call_{secrets.token_hex(12)}", call) for call in said.calls]
        return super()._piece(said, prefilled)

    def _remember(self) -> None:
        # A turn that was cut off in its thoughts says nothing: no history will hold it.
        if self.request.error or self._text.cut or not (self._shown or self.calls):
            return
        self._memory.remember(
            self._prompt, self.message(), [*self._prompt.ids, *self.request.tokens]
        )


def tool_call(name: str, call: ToolCall) -> dict[str, Any]:
    """A call as OpenAI's API has it; `name` is its id."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": name,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _grammar(
    grammars: GrammarFactory,
    ask: Ask,
    tools: Sequence[Mapping[str, Any]] | None,
    open_thought: bool,
) -> Grammar | None:
    names = [tool["function"]["name"] for tool in tools or ()]
    if ask.tool_choice not in ("auto", "none"):
        wanted = names if ask.tool_choice == "required" else [ask.tool_choice]
        if not names or not set(wanted) <= set(names):
            raise UsageError(
                f"tool_choice asks for {ask.tool_choice!r}, but the tools are: "
                f"{', '.join(names) or 'none'}"
            )
        return grammars.forced_call(
            [tool for tool in tools or () if tool["function"]["name"] in wanted],
            thinking=ask.thinking,
            in_thought=open_thought,
            most_calls=None if ask.parallel_calls else 1,
        )
    if ask.response_format is None:
        return None
    tools_too = bool(names) and ask.tool_choice == "auto"
    return grammars(
        ask.response_format, thinking=ask.thinking, in_thought=open_thought, tools=tools_too
    )
