"""Text in, text out, on top of the engine: `generate` for all of it, `stream` while it comes.

for piece in stream(pair, "def fibonacci(n):", Options(max_tokens=64)):
    print(piece.text, end="", flush=True)
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import mlx.core as mx

from mlx_mtp.engine.draft_length import check_draft_len
from mlx_mtp.engine.requests import Request, Stats
from mlx_mtp.engine.sampling import Sampling
from mlx_mtp.engine.session import Engine
from mlx_mtp.errors import MtpError, UsageError
from mlx_mtp.pair import GenerationDefaults, Pair
from mlx_mtp.text.stopping import Span, StopStrings, TextStream

MAX_TOKENS = 512
DRAFT_LEN = 4


@dataclass(frozen=True)
class Options:
    """How to answer one prompt; None takes what the checkpoint's generation_config says.

    max_tokens: how many tokens at most; the model's context bounds it too. seed None is a random
    one, shown in the result's settings. draft_len: drafted tokens a round, the bonus token not
    counted; 0 is plain decoding. raw: complete the prompt as it is, without the chat template.
    system: a system message before the prompt. Raises UsageError for a value out of range.
    """

    max_tokens: int = MAX_TOKENS
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    draft_len: int = DRAFT_LEN
    raw: bool = False
    system: str | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise UsageError(f"max-tokens is {self.max_tokens}; it must be 0 or more")
        check_draft_len(self.draft_len)
        StopStrings(self.stop)
        self.sampling(GenerationDefaults())
        if self.raw and self.system is not None:
            raise UsageError("--system needs the chat template, which --raw leaves out")

    def sampling(self, defaults: GenerationDefaults) -> Sampling:
        """What is in force: these options over the checkpoint's defaults."""

        def either(given: float | None, default: float) -> float:
            return default if given is None else given

        return Sampling(
            temperature=either(self.temperature, defaults.temperature),
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            top_p=either(self.top_p, defaults.top_p),
            min_p=either(self.min_p, defaults.min_p),
            seed=secrets.randbits(32) if self.seed is None else self.seed,
        )


@dataclass(frozen=True)
class Piece:
    """What one step brought: text as (text, drafted) spans, drafted where the drafter had proposed
    the token and the target agreed; `stats` so far; `prefilled` prompt tokens read so far."""

    spans: list[Span]
    stats: Stats
    prefilled: int

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.spans)


@dataclass(frozen=True)
class Result:
    """An answer and what it took. The text ends before a stop string, token_ids with the token that
    completed it; an EOS token is in neither. timing in seconds and tokens per second, memory in
    bytes."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    stats: Stats
    timing: dict[str, float]
    memory: dict[str, int]
    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The object that `mlx-mtp generate --json` prints."""
        stats, drafts = self.stats, self.settings["draft_len"]
        return {
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
                "accepted_by_position": stats.accepted_by_position[:drafts],
                "tokens_per_round": stats.tokens_per_round,
            },
            "timing": self.timing,
            "memory": self.memory,
            "settings": self.settings,
        }


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
        sampling = options.sampling(pair.defaults)
        self._pair = pair
        self._text = TextStream(pair.tokenizer, options.stop)
        self._shown: list[str] = []
        self._request = Request(
            prompt=prompt,
            max_tokens=options.max_tokens,
            sampling=sampling,
            eos=frozenset(pair.defaults.eos_token_ids),
            suppress=pair.defaults.suppress_tokens,
            draft_len=options.draft_len if pair.drafter is not None else 0,
            stop=self._text.add,
        )
        self._owned = engine is None
        self._engine = engine or Engine(pair.target, pair.drafter, memory_limit=pair.memory_limit)
        self._engine.add(self._request)
        self._pieces = self._run()
        self._result: Result | None = None
        self.notices: list[str] = []
        if self._request.max_tokens < options.max_tokens:
            self.notices.append(
                f"the model's context has room for {self._request.max_tokens} more tokens, not "
                f"for the {options.max_tokens} asked for"
            )
        self.settings: dict[str, Any] = {
            "model": pair.name,
            "revision": pair.revision,
            "drafter": pair.drafter_name,
            "drafter_revision": pair.drafter_revision,
            "max_tokens": self._request.max_tokens,
            "draft_len": self._request.draft_len,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "stop": list(options.stop),
            "raw": options.raw,
            "system": options.system,
            "eos_token_ids": sorted(self._request.eos),
        }

    @property
    def stats(self) -> Stats:
        return self._request.stats

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
            return self._piece([])
        self._engine.cancel(self._request)
        last = self._piece(self._text.finish())
        self._end()
        return last

    def _run(self) -> Generator[Piece]:
        while self._request.finish_reason is None:
            for event in self._engine.step():
                if event.request is not self._request:
                    continue
                if self._request.error:
                    raise MtpError(self._request.error)
                spans = self._text.release(event.drafted)
                if event.finish_reason is not None:
                    spans += self._text.finish()
                yield self._piece(spans, event.prefilled)
        self._end()

    def _piece(self, spans: list[Span], prefilled: int | None = None) -> Piece:
        self._shown += [text for text, _ in spans]
        return Piece(
            spans, self.stats, len(self._request.prompt) if prefilled is None else prefilled
        )

    def _end(self) -> None:
        stats, kv_bytes = self.stats, self._engine.kv_bytes
        if self._owned:
            self._engine.close()
        self._result = Result(
            text="".join(self._shown),
            token_ids=self._request.tokens,
            prompt_token_ids=self._request.prompt,
            finish_reason=self._request.finish_reason or "cancelled",
            stats=stats,
            timing={
                "load_s": self._pair.load_s,
                "first_token_s": stats.first_token_s,
                "prompt_tps": stats.prompt_tps,
                "decode_tps": stats.decode_tps,
            },
            memory={
                "peak_bytes": mx.get_peak_memory(),
                "weights_bytes": self._pair.weights_bytes,
                "kv_bytes": kv_bytes,
            },
            settings=self.settings,
        )


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
    if stats.rounds < rounds or not stats.drafted or stats.acceptance >= least:
        return None
    return (
        f"only {stats.accepted} of {stats.drafted} drafted tokens were accepted: the drafter does "
        "not suit this model or this text, and --draft-len 0 is faster"
    )
