"""Our models against tensors that transformers made (see make_golden.py); no torch needed."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mtp.config import SLIDING, DrafterConfig, TargetConfig, check_pair
from mlx_mtp.engine import round
from mlx_mtp.models.drafter import Drafter
from mlx_mtp.models.target import Target
from mlx_mtp.weights.load import load_drafter, load_target
from tests.oracle.models import TOLERANCE, Row, difference, draft
from tests.oracle.shapes import DRAFTERS, TARGETS, VOCAB, WINDOW, flat

FOLDER = Path(__file__).parents[1] / "golden"
SHAPES = list(TARGETS)
LENGTH = 5 * WINDOW + 5


def to_list(ids: mx.array) -> list[int]:
    values: Any = ids.tolist()
    return list(values)


@dataclass
class Golden:
    """One file of tests/golden, and our models loaded from the checkpoints in it."""

    tensors: dict[str, mx.array]
    configs: dict[str, Any]
    target: Target
    drafter: Drafter

    @property
    def ids(self) -> list[int]:
        return to_list(self.tensors["ids"])

    def rounds(self) -> list[tuple[int, int, mx.array, list[int], mx.array, mx.array]]:
        """Each drafted round: committed slots, bonus token, the hidden state that it came from,
        and transformers' tokens, logits and states."""
        t = self.tensors
        return [
            (
                n,
                int(t["draft.bonus"][i]),
                t["hidden"][n - 1],
                to_list(t["draft.tokens"][i]),
                t["draft.logits"][i],
                t["draft.hidden"][i],
            )
            for i, n in enumerate(to_list(t["draft.committed"]))
        ]


@functools.cache
def golden(name: str) -> Golden:
    loaded: Any = mx.load(str(FOLDER / f"{name}.safetensors"), return_metadata=True)
    tensors, metadata = loaded
    configs = json.loads(metadata["golden"])
    with tempfile.TemporaryDirectory() as temporary:
        for role in ("target", "drafter"):
            folder = Path(temporary) / role
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(configs[role]))
            weights = {
                # float32 on every device: some load bfloat16 as it is.
                key.removeprefix(f"{role}."): v.astype(mx.float32) if v.dtype == mx.bfloat16 else v
                for key, v in tensors.items()
                if key.startswith(f"{role}.")
            }
            mx.save_safetensors(str(folder / "model.safetensors"), weights)
        target = load_target(Path(temporary) / "target")
        drafter = load_drafter(Path(temporary) / "drafter")
    return Golden(tensors, configs, target, drafter)


@pytest.mark.parametrize("name", SHAPES)
def test_configs_read_the_same_in_both_spellings(name: str) -> None:
    """Published configs have `global_head_dim`; transformers 5.24 writes `per_layer_config`."""
    written = golden(name).configs
    target = TargetConfig.from_dict(TARGETS[name])
    drafter = DrafterConfig.from_dict(DRAFTERS[name])
    assert TargetConfig.from_dict(written["target"]).text == target.text
    assert DrafterConfig.from_dict(written["drafter"]).text == drafter.text
    assert TargetConfig.from_dict(flat(TARGETS[name])).text == target.text
    check_pair(target, drafter)


@pytest.mark.parametrize("chunk", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, LENGTH])
@pytest.mark.parametrize("name", SHAPES)
def test_prefill_in_chunks(name: str, chunk: int) -> None:
    """Up to all of it at once, which is more than the ring of a sliding layer holds, and enough
    for the experts to sort their rows."""
    g = golden(name)
    row = Row(g.target)
    hidden = row.feed_in_chunks(g.ids, chunk)
    assert difference(hidden, g.tensors["hidden"]) < TOLERANCE
    assert difference(row.logits(hidden), g.tensors["logits"]) < TOLERANCE


@pytest.mark.parametrize("name", SHAPES)
def test_decoding_past_three_windows(name: str) -> None:
    """A prompt longer than the window, then token by token until the ring has wrapped."""
    g = golden(name)
    row = Row(g.target)
    prompt = WINDOW + 3
    row.feed(g.ids[:prompt], keep=1)
    for position in range(prompt, len(g.ids)):
        logits = row.logits(row.feed([g.ids[position]]))
        assert difference(logits[0], g.tensors["logits"][position]) < TOLERANCE, position
    assert row.length > 3 * WINDOW
    assert row.length > row.layout.ring


