"""OpenAI's bodies in, OpenAI's objects out; no transport, no thread.

A body is checked as far as that needs no model, and every error names its parameter. Beside
OpenAI's parameters these are known: top_k, min_p, repetition_penalty, min_tokens, draft_len,
session, chat_template_kwargs (enable_thinking, preserve_thinking) and return_token_ids, which adds
the ids of the prompt and of the answer to the choice. What is not known is listed in the answer's
`mlx_mtp.ignored`.
"""

from __future__ import annotations

import math
import os
import reprlib
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from mlx_mtp.errors import UsageError

if TYPE_CHECKING:
    from mlx_mtp.cli.backends.service import Model
    from mlx_mtp.conversation import Ask, Conversations, Ready, Turn
    from mlx_mtp.engine.session import Engine
    from mlx_mtp.generation import Answer, Options, Piece
    from mlx_mtp.text.tokenizer import Tokenizer

THINKING = {"none": False, "minimal": False} | dict.fromkeys(
    ("low", "medium", "high", "xhigh"), True
)
FORMATS = ("json_object", "json_schema", "regex", "grammar")
KINDS = {
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
    int: "a whole number",
    float: "a number",
}
# Parameters that are numbers and options of the same name: kind, least and most.
NUMBERS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 100),
    "top_k": (int, 0, (1 << 31) - 1),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 1e-9, 100),
    "presence_penalty": (float, -2, 2),
    "frequency_penalty": (float, -2, 2),
    "min_tokens": (int, 0, (1 << 30) - 1),
}
MOST_TOKENS, MOST_STOPS, MOST_LOGPROBS = 1 << 31, 4, 20


class Left:
    """The parameters of a body that were not taken yet; `where` stands before their names."""

    def __init__(self, given: Mapping[str, Any], where: str = "") -> None:
        self._given, self.where = dict(given), where

    def names(self) -> list[str]:
        return [self.where + name for name in self._given]

    def take(
        self,
        name: str,
        kind: type = object,
        low: float = -math.inf,
        high: float = math.inf,
        default: Any = None,
    ) -> Any:
        """The value, which null or missing is `default`. Raises UsageError unless it is of that
        kind and, where it is a number, in that range."""
        value = self._given.pop(name, None)
        if value is None:
            return default
        if kind in (int, float):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if number and low <= value <= high and (kind is float or value == int(value)):
                return kind(value)
            what = KINDS[kind] if low < high else str(low)
            what += f", {low} to {high}" if -math.inf < low < high < math.inf else ""
        elif isinstance(value, kind):
            return value
        else:
            what = KINDS[kind]
        raise UsageError(f"{self.where}{name} is {shown(value)}; it must be {what}")

    def choice(self, name: str, values: Collection[str], default: str | None = None) -> str:
        value = self._given.pop(name, None)
        value = default if value is None else value
        if not isinstance(value, str) or value not in values:
            known = ", ".join(values)
            raise UsageError(f"{self.where}{name} is {shown(value)}; it must be one of {known}")
        return value


def chat(given: Mapping[str, Any], draft_len: int | None = None) -> Body:
    """A body of chat.completions; draft_len where it names none. Raises UsageError."""
    from mlx_mtp.conversation import Ask
    from mlx_mtp.text.messages import checked_messages, checked_tools

    left = Left(given)
    _unicode(given)
    messages = left.take("messages")
    checked_messages(messages)
    given_tools = left.take("tools")
    tools = given_tools if checked_tools(given_tools) else None
    # Calls are kept to names, not to types.
    strict = [
        f"tools[{i}].function.strict"
        for i, tool in enumerate(tools or ())
        if tool.get("function", tool).get("strict")
    ]
    effort = left.choice("reasoning_effort", THINKING, "none")
    extra = Left(left.take("chat_template_kwargs", dict, default={}), "chat_template_kwargs.")
    response_format = left.take("response_format", dict, default={"type": "text"})
    kind = Left(response_format, "response_format.").choice("type", ("text", *FORMATS))
    ask = Ask(
        messages,
        tools,
        thinking=extra.take("enable_thinking", bool, default=THINKING[effort]),
        preserve_thinking=extra.take("preserve_thinking", bool, default=True),
        tool_choice=_tool_choice(left.take("tool_choice", default="auto"), bool(tools)),
        parallel_calls=left.take("parallel_tool_calls", bool, default=True),
        response_format=None if kind == "text" else response_format,
        session=session_name(left),
    )
    top = left.take("top_logprobs", int, 0, MOST_LOGPROBS)
    logprobs = (top or 0) if left.take("logprobs", bool) else None
    if logprobs is None and top is not None:
        raise UsageError("top_logprobs needs logprobs to be true")
    longest = left.take("max_tokens", int, 0, MOST_TOKENS)
    longest = left.take("max_completion_tokens", int, 0, MOST_TOKENS, longest)
    options = _options(left, draft_len, max_tokens=longest, logprobs=logprobs)
    return _body(left, options, ask=ask, unknown=[*extra.names(), *strict])


