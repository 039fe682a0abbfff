import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.text.chat import ChatTemplate
from mlx_mtp.text.output import OutputStream, in_thought
from mlx_mtp.text.tokenizer import Tokenizer
from mlx_mtp.text.tool_calls import QUOTE, ToolCall
from tests.text.test_detokenize import ODD
from tests.text.test_tool_calls import CALLS, TEXT, written

TINY = Path(__file__).parents[2] / "weights" / "tiny" / "target"
CALL = '<|tool_call>call:read{path:<|"|>a.py<|"|>,n:3}<tool_call|>'
READ = ToolCall("read", {"path": "a.py", "n": 3})


@pytest.fixture(scope="module")
def tiny():
    """The embedded pair's tokenizer, which has every control token of Gemma's."""
    return Tokenizer.from_folder(TINY)


def ids_of(tokenizer, text):
    return tokenizer.encode(text, bos=False, parse_special=True)


def said(tokenizer, ids, sizes=(), flags=None, **options):
    """(content, thoughts, calls) of tokens that come in blocks of these sizes, the rest in one:
    text as a list of (character, flag)."""
    stream = OutputStream(tokenizer, **options)
    flags = flags or [False] * len(ids)
    content, thoughts, calls = [], [], []

    def take(part):
        content.extend((char, flag) for text, flag in part.content for char in text)
        thoughts.extend((char, flag) for text, flag in part.thoughts for char in text)
        calls.extend(part.calls)

    at = 0
    for size in [*sizes, len(ids)]:
        block = 0
        for token in ids[at : at + size]:
            block += 1
            if stream.add(token):
                break
        take(stream.release(flags[at : at + block]))
        at += block
        if stream.stopped:
            break
    take(stream.finish())
    return content, thoughts, calls


def texts(tokenizer, text, **options):
    """(content, thoughts, calls) of a text with its control tokens written out."""
    ids = text if isinstance(text, list) else ids_of(tokenizer, text)
    content, thoughts, calls = said(tokenizer, ids, **options)
    return "".join(c for c, _ in content), "".join(c for c, _ in thoughts), calls


def test_e04_thoughts_and_content_apart(tokenizer):
    text = "<|channel>thought\nHm.\n\nSo.\n<channel|>\n\nHello\n\nthere\n"
    assert texts(tokenizer, text) == ("Hello\n\nthere\n", "Hm.\n\nSo.", [])


def test_e05_content_without_thoughts_is_unchanged(tokenizer):
    assert texts(tokenizer, "\n Hello\n") == ("\n Hello\n", "", [])
    assert texts(tokenizer, "<|channel>thought\n<channel|>Hello") == ("Hello", "", [])


def test_e08_the_prompt_opens_the_channel(tokenizer):
    assert texts(tokenizer, "thought\nb\n<channel|>c", in_thought=True) == ("c", "thought\nb", [])


def test_e09_thoughts_without_an_end(tokenizer):
    assert texts(tokenizer, "<|channel>thought\nHm. Hm.") == ("", "Hm. Hm.", [])
    assert texts(tokenizer, "<|channel>thou") == ("", "", [])


def test_a_channel_without_its_name_loses_nothing(tokenizer):
    assert texts(tokenizer, "<|channel>those two<channel|>b") == ("b", "those two", [])
    assert texts(tokenizer, "a\n<|channel>b<channel|>\nc") == ("a\n\nc", "b", [])


def test_e02_control_tokens_behind_a_call_are_not_shown(tiny):
    assert texts(tiny, f"Look:{CALL}<|tool_response>", tools=True) == ("Look:", "", [READ])


def test_e18_three_calls_and_the_most_that_are_wanted(tiny):
    assert texts(tiny, CALL * 3, tools=True) == ("", "", [READ] * 3)
    assert texts(tiny, f"a{CALL * 3}", tools=True, most_calls=2) == ("a", "", [READ] * 2)
    ids = ids_of(tiny, f"aST{CALL}{CALL}")
    stream = OutputStream(tiny, ["STOP"], tools=True, most_calls=1)
    stopped = [stream.add(token) for token in ids]
    assert stopped.index(True) == ids.index(tiny.control["<tool_call|>"])


def test_calls_are_text_where_there_are_no_tools(tiny):
    assert texts(tiny, f"a {CALL} b") == (f"a {CALL} b", "", [])


def test_without_parsing_everything_is_content(tokenizer):
    text = "<|channel>thought\nHm.\n<channel|>\nHello"
    assert texts(tokenizer, text, parse=False) == ("thought\nHm.\n\nHello", "", [])


