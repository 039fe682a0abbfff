"""Chat templates rendered by mlx-mtp and by transformers."""

import pytest

from mlx_mtp.text.messages import checked_messages, checked_tools
from tests.text.test_messages import SCHEMA, tool
from tests.text.test_turns import SOURCES, TEMPLATES, TINY, TOKENIZER, result, said, user

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

SYSTEM = {"role": "system", "content": "Be brief."}
LOOP = [
    user("Look."),
    said("So: ", ("read", {"path": "a.py", "n": [1, {"deep": None}]}), ("add", {}), thoughts="hm"),
    result(0, "x = 1"),
    result(1, "3"),
]
CHATS = {
    "one turn": [user(" hi ")],
    "system": [SYSTEM, user("hi")],
    "two system messages": [SYSTEM, user("hi"), SYSTEM, user("you")],
    "parts": [user([{"type": "text", "text": "a {b} <c>\n"}])],
    "thoughts sent back": [user("hi"), said("<|channel>thought\nhm<channel|>Yes."), user("you")],
    "reasoning sent back": [user("hi"), said("Yes.", thoughts="hm"), user("you")],
    "two answers": [user("hi"), said("Yes."), said("No."), user("you")],
    "calls": LOOP[:2],
    "results": LOOP,
    "answer": [*LOOP, said("It is 1."), user("Thanks")],
    "calls again": [*LOOP, said("", ("add", {"a": "<b>", "c": 1.5})), result(0, ""), user("So?")],
}


@pytest.fixture(scope="module")
def reference():
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(TINY / "tokenizer.json"), bos_token="<bos>", eos_token="<eos>"
    )


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("tools", [None, checked_tools([tool(SCHEMA)])], ids=["", "tools"])
@pytest.mark.parametrize("chat", CHATS.values(), ids=list(CHATS))
@pytest.mark.parametrize("name", TEMPLATES)
def test_e06_the_ids_are_those_of_transformers(name, chat, tools, thinking, reference):
    messages = checked_messages(chat)
    ids = TEMPLATES[name].encode(messages, TOKENIZER, tools=tools, enable_thinking=thinking)
    assert ids.count(TOKENIZER.bos_id) == 1
    assert ids == reference.apply_chat_template(
        messages,
        tools=tools,
        chat_template=SOURCES[name],
        add_generation_prompt=True,
        enable_thinking=thinking,
        return_dict=False,
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_to_go_on_with_is_that_of_transformers(name, reference):
    messages = checked_messages([user("hi"), said("Well, I")])
    ids = TEMPLATES[name].encode(messages, TOKENIZER)
    assert ids == reference.apply_chat_template(
        messages, chat_template=SOURCES[name], continue_final_message=True, return_dict=False
    )
