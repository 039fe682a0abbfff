"""Text in, text out, on top of the engine: `generate` for all of it, `stream` while it comes,
`generate_batch` for many prompts at once.

for piece in stream(pair, "def fibonacci(n):", Options(max_tokens=64)):
    print(piece.text, end="", flush=True)
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import mlx.core as mx

from mlx_mtp.engine.processors import Processing
from mlx_mtp.engine.requests import Event, Grammar, Request, Stats, TokenLogprob
from mlx_mtp.engine.sampling import Sampling
from mlx_mtp.engine.session import MAX_ROWS, Engine
from mlx_mtp.errors import MtpError, UsageError
from mlx_mtp.pair import GenerationDefaults, Pair
from mlx_mtp.text.output import OutputStream, Said, in_thought
from mlx_mtp.text.stopping import Span, StopStrings
from mlx_mtp.text.tool_calls import ToolCall

MAX_TOKENS = 512


@dataclass(frozen=True)
class Options:
    """How to answer one prompt; None takes what the checkpoint's generation_config says.

    max_tokens: how many tokens at most, None for as many as there is room for; the model's context
    bounds it too. seed None is a random
    one, shown in the result's settings. draft_len: drafted tokens a round, the bonus token not
    counted; 0 is plain decoding, None lets the program choose every round. Penalties, logit_bias
    (token id to what is added), suppress and min_tokens: see `Processing`. logprobs: report the
    logprob of every token and of so many of the likeliest. raw: complete the prompt as it is,
    without the chat template. system: a system message before the prompt. Raises UsageError for a
    value out of range.
    """

    max_tokens: int | None = MAX_TOKENS
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    draft_len: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    suppress: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    raw: bool = False
    system: str | None = None

    def __post_init__(self) -> None:
        StopStrings(self.stop)
        nothing = GenerationDefaults()
        Request(
            [0],
            MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            self.sampling(nothing),
            self.processing(nothing),
            draft_len=self.draft_len,
            logprobs=self.logprobs,
        )
        if self.raw and self.system is not None:
            raise UsageError("--system needs the chat template, which --raw leaves out")

    def sampling(self, defaults: GenerationDefaults) -> Sampling:
        """What is in force: these options over the checkpoint's defaults."""
        return Sampling(
            temperature=_either(self.temperature, defaults.temperature),
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            top_p=_either(self.top_p, defaults.top_p),
            min_p=_either(self.min_p, defaults.min_p),
            seed=int.from_bytes(os.urandom(4)) if self.seed is None else self.seed,
        )

    def processing(self, defaults: GenerationDefaults) -> Processing:
        """The same for what is done to logits; suppressed tokens add up."""
        return Processing(
            repetition_penalty=_either(self.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            suppress=(*defaults.suppress_tokens, *self.suppress),
            min_tokens=self.min_tokens,
        )


def _either(given: float | None, default: float) -> float:
    return default if given is None else given


@dataclass(frozen=True)
class Piece:
    """What one step brought: text as (text, drafted) spans, drafted where the drafter had proposed
    the token and the target agreed; `stats` so far; `prefilled` prompt tokens read so far. The
    model's thoughts and its calls of tools are kept apart from what it says; `broken` calls, which
    cannot be read, are in the text, too."""

    spans: list[Span]
    stats: Stats
    prefilled: int
    thoughts: list[Span] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.spans)


@dataclass(frozen=True)
class Result:
    """An answer and what it took. The text ends before a stop string, token_ids with the token that
    completed it; an EOS token is in neither. logprobs: one a token, where asked for. timing in
    seconds and tokens per second, memory in bytes; engine: how rounds were run
    (`Engine.describe`)."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    stats: Stats
    logprobs: list[TokenLogprob]
    timing: dict[str, float]
    memory: dict[str, int]
    settings: dict[str, Any]
    engine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The object that `mlx-mtp generate --json` prints."""
        stats = self.stats
        drafts = sum(count > 0 for count in stats.drafted_by_position)
        found = {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_token_ids": self.prompt_token_ids,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": stats.prompt_tokens,
                "completion_tokens": stats.completion_tokens,
                "cached_tokens": stats.cached_tokens,
            },
            "speculation": {
                "rounds": stats.rounds,
                "drafted": stats.drafted,
                "accepted": stats.accepted,
                "copied": stats.copied,
                "accepted_by_position": stats.accepted_by_position[:drafts],
                "tokens_per_round": stats.tokens_per_round,
            },
            "timing": self.timing,
            "memory": self.memory,
            "settings": self.settings,
            "engine": self.engine,
        }
        if self.settings["logprobs"] is not None:
            found["logprobs"] = [
                {"logprob": at.logprob, "likeliest": [list(pair) for pair in at.likeliest]}
                for at in self.logprobs
            ]
        return found


