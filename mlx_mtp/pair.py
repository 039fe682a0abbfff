"""What loading gives: a target, its drafter, and what the checkpoint says about using them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_mtp.config import TargetConfig, token_ids
from mlx_mtp.engine.draft_length import AutoLength
from mlx_mtp.errors import LoadError

if TYPE_CHECKING:
    from mlx_mtp.engine.calibrate import Calibration
    from mlx_mtp.engine.lockstep import Journal
    from mlx_mtp.engine.session import Engine
    from mlx_mtp.models.drafter import Drafter
    from mlx_mtp.models.target import Target
    from mlx_mtp.text.chat import ChatTemplate
    from mlx_mtp.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GenerationDefaults:
    """How a checkpoint wants to be sampled from, where its user says nothing.

    eos_token_ids is the union of config.json and generation_config.json: Gemma 4 ends a turn by
    106 or, after a tool call, by 50, and either file alone lists too few.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    eos_token_ids: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    repetition_penalty: float = 1.0

    @classmethod
    def from_files(
        cls,
        config: TargetConfig,
        generation: Mapping[str, Any],
        where: str = "generation_config.json",
    ) -> GenerationDefaults:
        """`generation` is generation_config.json, {} where there is none. Raises LoadError."""
        eos = dict.fromkeys((*config.eos_token_ids, *token_ids(generation, where)))
        suppress = token_ids(generation, where, "suppress_tokens")
        # transformers samples at temperature 1 where do_sample is true and no temperature given.
        warm = 1.0 if generation.get("do_sample") else 0.0
        temperature = _number(generation, "temperature", where, warm, 0.0, 100.0)
        return cls(
            temperature=0.0 if generation.get("do_sample") is False else temperature,
            top_k=int(_number(generation, "top_k", where, 0, 0, 2**31 - 1)),
            top_p=_number(generation, "top_p", where, 1.0, 1e-9, 1.0),
            min_p=_number(generation, "min_p", where, 0.0, 0.0, 1.0),
            eos_token_ids=tuple(eos),
            # An id outside the vocabulary cannot be sampled, so it needs no suppressing.
            suppress_tokens=tuple(i for i in suppress if i < config.text.vocab_size),
            repetition_penalty=_number(generation, "repetition_penalty", where, 1.0, 0.01, 100.0),
        )


@dataclass
class Pair:
    """A loaded target with its drafter (None: plain decoding), ready to generate.

    notices: lines for the user, one each. weights_bytes: both models as they lie in memory.
    load_s: seconds that loading took. A revision is a commit of the hub, None for a plain folder.
    drafter_bits: bits of the drafter's matrices in memory, 0 for floats. drafter_device: "cpu" or
    "gpu", which it is laid out for. Both are None without a drafter.
    memory_limit: bytes that weights and KV may take, None for no limit. restore_limits: puts MLX's
    limits, which loading set on Metal, back to what they were. draft_length: chooses the draft
    length where it is left open, and learns as long as the pair lives. compiled: whether rounds are
    faster compiled, pipelined: pipelined, once that was measured.
    calibration: which kernels are used here, None off Metal. exact: draft only as far as a verify
    pass is bit for bit what plain decoding is on this machine (`engine.exact`). journal: where
    several ranks run the target, that of rank 0's engines.
    """

    target: Target
    drafter: Drafter | None
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults
    name: str
    revision: str | None = None
    drafter_name: str | None = None
    drafter_revision: str | None = None
    drafter_bits: int | None = None
    drafter_device: str | None = None
    notices: list[str] = field(default_factory=list)
    weights_bytes: int = 0
    load_s: float = 0.0
    memory_limit: int | None = None
    restore_limits: Callable[[], None] = lambda: None
    draft_length: AutoLength = field(default_factory=AutoLength)
    compiled: bool | None = None
    pipelined: bool | None = None
    calibration: Calibration | None = None
    exact: bool = False
    journal: Journal | None = None

    def cache_bytes(self, share: float = 0.25) -> int:
        """What the KV of conversations that may go on can take: a share of what is left of the
        memory limit beside the weights, 0 where there is no limit."""
        return int(share * max((self.memory_limit or 0) - self.weights_bytes, 0))

    def engine(self, **how: Any) -> Engine:
        """An engine of this pair; `how` as `Engine` takes it. All of them learn from each other
        which draft length pays. On a GPU the first one races compiled rounds against eager ones,
        a few rounds each, where `compile` leaves it open. WAITS for the device there, and where
        `exact`: then UsageError is raised where no draft can be verified exactly, or for several
        rows, which are not probed."""
        import mlx.core as mx

        from mlx_mtp.engine import lockstep
        from mlx_mtp.engine.session import Engine

        here, device = mx.default_device().type.name, self.drafter_device
        beside = None if device in (None, here) else getattr(mx, device)
        for name, measured in (("compile", self.compiled), ("pipeline", self.pipelined)):
            if beside is None and how.get(name) is None:
                how[name] = measured
        settings: dict[str, Any] = {
            "draft_length": self.draft_length,
            "memory_limit": self.memory_limit,
            "drafter_device": beside,
        }
        if self.calibration is not None and self.journal is None:
            text, bits = self.target.config.text, how.get("kv_bits")
            settings["full_ways"] = self.calibration.attention(text, self.target.dtype, bits)
        if self.journal is None:
            engine = Engine(self.target, self.drafter, **(settings | how))
        else:
            settings = settings | how | {"journal": self.journal}
            engine = lockstep.Leader(self.target, self.drafter, **settings)
        racing = self.calibration is None or self.calibration.racing
        if racing and beside is None and how["compile"] is None and here == "gpu":
            engine.calibrate()
            self.compiled = engine.policy.compile
        if self.exact:
            from mlx_mtp.engine import exact

            exact.limit(engine)
        return engine


def _number(
    raw: Mapping[str, Any], key: str, where: str, default: float, low: float, high: float
) -> float:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise LoadError(f"{where}: {key} is {value!r}; it must be a number in {low:g}..{high:g}")
    return float(value)
