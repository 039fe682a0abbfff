"""OpenAI's bodies: what is taken, what is refused, and what comes of an answer."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.cli.backends import openai
from mlx_mtp.conversation import tool_call
from mlx_mtp.engine.requests import Stats
from mlx_mtp.errors import UsageError
from mlx_mtp.text.tool_calls import ToolCall

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**body):
    return openai.chat({"messages": USER} | body)


def completion(**body):
    return openai.completion({"prompt": "hi"} | body)


def test_nothing_but_messages_leaves_everything_to_the_checkpoint():
    body = chat()
    assert (body.options.max_tokens, body.options.temperature, body.options.seed) == (None,) * 3
    assert (body.options.draft_len, body.options.stop, body.options.logprobs) == (None, (), None)
    assert (body.stream, body.ignored, body.ask.thinking, body.ask.tools) == (
        False,
        [],
        False,
        None,
    )


def test_null_is_what_a_missing_parameter_is():
    names = [*openai.NUMBERS, "max_completion_tokens", "stop", "seed", "logit_bias", "tools"]
    names += ["tool_choice", "response_format", "reasoning_effort", "chat_template_kwargs"]
    names += ["stream", "stream_options", "n", "model", "session", "draft_len", "logprobs"]
    assert chat(**dict.fromkeys(names)).options == chat().options


def test_i03_how_long_an_answer_may_be():
    assert chat(max_tokens=3).options.max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=5).options.max_tokens == 5
    assert chat(max_tokens=0).options.max_tokens == 0  # A08
    assert chat(max_tokens=None).options.max_tokens is None
    assert completion().options.max_tokens == 512
    assert completion(max_tokens=None).options.max_tokens is None


def test_options_are_those_of_generate():
    options = chat(
        temperature=1,
        top_k=4,
        top_p=0.5,
        min_p=0.1,
        seed=-1,
        stop="x",
        draft_len=3,
        repetition_penalty=1.5,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"7": -100},
        min_tokens=2,
        logprobs=True,
        top_logprobs=2,
    ).options
    assert (options.temperature, options.top_k, options.top_p, options.min_p) == (1, 4, 0.5, 0.1)
    assert (options.seed, options.stop, options.draft_len) == (2**64 - 1, ("x",), 3)
    assert (options.repetition_penalty, options.presence_penalty) == (1.5, 1)
    assert (options.frequency_penalty, options.logit_bias) == (-1, {7: -100})
    assert (options.min_tokens, options.logprobs) == (2, 2)
    assert chat(top_k=4.0).options.top_k == 4


def test_a_draft_length_of_the_command_line_is_for_bodies_that_name_none():
    assert openai.chat({"messages": USER}, 3).options.draft_len == 3
    assert openai.chat({"messages": USER, "draft_len": 0}, 3).options.draft_len == 0
    assert openai.chat({"messages": USER, "draft_len": "auto"}, 3).options.draft_len is None


@pytest.mark.parametrize(
    ("effort", "thinking"), [("none", False), ("minimal", False), ("low", True), ("high", True)]
)
def test_thinking(effort, thinking):
    assert chat(reasoning_effort=effort).ask.thinking is thinking
    wanted = {"enable_thinking": not thinking}
    assert chat(reasoning_effort=effort, chat_template_kwargs=wanted).ask.thinking is not thinking


def test_tools_and_what_to_do_with_them():
    assert chat(tools=[]).ask.tools is None
    asked = chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}})
    assert asked.ask.tool_choice == "f"
    assert chat(tools=[TOOL], tool_choice="required").ask.tool_choice == "required"
    assert chat(tools=[TOOL], parallel_tool_calls=False).ask.parallel_calls is False
    assert chat(tool_choice="none").ask.tool_choice == "none"


def test_i08_parts_are_taken_and_i14_formats():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).ask.messages[0]["content"] == parts
    assert chat(response_format={"type": "text"}).ask.response_format is None
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    assert chat(response_format=wanted).ask.response_format == wanted


def test_strict_is_not_kept_to_and_listed():
    strict = {"type": "function", "function": TOOL["function"] | {"name": "g", "strict": True}}
    assert chat(tools=[TOOL, strict]).ignored == ["tools[1].function.strict"]


@pytest.mark.parametrize(
    ("asked", "loaded", "names"),
    [
        (None, "embedded target", ["default", "embedded target"]),
        ("e4b", None, ["default", "e4b"]),
        (
            "e4b",
            "google/gemma-4-E4B-it",
            ["default", "e4b", "google/gemma-4-E4B-it", "gemma-4-E4B-it"],
        ),
        ("a/b", "a/b", ["default", "a/b", "b"]),
        ("/home/me/b/", "/home/me/b", ["default", "/home/me/b/", "/home/me/b", "b"]),
        ("b", "/home/me/b", ["default", "/home/me/b", "b"]),
    ],
)
def test_the_last_of_its_names_is_its_own(asked, loaded, names):
    assert openai.names(asked, loaded and SimpleNamespace(name=loaded)) == names
    with pytest.raises(UsageError, match=f"here is default or {names[-1]}$"):
        openai.check_model("gpt-4o", names)


def test_a_name_that_is_no_unicode():
    with pytest.raises(UsageError, match=r"^the name '\\ud800' is not valid Unicode"):
        chat(**{"\ud800": 1})


def test_what_is_not_known_is_listed():
    body = chat(
        user="me",
        store=True,
        stream_options={"include_usage": True, "other": 1},
        chat_template_kwargs={"enable_thinking": True, "x": 1},
    )
    assert body.ignored == ["user", "store", "stream_options.other", "chat_template_kwargs.x"]
    assert body.include_usage


def test_a_prompt_is_a_text_or_ids():
    assert completion().prompt == "hi"
    assert completion(prompt=[2, 7]).prompt == [2, 7]
    assert completion(prompt="").prompt == ""
    assert completion(suffix="", echo=False, best_of=1, logprobs=0).options.logprobs == 0
    assert completion().options.raw


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]


@pytest.mark.parametrize(
    ("check", "body", "words"),
    [
        (chat, {"messages": None}, ["messages"]),  # I10
        (chat, {"messages": {}}, ["messages"]),
        (chat, {"messages": []}, ["messages"]),
        (chat, {"messages": [{"role": "foo", "content": "x"}]}, ["messages[0].role"]),
        (chat, {"messages": [{"content": "x"}]}, ["messages[0].role"]),
        (chat, {"messages": IMAGE}, ["messages[0].content[0]", "text"]),
        (chat, {"n": 2}, ["n is 2", "it must be 1"]),
        (chat, {"n": 0}, ["n is 0"]),
        (chat, {"max_tokens": -1}, ["max_tokens is -1"]),
        (chat, {"max_tokens": "3"}, ["max_tokens is '3'"]),
        (chat, {"max_tokens": True}, ["max_tokens is True"]),
        (chat, {"max_tokens": 1.5}, ["max_tokens is 1.5"]),
        (chat, {"max_completion_tokens": 10**30}, ["max_completion_tokens"]),
        (chat, {"temperature": -0.1}, ["temperature is -0.1", "0 to 100"]),
        (chat, {"temperature": [1]}, ["temperature is [1]"]),
        (chat, {"temperature": float("nan")}, ["temperature is nan"]),
        (chat, {"temperature": float("inf")}, ["temperature is inf"]),
        (chat, {"top_k": float("inf")}, ["top_k is inf"]),
        (chat, {"top_p": -1}, ["top_p is -1"]),
        (chat, {"seed": 1 << 64}, ["seed"]),
        (chat, {"draft_len": 9}, ["draft_len is 9", "0 to 8"]),
        (chat, {"draft_len": "x"}, ["draft_len"]),
        (chat, {"stop": ""}, ["stop"]),  # I07
        (chat, {"stop": ["a", ""]}, ["stop"]),
        (chat, {"stop": list("abcde")}, ["stop has 5", "4"]),
        (chat, {"stop": 7}, ["stop is 7"]),
        (chat, {"logit_bias": {"x": 1}}, ["logit_bias", "'x'"]),
        (chat, {"logit_bias": {"7": 101}}, ["logit_bias.7 is 101"]),
        (chat, {"logit_bias": {"-7": 1}}, ["logit_bias"]),
        (chat, {"logit_bias": []}, ["logit_bias is []"]),
        (chat, {"top_logprobs": 2}, ["top_logprobs", "logprobs"]),
        (chat, {"logprobs": True, "top_logprobs": 21}, ["top_logprobs is 21"]),
        (chat, {"logprobs": 1}, ["logprobs is 1", "true or false"]),
        (chat, {"stream": "yes"}, ["stream is 'yes'"]),
        (chat, {"stream_options": 1}, ["stream_options is 1"]),
        (chat, {"stream_options": {"include_usage": 1}}, ["stream_options.include_usage is 1"]),
        (chat, {"tools": 1}, ["tools"]),
        (chat, {"tools": [{"type": "web_search"}]}, ["tools[0]"]),
        (chat, {"tool_choice": "required"}, ["tool_choice", "no tools"]),
        (chat, {"tool_choice": 7}, ["tool_choice is 7"]),
        (chat, {"tool_choice": {"type": "function"}}, ["tool_choice"]),
        (chat, {"tool_choice": {"function": []}}, ["tool_choice"]),
        (chat, {"reasoning_effort": "huge"}, ["reasoning_effort is 'huge'", "high"]),
        (chat, {"reasoning_effort": []}, ["reasoning_effort is []"]),
        (chat, {"chat_template_kwargs": {"enable_thinking": 1}}, ["kwargs.enable_thinking is 1"]),
        (chat, {"response_format": "json"}, ["response_format is 'json'"]),
        (chat, {"response_format": {"type": "xml"}}, ["response_format.type is 'xml'"]),
        (chat, {"response_format": {}}, ["response_format.type is None"]),
        (chat, {"tools": {}}, ["tools"]),
        (
            chat,
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            ["tools[0]", "parameters"],
        ),
        (chat, {"draft_len": "x"}, ["draft_len is 'x'", "auto"]),
        (chat, {"stop": ["a", ""]}, ["stop", "none empty"]),
        (chat, {"messages": [{"role": "user", "content": "\ud800"}]}, ["messages[0].content"]),
        (chat, {"stop": "\ud800"}, ["stop"]),
        (completion, {"prompt": "\ud800"}, ["prompt"]),
        (chat, {"session": ""}, ["session"]),
        (chat, {"session": 1}, ["session is 1"]),
        (chat, {"model": 1}, ["model is 1"]),
        (completion, {"prompt": None}, ["prompt is None"]),
        (completion, {"prompt": []}, ["prompt is []"]),
        (completion, {"prompt": ["a", "b"]}, ["prompt"]),
        (completion, {"prompt": [1, True]}, ["prompt"]),
        (completion, {"suffix": "x"}, ["suffix"]),
        (completion, {"echo": True}, ["echo"]),
        (completion, {"best_of": 2}, ["best_of is 2"]),
        (completion, {"logprobs": 21}, ["logprobs is 21"]),
    ],
)
def test_a_wrong_parameter_is_named(check, body, words):
    with pytest.raises(UsageError) as refused:
        check(**body)
    assert all(word in str(refused.value) for word in words), refused.value
    assert "\n" not in str(refused.value)


def test_an_unknown_model():
    openai.check_model(None, ["a"])
    openai.check_model("a", ["a", "b"])
    with pytest.raises(UsageError, match="model is 'gpt-4o'; here is a or b"):
        openai.check_model("gpt-4o", ["a", "b"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@pytest.mark.parametrize("prompt", ["hi", [1, 2]])
def test_a_list_of_one_prompt_is_that_prompt(prompt):
    assert completion(prompt=[prompt]).prompt == prompt


NAMES = [*openai.NUMBERS, "messages", "prompt", "tools", "stop", "seed", "draft_len", "logit_bias"]
NAMES += ["tool_choice", "response_format", "stream_options", "chat_template_kwargs", "n", "model"]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4))
def test_whatever_json_a_body_is_made_of(body):
    for check in (chat, completion):
        with suppress(UsageError):
            check(**body)


class Answer(SimpleNamespace):
    """A turn as `Body` sees one."""

    def message(self):
        return {"tool_calls": [tool_call(name, call) for name, call in self.calls]}


CALLS = [("call_0", ToolCall("f", {"x": 1})), ("call_1", ToolCall("g", {}))]
ANSWER = Answer(
    settings={"model": "m"},
    request=SimpleNamespace(stats=Stats(5, 4, 3), finish_reason="stop"),
    finish_reason="tool_calls",
    calls=CALLS,
)


def test_a_piece_becomes_deltas_of_one_kind_each():
    piece = SimpleNamespace(text="said", thoughts=[("thou", True), ("ght", False)], calls=[1])
    thoughts, said, calls = chat().deltas(ANSWER, piece)
    assert (thoughts, said) == ({"reasoning_content": "thought"}, {"content": "said"})
    (call,) = calls["tool_calls"]
    assert (call["index"], call["id"], call["function"]["name"]) == (1, "call_1", "g")
    nothing = SimpleNamespace(text="", thoughts=[], calls=[])
    assert chat().deltas(ANSWER, nothing) == completion().deltas(ANSWER, nothing) == []
    assert completion().deltas(ANSWER, piece) == [{"text": "said"}]


def test_i02_i04_the_last_chunks():
    (last,) = chat().last_chunks(ANSWER)
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert last["object"] == "chat.completion.chunk"
    _, counted = chat(stream_options={"include_usage": True}).last_chunks(ANSWER)
    assert counted["choices"] == []
    assert counted["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert counted["usage"]["total_tokens"] == 8
    assert completion().last_chunks(ANSWER)[0]["object"] == "text_completion"
    assert openai.usage(None)["total_tokens"] == 0
