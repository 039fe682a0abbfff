"""A checkpoint's chat template: messages in, prompt out.

Templates come from strangers, so they run in Jinja's immutable sandbox, with the helpers that
transformers gives them (transformers/utils/chat_template_utils.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlx_mtp.errors import LoadError, UsageError
from mlx_mtp.text.tokenizer import Tokenizer, read_json

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders messages; `variants` are templates by name, of which "default" must be one and
    "tool_use", where there is one, is taken when tools are given."""

    def __init__(
        self, variants: Mapping[str, str], specials: Mapping[str, str], where: str = "chat template"
    ) -> None:
        environment = _environment()
        try:
            self._variants = {n: environment.from_string(s) for n, s in variants.items()}
        except jinja2.TemplateSyntaxError as error:
            raise LoadError(f"{where}: line {error.lineno}: {error.message}") from error
        if "default" not in self._variants:
            raise LoadError(f"{where}: none of its templates is named default")
        self._specials = dict(specials)

    @classmethod
    def from_folder(cls, path: str | Path) -> ChatTemplate | None:
        """From chat_template.jinja, tokenizer_config.json (a string or a list of named ones) or
        chat_template.json; None for a base model, which has none. Raises LoadError."""
        folder = Path(path)
        config = read_json(folder / "tokenizer_config.json")
        names = {**read_json(folder / "special_tokens_map.json"), **config}
        specials = {}
        for key, value in names.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                specials[key] = text
        jinja = folder / "chat_template.jinja"
        if jinja.exists():
            return cls({"default": _read(jinja)}, specials, str(jinja))
        for file in ("tokenizer_config.json", "chat_template.json"):
            found = read_json(folder / file).get("chat_template")
            if found:
                where = f"{folder / file}: chat_template"
                return cls(_variants(found, where), specials, where)
        return None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
    ) -> str:
        """The prompt with its control tokens as text, up to where the model's turn begins. Raises
        UsageError where the template refuses the messages."""
        name = "tool_use" if tools and "tool_use" in self._variants else "default"
        template = self._variants[name]
        context = template.new_context(
            {
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": True,
                "enable_thinking": enable_thinking,
                **self._specials,
            }
        )
        try:
            return "".join(template.root_render_func(context))
        except Exception as error:  # whatever the template does with messages it did not expect
            raise UsageError(f"the chat template refuses these messages: {error}") from error
        finally:
            # Macros and their context hold each other, and the messages, until Python looks for it.
            context.parent.clear()
            context.vars.clear()

    def prompt(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
    ) -> Rendered:
        """The rendered prompt, in which a control token that a message or a tool writes is plain
        text. An answer as the last message is one to go on with: the prompt ends with its text."""
        end = unused_character([messages, tools])
        last = messages[-1] if messages else {}
        text = last.get("content")
        if last.get("role") == "assistant" and not last.get("tool_calls") and isinstance(text, str):
            messages = [*messages[:-1], {**last, "content": text + end}]
        mark = unused_character([messages, tools, end])
        rendered = self.render(
            [_guarded(message, tokenizer, mark) for message in messages],
            tools=_guarded(tools, tokenizer, mark),
            enable_thinking=enable_thinking,
        )
        return Rendered(rendered.partition(end)[0], mark)

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
    ) -> list[int]:
        """The ids of `prompt`, with one BOS."""
        rendered = self.prompt(messages, tokenizer, tools=tools, enable_thinking=enable_thinking)
        return rendered.encode(tokenizer, bos=True)


class Rendered(NamedTuple):
    """A prompt as text; where `mark` stands, a control token that is only quoted is cut in two."""

    text: str
    mark: str

    def encode(self, tokenizer: Tokenizer, *, bos: bool) -> list[int]:
        first, *rest = self.text.split(self.mark)
        ids = tokenizer.encode(first, bos=bos, parse_special=True)
        for piece in rest:
            ids += tokenizer.encode(piece, bos=False, parse_special=True)
        return ids


def unused_character(value: Any) -> str:
    """A private-use character that no text in the JSON value has."""
    used = set(json.dumps(value, ensure_ascii=False, default=str))
    return next(char for char in map(chr, range(0xF0000, 0x110000)) if char not in used)


def _guarded(value: Any, tokenizer: Tokenizer, mark: str) -> Any:
    """The same value with every string guarded."""
    if isinstance(value, str):
        return tokenizer.guard(value, mark)
    if isinstance(value, Mapping):
        return {
            _guarded(key, tokenizer, mark): _guarded(item, tokenizer, mark)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_guarded(item, tokenizer, mark) for item in value]
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: not readable ({error})") from error


def _variants(found: Any, where: str) -> dict[str, str]:
    if isinstance(found, str):
        return {"default": found}
    try:
        return {item["name"]: item["template"] for item in found}
    except (TypeError, KeyError):
        raise LoadError(f"{where} is neither a text nor a list of named ones") from None


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that reach into Python, which its sandbox lets through."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


class _Generation(Extension):
    """`{% generation %}`, by which trainers mark the assistant's text; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = _Namespace
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, this does not escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
