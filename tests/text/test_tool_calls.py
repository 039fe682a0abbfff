import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.text.tool_calls import QUOTE, ToolCall, parse

# Without ▁, which is a space to Gemma's tokenizers.
TEXT = st.text(max_size=12).filter(lambda text: not {QUOTE, "▁"} & set(text))
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.:-]{0,12}", fullmatch=True)
KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
CALLS = st.builds(ToolCall, NAMES, st.dictionaries(KEYS, VALUES, max_size=4))


def written(value, space="", quoted=False):
    """A value as Gemma's templates write it; with white space and quoted keys, as models may."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, list):
        return f"[{space}{f',{space}'.join(written(v, space, quoted) for v in value)}{space}]"
    if isinstance(value, dict):
        keys = [written(key) if quoted else key for key in value]
        values = [written(inner, space, quoted) for inner in value.values()]
        pairs = (f"{k}{space}:{space}{v}{space}" for k, v in zip(keys, values, strict=True))
        return f"{{{space}{f',{space}'.join(pairs)}}}"
    return json.dumps(value)


def parsed(arguments):
    """The arguments in a call written with " for each quote; None where it is no call."""
    call = parse(f"call:f{arguments}".replace('"', QUOTE))
    return None if call is None else call.arguments


@given(call=CALLS, space=st.sampled_from(["", " ", "\n  "]), quoted=st.booleans())
@settings(deadline=None)
def test_a_call_is_read_as_it_was_written(call, space, quoted):
    text = f"{space}call:{space}{call.name}{space}{written(call.arguments, space, quoted)}{space}"
    assert parse(text) == call
    assert parse(text.rstrip()[:-1]) is None


def test_e19_nested_objects_braces_in_strings_hyphens_in_names():
    text = 'call:a-b{o:{m:"x } , y"},n:[1,{k:true}],z:null}'.replace('"', QUOTE)
    expected = {"o": {"m": "x } , y"}, "n": [1, {"k": True}], "z": None}
    assert parse(text) == ToolCall("a-b", expected)
    assert parse("call:ns:tool.v1-x{}") == ToolCall("ns:tool.v1-x", {})


def test_e20_a_string_without_its_opening_quote():
    assert parsed('{query:Paris, France",limit:5}') == {"query": "Paris, France", "limit": 5}
    assert parsed('{a:x,b:"y",c:Rome}') == {"a": "x", "b": "y", "c": "Rome"}
    assert parsed('{l:[Paris", "b"],n:5"}') == {"l": ["Paris", "b"], "n": "5"}
    assert parsed('{a:Paris, "b":1}') == {"a": "Paris", "b": 1}


def test_values_without_quotes():
    assert parsed("{path:src/a b.py,on:[x, y],o:{k:v}}") == {
        "path": "src/a b.py",
        "on": ["x", "y"],
        "o": {"k": "v"},
    }
    assert parsed("{a:,b:1,}") == {"a": "", "b": 1}
    assert parsed("{a:007,b:-1.5e3,c:1e999,d:.5,e:True}") == {
        "a": "007",
        "b": -1500.0,
        "c": "1e999",
        "d": ".5",
        "e": "True",
    }
    assert parsed(f"{{a:{'9' * 5000}}}") == {"a": "9" * 5000}


def test_e22_escapes_are_text():
    assert parsed(r'{re:"\d+\",n:1}') == {"re": r"\d+" + "\\", "n": 1}
    assert parsed('{s:"a\nb\x00\'"}') == {"s": "a\nb\x00'"}


NOT_CALLS = [
    *("", "call", "call:", "call:f", "call:{}", "f{a:1}", "call:f(a)", "call:f{a:1", "call:f{a}"),
    *('call:f{a:"x}', 'call:f{a:"x" y}', "call:f{a:1}}", "call:f{:1}", "call:f[1]", "call:f{a:[}"),
    *("call:f{a:" + "[" * 5000, "call:f{a:" + "{a:" * 65 + "1" + "}" * 66),
]


@pytest.mark.parametrize("text", NOT_CALLS)
def test_what_is_not_a_call(text):
    assert parse(text.replace('"', QUOTE)) is None


def strings_in(value):
    if isinstance(value, dict):
        return [*value, *(s for inner in value.values() for s in strings_in(inner))]
    if isinstance(value, list):
        return [s for inner in value for s in strings_in(inner)]
    return [value] if isinstance(value, str) else []


@given(text=st.text(alphabet=f'{QUOTE}{{}}[],: \n"-1.eax', max_size=40))
@settings(deadline=None)
def test_anything_gives_arguments_that_json_can_hold_or_no_call(text):
    call = parse(f"call:f{{{text}}}")
    if call is not None:
        assert json.loads(json.dumps(call.arguments, allow_nan=False)) == call.arguments
        assert not any(QUOTE in string for string in strings_in(call.arguments))


@pytest.mark.parametrize(
    "piece",
    ["a,", "[", "{a:", 'x",', '"x",', "[],", "a:", "1", "9,", " ", "\n,", ' "', ",,", "-", "call:"],
)
@pytest.mark.parametrize(
    "before", ["", "call:", "call:f{a:[", 'call:f{a:["', "call:f{a:", "call:f{"]
)
def test_e20_no_text_takes_long(before, piece):
    for end in ("", "]}", ' "]}', "  1"):
        text = (before + piece * (50_000 // len(piece)) + end).replace('"', QUOTE)
        started = time.process_time()
        parse(text)
        assert time.process_time() - started < 1