class Answer:
    """One prompt's answer in the making: its request, its text, and the settings in force.

    `notices` are lines for the user. `text` takes the tokens apart, by default into thoughts and
    text, or with `options.raw` not at all; `eos` by default the checkpoint's; the others are
    what `Request` says of them.
    """

    def __init__(
        self,
        pair: Pair,
        prompt: list[int],
        options: Options,
        engine: Engine,
        *,
        text: OutputStream | None = None,
        grammar: Grammar | None = None,
        snapshots: tuple[int, ...] = (),
        session: str | None = None,
        eos: frozenset[int] = frozenset(),
    ) -> None:
        sampling = options.sampling(pair.defaults)
        processing = options.processing(pair.defaults)
        self._pair, self._engine = pair, engine
        self._text = text or OutputStream(
            pair.tokenizer,
            options.stop,
            parse=not options.raw,
            in_thought=not options.raw and in_thought(prompt, pair.tokenizer),
        )
        self._shown: list[str] = []
        self.request = Request(
            prompt=prompt,
            max_tokens=engine.context if options.max_tokens is None else options.max_tokens,
            sampling=sampling,
            processing=processing,
            eos=eos or frozenset(pair.defaults.eos_token_ids),
            draft_len=options.draft_len if pair.drafter is not None else 0,
            logprobs=options.logprobs,
            stop=self._text.add,
            grammar=grammar,
            snapshots=snapshots,
            session=session,
        )
        engine.add(self.request)
        self.notices: list[str] = []
        if options.max_tokens is not None and self.request.max_tokens < options.max_tokens:
            self.notices.append(
                f"there is room for {self.request.max_tokens} more tokens in the context and in "
                f"memory, not for the {options.max_tokens} asked for"
            )
        draft_len = self.request.draft_len
        self.settings: dict[str, Any] = {
            "model": pair.name,
            "revision": pair.revision,
            "drafter": pair.drafter_name,
            "drafter_revision": pair.drafter_revision,
            "drafter_bits": pair.drafter_bits,
            "drafter_device": pair.drafter_device,
            "exact": pair.exact,
            "max_tokens": self.request.max_tokens,
            "draft_len": "auto" if draft_len is None else draft_len,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "repetition_penalty": processing.repetition_penalty,
            "presence_penalty": processing.presence_penalty,
            "frequency_penalty": processing.frequency_penalty,
            "logit_bias": {str(token): bias for token, bias in processing.logit_bias},
            "suppress_tokens": list(processing.suppress),
            "min_tokens": processing.min_tokens,
            "logprobs": options.logprobs,
            "stop": list(options.stop),
            "raw": options.raw,
            "system": options.system,
            "eos_token_ids": sorted(self.request.eos),
        }

    def take(self, event: Event) -> Piece:
        """The text that an event of this request brings. Raises MtpError where it ended in one,
        UsageError where that is of what was asked for."""
        if self.request.error:
            raise (UsageError if self.request.outgrown else MtpError)(self.request.error)
        said = self._text.release(event.drafted)
        if event.finish_reason is not None:
            rest = self._text.finish()
            said = Said(
                said.content + rest.content,
                said.thoughts + rest.thoughts,
                said.calls + rest.calls,
                said.broken + rest.broken,
            )
        return self._piece(said, event.prefilled)

    def cancel(self) -> Piece:
        """End it; the text that was held back because a stop string could have come of it."""
        self._engine.cancel(self.request)
        return self._piece(self._text.finish())

    def result(self) -> Result:
        stats = self.request.stats
        return Result(
            text="".join(self._shown),
            token_ids=self.request.tokens,
            prompt_token_ids=self.request.prompt,
            finish_reason=self.request.finish_reason or "cancelled",
            stats=stats,
            logprobs=self.request.token_logprobs,
            timing={
                "load_s": self._pair.load_s,
                "first_token_s": stats.first_token_s,
                "prompt_tps": stats.prompt_tps,
                "decode_tps": stats.decode_tps,
            },
            memory={
                "peak_bytes": mx.get_peak_memory(),
                "weights_bytes": self._pair.weights_bytes,
                "kv_bytes": self._engine.kv_bytes,
            },
            settings=self.settings,
            engine=self._engine.describe(),
        )

    def _piece(self, said: Said, prefilled: int | None = None) -> Piece:
        self._shown += [text for text, _ in said.content]
        done = len(self.request.prompt) if prefilled is None else prefilled
        return Piece(said.content, self.request.stats, done, said.thoughts, said.calls, said.broken)


