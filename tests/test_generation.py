"""Text in, text out: on a scripted engine, where the test decides every block, and on a small
random pair."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace

import pytest

from mlx_mtp.engine.requests import Event, Stats
from mlx_mtp.engine.session import Engine
from mlx_mtp.errors import MtpError, UsageError
from mlx_mtp.generation import (
    Options,
    generate,
    generate_batch,
    low_acceptance,
    prompt_ids,
    stream,
)
from mlx_mtp.pair import GenerationDefaults, Pair
from mlx_mtp.text.chat import ChatTemplate
from mlx_mtp.text.tokenizer import Tokenizer
from mlx_mtp.weights.load import load_pair
from tests.cli.pairs import write_pair
from tests.text import folders

EOS = 1


class ScriptedEngine:
    """Answers with given blocks; in each, all tokens but the last were drafted."""

    busy = False

    kv_bytes = 7

    def __init__(self, blocks):
        self.blocks = deque(blocks)

    def describe(self):
        return {"waits": 0}

    def add(self, request):
        self.request = request
        request.stats.prompt_tokens = len(request.prompt)

    def step(self):
        block, before = self.blocks.popleft(), len(self.request.tokens)
        for token in block:
            if not self.request.take(token) or self.request.finish_reason:
                break
        new = self.request.tokens[before:]
        flags = [i < len(block) - 1 for i in range(len(new))]
        return [Event(self.request, new, flags, len(self.request.prompt))]

    def cancel(self, request):
        request.finish_reason = request.finish_reason or "cancelled"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A pair without models."""
    folder = folders.gemma_like(tmp_path_factory.mktemp("words"), chat_template=folders.TEMPLATE)
    return Pair(
        target=None,
        drafter="scripted",
        tokenizer=Tokenizer.from_folder(folder),
        template=ChatTemplate.from_folder(folder),
        defaults=GenerationDefaults(eos_token_ids=(EOS,)),
        name="scripted",
    )


def chars(pair, *blocks):
    """Blocks of text as blocks of tokens, one a byte or a character."""
    encode = pair.tokenizer.encode
    return [[t for char in block for t in encode(char, bos=False)] for block in blocks]


def answer(pair, blocks, **options):
    generation = stream(pair, "hi", Options(**options), engine=ScriptedEngine(blocks))
    pieces = list(generation)
    assert "".join(piece.text for piece in pieces) == generation.result.text
    return generation.result, pieces


def test_text_comes_block_by_block_with_a_flag_a_token(words):
    result, pieces = answer(words, chars(words, "a", "bcd", "ef"), max_tokens=6)
    assert [piece.text for piece in pieces] == ["a", "bcd", "ef"]
    assert pieces[1].spans == [("b", True), ("c", True), ("d", False)]
    assert (result.finish_reason, len(result.token_ids)) == ("length", 6)


def test_a09_a_stop_string_early_in_a_long_block(words):
    result, _ = answer(words, chars(words, "x", "ab1234567"), stop=("ab",))
    assert (result.text, result.finish_reason) == ("x", "stop")
    assert result.token_ids == chars(words, "xab")[0]


def test_a11_a_stop_string_over_two_blocks_and_over_three_tokens(words):
    for blocks in (("one EN", "D two"), ("one END two",), ("o", "n", "e ", "E", "N", "D")):
        result, pieces = answer(words, chars(words, *blocks), stop=(" END",))
        assert (result.text, result.finish_reason) == ("one", "stop")
        assert not any("E" in piece.text for piece in pieces)


def test_a12_a_stop_string_that_does_not_complete_is_flushed(words):
    result, pieces = answer(words, chars(words, "1a", "bc"), stop=("abcX",), max_tokens=4)
    assert (result.text, result.finish_reason) == ("1abc", "length")
    assert [piece.text for piece in pieces] == ["1", "abc"]
    result, _ = answer(words, [*chars(words, "1a", "bc"), [EOS]], stop=("abcX",))
    assert (result.text, result.finish_reason) == ("1abc", "stop")


