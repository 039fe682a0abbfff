import json
import random
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.errors import UsageError
from mlx_mtp.text.grammar import GrammarFactory
from mlx_mtp.text.output import OutputStream
from mlx_mtp.text.tokenizer import Tokenizer

EMBEDDED = Path(__file__).parents[2] / "weights/tiny/target"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "mood": {"enum": ["é漢", 'a"b', "x"]},
        "age": {"type": ["integer", "null"], "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
        "friend": {"$ref": "#"},
    },
    "required": ["name", "mood", "age"],
    "additionalProperties": False,
}
CLOSING = (b'"', b"}", b"]", b")", b"z")
OBJECT = {"type": "json_object"}
NUMBER = {"type": "regex", "regex": "[0-9]{1,3}"}


def schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


@pytest.fixture(scope="module")
def factory(tokenizer):
    """For each kind of tokenizer; there are more logits than tokens, and two ways to end."""
    pytest.importorskip("llguidance")
    control = tokenizer.control
    return GrammarFactory(
        tokenizer, tokenizer.vocab_size + 37, [control["<eos>"], control["<turn|>"]]
    )


@pytest.fixture(scope="module")
def words():
    return Tokenizer.from_folder(EMBEDDED)


@pytest.fixture(scope="module")
def embedded(words):
    pytest.importorskip("llguidance")
    return GrammarFactory(words, 2100, [1, words.control["<turn|>"]])


def allowed(row):
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def walk(grammar, tokenizer, eos, rng, steps=400):
    """The ids of a random answer, by tokens that the masks allow; it hurries to its end."""
    ids = []
    for step in range(steps):
        options = allowed(grammar.masks([])[0])
        texts = set(options) - eos
        assert options
        assert max(options) < tokenizer.vocab_size
        assert not texts & tokenizer.control_ids
        if eos & set(options) and (not texts or step > 30 or rng.random() < 0.3):
            assert eos <= set(options)
            return ids
        closing = [t for t in sorted(texts) if tokenizer.token_bytes(t) in CLOSING]
        ids.append(rng.choice(closing if closing and step > 20 else sorted(texts)))
        grammar.accept(ids[-1])
    raise AssertionError(tokenizer.decode(ids))


def eos_of(tokenizer):
    return {tokenizer.control["<eos>"], tokenizer.control["<turn|>"]}


def test_b10_e11_random_walks_give_what_the_schema_says(factory, tokenizer):
    jsonschema = pytest.importorskip("jsonschema")
    for seed in range(12):
        ids = walk(factory(schema(PERSON)), tokenizer, eos_of(tokenizer), random.Random(seed))
        jsonschema.validate(json.loads(tokenizer.decode(ids)), PERSON)


def test_e11_random_walks_give_a_json_object(factory, tokenizer):
    for seed in range(12):
        ids = walk(factory(OBJECT), tokenizer, eos_of(tokenizer), random.Random(seed))
        assert isinstance(json.loads(tokenizer.decode(ids)), dict)


def test_a_regex_and_a_lark_grammar(factory, tokenizer):
    lark = 'start: "(" start ")" | "é"'
    for seed in range(5):
        rng, eos = random.Random(seed), eos_of(tokenizer)
        ids = walk(factory({"type": "regex", "regex": "[ab]{2,5} ?é+z"}), tokenizer, eos, rng)
        assert re.fullmatch("[ab]{2,5} ?é+z", tokenizer.decode(ids))
        ids = walk(factory({"type": "grammar", "grammar": lark}), tokenizer, eos, rng)
        assert re.fullmatch(r"\(*é\)*", tokenizer.decode(ids))


def test_there_is_no_grammar_for_text(tokenizer):
    assert GrammarFactory(tokenizer, 8, [1])({"type": "text"}) is None


def test_e11_whitespace_cannot_run_away(factory, tokenizer):
    """A model that takes whitespace wherever it may, and comes on only where it must."""
    grammar, text = factory(schema(PERSON)), ""
    while not set(options := allowed(grammar.masks([])[0])) & eos_of(tokenizer):
        texts = {t: tokenizer.decode([t]) for t in options}
        inside = text.count('"') % 2
        blank = [t for t in options if not inside and texts[t] and not texts[t].strip()]
        closing = [t for t in options if texts[t] in ('"', "}", "]")]
        grammar.accept(token := (blank or closing or options)[0])
        text += texts[token]
        assert len(text) < 1000
    assert json.loads(text)
    assert not re.search(r"\s{34}", text)
    assert text == text.strip()