class Generation:
    """One prompt being answered: iterate it for pieces, one a step, then read `result`.

    Steps that read the prompt, or only wait for a stop string to be decided, give pieces without
    text. `notices` are lines for the user. Leaving it early (`close`, or the end of a `with`)
    ends the request between two steps; its result then says "cancelled".
    """

    def __init__(
        self, pair: Pair, prompt: list[int], options: Options, engine: Engine | None = None
    ) -> None:
        if engine is not None and engine.busy:
            raise UsageError("the engine is busy with another generation; close that one first")
        self._owned = engine is None
        self._engine = engine or pair.engine()
        self._answer = Answer(pair, prompt, options, self._engine)
        self._pieces = self._run()
        self._result: Result | None = None
        self.notices, self.settings = self._answer.notices, self._answer.settings

    @property
    def stats(self) -> Stats:
        return self._answer.request.stats

    @property
    def result(self) -> Result:
        """The answer, once the iteration is over. Raises RuntimeError before that."""
        if self._result is None:
            raise RuntimeError("the generation is not over: iterate it to the end or close it")
        return self._result

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> Piece:
        """End now, between two steps; WAITS for the round in flight. Returns the text that was
        held back because a stop string could still have come of it."""
        self._pieces.close()
        if self._result is not None:
            return Piece([], self.stats, self.stats.prompt_tokens)
        last = self._answer.cancel()
        self._end()
        return last

    def _run(self) -> Generator[Piece]:
        while self._answer.request.finish_reason is None:
            for event in self._engine.step():
                if event.request is self._answer.request:
                    yield self._answer.take(event)
        self._end()

    def _end(self) -> None:
        self._result = self._answer.result()
        if self._owned:
            self._engine.close()


def stream(
    pair: Pair, prompt: str, options: Options | None = None, *, engine: Engine | None = None
) -> Generation:
    """Start to answer one prompt; nothing runs until the generation is iterated.

    `engine` is an idle engine of the pair to run on, which stays open. Raises UsageError for a
    prompt that is blank or too long, or a model without a chat template.
    """
    options = options or Options()
    return Generation(pair, prompt_ids(pair, prompt, options), options, engine)


def generate(
    pair: Pair, prompt: str, options: Options | None = None, *, engine: Engine | None = None
) -> Result:
    """Answer one prompt; see `stream`."""
    with stream(pair, prompt, options, engine=engine) as generation:
        for _ in generation:
            pass
    return generation.result


def generate_batch(
    pair: Pair,
    prompts: Sequence[str],
    options: Options | Sequence[Options] | None = None,
    *,
    engine: Engine | None = None,
) -> list[Result]:
    """Answer many prompts at once, each as it would be alone; up to 16 share every round, and where
    one ends the next takes its row. `options` are one for all or one each. The first error of a
    prompt ends all. Raises as `stream` does.
    """
    if isinstance(prompts, str):
        raise UsageError("prompts is one string; give a list of them")
    each = [options or Options()] * len(prompts) if not isinstance(options, Sequence) else options
    if len(each) != len(prompts):
        raise UsageError(f"{len(prompts)} prompts, but {len(each)} options")
    if engine is not None and engine.busy:
        raise UsageError("the engine is busy with another generation; close that one first")
    ids = [prompt_ids(pair, prompt, one) for prompt, one in zip(prompts, each, strict=True)]
    running = engine or pair.engine(rows=max(1, min(len(prompts), MAX_ROWS)))
    answers: dict[Request, Answer] = {}
    try:
        for prompt, one in zip(ids, each, strict=True):
            answer = Answer(pair, prompt, one, running)
            answers[answer.request] = answer
        while running.busy:
            for event in running.step():
                answers[event.request].take(event)
        return [answer.result() for answer in answers.values()]
    finally:
        for request in answers:
            running.cancel(request)
        if engine is None:
            running.close()


def prompt_ids(pair: Pair, prompt: str, options: Options) -> list[int]:
    """The prompt as one user turn, or with `raw` as it is, control tokens in it parsed. One BOS."""
    if options.raw:
        return pair.tokenizer.encode(prompt, bos=True, parse_special=True)
    if not prompt.strip():
        raise UsageError(
            "the prompt is empty; give some text (with --raw an empty one is BOS only)"
        )
    if pair.template is None:
        raise UsageError(
            f"{pair.name} has no chat template, as base models have none: use --raw to complete "
            "the prompt as it is, or its -it version"
        )
    messages = [{"role": "user", "content": prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    return pair.template.encode(messages, pair.tokenizer)


def low_acceptance(stats: Stats, rounds: int = 20, least: float = 0.02) -> str | None:
    """A line for the user when drafts were hardly ever accepted over many rounds."""
    if stats.rounds < rounds or stats.drafted < rounds or stats.acceptance >= least:
        return None
    return (
        f"only {stats.accepted} of {stats.drafted} drafted tokens were accepted: the drafter does "
        "not suit this model or this text, and plain decoding (--draft-len 0) is as fast"
    )