def test_e22_what_is_no_call_is_shown_as_it_was_written(tiny):
    for text in ("<|tool_call>read the file<tool_call|>", CALL[:-12], "<|tool_call>", CALL[:40]):
        assert texts(tiny, f"a {text}", tools=True) == (f"a {text}", "", [])
    assert texts(tiny, "<|tool_call>x y<tool_call|>z", tools=True, stops=["y<"]) == (
        "<|tool_call>x ",
        "",
        [],
    )


def test_e20_a_quote_left_out_loses_no_call(tiny):
    first = '<|tool_call>call:find{query:Paris, France<|"|>,limit:5}<tool_call|>'
    found = ToolCall("find", {"query": "Paris, France", "limit": 5})
    assert texts(tiny, first + CALL, tools=True) == ("", "", [found, READ])
    second = '<|tool_call>call:find{query:<|"|>Paris,limit:5}<tool_call|>'
    assert texts(tiny, second + CALL, tools=True) == (second, "", [READ])
    assert texts(tiny, CALL[:-12] + CALL, tools=True) == ("", "", [READ, READ])
    assert texts(tiny, "<|tool_call>no<|channel>thought\nHm.<channel|>a", tools=True) == (
        "<|tool_call>noa",
        "Hm.",
        [],
    )


def test_e19_a_string_holds_control_tokens(tiny):
    inside = "x}<tool_call|> <|channel>, <|tool_call>} <tool_call|>"
    text = f'<|tool_call>call:f{{a:<|"|>{inside}<|"|>}}<tool_call|>'
    assert texts(tiny, text.replace(", <|tool_call>", ""), tools=True)[2] == [
        ToolCall("f", {"a": inside.replace(", <|tool_call>", "")})
    ]


def test_a_call_in_the_thoughts_is_a_call(tiny):
    text = f"<|channel>thought\nGo.{CALL}"
    assert texts(tiny, text, tools=True) == ("", "Go.", [READ])
    assert texts(tiny, f"{text[:-12]}\n<channel|>a", tools=True) == ("a", "Go.", [READ])


def test_a11_stop_strings_count_in_content_only(tiny):
    text = f"<|channel>thought\nSTOP\n<channel|>a ST{CALL}OP b"
    assert texts(tiny, text, tools=True, stops=["STOP"]) == ("a ", "STOP", [READ])
    assert texts(tiny, text, stops=["STOP"]) == (f"a ST{CALL}OP b", "STOP", [])
    assert texts(tiny, "<|channel>thought\na\n<channel|>\n\nb", stops=["\n"]) == ("b", "a", [])


def test_a12_what_did_not_become_a_stop_string_comes_at_the_end(tokenizer):
    assert texts(tokenizer, "1abc", stops=["abcX"]) == ("1abc", "", [])


def test_f01_a_character_over_four_tokens_and_one_cut_off_by_a_marker(gemma):
    ours, _ = gemma
    ids = ids_of(ours, "<|channel>thought\n🦙<channel|>🦙한")
    assert texts(ours, ids[:-1]) == ("🦙\ufffd", "🦙", [])
    thoughts = ids[: ids.index(ours.control["<channel|>"])]
    assert texts(ours, [*thoughts[:-1], ours.control["<channel|>"]]) == ("", "\ufffd", [])


@pytest.mark.parametrize("text", [" Hello", ODD, f"{ODD}\n"])
def test_f06_odd_text_comes_out_unchanged(tokenizer, text):
    assert texts(tokenizer, tokenizer.encode(text, bos=False)) == (text, "", [])
    inside = [tokenizer.control["<|channel>"], *tokenizer.encode(f"thought\n{ODD}x", bos=False)]
    assert texts(tokenizer, inside) == ("", f"{ODD}x", [])


@given(data=st.data())
@settings(deadline=None)
def test_any_tokens_are_what_the_full_decode_has(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1)))
    assert texts(tokenizer, ids, parse=False) == (tokenizer.decode(ids), "", [])
    marked = {tokenizer.control["<|channel>"], tokenizer.control["<channel|>"]}
    plain = [token for token in ids if token not in marked]
    assert texts(tokenizer, plain)[0] == tokenizer.decode(plain)


PARTS = st.lists(
    st.tuples(st.just("content"), TEXT)
    | st.tuples(st.just("thoughts"), TEXT)
    | st.tuples(st.just("call"), CALLS),
    max_size=5,
)


