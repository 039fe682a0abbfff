"""Answers that fit a grammar: which tokens may come, for each place of a block of drafts.

llguidance walks the grammar over bytes. What lies around the constrained text
is kept here: a thought before it, in which the answer cannot end; a tool call instead of it.
A round asks for the masks of all its places: the matcher steps over the drafts and is rolled back,
which costs the same after any length of text; a copy of it would grow with the text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from itertools import islice
from types import NoneType
from typing import TYPE_CHECKING, Any

from mlx_mtp.errors import UsageError
from mlx_mtp.text.lark import call_grammar, named
from mlx_mtp.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLMatcher, LLTokenizer

# At most one of these between two parts of JSON, none around it: nothing that could run away.
_WHITESPACE = r" |\n {0,32}"
_DEFINITIONS = ("$defs", "definitions")


class _Phase(Enum):
    THOUGHT = auto()
    FIRST = auto()  # the constrained text begins, or what may come before or instead of it
    THOUGHT_OVER = auto()  # the same, but thoughts: a second one could go on for ever
    INSIDE = auto()
    FREE = auto()


@dataclass
class Grammar:
    """One answer's place in its grammar. Both methods raise UsageError, which begins with `where`,
    when the text outgrows what llguidance can follow.

    doors: the tokens that may also come at the first place, and where they lead.
    """

    matcher: LLMatcher
    where: str
    words: int
    eos: Collection[int]
    thought_end: int | None
    phase: _Phase
    doors: Mapping[int, _Phase]

    def masks(self, drafts: Sequence[int]) -> npt.NDArray[np.uint32] | None:
        """uint32 [len(drafts) + 1, ceil(V / 32)]: bit t % 32 of word t // 32 at place i says that
        token t may come after drafts[:i]. None: everything may, everywhere.

        A draft may be wrong, or -1 for none: the places behind one that cannot come are all ones.
        """
        import numpy as np

        rows = np.full((len(drafts) + 1, self.words), 0xFFFFFFFF, np.uint32)
        phase, taken, bound = self.phase, 0, False
        for row, token in zip(rows, [*drafts, -1], strict=True):
            if self.phase not in (_Phase.THOUGHT, _Phase.FREE):
                bound = True
                self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
                self._check()
            for door in self._doors():
                row[door // 32] |= np.uint32(1 << door % 32)
            for end in self.eos if self.phase is _Phase.THOUGHT else ():
                bound = True
                row[end // 32] &= np.uint32(~(1 << end % 32) & 0xFFFFFFFF)
            if token < 0 or token in self.eos or not row[token // 32] >> token % 32 & 1:
                break
            taken += self._step(token)
        self.matcher.rollback(taken)
        self.phase = phase
        return rows if bound else None

    def accept(self, token: int) -> None:
        """Takes a token that was emitted; never an end-of-sequence token."""
        self._step(token)

    def _step(self, token: int) -> bool:
        """Moves on by one token; whether the matcher took it."""
        if self.phase is _Phase.THOUGHT:
            if token == self.thought_end:
                self.phase = _Phase.THOUGHT_OVER
        elif token in self._doors():
            self.phase = self.doors[token]
        elif self.phase is not _Phase.FREE:
            self.matcher.consume_token(token)
            self._check()
            self.phase = _Phase.INSIDE
            return True
        return False

    def _doors(self) -> Collection[int]:
        """The tokens that lead elsewhere from here."""
        if self.phase is _Phase.FIRST:
            return self.doors
        over = self.phase is _Phase.THOUGHT_OVER
        return [token for token, to in self.doors.items() if over and to is _Phase.FREE]

    def _check(self) -> None:
        if self.matcher.is_error():
            raise UsageError(f"{self.where}: {_message(self.matcher)}")


class GrammarFactory:
    """Makes grammars for one checkpoint. `vocabulary` is the number of logits, which may exceed
    the tokenizer's vocabulary; `eos` are the tokens that end an answer.

    With `thinking` a thought may come before the constrained text; `in_thought` says that the
    prompt has already begun it. Raises UsageError that names the place in the request, and where
    llguidance is missing.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos = frozenset(eos)

    def __call__(
        self,
        response_format: Mapping[str, Any],
        *,
        thinking: bool = False,
        in_thought: bool = False,
        tools: bool = False,
    ) -> Grammar | None:
        """The grammar of an OpenAI response_format, or of {"type": "regex", "regex": ...} or
        {"type": "grammar", "grammar": Lark}; None for {"type": "text"}.

        With `tools` a tool call may come instead, free of any grammar. No other control token may
        come, unless a Lark grammar names it.
        """
        kind, where = response_format.get("type"), "response_format"
        language: str = "json_schema"
        source: Any = {"type": "object"}
        if kind == "text":
            return None
        if kind == "json_schema":
            holder = _value(response_format, kind, Mapping, where)
            source = _value(holder, "schema", dict, f"{where}.json_schema")
            if not isinstance(holder.get("strict"), (bool, NoneType)):
                raise UsageError(f"{where}.json_schema.strict: must be true, false or null")
            where = "response_format.json_schema.schema"
        elif kind in ("regex", "grammar"):
            language = "lark" if kind == "grammar" else "regex"
            source = _value(response_format, kind, str, where)
            where = f"response_format.{kind}"
            if kind == "grammar" and (end := named(source, self._tokenizer.control, self._eos)):
                raise UsageError(f"{where}: {end} ends the answer, so it cannot be part of it")
        elif kind != "json_object":
            known = "text, json_object, json_schema, regex or grammar"
            raise UsageError(f"{where}.type: must be {known}, not {json.dumps(kind)}")
        return self._grammar(language, source, where, thinking, in_thought, tools=tools)

    def forced_call(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        thinking: bool,
        in_thought: bool,
        most_calls: int | None,
    ) -> Grammar:
        """Calls of the tools, which are in OpenAI's form, and nothing else."""
        control = self._tokenizer.control
        if not {"<|tool_call>", "<tool_call|>", '<|"|>'} <= set(control):
            raise UsageError("tool_choice: this checkpoint knows no tool calls")
        lark = call_grammar(tools, control, most_calls)
        return self._grammar("lark", lark, "tool_choice", thinking, in_thought)

    def _grammar(
        self,
        language: str,
        source: Any,
        where: str,
        thinking: bool,
        in_thought: bool,
        *,
        tools: bool = False,
    ) -> Grammar:
        try:
            matcher = self._compile(language, source)
        except ImportError:
            needs = "needs llguidance; install it: pip install llguidance"
            raise UsageError(f"{where.partition('.')[0]}: {needs}") from None
        except ValueError as error:
            if isinstance(source, dict):
                shared = {key: source[key] for key in _DEFINITIONS if key in source}
                where += self._place(source, shared, str(error))
                where = where if len(where) <= 120 else f"{where[:58]}...{where[-58:]}"
            raise UsageError(f"{where}: {error}") from None
        control = self._tokenizer.control
        doors = {}
        if thinking and "<|channel>" in control:
            doors[control["<|channel>"]] = _Phase.THOUGHT
        if tools and "<|tool_call>" in control:
            doors[control["<|tool_call>"]] = _Phase.FREE
        return Grammar(
            matcher,
            where,
            words=-(-self._vocabulary // 32),
            eos=self._eos,
            thought_end=control.get("<channel|>"),
            phase=_Phase.THOUGHT if in_thought else _Phase.FIRST,
            doors=doors,
        )

    def _place(self, schema: Mapping[str, Any], shared: dict[str, Any], message: str) -> str:
        """The path of the innermost part of a schema that fails with the same message by itself,
        as far as a few hundred tries at each level find it."""
        for path, part in islice(_parts(schema), 300):
            try:
                self._compile("json_schema", shared | part)
            except ValueError as error:
                if str(error) == message:
                    return path + self._place(part, shared, message)
        return ""

    def _compile(self, language: str, source: Any) -> LLMatcher:
        """Raises ValueError that says in one line what is wrong."""
        tokenizer = self._llguidance
        from llguidance import LLMatcher, LLParserLimits

        spaces = {"overrides": {"whitespace_pattern": _WHITESPACE}}
        options = spaces if language == "json_schema" else {}
        grammar = getattr(LLMatcher, f"grammar_from_{language}")(source, **options)
        # An optional property takes four items of a row.
        limits = LLParserLimits(
            max_items_in_row=20_000, step_max_items=200_000, verbose_errors=False
        )
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # fails where no text can fit
        if matcher.is_error():
            raise ValueError(_message(matcher))
        return matcher

    @cached_property
    def _llguidance(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        words = _Words(self._tokenizer, self._vocabulary, self._eos)
        return LLTokenizer(TokenizerWrapper(words), eos_token=sorted(self._eos))


class _Words:
    """What llguidance asks of a tokenizer: each token's bytes, 0xFF before the name of one that is
    no text. Ids beyond the tokenizer's vocabulary have no bytes, and never come."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos: Collection[int]) -> None:
        control = {token: name for name, token in tokenizer.control.items()}
        names = dict.fromkeys(eos, "<eos>") | control
        self.eos_token_id = min(eos)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [
            b"\xff" + names[token].encode() if token in names else tokenizer.token_bytes(token)
            for token in range(vocabulary)
        ]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, bos=False)


def _value(holder: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    value = holder.get(key)
    if not isinstance(value, kind):
        raise UsageError(f"{where}.{key}: must be {'a string' if kind is str else 'an object'}")
    return value


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What may be a schema within a schema, with its path; shared definitions come first."""
    for key in sorted(schema, key=lambda key: key not in _DEFINITIONS):
        value = schema[key]
        if isinstance(value, dict):
            yield f".{key}", value
            yield from ((f".{key}.{name}", v) for name, v in value.items() if isinstance(v, dict))
        elif isinstance(value, list):
            yield from ((f".{key}[{i}]", v) for i, v in enumerate(value) if isinstance(v, dict))


def _message(matcher: LLMatcher) -> str:
    """llguidance's message without its excerpts of the grammar."""
    first, *rest = matcher.get_error().removesuffix("<non-verbose/>").splitlines()
    reasons = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
    message = " ".join([first, *reasons])
    return "no text can fit it" if message == "NoExtensionBias" else message