@given(
    seed=st.integers(0, 10**6),
    start=st.integers(0, 30),
    wrong=st.integers(0, 9),
    call=st.booleans(),
)
def test_b10_the_masks_of_a_block_are_those_of_single_places(
    embedded, words, seed, start, wrong, call
):
    rng, eos = random.Random(seed), eos_of(words)
    if call:
        text = '<|tool_call>call:f{b:[1,{x y:-2.5e3}],a:<|"|>a{},<|"|>}<tool_call|>'
        ids = words.encode(text * 2, bos=False, parse_special=True)
        whole, alone = (forced(embedded, [tool("f", ["a", "b", "c"], ["a"])]) for _ in range(2))
    else:
        ids = walk(embedded(schema(PERSON)), words, eos, rng)
        whole, alone = embedded(schema(PERSON)), embedded(schema(PERSON))
    block = (ids[start:] + [1] * 8)[:8]
    if wrong < 8:
        block[wrong] = rng.choice([-1, 1, 0, rng.randrange(2100)])
    for token in ids[:start]:
        whole.accept(token)
        alone.accept(token)
    rows = whole.masks(block)
    assert rows.shape == (9, 66)
    np.testing.assert_array_equal(rows, whole.masks(block))
    for place, token in enumerate([*block, -1]):
        np.testing.assert_array_equal(rows[place], alone.masks([])[0])
        if token < 0 or token in eos or token not in allowed(rows[place]):
            assert (rows[place + 1 :] == 0xFFFFFFFF).all()
            break
        alone.accept(token)


def test_b10_a_complete_answer_allows_only_its_end(factory, tokenizer):
    grammar = factory({"type": "regex", "regex": "ab"})
    for token in tokenizer.encode("ab", bos=False):
        assert not set(allowed(grammar.masks([])[0])) & eos_of(tokenizer)
        grammar.accept(token)
    eos = tokenizer.control["<eos>"]
    rows = grammar.masks([eos, eos, -1])
    assert set(allowed(rows[0])) == eos_of(tokenizer)
    assert (rows[1:] == 0xFFFFFFFF).all()
    assert set(allowed(grammar.masks([])[0])) == eos_of(tokenizer)


def test_every_token_with_the_same_bytes_may_come(embedded, words):
    digits = {t for t in range(2048) if re.fullmatch(rb"[0-9]{1,3}", words.token_bytes(t))}
    assert len(digits) > 10
    assert set(allowed(embedded(NUMBER).masks([])[0])) == digits


def all_but_an_end(row):
    """An answer that ended in its thoughts would be empty."""
    return set(range(2048)) - set(allowed(row)) == {1, 106}


def test_e11_everything_may_come_in_a_thought(embedded, words):
    channel, close = words.control["<|channel>"], words.control["<channel|>"]
    seven, letter = words.encode("7", bos=False)[0], words.encode("x", bos=False)[0]
    grammar = embedded(NUMBER, thinking=True)
    first = embedded(NUMBER).masks([])[0]
    rows = grammar.masks([channel, letter, close, seven])
    assert set(allowed(rows[0])) == {*allowed(first), channel}
    for row in rows[1:3]:
        assert all_but_an_end(row)
    np.testing.assert_array_equal(rows[3], first)  # a second thought could go on for ever
    assert 1 in allowed(rows[4])
    assert letter not in allowed(rows[4])
    for token in (channel, letter):
        grammar.accept(token)
    assert all_but_an_end(grammar.masks([letter, 1, -1])[0])
    grammar.accept(close)
    np.testing.assert_array_equal(grammar.masks([])[0], first)
    grammar.accept(seven)
    assert channel not in allowed(grammar.masks([])[0])


def test_e11_a_prompt_that_opened_the_thought(embedded, words):
    grammar = embedded(NUMBER, thinking=True, in_thought=True)
    assert all(map(all_but_an_end, grammar.masks([5, 6])))
    rows = grammar.masks([5, words.control["<channel|>"]])
    assert all(map(all_but_an_end, rows[:2]))
    assert 1 not in allowed(rows[2])