def test_a15_the_eos_is_neither_in_the_text_nor_counted(words):
    block = chars(words, "ok")[0] + [EOS] + chars(words, "no")[0]
    result, _ = answer(words, [block])
    assert (result.text, result.finish_reason) == ("ok", "stop")
    assert len(result.token_ids) == result.stats.completion_tokens == 2


def test_f01_an_emoji_over_two_blocks(words):
    (emoji,) = chars(words, "🦙")
    assert len(emoji) == 4
    result, pieces = answer(words, [emoji[:2], emoji[2:]], max_tokens=4)
    assert [piece.text for piece in pieces] == ["", "🦙"]
    assert result.text == "🦙"


def test_closing_early_keeps_the_text_and_gives_what_was_held_back(words):
    generation = stream(
        words, "hi", Options(stop=("bX",)), engine=ScriptedEngine(chars(words, "ab"))
    )
    with pytest.raises(RuntimeError, match="not over"):
        generation.result  # noqa: B018
    with generation:
        assert next(iter(generation)).text == "a"
        assert generation.close().text == "b"
        assert generation.close().text == ""
    assert (generation.result.text, generation.result.finish_reason) == ("ab", "cancelled")


def test_a_prompt_is_one_user_turn_and_raw_is_the_prompt_itself(words):
    def decode(prompt, **options):
        return words.tokenizer.decode(prompt_ids(words, prompt, Options(**options)))

    assert decode("hi") == "user\nhi\nmodel\n"
    assert decode("hi", system="be brief") == "system\nbe brief\nuser\nhi\nmodel\n"
    assert decode("hi", raw=True) == "hi"
    assert decode("h\\n", raw=True) == "h\\n"


def test_e14_e15_one_bos_in_both_forms(words):
    for options in (Options(), Options(raw=True)):
        assert prompt_ids(words, "hi", options).count(words.tokenizer.bos_id) == 1
    assert prompt_ids(words, "<bos><|turn>", Options(raw=True)) == [2, 4]


def test_e16_a_base_model_answers_only_raw(words):
    base = replace(words, template=None)
    with pytest.raises(UsageError, match="--raw"):
        stream(base, "hi")
    assert prompt_ids(base, "hi", Options(raw=True))


def test_h24_a_blank_prompt_is_refused_and_raw_is_the_bos_alone(words):
    for prompt in ("", " \n"):
        with pytest.raises(UsageError, match="empty"):
            stream(words, prompt)
    assert prompt_ids(words, "", Options(raw=True)) == [2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": -1},
        {"draft_len": 9},
        {"draft_len": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 1.1},
        {"seed": -1},
        {"stop": ("",)},
        {"raw": True, "system": "x"},
    ],
)
def test_a_value_out_of_range_is_refused_where_it_is_built(wrong):
    with pytest.raises(UsageError):
        Options(**wrong)


def test_d06_hardly_anything_accepted_over_many_rounds_is_said():
    assert low_acceptance(Stats(rounds=30, drafted=120, accepted=1)) is not None
    assert low_acceptance(Stats(rounds=30, drafted=120, accepted=60)) is None
    assert low_acceptance(Stats(rounds=3, drafted=12)) is None
    assert low_acceptance(Stats(rounds=30)) is None


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return load_pair(str(write_pair(tmp_path_factory.mktemp("pair"))))


def test_a08_no_tokens_asked_for(pair):
    result = generate(pair, "hi", Options(max_tokens=0))
    assert (result.text, result.token_ids, result.finish_reason) == ("", [], "length")
    json.dumps(result.to_dict(), allow_nan=False)


@pytest.mark.parametrize("drafts", [1, 2, 3, 5, 8])
def test_a16_d07_every_draft_length_is_honoured_and_changes_nothing(pair, drafts):
    plain = generate(pair, "hi", Options(max_tokens=24, draft_len=0))
    result = generate(pair, "hi", Options(max_tokens=24, draft_len=drafts))
    assert (result.text, result.token_ids) == (plain.text, plain.token_ids)
    assert plain.stats.drafted == 0
    assert result.stats.drafted == drafts * result.stats.rounds > 0
    assert result.settings["draft_len"] == drafts