def completion(given: Mapping[str, Any], draft_len: int | None = None) -> Body:
    """The same for a body of completions."""
    from mlx_mtp.generation import MAX_TOKENS

    left = Left({"max_tokens": MAX_TOKENS} | dict(given))
    _unicode(given)
    prompt = left.take("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        (prompt,) = prompt  # several prompts of which there is one
    ids = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not ids:
        raise UsageError(f"prompt is {shown(prompt)}; it must be a string or a list of token ids")
    if left.take("suffix", str):
        raise UsageError("suffix: Gemma 4 has no tokens for filling in the middle")
    if left.take("echo", bool):
        raise UsageError("echo is true; the prompt is not repeated here")
    left.take("best_of", int, 1, 1)
    longest = left.take("max_tokens", int, 0, MOST_TOKENS)
    logprobs = left.take("logprobs", int, 0, MOST_LOGPROBS)
    options = _options(left, draft_len, max_tokens=longest, logprobs=logprobs, raw=True)
    return _body(left, options, prompt=prompt)


class ModelError(UsageError):
    """A body asks for a model that is not here."""


def names(asked: str | None, model: Model | None) -> list[str]:
    """What a body may call the model: "default", what was `asked` for at the start, what was
    loaded, and last the name that answers give it."""
    asked = asked or "embedded target"
    name = asked if model is None else model.name
    others = dict.fromkeys(["default", asked, own_name(asked), name])
    others.pop(mine := own_name(name), None)
    return [*others, mine]


def own_name(name: str) -> str:
    """The last part of a hub's name or of a path, which is not for clients to see."""
    return os.path.basename(os.path.abspath(name))


def check_model(model: str | None, known: Sequence[str]) -> None:
    """Raises ModelError."""
    if model is not None and model not in known:
        shortest = dict.fromkeys((known[0], known[-1]))
        raise ModelError(f"model is {shown(model)}; here is {' or '.join(shortest)}")


def session_name(left: Left) -> str | None:
    name: str | None = left.take("session", str)
    if name is not None and not 0 < len(name) <= 256:
        raise UsageError(f"session is a name of {len(name)} characters; it must have 1 to 256")
    return name


def usage(answer: Answer | None) -> dict[str, Any]:
    """Of an answer as far as it got; None: of a request that never ran."""
    stats = None if answer is None else answer.request.stats
    prompt, said = (stats.prompt_tokens, stats.completion_tokens) if stats else (0, 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens if stats else 0},
    }