def test_a_tool_call_may_come_instead(embedded, words):
    call, seven = words.control["<|tool_call>"], words.encode("7", bos=False)[0]
    grammar = embedded(NUMBER, tools=True)
    assert set(allowed(grammar.masks([])[0])) == {*allowed(embedded(NUMBER).masks([])[0]), call}
    assert (grammar.masks([call, 5])[1:] == 0xFFFFFFFF).all()
    assert call not in allowed(grammar.masks([seven])[1])
    grammar.accept(call)
    assert grammar.masks([5, 5]) is None


def tool(name, keys=(), required=()):
    parameters = {"type": "object", "properties": {key: {} for key in keys}}
    parameters |= {"required": list(required)} if required else {}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def forced(embedded, tools, most_calls=None, **settings):
    settings = {"thinking": False, "in_thought": False} | settings
    return embedded.forced_call(tools, most_calls=most_calls, **settings)


def call_walk(grammar, words, rng, most_calls=None, hurry=30, first=()):
    """The calls of a random answer, by tokens that the masks allow; it hurries to its end."""
    stream = OutputStream(words, tools=True, most_calls=most_calls)
    eos = eos_of(words)
    ending = {t for t in range(2048) if words.token_bytes(t) in (b"}", b"]", b":")}
    ending |= words.control_ids
    for step in range(2000):
        options = set(allowed(grammar.masks([])[0]))
        assert options
        if options & eos:
            assert eos <= options
            if step > hurry or rng.random() < 0.3:
                break
        options -= eos
        if step > hurry:
            options = options & ending - {words.control["<|tool_call>"]} or options
        if step < len(first):
            assert first[step] in options
        token = first[step] if step < len(first) else rng.choice(sorted(options))
        grammar.accept(token)
        if stream.add(token):
            break
    else:
        raise AssertionError
    said = stream.finish()
    assert said.content == said.thoughts == []
    return said.calls


NAMES = st.from_regex(r"[\w.:/-]{1,12}", fullmatch=True) | st.sampled_from(
    ["get", "get-it", "a.b:c"]
)
ODD = [
    "a b",
    'a"b',
    "\\",
    "é漢",
    "😀",
    "\x7f",
    "a\nb",
    "//",
    "#",
    '<|"|>',
    "true",
    "-1",
    "x\u2028y",
]
NOT_BARE = ["", " a", "a\t", "a:b", "{", "]", "a,b", "\U0010fffd", "\ud800", "\x1f"]
KEYS = st.sampled_from([*ODD, *NOT_BARE]) | st.text(max_size=8)


@settings(deadline=None)
@given(
    names=st.lists(NAMES, min_size=1, max_size=3, unique=True),
    keys=st.lists(KEYS, max_size=5, unique=True),
    needed=st.integers(0, 5),
    most_calls=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 10**6),
)
def test_b09_a_forced_call_is_always_a_call(embedded, words, names, keys, needed, most_calls, seed):
    tools = [tool(name, keys, keys[:needed]) for name in names]
    grammar, rng = forced(embedded, tools, most_calls), random.Random(seed)
    calls = call_walk(grammar, words, rng, most_calls, hurry=rng.choice([5, 30, 100]))
    bare = {
        k for k in keys if k and k == k.strip() and not re.search("[][:,{}\U0010fffd\ud800]", k)
    }
    assert 1 <= len(calls) <= (most_calls or len(calls))
    for call in calls:
        assert call.name in names
        json.dumps(call.arguments, allow_nan=False)
        assert set(call.arguments) <= bare or not bare
        assert set(call.arguments) >= bare & set(keys[:needed])


def begin(words, text):
    return [words.control["<|tool_call>"], *words.encode(text, bos=False)]


def test_b09_a_forced_call_gives_each_argument_once(embedded, words):
    rng, comma = random.Random(0), {t for t in range(2048) if b"," in words.token_bytes(t)}
    grammar = forced(embedded, [tool("f", ["a", "b"], ["b"])])
    for token in begin(words, "call:f{a:true"):
        grammar.accept(token)
    (texts,) = (words.decode([t]) for t in [next(iter(allowed(grammar.masks([])[0])))])
    assert texts.startswith(",")  # b must come
    for token in words.encode(",b:true", bos=False):
        grammar.accept(token)
    assert not set(allowed(grammar.masks([])[0])) & comma
    many = [f"k{i}" for i in range(70)]
    (call,) = call_walk(forced(embedded, [tool("f", many, many)]), words, rng, hurry=0)
    assert set(many[:64]) <= set(call.arguments) <= set(many)