def test_a14_accepted_and_own_tokens_are_what_was_emitted(pair):
    speculation = (result := generate(pair, "hi", Options(max_tokens=20))).to_dict()["speculation"]
    first, own = 1, speculation["rounds"]
    assert first + own + speculation["accepted"] == len(result.token_ids)
    assert sum(speculation["accepted_by_position"]) == speculation["accepted"]
    assert speculation["accepted"] <= speculation["drafted"]


def test_d15_draft_length_0_is_the_same_as_no_drafter(pair):
    with_drafter = generate(pair, "hi", Options(max_tokens=12, draft_len=0))
    without = generate(replace(pair, drafter=None), "hi", Options(max_tokens=12))
    assert without.token_ids == with_drafter.token_ids
    assert without.settings["draft_len"] == without.stats.drafted == 0


@pytest.mark.parametrize(
    ("generation", "config"),
    [
        (lambda eos: {"eos_token_id": [1, eos, 50]}, {}),
        (lambda eos: {"eos_token_id": eos}, {}),
        (lambda eos: None, {"config": True}),
        (lambda eos: {"eos_token_id": [50]}, {"config": True}),
    ],
    ids=["a list", "one id", "only in config.json", "in both, different"],
)
def test_e01_a01_every_listed_eos_stops(pair, generation, config, tmp_path):
    said = generate(pair, "hi", Options(max_tokens=16)).token_ids
    place = next(i for i in range(5, 16) if said[i] not in said[:i])
    eos = said[place]
    in_config = {"eos_token_id": [1, eos]} if config else {}
    model = write_pair(tmp_path, generation=generation(eos), **in_config)
    stopping = load_pair(str(model))
    for drafts in (0, 4):
        result = generate(stopping, "hi", Options(max_tokens=16, draft_len=drafts))
        assert (result.token_ids, result.finish_reason) == (said[:place], "stop")
        assert result.text == pair.tokenizer.decode(said[:place])


def test_a04_a05_an_eos_and_the_budget_in_one_block(pair):
    said = generate(pair, "hi", Options(max_tokens=16)).token_ids
    place = next(i for i in range(5, 16) if said[i] not in said[:i])
    stopping = replace(pair, defaults=replace(pair.defaults, eos_token_ids=(said[place],)))
    for budget, finish in ((place + 1, "stop"), (place - 1, "length")):
        result = generate(stopping, "hi", Options(max_tokens=budget, draft_len=8))
        assert (len(result.token_ids), result.finish_reason) == (min(place, budget), finish)


def test_e24_flag_over_generation_config_over_default(tmp_path):
    generation = {"do_sample": True, "temperature": 0.5, "top_k": 20}
    settings = stream(
        load_pair(str(write_pair(tmp_path, generation=generation))), "hi", Options(top_k=3)
    ).settings
    assert (settings["temperature"], settings["top_k"], settings["top_p"]) == (0.5, 3, 1.0)


def test_b04_a_seed_repeats_a_text_and_a_random_one_is_shown(pair):
    warm = Options(max_tokens=12, temperature=1.0)
    free = generate(pair, "hi", warm)
    again = generate(pair, "hi", replace(warm, seed=free.settings["seed"]))
    other = generate(pair, "hi", replace(warm, seed=free.settings["seed"] + 1))
    assert again.token_ids == free.token_ids != other.token_ids


def test_the_context_bounds_prompt_and_answer(tmp_path):
    small = load_pair(str(write_pair(tmp_path, positions=32)))
    room = 32 - len(prompt_ids(small, "hi", Options()))
    generation = stream(small, "hi", Options(max_tokens=100))
    assert generation.settings["max_tokens"] == room
    assert generation.notices == [
        f"there is room for {room} more tokens in the context and in memory, not for the 100 "
        "asked for"
    ]
    with pytest.raises(UsageError, match=r"\d+ tokens.*32"):
        stream(small, "hi " * 40)


def test_h22_a_refused_prompt_leaves_the_engine_as_it_was(pair):
    engine = Engine(pair.target, pair.drafter)
    first = generate(pair, "hello", Options(max_tokens=8), engine=engine)
    with pytest.raises(MtpError):
        generate(pair, "x" * 5000, engine=engine)
    third = generate(pair, "hello", Options(max_tokens=8), engine=engine)
    assert third.token_ids == first.token_ids


