"""Chats on the embedded pair: each turn goes on from KV, and says what a fresh engine says."""

from __future__ import annotations

import json
from itertools import pairwise

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp.conversation import Ask, Conversations
from mlx_mtp.engine.kv import KVLayout, capacity_for
from mlx_mtp.engine.requests import Request
from mlx_mtp.errors import UsageError
from mlx_mtp.generation import Options


def tool(name, *parameters):
    properties = {one: {"type": "string", "description": f"The {one}."} for one in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    about = {"name": name, "description": f"{name} something.", "parameters": schema}
    return {"type": "function", "function": about}


TOOLS = [tool("read_file", "path"), tool("write_file", "path", "content"), tool("run", "command")]
SYSTEM = {"role": "system", "content": "You are a coding assistant. Be brief."}
FILE = "".join(f"def part_{i}(a, b):\n    return a * {i} + b\n\n\n" for i in range(16))
ASKED = [
    "Read the file util.py.",
    "Write a function that adds two numbers to calc.py.",
    "Run the tests.",
    "Read the file main.py and tell me what it does.",
    "Write a function gcd(a, b).",
]


@pytest.fixture(scope="module")
def pair():
    return mlx_mtp.load()


class Client:
    """Sends the whole history with every turn, as agents do: arguments written anew in another
    order, thoughts left out."""

    def __init__(self, pair, engine=None, conversations=None, draft_len=4, **ask):
        self.pair = pair
        self.engine = engine or pair.engine(cache_bytes=1 << 30)
        self.conversations = conversations or Conversations(pair)
        self.options = Options(max_tokens=120, temperature=0, draft_len=draft_len)
        self.ask = {"tools": TOOLS} | ask
        self.messages = [SYSTEM]
        self.turns = []

    def start(self):
        return self.conversations.start(self.engine, Ask(self.messages, **self.ask), self.options)

    def step(self, *texts):
        """One turn of the model, after what the user or tools say."""
        self.messages += texts
        turn = self.start()
        while self.engine.busy:
            for event in self.engine.step():
                turn.take(event)
        self.turns.append(turn)
        self.keep(turn)
        return turn

    def keep(self, turn):
        message = turn.message()
        message.pop("reasoning_content", None)
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
        self.messages.append(message)

    def say(self, text):
        """A user's turn, with all the calls that come of it."""
        turn = self.step({"role": "user", "content": text})
        for _ in range(2):
            if turn.finish_reason != "tool_calls":
                break
            turn = self.step(
                *({"role": "tool", "tool_call_id": name, "content": FILE} for name, _ in turn.calls)
            )
        return turn


def fresh(pair, turn):
    """What a fresh engine says to the same prompt, decoding plainly."""
    engine = pair.engine()
    request = Request(list(turn.request.prompt), 120, eos=turn.request.eos, draft_len=0)
    engine.add(request)
    while engine.busy:
        engine.step()
    assert request.stats.cached_tokens == 0
    return request.tokens


def likeliest(target, ids, chunk=256):
    """The token that the target would say behind each of `ids`."""
    layout = KVLayout(target.config.text, target.dtype)
    buffers, found = layout.allocate(1, capacity_for(len(ids))), []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        view = layout.view(buffers, mx.array([start]), len(part), start)
        hidden = target(mx.array([part]), view)
        buffers = view.buffers
        found += mx.argmax(target.logits(hidden), -1)[0].tolist()
    return found


def check(turns):
    """Each turn is cached as far as the one before it got, and says what the target says when it
    reads the whole conversation anew."""
    whole = turns[-1].request.prompt + turns[-1].request.tokens
    best = likeliest(turns[-1]._pair.target, whole)
    for before, turn in pairwise([None, *turns]):
        request = turn.request
        said = request.prompt + request.tokens
        assert whole[: len(said)] == said
        assert request.tokens == best[len(request.prompt) - 1 : len(said) - 1]
        if request.ended_by_eos:
            assert best[len(said) - 1] in request.eos
        if before is not None:
            held = before.request.stats.prompt_tokens + before.request.stats.completion_tokens
            assert request.stats.cached_tokens >= 0.95 * held


@pytest.mark.parametrize(("thinking", "draft_len"), [(False, 0), (True, None)])
def test_five_turns_with_tools_past_the_window(pair, thinking, draft_len):
    client = Client(pair, thinking=thinking, draft_len=draft_len)
    for text in ASKED:
        client.say(text)
    check(client.turns)
    assert sum(turn.finish_reason == "tool_calls" for turn in client.turns) >= 3
    assert client.turns[-1].request.stats.prompt_tokens >= 1500
    assert any(turn.message().get("reasoning_content") for turn in client.turns) == thinking
    drafted = sum(turn.request.stats.accepted for turn in client.turns)
    assert (drafted > 0) == (draft_len != 0)


def test_another_conversation_in_between_and_one_that_forks_the_prefix(pair):
    client = Client(pair)
    client.say(ASKED[0])
    other = Client(pair, client.engine, client.conversations, tools=None)
    other.messages = []
    other.say("Write a function that reverses a string.")
    fork = Client(pair, client.engine, client.conversations)
    fork.say(ASKED[1])
    assert fork.turns[0].request.stats.cached_tokens > 100  # system message and tools
    other.say("Now add a docstring.")
    for text in ASKED[1:3]:
        client.say(text)
    check(client.turns)
    check(fork.turns)
    check(other.turns)


def test_a_cancelled_turn_and_the_one_after_it(pair):
    client = Client(pair)
    for text in ASKED[:2]:
        client.say(text)
    client.messages.append({"role": "user", "content": ASKED[4]})
    cancelled = client.start()
    while len(cancelled.request.tokens) < 12:
        for event in client.engine.step():
            cancelled.take(event)
    cancelled.cancel()
    assert cancelled.finish_reason == "cancelled"
    partial = cancelled.message()["content"]
    assert partial.startswith("Here is `gcd`")
    client.keep(cancelled)
    after = client.step({"role": "user", "content": ASKED[2]})
    held = len(cancelled.request.prompt) + len(cancelled.request.tokens)
    assert after.request.stats.cached_tokens >= 0.95 * held
    assert after.request.tokens == fresh(pair, after)
    # A client that forgets what was cancelled goes on from before it.
    del client.messages[-3:]
    client.messages[-1] = {"role": "user", "content": ASKED[3]}
    again = client.step()
    assert again.request.stats.cached_tokens >= 0.95 * len(cancelled.request.prompt)
    assert again.request.tokens == fresh(pair, again)


def test_b09_what_a_tool_choice_asks_for(pair):
    client = Client(pair, tool_choice="required")
    turn = client.step({"role": "user", "content": "Hello."})
    assert turn.request.tokens[0] == pair.tokenizer.control["<|tool_call>"]
    client = Client(pair, tool_choice="run")
    turn = client.step({"role": "user", "content": "Read the file util.py."})
    assert [call.name for _, call in turn.calls] == ["run"]
    client = Client(pair, tool_choice="none")
    turn = client.step({"role": "user", "content": "Read the file util.py."})
    assert turn.calls == []
    assert turn.finish_reason != "tool_calls"
    with pytest.raises(UsageError, match="tool_choice asks for 'grep'"):
        Client(pair, tool_choice="grep").step({"role": "user", "content": "Hello."})


@pytest.mark.parametrize("thinking", [False, True])
def test_a_schema_is_kept_to_at_any_draft_length(pair, thinking):
    properties = {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}}
    schema = {
        "type": "object",
        "properties": properties | {"ok": {"type": "boolean"}},
        "required": ["name", "n", "ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    said = []
    for draft_len in (0, 4, 8):
        client = Client(
            pair, tools=None, response_format=wanted, thinking=thinking, draft_len=draft_len
        )
        client.options = Options(max_tokens=200, temperature=1.0, seed=5, draft_len=draft_len)
        turn = client.step({"role": "user", "content": "Describe yourself."})
        assert turn.finish_reason == "stop"
        assert set(json.loads(turn.message()["content"])) == {"name", "n", "ok"}
        said.append(turn.message())
    assert said[0] == said[1] == said[2]


def test_what_cannot_be_said_is_the_callers_mistake(pair):
    client = Client(pair, tools=None, response_format={"type": "regex", "regex": "a"})
    client.options = Options(max_tokens=20, min_tokens=10)
    with pytest.raises(UsageError, match="nothing is left that may be said"):
        client.step({"role": "user", "content": "Hello."})


def test_a_turn_that_a_stop_string_ended_is_not_remembered(pair):
    client = Client(pair, tools=None)
    client.options = Options(max_tokens=60, temperature=0, stop=("```",))
    first = client.step({"role": "user", "content": ASKED[4]})
    assert "```" not in first.message()["content"]
    second = client.step({"role": "user", "content": ASKED[4]})
    assert pair.tokenizer.decode(second.request.prompt).count("```") == 0
    assert second.request.tokens == fresh(pair, second)[: len(second.request.tokens)]
