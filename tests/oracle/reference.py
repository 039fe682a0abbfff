"""Seeded random Gemma 4 models in transformers, and what they compute. Needs torch."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    GenerationConfig,
)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from tests.oracle.shapes import WINDOW, Config

KV = dict[str, tuple[torch.Tensor, torch.Tensor]]

_CLASSES: dict[str, tuple[Any, Any]] = {
    "gemma4": (Gemma4Config, Gemma4ForConditionalGeneration),
    "gemma4_text": (Gemma4TextConfig, Gemma4ForCausalLM),
    "gemma4_unified": (Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration),
    "gemma4_unified_text": (Gemma4UnifiedTextConfig, Gemma4UnifiedForCausalLM),
    "gemma4_assistant": (Gemma4AssistantConfig, Gemma4AssistantForCausalLM),
    "gemma4_unified_assistant": (Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM),
}


def build(config: Config, seed: int) -> Any:
    """The model of `config` in float32, eager attention, with every weight random.

    Each value is one that bfloat16 can hold, so a checkpoint may store either type.
    """
    config_class, model_class = _CLASSES[config["model_type"]]
    parsed = config_class.from_dict(copy.deepcopy(config))
    parsed._attn_implementation = "eager"
    model = model_class(parsed).float().eval()
    _fill(model, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def _fill(model: Any, rng: torch.Generator) -> None:
    """Random weights at scales where every part of the model moves the logits.

    Norms and scales stay away from 1; attention is neither flat nor one-hot; logits spread over
    several units, so that the softcap bends them and the best token is clear of the second. Sharper
    attention or louder branches would make the model chaotic: the last bits of a float32 would then
    move the logits by more than the tests allow.
    """

    def uniform(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(like.shape, generator=rng)

    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    saved = model.state_dict()
    for name in sorted(tensors):
        tensor = tensors[name]
        if name not in saved:
            continue  # what a checkpoint does not hold: RoPE tables, embedding scales
        if name.endswith("token_ordering"):
            tensor.copy_(torch.randperm(len(tensor), generator=rng))
            continue
        if name.endswith("layer_scalar"):
            value = uniform(tensor, 0.5, 0.9)
        elif "q_norm" in name or "k_norm" in name:
            value = uniform(tensor, 0.4, 0.9)
        elif ".post_" in name and tensor.ndim == 1:
            value = uniform(tensor, 0.2, 0.8)
        elif tensor.ndim == 1:
            value = uniform(tensor, 0.5, 1.5)
        else:
            gain = 1.0 if "embed_tokens" in name or "router" in name else tensor.shape[-1] ** -0.5
            if "per_layer_model_projection" in name or "per_layer_projection" in name:
                # A norm follows: only beside its epsilon does the scale before it show.
                gain *= 1e-3
            value = gain * torch.randn(tensor.shape, generator=rng)
        tensor.copy_(value.bfloat16().float())


def save(model: Any, folder: Path) -> Path:
    """A checkpoint folder as transformers writes it."""
    model.save_pretrained(folder)
    return folder


def random_ids(length: int, vocab: int, seed: int) -> list[int]:
    """Token ids above the special ones (pad, eos, bos)."""
    rng = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, vocab, (length,), generator=rng).tolist()
    return ids


@dataclass
class Run:
    """One causal pass over T tokens."""

    logits: torch.Tensor  # [T, V]
    hidden: torch.Tensor  # [T, H], after the final norm
    kv: KV  # layer type -> the donor's (K, V), each [1, kv heads, T, head dim]


@torch.no_grad()
def run(target: Any, ids: list[int]) -> Run:
    """Every position at once, without a cache, so that nothing depends on chunks or rings."""
    out = target(
        torch.tensor([ids]),
        use_cache=False,
        output_hidden_states=True,
        return_shared_kv_states=True,
    )
    return Run(out.logits[0], out.hidden_states[-1][0], dict(out.shared_kv_states))


@dataclass
class Draft:
    """Greedy drafts of one round."""

    tokens: list[int]
    logits: torch.Tensor  # [steps, V]; outside the chosen centroids one value below all others
    hidden: torch.Tensor  # [steps, H of the target], what each step hands to the next


@torch.no_grad()
def draft(
    drafter: Any,
    target: Any,
    kv: KV,
    hidden: torch.Tensor,
    bonus: int,
    committed: int,
    steps: int,
    position: int | None = None,
) -> Draft:
    """`steps` drafts after `bonus`, with `committed` (N) slots in the target's KV.

    As transformers' SinglePositionMultiTokenCandidateGenerator feeds its assistant, but for what
    Gemma 4's other implementations agree on: the queries stand at `position` N-1 (transformers: N),
    and the sliding layers see the last `WINDOW` committed slots (transformers: one more after a
    long prefill, and rejected ones after a rejection), so the KV is cut here.
    """
    position = committed - 1 if position is None else position
    first = max(0, committed - WINDOW)
    cut = {
        kind: tuple(
            x[:, :, (first if kind == "sliding_attention" else 0) : committed] for x in pair
        )
        for kind, pair in kv.items()
    }
    embed = target.get_input_embeddings()
    token, state = torch.tensor([[bonus]]), hidden.view(1, 1, -1)
    tokens, logits, states = [], [], []
    for _ in range(steps):
        out = drafter(
            inputs_embeds=torch.cat([embed(token), state], dim=-1),
            position_ids=torch.tensor([[position]]),
            shared_kv_states=cut,
        )
        token, state = out.logits.argmax(dim=-1), out.last_hidden_state
        tokens.append(int(token))
        logits.append(out.logits[0, 0])
        states.append(state[0, 0])
    return Draft(tokens, torch.stack(logits), torch.stack(states))


@torch.no_grad()
def candidates(drafter: Any, target: Any, prompt: list[int], bonus: int, steps: int) -> list[int]:
    """What transformers' own assisted generation drafts in its first round after `prompt`."""
    settings = _settings(max_length=len(prompt) + steps + 2)
    drafter.generation_config.num_assistant_tokens = steps
    generator = SinglePositionMultiTokenCandidateGenerator(
        assistant_model=drafter,
        target_model_input_embeddings=target.get_input_embeddings(),
        generation_config=settings,
    )
    outputs = target(torch.tensor([prompt]), use_cache=True, **generator.model_kwargs_overrides)
    ids, _ = generator.get_candidates(
        torch.LongTensor([[*prompt, bonus]]),
        model_kwargs={},
        model_outputs=outputs,
        is_first_iteration=False,
        n_last_matches=0,
    )
    drafted: list[int] = ids[0, len(prompt) + 1 :].tolist()
    return drafted


@torch.no_grad()
def greedy(target: Any, prompt: list[int], tokens: int, **options: Any) -> list[int]:
    """transformers' `generate` with its cache; nothing ends it early. options: of `generate`."""
    settings = _settings(max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    # An assigned config keeps `generate` from falling back to the model's own EOS.
    target.generation_config = settings
    out = target.generate(torch.tensor([prompt]), generation_config=settings, **options)
    text: list[int] = out[0, len(prompt) :].tolist()
    return text


def _settings(**values: Any) -> GenerationConfig:
    made: GenerationConfig = GenerationConfig(**values)  # type: ignore[no-untyped-call]
    return made