@dataclass(frozen=True)
class Body:
    """A checked body. `ask` is what a chat goes on from; None: `prompt` is completed as it is."""

    options: Options
    ask: Ask | None
    prompt: str | list[int]
    model: str | None
    stream: bool
    include_usage: bool
    token_ids: bool
    ignored: list[str]
    ready: Ready | None = None  # what `prepared` made of `ask`
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def prepared(self, model: Model) -> Body:
        """The same, its prompt brought into tokens, for which the engine's thread need not wait. In
        any thread. Raises UsageError."""
        if self.ask is None:
            return replace(self, prompt=self._prompt_ids(model.tokenizer))
        from mlx_mtp.conversation import prepare

        ready = prepare(self.ask, model.template, model.tokenizer, model.turns)
        return replace(self, ready=ready)

    def start(self, conversations: Conversations, engine: Engine) -> Answer:
        """In the engine's thread. Raises UsageError and FitError."""
        from mlx_mtp.generation import Answer

        if self.ask is not None:
            return conversations.start(engine, self.ask, self.options, self.ready)
        pair = conversations.pair
        return Answer(pair, self._prompt_ids(pair.tokenizer), self.options, engine)

    def count(self, model: Model) -> int:
        """The tokens of the prompt, as rendered anew."""
        from mlx_mtp.text.messages import checked_messages, checked_tools

        if self.ask is None:
            return len(self._prompt_ids(model.tokenizer))
        if model.template is None:
            raise UsageError(f"messages: {model.name} has no chat template; give a prompt")
        messages, tools = checked_messages(self.ask.messages), checked_tools(self.ask.tools)
        thinking = self.ask.thinking
        return len(
            model.template.encode(messages, model.tokenizer, tools=tools, enable_thinking=thinking)
        )

    def _prompt_ids(self, tokenizer: Tokenizer) -> list[int]:
        if isinstance(self.prompt, list):
            return self.prompt
        return tokenizer.encode(self.prompt, bos=True, parse_special=True)

    def deltas(self, answer: Answer, piece: Piece) -> list[dict[str, Any]]:
        """What a piece adds to the message, one kind each: thoughts, text, calls."""
        if self.ask is None:
            return [{"text": piece.text}] if piece.text else []
        thoughts = "".join(text for text, _ in piece.thoughts)
        found: list[dict[str, Any]] = [{"reasoning_content": thoughts}] if thoughts else []
        found += [{"content": piece.text}] if piece.text else []
        if piece.calls:
            calls = enumerate(self.message(answer)["tool_calls"])
            numbered = [{"index": i} | call for i, call in calls]
            found.append({"tool_calls": numbered[-len(piece.calls) :]})
        return found

    def chunk(
        self, answer: Answer, delta: dict[str, Any], finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        choice |= {"text": ""} | delta if self.ask is None else {"delta": delta}
        return self._object(answer, ".chunk") | {"choices": [choice]}

    def last_chunks(self, answer: Answer) -> list[dict[str, Any]]:
        """The one with the finish reason, and the one with the usage if that was asked for."""
        counted = self._object(answer, ".chunk") | {"choices": [], "usage": usage(answer)}
        return [self.chunk(answer, {}, _finish_reason(answer)), counted][: 1 + self.include_usage]

    def result(self, answer: Answer, tokenizer: Tokenizer) -> dict[str, Any]:
        """The whole answer; logprobs are of every token."""
        result = answer.result()
        choice: dict[str, Any] = {"index": 0, "finish_reason": _finish_reason(answer)}
        choice |= {"text": result.text} if self.ask is None else {"message": self.message(answer)}
        choice["logprobs"] = None
        if self.options.logprobs is not None:
            places = [
                _logprob(tokenizer, token, at.logprob)
                | {"top_logprobs": [_logprob(tokenizer, *one) for one in at.likeliest]}
                for token, at in zip(result.token_ids, result.logprobs, strict=True)
            ]
            choice["logprobs"] = {"content": places} if self.ask else _of_completion(places)
        if self.token_ids:
            choice["prompt_token_ids"] = result.prompt_token_ids
            choice["token_ids"] = result.token_ids
        stats = result.stats
        ours = {
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "draft_len": round(stats.drafted / stats.rounds, 2) if stats.rounds else 0,
            "prefill_ms": round(stats.first_token_s * 1000),
            "decode_tps": round(stats.decode_tps, 1),
            "cached_tokens": stats.cached_tokens,
            "ignored": self.ignored,
            "notices": answer.notices,
        }
        found = self._object(answer) | {"choices": [choice]}
        return found | {"usage": usage(answer), "mlx_mtp": ours}

    def message(self, answer: Answer) -> dict[str, Any]:
        """The assistant's message as far as it got; of a completion, the text in that form."""
        if self.ask is None:
            return {"role": "assistant", "content": answer.result().text}
        return cast("Turn", answer).message()

    def _object(self, answer: Answer, chunk: str = "") -> dict[str, Any]:
        chat = self.ask is not None
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.name}",
            "object": f"chat.completion{chunk}" if chat else "text_completion",
            "created": self.created,
            "model": own_name(answer.settings["model"]),
        }