def test_h23_a_prompt_of_one_token(pair):
    for prompt in ("h", "hi"):
        assert generate(pair, prompt, Options(max_tokens=4, raw=True)).finish_reason == "length"


def test_the_json_object_has_what_the_readme_says(pair):
    found = generate(pair, "hi", Options(max_tokens=4)).to_dict()
    assert list(found) == [
        "text",
        "token_ids",
        "prompt_token_ids",
        "finish_reason",
        "usage",
        "speculation",
        "timing",
        "memory",
        "settings",
        "engine",
    ]
    engine = ["compile", "pipeline", "waits", "traces", "buffer_growths"]
    engine += ["grammar_rounds", "kv_bits", "attention"]
    assert list(found["engine"]) == [*engine, "context", "auto"]
    assert found["usage"] == {
        "prompt_tokens": len(found["prompt_token_ids"]),
        "completion_tokens": 4,
        "cached_tokens": 0,
    }
    assert list(found["timing"]) == ["load_s", "first_token_s", "prompt_tps", "decode_tps"]
    assert found["memory"]["weights_bytes"] == pair.weights_bytes > 0
    assert found["memory"]["kv_bytes"] > 0 < found["memory"]["peak_bytes"]


def test_a_busy_engine_is_refused(pair):
    """Two streams on one engine of one row would take each other's pieces."""
    engine = Engine(pair.target, pair.drafter)
    with stream(pair, "hello", Options(max_tokens=8), engine=engine) as first:
        next(iter(first))
        with pytest.raises(UsageError, match="engine is busy"):
            stream(pair, "hello", engine=engine)
    assert generate(pair, "hello", Options(max_tokens=4), engine=engine).token_ids


def test_many_prompts_at_once_are_answered_as_each_alone(pair):
    prompts = ["hi", "hello there", "x", "what is it", "go on"]
    options = [Options(max_tokens=n, seed=n, temperature=0.5 * (n % 2)) for n in (9, 3, 14, 0, 6)]
    alone = [generate(pair, p, o) for p, o in zip(prompts, options, strict=True)]
    together = generate_batch(pair, prompts, options)
    assert [r.text for r in together] == [r.text for r in alone]
    assert [r.finish_reason for r in together] == [r.finish_reason for r in alone]
    assert generate_batch(pair, []) == []
    one = generate_batch(pair, prompts[:2], Options(max_tokens=4))
    assert [len(r.token_ids) for r in one] == [4, 4]


def test_a_batch_with_a_bad_prompt_runs_nothing(pair):
    engine = pair.engine(rows=2)
    with pytest.raises(UsageError, match="empty"):
        generate_batch(pair, ["hi", " "], engine=engine)
    with pytest.raises(UsageError, match="2 prompts, but 1 options"):
        generate_batch(pair, ["a", "b"], [Options()])
    with pytest.raises(UsageError, match="tokens"):
        generate_batch(pair, ["hi", "x" * 200_000], engine=engine)
    assert not engine.busy


def test_what_the_checkpoint_says_about_penalties_is_applied(tmp_path):
    generation = {"repetition_penalty": 1.7}
    asked = load_pair(str(write_pair(tmp_path, generation=generation)))
    result = generate(asked, "hi", Options(max_tokens=12))
    assert result.settings["repetition_penalty"] == 1.7
    off = generate(asked, "hi", Options(max_tokens=12, repetition_penalty=1.0))
    assert off.token_ids != result.token_ids


def test_the_length_that_pays_is_learnt_across_requests(pair):
    """One controller chooses for all requests of a pair, whatever engine they run on."""
    before = sum(pair.draft_length.describe()["chosen"].values())
    results = [generate(pair, prompt, Options(max_tokens=20)) for prompt in ("hi", "hello")]
    assert [result.settings["draft_len"] for result in results] == ["auto", "auto"]
    chosen = sum(results[1].engine["auto"]["chosen"].values()) - before
    assert chosen == sum(result.stats.rounds for result in results)
    assert (
        results[1].token_ids
        == generate(pair, "hello", Options(max_tokens=20, draft_len=0)).token_ids
    )