def test_b09_a_forced_call_is_not_nested_deeper_than_can_be_read(embedded, words):
    for text in ("call:f{a:" + "[" * 24, "call:f{a:" + "{x:" * 24):
        grammar, first = forced(embedded, [tool("f")], 1), begin(words, text)
        (call,) = call_walk(grammar, words, random.Random(0), 1, hurry=len(first), first=first)
        assert str(call.arguments).count(text[-1]) >= 24
    opening = {t for t in range(2048) if words.token_bytes(t)[:1] in (b"[", b"{")}
    grammar = forced(embedded, [tool("f")])
    for token in begin(words, "call:f{a:" + "[" * 24):
        grammar.accept(token)
    assert not set(allowed(grammar.masks([])[0])) & opening


def test_b09_a_string_of_a_forced_call_may_be_empty_or_any_text_but_the_mark(embedded, words):
    quote, mark = words.control['<|"|>'], "\U0010fffd".encode()
    single = {words.token_bytes(t): t for t in range(2048) if len(words.token_bytes(t)) == 1}
    grammar = forced(embedded, [tool("f")])
    for token in [*begin(words, "call:f{a:"), quote, *words.encode('\n "}é', bos=False)]:
        assert token in allowed(grammar.masks([])[0])
        grammar.accept(token)
        if token == quote:
            assert set(allowed(grammar.masks([])[0])) & words.control_ids == {quote}
    for byte in mark[:-1]:
        grammar.accept(single[bytes([byte])])
    assert single[mark[-2:-1]] in allowed(grammar.masks([])[0])
    assert single[mark[-1:]] not in allowed(grammar.masks([])[0])


def test_b09_how_a_forced_call_begins_and_ends(embedded, words):
    opener, closer = words.control["<|tool_call>"], words.control["<tool_call|>"]
    call = [*begin(words, "call:f{}"), closer]
    for most_calls, after in ((None, {opener}), (1, set()), (2, {opener})):
        grammar = forced(embedded, [tool("f"), tool("ff")], most_calls)
        for token in call:
            options = allowed(grammar.masks([])[0])
            assert token in options
            assert not set(options) & eos_of(words)
            grammar.accept(token)
        assert set(allowed(grammar.masks([])[0])) == eos_of(words) | after
    channel = words.control["<|channel>"]
    grammar = forced(embedded, [tool("f")], thinking=True)
    assert set(allowed(grammar.masks([])[0])) == {opener, channel}
    grammar = forced(embedded, [tool("f")], thinking=True, in_thought=True)
    assert all_but_an_end(grammar.masks([])[0])


def test_b09_many_tools_can_be_forced_soon(embedded):
    tools = [tool(f"tool{i}", [f"key{i}_{j}" for j in range(30)]) for i in range(60)]
    forced(embedded, tools)
    begun = time.process_time()
    forced(embedded, tools)
    assert time.process_time() - begun < 2


def test_a_checkpoint_without_tool_calls_cannot_be_forced(factory):
    with pytest.raises(UsageError, match="tool_choice"):
        forced(factory, [tool("get")])


BAD = {
    "properties.x: ": {"properties": {"x": {"type": "strin"}}},
    "$defs.n.items.anyOf[1]: ": {
        "properties": {"x": {"$ref": "#/$defs/n"}},
        "$defs": {"m": {}, "n": {"items": {"anyOf": [{}, {"uniqueItems": True}]}}},
    },
    "properties.x: regex parse error: unclosed group": {"properties": {"x": {"pattern": "(a"}}},
    "schema: no text can fit it": {"$ref": "#"},
    "does not exist": {"properties": {"x": {"$ref": "#/$defs/no"}}},
    "must be an object": [1],
    "serializable": {"properties": {"x": {"const": "\ud800"}}},
    "recursion limit": json.loads('{"items":' * 500 + "{}" + "}" * 500),
    "too big": {"enum": [f"value number {i}" for i in range(100_000)]},
}