def _options(left: Left, draft_len: int | None, **more: Any) -> Options:
    from mlx_mtp.engine.draft_length import MAX_DRAFT
    from mlx_mtp.generation import Options

    numbers = {name: left.take(name, *how) for name, how in NUMBERS.items()}
    seed = left.take("seed", int, -(1 << 63), (1 << 64) - 1)
    length = left.take("draft_len", default=draft_len)
    if isinstance(length, str) and length != "auto":
        raise UsageError(f"draft_len is {shown(length)}; it must be 0 to {MAX_DRAFT} or auto")
    if length != "auto":
        length = Left({"draft_len": length}).take("draft_len", int, 0, MAX_DRAFT)
    if numbers["top_p"] == 0:
        numbers["top_p"] = 1e-9  # the likeliest token alone
    return Options(
        seed=None if seed is None else seed % (1 << 64),
        stop=_stop(left.take("stop", default=[])),
        draft_len=None if length == "auto" else length,
        logit_bias=_logit_bias(left.take("logit_bias", dict, default={})),
        **{name: value for name, value in numbers.items() if value is not None},
        **more,
    )


def _body(
    left: Left,
    options: Options,
    *,
    ask: Ask | None = None,
    prompt: str | list[int] = "",
    unknown: Collection[str] = (),
) -> Body:
    left.take("n", int, 1, 1)
    wanted = Left(left.take("stream_options", dict, default={}), "stream_options.")
    return Body(
        options,
        ask,
        prompt,
        model=left.take("model", str),
        stream=left.take("stream", bool, default=False),
        include_usage=wanted.take("include_usage", bool, default=False),
        token_ids=left.take("return_token_ids", bool, default=False),
        ignored=[*left.names(), *wanted.names(), *unknown],
    )


def _stop(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    if not (isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)):
        raise UsageError(
            f"stop is {shown(given)}; it must be a text or a list of texts, none empty"
        )
    if len(stops) > MOST_STOPS:
        raise UsageError(f"stop has {len(stops)} texts; {MOST_STOPS} are the most")
    return tuple(stops)


def _logit_bias(given: dict[str, Any]) -> dict[int, float]:
    left = Left(given, "logit_bias.")
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise UsageError(f"logit_bias has {shown(token)}, which is no token id")
    return {int(token): left.take(token, float, -100, 100, 0.0) for token in given}


def _tool_choice(given: Any, tools: bool) -> str:
    choice = given if given in ("auto", "none", "required") else None
    if isinstance(given, dict):
        function = given.get("function", given)
        choice = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, str):
        known = "it must be auto, none, required or a function"
        raise UsageError(f"tool_choice is {shown(given)}; {known}")
    if not tools and choice not in ("auto", "none"):
        raise UsageError(f"tool_choice is {shown(given)}, but there are no tools")
    return choice


def _finish_reason(answer: Answer) -> str | None:
    reason: str | None = getattr(answer, "finish_reason", answer.request.finish_reason)
    return reason


def _logprob(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.token_bytes(token)
    # Of a token that was ruled out it is -inf, which is no number in JSON.
    known = {"token": text.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0)}
    return known | {"bytes": list(text)}


def _of_completion(places: list[dict[str, Any]]) -> dict[str, Any]:
    """Logprobs as OpenAI's completions have them."""
    texts = [place["token"] for place in places]
    return {
        "tokens": texts,
        "token_logprobs": [place["logprob"] for place in places],
        "top_logprobs": [
            {one["token"]: one["logprob"] for one in place["top_logprobs"]} for place in places
        ],
        "text_offset": [sum(map(len, texts[:i])) for i in range(len(texts))],
    }


def _unicode(value: Any, place: str = "") -> None:
    """Raises UsageError naming the place of a text that is no Unicode."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{place} is not valid Unicode (a lone surrogate)") from None
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _unicode(key, f"{place}: the name {shown(key)}".removeprefix(": "))
            _unicode(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _unicode(item, f"{place}[{i}]")


def shown(value: object) -> str:
    return reprlib.repr(value)