@pytest.mark.parametrize("name", SHAPES)
def test_prefill_that_keeps_only_the_last_position(name: str) -> None:
    """Layers without KV of their own skip the rest of the prompt."""
    g = golden(name)
    row = Row(g.target)
    middle = 2 * WINDOW + 1
    assert row.feed(g.ids[:middle], keep=0).shape[0] == 0
    hidden = row.feed(g.ids[middle:], keep=1)
    assert difference(row.logits(hidden)[0], g.tensors["logits"][-1]) < TOLERANCE


@pytest.mark.parametrize("name", SHAPES)
def test_a_rejected_block_leaves_no_trace(name: str) -> None:
    """The text in blocks of three, each after five wrong tokens that are rolled back."""
    g = golden(name)
    row = Row(g.target)
    for start in range(0, len(g.ids), 3):
        block = g.ids[start : start + 3]
        row.feed([(token + 1) % VOCAB for token in (*block, 5, 6)])
        row.length = start
        logits = row.logits(row.feed(block))
        wanted = g.tensors["logits"][start : start + 3]
        assert difference(logits, wanted) < TOLERANCE, start


@pytest.mark.parametrize("name", SHAPES)
def test_drafts_from_the_same_kv(name: str) -> None:
    """Given transformers' KV, hidden state and position: the same tokens, logits and states."""
    g = golden(name)
    for committed, bonus, hidden, tokens, logits, states in g.rounds():
        row = Row(g.target)
        view = row.layout.view(row.kv, mx.array([0]), committed, 0)
        for kind, layer in g.target.config.text.donors.items():
            k, v = (g.tensors[f"kv.{kind}.{x}"][None, :, :committed] for x in "kv")
            view.write(layer, k, v)
        row.kv, row.length = view.buffers, committed
        check_drafts(g, draft(g.drafter, row, hidden, bonus, len(tokens)), tokens, logits, states)


@pytest.mark.parametrize("name", SHAPES)
def test_drafts_after_our_own_prefill(name: str) -> None:
    g = golden(name)
    for committed, bonus, _, tokens, logits, states in g.rounds():
        row = Row(g.target)
        hidden = row.feed_in_chunks(g.ids[:committed], WINDOW + 1)[-1]
        assert int(row.logits(hidden[None]).argmax()) == bonus
        check_drafts(g, draft(g.drafter, row, hidden, bonus, len(tokens)), tokens, logits, states)
        state, shape = row.round(hidden, bonus, len(tokens))
        assert round.draft(g.target, g.drafter, row.layout, state, shape).tolist() == [tokens]


def check_drafts(
    g: Golden,
    ours: tuple[list[int], mx.array, mx.array],
    tokens: list[int],
    logits: mx.array,
    states: mx.array,
) -> None:
    our_tokens, our_logits, our_states = ours
    assert our_tokens == tokens
    assert difference(our_states, states) < TOLERANCE
    scored = mx.isfinite(our_logits)
    if g.configs["drafter"]["use_ordered_embeddings"]:
        # transformers gives what is outside the chosen centroids one value below all others.
        assert mx.array_equal(scored, logits > logits.min(axis=-1, keepdims=True))
    else:
        assert scored.all()
    assert difference(mx.where(scored, our_logits, logits), logits) < TOLERANCE


def test_every_shape_differs_where_the_real_ones_do() -> None:
    """The miniatures cover what can go wrong; a shape edited into another's likeness would not."""
    configs = {name: TargetConfig.from_dict(c).text for name, c in TARGETS.items()}
    assert [n for n, c in configs.items() if c.num_kv_shared_layers] == ["e2b", "e4b"]
    assert [n for n, c in configs.items() if c.hidden_size_per_layer_input] == ["e2b", "e4b"]
    assert [n for n, c in configs.items() if c.use_double_wide_mlp] == ["e2b"]
    assert [n for n, c in configs.items() if c.attention_k_eq_v] == ["12b", "26b", "31b"]
    assert [n for n, c in configs.items() if c.enable_moe_block] == ["26b"]
    assert [n for n, c in TARGETS.items() if c["model_type"] == "gemma4_unified"] == ["12b"]
    assert [n for n, c in DRAFTERS.items() if c["use_ordered_embeddings"]] == ["e2b", "e4b"]
    assert all(c.head_dim_of(SLIDING) * 2 == c.global_head_dim for c in configs.values())