def tokens_of(tokenizer, parts):
    """What a model writes to say these parts, as tokens."""
    control, ids = tokenizer.control, []
    for kind, part in parts:
        if kind == "content":
            ids += tokenizer.encode(part, bos=False)
        elif kind == "thoughts":
            thought = tokenizer.encode(f"thought\n{part}\n", bos=False)
            ids += [control["<|channel>"], *thought, control["<channel|>"]]
        else:
            ids.append(control["<|tool_call>"])
            pieces = f"call:{part.name}{written(part.arguments)}".split(QUOTE)
            for i, piece in enumerate(pieces):
                ids += [control['<|"|>']] * (i > 0) + tokenizer.encode(piece, bos=False)
            ids.append(control["<tool_call|>"])
    return ids


def content_of(parts):
    """White space that opens the content is dropped behind thoughts."""
    content, behind = "", False
    for kind, part in parts:
        if kind == "content":
            content += part.lstrip() if behind and not content.strip() else part
        behind = behind or kind == "thoughts"
    return content


@given(parts=PARTS, seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_what_was_rendered_is_parsed_whatever_the_blocks(tiny, parts, seed):
    ids, chance = tokens_of(tiny, parts), random.Random(seed)
    flags = [chance.random() < 0.5 for _ in ids]
    sizes = [chance.randrange(10) for _ in ids]
    content, thoughts, calls = whole = said(tiny, ids, sizes, flags, tools=True)
    assert "".join(char for char, _ in thoughts) == "".join(p for k, p in parts if k == "thoughts")
    assert calls == [part for kind, part in parts if kind == "call"]
    assert whole == said(tiny, ids, [1] * len(ids), flags, tools=True)
    assert "".join(char for char, _ in content) == content_of(parts)


@given(parts=PARTS, where=st.floats(0, 1))
@settings(deadline=None)
def test_cut_at_any_token_nothing_is_lost_or_taken_back(tiny, parts, where):
    ids = tokens_of(tiny, parts)
    whole = texts(tiny, ids, tools=True)
    cut = ids[: round(where * len(ids))]
    content, thoughts, calls = texts(tiny, cut, tools=True)
    marker = content.rfind("<|tool_call>")
    sure = content if marker < 0 else content[:marker]
    assert whole[0].startswith(sure.removesuffix("\ufffd")) or "\ufffd" in sure
    assert whole[1].startswith(thoughts.removesuffix("\ufffd")) or "\ufffd" in thoughts
    assert calls == whole[2][: len(calls)]
    opened, closed = (cut.count(tiny.control[t]) for t in ("<|tool_call>", "<tool_call|>"))
    assert (len(calls), marker >= 0) == (closed, opened > closed)


@given(thoughts=TEXT, content=TEXT, calls=st.lists(CALLS, max_size=2))
@settings(deadline=None)
def test_what_the_template_renders_is_parsed_again(tiny, thoughts, content, calls):
    template = ChatTemplate.from_folder(TINY)
    user = {"role": "user", "content": "hi"}
    answer = {
        "role": "assistant",
        "content": content,
        "reasoning": thoughts,
        "tool_calls": [{"function": {"name": c.name, "arguments": c.arguments}} for c in calls],
    }
    prompt = template.encode([user], tiny)
    ids = template.encode([user, answer], tiny)[len(prompt) :]
    end = tiny.control["<turn|>"]
    ids = ids[: ids.index(end)] if end in ids else ids
    expected = (content.lstrip() if thoughts else content, thoughts, calls)
    assert texts(tiny, ids, tools=True) == expected


def test_whether_a_prompt_leaves_the_channel_open(tiny):
    def is_open(text):
        return in_thought(ids_of(tiny, text), tiny)

    assert is_open("<|turn>model\n<|channel>thought\n")
    assert is_open("<|turn>model\n<|tool_response>x<tool_response|><|channel>thought\n")
    assert not is_open("<|turn>model\n<|channel>thought\n<channel|>")
    assert not is_open("<|channel>thought\n<|turn>model\n")
    assert not is_open("")


def test_a_long_answer_costs_what_its_tokens_cost(tiny):
    x = tiny.encode("x", bos=False) * 30_000
    quote, *marks = (tiny.control[t] for t in ('<|"|>', "<|channel>", "<tool_call|>"))
    call = [tiny.control["<|tool_call>"], *tiny.encode("call:f{a:", bos=False), quote]
    for ids in (x, [marks[0], *x], [*call, *x], [*call, *marks * 15_000], marks * 15_000):
        started = time.process_time()
        texts(tiny, ids, tools=True, stops=["xxxy"])
        assert time.process_time() - started < 3
