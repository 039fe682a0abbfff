"""The embedded pair: what its card says, measured again; and the main job on it."""

from __future__ import annotations

import ast
import json
import threading

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import mlx_mtp
from benchmarks.embedded import decode, loops
from mlx_mtp.engine.session import Engine, Request
from mlx_mtp.generation import Options, generate
from mlx_mtp.weights.find import TINY


@pytest.fixture(scope="module")
def pair():
    return mlx_mtp.load()


PROMPTS = 24  # of each kind; about half of the real functions end in loops, and the card says so


@pytest.mark.parametrize(
    ("kind", "acceptance", "tokens_per_round"), [("real", 0.50, 2.7), ("template", 0.80, 3.5)]
)
def test_acceptance_on_prompts_it_never_saw(pair, kind, acceptance, tokens_per_round):
    """Greedy, 4 drafts, stopping at EOS, loops left out; and the text is plain decoding's."""
    prompts = json.loads((TINY / "prompts.json").read_text())
    assert len(prompts["real"]) + len(prompts["template"]) >= 40
    accepted = drafted = emitted = rounds = counted = 0
    asked = [entry["prompt"] for entry in prompts[kind][:PROMPTS]]
    requests = [
        Request(
            pair.tokenizer.encode(prompt, bos=True),
            160,
            eos=frozenset(pair.defaults.eos_token_ids),
            draft_len=4,
        )
        for prompt in asked
    ]
    engine = pair.engine(rows=8)
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    for prompt, request in zip(asked[:6], requests, strict=False):
        assert decode(pair, prompt, 0, 160).tokens == request.tokens
    for request in requests:
        if loops(pair.tokenizer.decode(request.tokens), request):
            continue
        stats = request.stats
        accepted, drafted = accepted + stats.accepted, drafted + stats.drafted
        emitted, rounds = emitted + stats.completion_tokens - 1, rounds + stats.rounds
        counted += 1
    assert counted >= 10
    assert accepted / drafted >= acceptance
    assert emitted / rounds >= tokens_per_round


def test_fibonacci_is_right_as_a_user_turn_and_raw(pair):
    """The main command's prompt: text that a reader recognises as Python, and that runs."""
    for raw in (False, True):
        prompt = "def fibonacci(n):"
        result = generate(pair, prompt, Options(max_tokens=80, raw=raw))
        scope: dict[str, object] = {}
        exec(compile(ast.parse(prompt + result.text), "answer", "exec"), scope)
        assert callable(scope["fibonacci"])
        assert result.finish_reason == "stop"
        assert result.stats.accepted > 0


@pytest.mark.parametrize("draft_len", range(1, 9))
def test_greedy_text_past_the_window_at_every_draft_length(pair, draft_len):
    """A pair that accepts most of what it drafts, 150 tokens past its window of 128."""
    prompt = pair.tokenizer.encode("class Stack:\n", bos=True)
    tokens = 128 + 150
    if not hasattr(pair, "plain"):
        pair.plain = run_on(pair, prompt, tokens, 0)
    assert run_on(pair, prompt, tokens, draft_len) == pair.plain


def run_on(pair, prompt, tokens, draft_len):
    """Without stopping at EOS."""
    request = Request(prompt, tokens, draft_len=draft_len)
    engine = Engine(pair.target, pair.drafter)
    engine.add(request)
    while engine.busy:
        engine.step()
    return request.tokens


def test_loads_and_generates_in_a_worker_thread(pair):
    """MLX's arrays belong to the thread that made them: a pair loaded in a thread works there."""
    wanted = generate(pair, "def gcd(a, b):", Options(max_tokens=40)).text
    texts = []

    def work():
        own = mlx_mtp.load()
        texts.append(generate(own, "def gcd(a, b):", Options(max_tokens=40)).text)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert texts == [wanted]


def test_the_pair_is_small_and_whole(pair):
    """At most 8 MB with its tokenizer; every feature of the architecture is on."""
    files = [p for part in ("target", "drafter") for p in (TINY / part).iterdir()]
    assert sum(p.stat().st_size for p in files) <= 8e6
    text = pair.target.config.text
    assert set(text.layer_types) == {"sliding_attention", "full_attention"}
    assert text.num_kv_shared_layers > 0
    assert text.use_double_wide_mlp
    assert text.hidden_size_per_layer_input > 0
    assert text.rope["full_attention"].fraction == 0.25
    assert text.final_logit_softcapping == 30.0
    assert text.max_position_embeddings == 32768
    assert pair.drafter.config.use_ordered_embeddings
    scalars = [layer.layer_scalar.item() for layer in pair.target.layers]
    assert any(abs(s - 1) > 0.05 for s in scalars)
    for name in ("README.md", "LICENSE-NOTICE.md"):
        assert (TINY / name).read_text().strip()


def test_weights_are_held_once(pair):
    """The drafter has no table for its input: it shares the target's. Loading a pair takes the
    bytes of its arrays and nothing beside."""
    mx.clear_cache()
    before = mx.get_active_memory()
    second = mlx_mtp.load()
    held = mx.get_active_memory() - before
    arrays = [a for m in (second.target, second.drafter) for _, a in tree_flatten(m.parameters())]
    assert second.weights_bytes == sum(a.nbytes for a in arrays)
    assert held <= 1.02 * second.weights_bytes + 100_000


@pytest.mark.long
def test_a_prompt_of_20000_tokens(pair):
    """Minutes on 2 cores, so in .ci/long. Ten times what it was trained on: what it says there is
    not worth much, but it is the same with and without drafts."""
    filler = pair.tokenizer.encode("def add(a, b):\n    return a + b\n\n\n", bos=False)
    prompt = [2, *(filler * (20_000 // len(filler) + 1))[:19_999]]
    engine = Engine(pair.target, pair.drafter)
    texts = []
    for draft_len in (4, 0):
        request = Request(prompt, 24, draft_len=draft_len)
        engine.add(request)
        while engine.busy:
            engine.step()
        texts.append(request.tokens)
        assert request.stats.prompt_tokens == 20_000
    assert texts[0] == texts[1]
    assert len(texts[0]) == 24
