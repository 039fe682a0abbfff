"""What is asked of the engine and what came of it. Host-side, no arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mlx_mtp.engine.draft_length import MAX_DRAFT, check_draft_len
from mlx_mtp.engine.processors import Processing
from mlx_mtp.engine.sampling import Sampling
from mlx_mtp.errors import MtpError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_LOGPROBS = 20


class Grammar(Protocol):
    """What a request may say, place by place."""

    def masks(self, drafts: Sequence[int]) -> npt.NDArray[np.uint32] | None:
        """uint32 [len(drafts) + 1, ceil(V / 32)]: at place i, behind the drafts before it, bit
        t % 32 of word t // 32 says that token t may come. None: every token may, everywhere. The
        state stays as it is. A draft may be wrong, or -1: what stands behind it is of no matter.
        Raises MtpError where the text outgrows the grammar, which ends the request."""

    def accept(self, token: int) -> None:
        """A token was emitted; never an EOS. Raises as `masks` does."""


@dataclass
class Stats:
    """Counts and times of one request. Only tokens that were emitted count: what a block held
    behind a stop, and a round that was run ahead for nothing, appear nowhere."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    copied: int = 0  # of the accepted, those that were copied from the text
    drafted_by_position: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT)
    accepted_by_position: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT)
    first_token_s: float = 0.0  # from the request's start to its first token read
    decode_s: float = 0.0  # from the first token read to the last

    @property
    def acceptance(self) -> float:
        """Accepted over drafted tokens, 0 to 1."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a round emitted; the first token comes from the prefill, not a round."""
        return (self.completion_tokens - 1) / self.rounds if self.rounds else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def prompt_tps(self) -> float:
        fresh = self.prompt_tokens - self.cached_tokens
        return fresh / self.first_token_s if self.first_token_s > 0 else 0.0

    def count_round(self, drafted: int, accepted: int, copied: bool) -> None:
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.copied += accepted * copied
        for i in range(drafted):
            self.drafted_by_position[i] += 1
            self.accepted_by_position[i] += i < accepted


@dataclass(frozen=True)
class TokenLogprob:
    """Of an emitted token, and of the likeliest tokens there, best first, as (id, logprob)."""

    logprob: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Request:
    """A prompt as token ids, and how to go on from it.

    `draft_len` is how many tokens a round drafts for it, 0 for plain decoding, or None for as
    many as the engine's controller chooses. `logprobs` asks for the logprob of every token beside
    those of so many of the likeliest. `stop` is called once for every emitted token, in order, and
    says whether the text stops behind it. `grammar` narrows every choice. `snapshots`: lengths of
    the prompt from which others may go on. `session`: whose KV it may take over. The engine fills
    the last seven fields; `tokens` never holds the EOS token, and `error` says why a request ended
    with the finish reason "error". `outgrown`: that was because of what was asked for, for the
    grammar, or what is suppressed, left nothing to say.
    Raises UsageError for a value out of range.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    processing: Processing = field(default_factory=Processing)
    eos: frozenset[int] = frozenset()
    draft_len: int | None = None
    logprobs: int | None = None
    stop: Callable[[int], bool] | None = None
    grammar: Grammar | None = None
    snapshots: tuple[int, ...] = ()
    session: str | None = None
    tokens: list[int] = field(default_factory=list)
    token_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    ended_by_eos: bool = False
    error: str = ""
    outgrown: bool = False
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        if self.draft_len is not None:
            check_draft_len(self.draft_len)
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise UsageError(f"logprobs is {self.logprobs}; it must be 0 to {MAX_LOGPROBS} tokens")
        if not self.prompt:
            raise UsageError("the prompt is empty; it must hold at least one token")
        if self.max_tokens < 0:
            raise UsageError(f"max-tokens is {self.max_tokens}; it must be 0 or more")

    @property
    def budget(self) -> int:
        """The most drafts that a round may accept."""
        return MAX_DRAFT if self.draft_len is None else self.draft_len

    def take(self, token: int) -> bool:
        """Emit one token unless it is an EOS; returns whether it was emitted. Afterwards
        `finish_reason` says whether the request ended with it."""
        if token in self.eos:
            self.finish_reason, self.ended_by_eos = "stop", True
            return False
        self.tokens.append(token)
        self.stats.completion_tokens = len(self.tokens)
        if self.stop is not None and self.stop(token):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"
        elif self.grammar is not None:
            try:
                self.grammar.accept(token)
            except MtpError as error:
                self.fail(str(error), outgrown=True)
        return True

    def fail(self, error: str, *, outgrown: bool = False) -> None:
        self.finish_reason, self.error, self.outgrown = "error", error, outgrown


@dataclass(frozen=True)
class Event:
    """What one step brought for one request.

    tokens: newly emitted ids. drafted: for each of them, whether the drafter had proposed it.
    prefilled: how many tokens of the prompt are in KV by now.
    """

    request: Request
    tokens: list[int]
    drafted: list[bool]
    prefilled: int

    @property
    def finish_reason(self) -> str | None:
        return self.request.finish_reason