@pytest.mark.parametrize("message", BAD)
def test_i14_an_odd_schema_is_refused_in_one_line_naming_the_place(embedded, message):
    begun = time.process_time()
    with pytest.raises(UsageError) as error:
        embedded(schema(BAD[message]))
    line = str(error.value)
    assert line.startswith("response_format.json_schema.schema")
    assert message in line
    assert "\n" not in line
    assert time.process_time() - begun < 5


FORMATS = {
    "response_format.type": {"type": "yaml"},
    "response_format.json_schema: must be an object": {"type": "json_schema"},
    "response_format.regex: must be a string": {"type": "regex"},
    "response_format.regex: ": {"type": "regex", "regex": "(?=a)b"},
    "response_format.grammar: ": {"type": "grammar", "grammar": "start: nothing"},
    "response_format.json_schema.strict: must be true": {
        "type": "json_schema",
        "json_schema": {"name": "it", "schema": {}, "strict": 1},
    },
}


@pytest.mark.parametrize("message", FORMATS)
def test_i14_an_odd_format_is_refused_in_one_line_naming_the_place(embedded, message):
    with pytest.raises(UsageError) as error:
        embedded(FORMATS[message])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


ENDING = ["<turn|>", "<eos>", "<[106]>", "<[5,100-110]>", "<[^5-7,106]>", "<[*]>"]
OTHER = ["<|tool>", "<[107]>", "<[2-105]>", "<[^0-2,106]>", '"<turn|>"', "/<eos>/", '"x" // <eos>']
OTHER += ['"\\"<eos>"', '/"/ <|tool> "<turn|>"', '"x"\n# <[*]>']


@pytest.mark.parametrize("part", ENDING)
def test_i14_a_grammar_that_names_an_end_is_refused(embedded, part):
    with pytest.raises(UsageError) as error:
        embedded({"type": "grammar", "grammar": f'start: "a" {part}'})
    assert str(error.value).startswith(f"response_format.grammar: {part} ends the answer")


@pytest.mark.parametrize("part", OTHER)
def test_a_grammar_may_name_other_tokens(embedded, part):
    assert embedded({"type": "grammar", "grammar": f'start: "a" {part}'}) is not None


@pytest.mark.parametrize("part", ['"', '"' + '\\"' * 100_000, "/" + "\\/" * 100_000, "<" * 200_000])
def test_i14_an_odd_grammar_is_refused_soon(embedded, part):
    begun = time.process_time()
    with pytest.raises(UsageError, match=r"response_format\.grammar: "):
        embedded({"type": "grammar", "grammar": f"start: {part}"})
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_may_be_strict(embedded, strict):
    wanted = schema({"type": "null"})
    wanted["json_schema"]["strict"] = strict
    assert embedded(wanted) is not None


def test_i14_a_long_place_is_shortened_in_the_middle(embedded):
    deep = {"type": "strin"}
    for i in range(30):
        deep = {"type": "object", "properties": {f"key{i}": deep}}
    with pytest.raises(UsageError) as error:
        embedded(schema(deep))
    place = str(error.value).split(": ")[0]
    assert place.startswith("response_format.json_schema.schema.properties.key29.")
    assert place.endswith(".properties.key1.properties.key0")
    assert "..." in place
    assert len(place) <= 120


def test_i14_large_and_recursive_schemas_work(embedded, words):
    tree = {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
    many = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2000)}}
    for one, text in ((tree, "[[],[[]]]"), (many, '{"p17":null,"p1999":null}')):
        grammar, ids = embedded(schema(one)), []
        while len(words.decode(ids)) < len(text):
            fits = [
                t
                for t in allowed(grammar.masks([])[0])
                if text.startswith(words.decode([*ids, t])) and words.token_bytes(t)
            ]
            ids.append(fits[0])
            grammar.accept(ids[-1])
        assert allowed(grammar.masks([])[0]) == [1, words.control["<turn|>"]]


def test_without_llguidance_the_extra_is_named(words, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    needs = "needs llguidance; install it: pip install llguidance"
    for wanted in (OBJECT, NUMBER):
        with pytest.raises(UsageError, match=re.escape(f"response_format: {needs}")):
            GrammarFactory(words, 2100, [1])(wanted)
    with pytest.raises(UsageError, match=re.escape(f"tool_choice: {needs}")):
        forced(GrammarFactory(words, 2100, [1]), [tool("get")])
