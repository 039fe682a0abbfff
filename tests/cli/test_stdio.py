"""The protocol of `mlx-mtp stdio` from a client's side, and how the process ends."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp import conversation
from mlx_mtp.cli.backends import stdio
from mlx_mtp.cli.backends.service import Service
from mlx_mtp.errors import LoadError, MtpError
from mlx_mtp.generation import Answer
from mlx_mtp.weights.load import load_pair
from tests.cli.conftest import COMMAND, environment
from tests.cli.talk import ENDLESS, Child, Inside

USER = [{"role": "user", "content": "def gcd(a, b):"}]
CANCELLED, FULL, LOAD, CLOSING = -32800, -32001, -32002, -32004


def service(load=load_pair, rows=1, **how):
    return Service(
        lambda progress: load(progress=progress),
        lambda pair: pair.engine(rows=rows, cache_bytes=1 << 26),
        rows=rows,
        **how,
    )


@pytest.fixture(scope="module")
def running():
    """A service with the embedded pair, one request at a time, two may wait."""
    found = service(most_waiting=2)
    assert found.loaded.wait(30)
    return found


@pytest.fixture
def talk(running):
    talk = Inside(running)
    yield talk
    assert talk.end() == 0
    answered = [m["id"] for m in talk.seen if "method" not in m and m["id"] is not None]
    assert len(answered) == len(set(answered))


def code(message):
    return message["error"]["code"]


def started(talk, name, **more):
    """A request that goes on and on, and has begun to."""
    talk.ask(name, "completions", prompt="x", stream=True, **ENDLESS | more)
    talk.until(lambda m: m.get("method") == "completions.chunk" and m["params"]["id"] == name)


# -- requests and their answers -------------------------------------------------------------------


def test_a_chat_as_openai_has_it(talk):
    result = talk.call(1, "chat.completions", messages=USER, max_tokens=4, x=1)["result"]
    assert result["object"] == "chat.completion"
    (choice,) = result["choices"]
    assert (choice["finish_reason"], choice["message"]["role"]) == ("length", "assistant")
    assert result["usage"]["completion_tokens"] == 4
    ours = result["mlx_mtp"]
    assert ours["ignored"] == ["x"]
    assert {"drafted", "accepted", "draft_len", "prefill_ms", "decode_tps"} < set(ours)


def test_i02_i04_a_stream_says_what_the_answer_says(talk):
    usage = {"include_usage": True}
    asked = {"messages": USER, "stream": True, "stream_options": usage, "max_tokens": 40}
    result = talk.call(1, "chat.completions", **asked)["result"]
    chunks = [m["params"] for m in talk.seen if m.get("method") == "chat.completions.chunk"]
    assert {chunk["id"] for chunk in chunks} == {1}
    assert {chunk["chunk"]["id"] for chunk in chunks} == {result["id"]}
    *deltas, last, counted = [chunk["chunk"] for chunk in chunks]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in deltas)
    assert text == result["choices"][0]["message"]["content"]
    assert deltas[0]["choices"][0]["delta"]["role"] == "assistant"
    assert {c["choices"][0]["finish_reason"] for c in deltas} == {None}
    assert last["choices"][0] | {"delta": {}} == last["choices"][0]
    assert last["choices"][0]["finish_reason"] == result["choices"][0]["finish_reason"]
    assert (counted["choices"], counted["usage"]) == ([], result["usage"])


SAID = "<|channel>thought\nhm<channel|>so<|tool_call>call:f{x:[1,2]}<tool_call|>"


def test_thoughts_and_calls_are_apart(talk, monkeypatch):
    """The demo pair knows no tools: what it says is exchanged for something else."""
    left = talk.service.model.tokenizer.encode(SAID, bos=False, parse_special=True)

    class Scripted(conversation.OutputStream):
        def add(self, token):
            return super().add(left.pop(0)) or not left

    monkeypatch.setattr(conversation, "OutputStream", Scripted)
    tool = {"type": "function", "function": {"name": "f"}}
    asked = {"messages": USER, "tools": [tool], "stream": True, "min_tokens": 99}
    (choice,) = talk.call(1, "chat.completions", **asked)["result"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("so", "hm")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"x": [1, 2]}'}
    deltas = [
        m["params"]["chunk"]["choices"][0]["delta"]
        for m in talk.seen
        if m.get("method") == "chat.completions.chunk"
    ]
    assert "".join(delta.get("content", "") for delta in deltas) == "so"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert [d["tool_calls"] for d in deltas if "tool_calls" in d] == [[{"index": 0} | call]]


def test_completions_by_text_and_by_ids(talk):
    first = talk.complete(1, return_token_ids=True, logprobs=1)
    (choice,) = first["choices"]
    again = talk.complete(2, prompt=choice["prompt_token_ids"])
    assert again["choices"][0]["text"] == choice["text"]
    logprobs = choice["logprobs"]
    assert len(choice["token_ids"]) == len(logprobs["token_logprobs"]) == 8
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
    assert all(max(at.values()) <= 0 for at in logprobs["top_logprobs"])


def test_a_body_alone_is_a_request(talk):
    talk.send(b'\xef\xbb\xbf{"prompt": "hi", "max_tokens": 2}\r\n')  # H06, H07
    assert talk.answer(1)["result"]["object"] == "text_completion"
    talk.send(b"\n  \n")
    talk.send({"messages": USER, "max_tokens": 2})
    assert talk.answer(4)["result"]["object"] == "chat.completion"


def test_b04_seeds_a08_nothing_asked_for_c07_the_same_again(talk):
    texts = [
        talk.complete(n, temperature=9, seed=seed)["choices"][0]["text"]
        for n, seed in enumerate((1, 2, 1))
    ]
    assert texts[0] == texts[2] != texts[1]
    nothing = talk.complete(4, max_tokens=0)
    assert nothing["choices"][0]["text"] == ""
    assert nothing["choices"][0]["finish_reason"] == "length"
    greedy = [talk.complete(n)["choices"][0]["text"] for n in (5, 6)]
    assert greedy[0] == greedy[1]


def test_i16_an_end_as_the_first_token(talk, running):
    eos = {str(running._pair.defaults.eos_token_ids[0]): 100}
    for body in ({"stream": True}, {}):
        result = talk.complete(str(body), logit_bias=eos, **body)
        assert result["choices"][0]["finish_reason"] == "stop"
        assert (result["choices"][0]["text"], result["usage"]["completion_tokens"]) == ("", 0)


@pytest.mark.parametrize("prompt", ["", "h", "hi", " "])
def test_h23_short_prompts(talk, prompt):
    assert talk.complete(1, prompt=prompt, max_tokens=2)["usage"]["completion_tokens"] <= 2


def test_tokens_are_counted_as_the_engine_reads_them(talk):
    count = talk.call(1, "tokens.count", messages=USER)["result"]["tokens"]
    usage = talk.call(2, "chat.completions", messages=USER, max_tokens=1)["result"]["usage"]
    assert count == usage["prompt_tokens"]
    assert talk.call(3, "tokens.count", prompt=[1, 2, 3])["result"] == {"tokens": 3}
    assert code(talk.call(4, "tokens.count")) == -32602


def test_what_is_there(talk):
    about = talk.call(1, "initialize", protocol="mlx-mtp/1")["result"]
    assert (about["protocol"], about["model"]["state"]) == ("mlx-mtp/1", "ready")
    assert about["model"]["context"] == 32768
    assert about["capabilities"]["max_queue"] == 2
    (model,) = talk.call(2, "models.list")["result"]["data"]
    assert model["id"] == about["model"]["id"]
    assert talk.complete(3, model=model["id"])["model"] == model["id"]
    wrong = talk.call(4, "completions", prompt="x", model="gpt-4o")
    assert code(wrong) == -32602
    assert "gpt-4o" in wrong["error"]["message"]


def test_sessions(talk):
    messages = [{"role": "user", "content": "def gcd(a, b): " * 20}]
    body = {"messages": messages, "max_tokens": 9, "session": "s"}
    first = talk.call(1, "chat.completions", **body)["result"]
    messages += [first["choices"][0]["message"], *USER]
    second = talk.call(2, "chat.completions", **body)["result"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == second["mlx_mtp"]["cached_tokens"]
    assert cached >= 0.95 * (first["usage"]["total_tokens"] - 1)  # C16
    assert talk.call(3, "session.close", session="s")["result"] is None
    assert code(talk.call(4, "session.close")) == -32602


# -- what is no request ---------------------------------------------------------------------------

GARBAGE = [
    (b'{"id":7,\n', -32700),  # H04
    (b"\xff\xfe\n", -32700),  # H03
    (b'"caf\xe9"\n', -32700),
    (b"NaN\n", -32700),
    (b"[" * 100_000 + b"\n", -32700),
    (b"[]\n", -32600),
    (b'[{"jsonrpc":"2.0","id":1,"method":"models.list"}]\n', -32600),
    (b"7\n", -32600),
    (b"{}\n", -32600),
    (b'{"jsonrpc":"1.0","id":null,"method":"models.list"}\n', -32600),
    (b'{"jsonrpc":"2.0","id":null}\n', -32600),
    (b'{"jsonrpc":"2.0","id":null,"method":7}\n', -32600),
    (b'{"jsonrpc":"2.0","id":true,"method":"models.list"}\n', -32600),
    (b'{"jsonrpc":"2.0","id":[1],"method":"models.list"}\n', -32600),
    (b'{"jsonrpc":"2.0","id":null,"method":"models.list","params":[1]}\n', -32602),
    (b'{"jsonrpc":"2.0","id":null,"method":"no.such"}\n', -32601),
    (b'{"jsonrpc":"2.0","id":null,"method":"completions","params":{}}\n', -32602),
    (b'{"jsonrpc":"2.0","id":null,"result":1}\n', -32600),
]


def test_garbage_is_answered_and_changes_nothing(talk):
    before = talk.complete("before")["choices"]
    for line, wanted in GARBAGE:
        talk.send(line)
        assert code(talk.answer(None)) == wanted, line
    assert talk.complete("after")["choices"] == before


def test_h21_ids_of_every_kind(talk):
    for name in (0, -1, 1.5, "1", "x" * 100_000, 10**30, None):
        assert "result" in talk.call(name, "models.list")


def test_h21_a_live_id_used_again(talk):
    started(talk, 1)
    talk.ask(1, "models.list")
    refused = talk.answer(None)
    assert code(refused) == -32600
    talk.ask(1.0, "completions", prompt="x")
    assert code(talk.answer(None)) == -32600
    talk.cancel(1)
    assert code(talk.answer(1)) == CANCELLED
    talk.seen.clear()
    assert "result" in talk.call(1, "models.list")


def test_nobody_waits_for_what_comes_of_a_notification(talk):
    for method in ("completions", "models.list", "no.such", "tokens.count", "session.close"):
        talk.send({"jsonrpc": "2.0", "method": method, "params": {"prompt": "x"}})
    talk.send({"jsonrpc": "2.0", "method": "completions", "params": 7})
    talk.cancel("nothing of that name")
    talk.cancel(None)
    talk.cancel([])
    talk.complete(1)
    assert [m["id"] for m in talk.seen] == [1]


def test_a_prompt_of_many_mb_is_refused_at_once(talk):
    """It would take half a minute to count its tokens, and nobody else would be heard."""
    talk.ask(1, "completions", prompt="word " * 4_000_000)
    started = time.monotonic()
    error = talk.answer(1)["error"]
    assert error["code"] == -32602
    assert "more than" in error["message"]
    assert error["data"]["tokens"] > error["data"]["limit"]
    assert time.monotonic() - started < 5


def test_a_prompt_longer_than_the_context_says_by_how_much(talk):
    refused = talk.call(1, "completions", prompt=[5] * 40_000)
    assert code(refused) == -32602
    assert refused["error"]["data"] == {"tokens": 40_000, "limit": 32_768}
    refused = talk.call(2, "completions", prompt=[5_000])
    assert code(refused) == -32602


def test_h22_an_error_changes_nothing_for_the_next(talk, monkeypatch):
    before = talk.complete(1)["choices"]
    with monkeypatch.context() as patched:
        patched.setattr(Answer, "take", lambda self, event: 1 / 0)
        failed = talk.call(2, "completions", prompt="x")
    assert failed["error"] == {"code": -32603, "message": "ZeroDivisionError: division by zero"}
    assert talk.complete(3)["choices"] == before
    with monkeypatch.context() as patched:
        patched.setattr(talk.service._engine, "step", lambda: 1 / 0)
        assert code(talk.call(4, "completions", prompt="x")) == -32603
    assert talk.complete(5)["choices"] == before
    with monkeypatch.context() as patched:
        patched.setattr(Answer, "result", lambda self: 1 / 0)
        assert code(talk.call(6, "completions", prompt="x")) == -32603
    assert talk.complete(7)["choices"] == before


def test_i11_a_failure_in_a_stream_is_an_error(talk, monkeypatch):
    def fail(self, event):
        raise MtpError("the logits are no numbers")

    with monkeypatch.context() as patched:
        patched.setattr(Answer, "take", fail)
        failed = talk.call(1, "completions", prompt="x", stream=True)
    assert failed["error"]["message"] == "the logits are no numbers"
    chunks = [m["params"]["chunk"] for m in talk.seen if "method" in m]
    assert not any(c["choices"][0]["finish_reason"] for c in chunks)


# -- cancelling, waiting --------------------------------------------------------------------------


def test_a_cancelled_stream_tells_what_was_said_and_leaves_its_kv(talk):
    started(talk, 1)
    talk.cancel(1)
    asked = time.monotonic()
    ended = talk.answer(1)
    assert time.monotonic() - asked < 1
    assert code(ended) == CANCELLED
    chunks = [m["params"]["chunk"] for m in talk.seen if m.get("method") == "completions.chunk"]
    said = ended["error"]["data"]
    assert said["content"] == "".join(c["choices"][0]["text"] for c in chunks) != ""
    assert said["usage"]["completion_tokens"] > 0
    talk.cancel(1)  # again: there is nothing of that name
    ids = talk.complete(2, prompt="x" + said["content"], max_tokens=1)
    assert ids["mlx_mtp"]["cached_tokens"] > 0


def test_a_prompt_is_left_within_a_chunk(talk):
    talk.ask(1, "completions", prompt=[5] * 30_000, max_tokens=1)
    time.sleep(0.3)
    talk.cancel(1)
    asked = time.monotonic()
    ended = talk.answer(1)
    assert time.monotonic() - asked < 10  # the whole takes minutes
    assert ended["error"]["data"]["content"] == ""
    assert ended["error"]["data"]["usage"]["completion_tokens"] == 0


def test_the_queue_is_bounded_and_answers_come_at_once_beside_a_request(talk):
    started(talk, 1)
    for name in (2, 3):
        talk.ask(name, "completions", prompt="x", max_tokens=2)
    full = talk.call(4, "completions", prompt="x")
    assert code(full) == FULL
    assert full["error"]["data"]["retry_after_ms"] > 0
    talk.seen.clear()
    asked = time.monotonic()
    for n, method in enumerate(("initialize", "models.list", "no.such", "tokens.count")):
        talk.call(f"m{n}", method, prompt="x")
    assert code(talk.call("wrong", "completions", prompt="x", temperature=-1)) == -32602
    assert time.monotonic() - asked < 1
    assert all("id" in m or m["params"]["id"] == 1 for m in talk.seen if "result" in m)
    talk.cancel(3)  # in the queue
    ended = talk.answer(3)
    assert ended["error"]["data"] == {
        "content": "",
        "usage": {
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "total_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    talk.cancel(1)
    assert code(talk.answer(1)) == CANCELLED
    assert "result" in talk.answer(2)


def test_live_requests_say_how_far_they_are(talk, monkeypatch):
    monkeypatch.setattr(stdio, "TICK", 0.05)
    other = Inside(talk.service)  # its threads tick faster
    other.ask(1, "completions", prompt=[5] * 1100, **ENDLESS)
    other.ask(2, "completions", prompt="x", max_tokens=1)
    seen = {}
    while {"prefill", "generate"} - {phase for phase, _ in seen} or (("queue", 2) not in seen):
        message = other.until(lambda m: m.get("method") == "progress")
        params = message["params"]
        seen[params["phase"], params["id"]] = params
    assert seen["prefill", 1]["total"] == 1100
    assert seen["generate", 1]["total"] == 4000
    assert seen["queue", 2]["total"] == 1
    other.cancel(1)
    assert other.answer(1)
    assert other.answer(2)
    assert other.end() == 0


def test_i13_requests_side_by_side_say_what_each_says_alone():
    beside = service(rows=4)
    assert beside.loaded.wait(30)
    talk = Inside(beside)
    bodies = [
        {"prompt": "def gcd(a, b):", "max_tokens": 30},
        {"prompt": "class Stack:", "max_tokens": 5},
        {"prompt": "import os", "max_tokens": 20, "temperature": 1, "seed": 3},  # B06
        {"prompt": "x = [", "max_tokens": 20, "temperature": 1, "seed": 4, "draft_len": 0},
    ]
    alone = [talk.call(f"alone {n}", "completions", **body) for n, body in enumerate(bodies)]
    for n, body in enumerate(bodies):
        talk.ask(n, "completions", **body)
    together = {}
    while len(together) < len(bodies):
        message = talk.until(lambda m: m.get("id") in range(4))
        together[message["id"]] = message
    for n, one in enumerate(alone):
        assert together[n]["result"]["choices"] == one["result"]["choices"], n
    assert talk.end() == 0


# -- loading --------------------------------------------------------------------------------------


def test_while_the_model_loads(monkeypatch):
    monkeypatch.setattr(stdio, "TICK", 0.05)
    gate = threading.Event()

    def slowly(progress):
        progress("weights", 3, 7)
        gate.wait(20)
        return load_pair()

    talk = Inside(service(slowly))
    assert talk.call(1, "initialize")["result"]["model"]["state"] == "loading"
    assert code(talk.call(2, "completions", prompt="x", n=2)) == -32602
    for name in (3, 4):
        talk.ask(name, "completions", prompt="x", max_tokens=2)
    talk.ask(5, "tokens.count", prompt="x")
    talk.ask(6, "tokens.count", prompt="x")
    progress = talk.until(lambda m: m.get("method") == "progress")["params"]
    assert (progress["phase"], progress["done"], progress["total"]) == ("load", 3, 7)
    talk.cancel(4)
    assert code(talk.answer(4)) == CANCELLED
    talk.cancel(6)
    assert code(talk.answer(6)) == CANCELLED
    talk.ask(7, "completions", prompt="x", model="gpt-4o")
    gate.set()
    assert code(talk.answer(7)) == -32602
    for name in (3, 5):
        assert "result" in talk.answer(name)
    assert talk.end() == 0


def test_a_model_that_cannot_be_loaded():
    gate = threading.Event()

    def load(progress):
        gate.wait(20)
        raise LoadError("the weights are not there")

    talk = Inside(service(load))
    talk.ask(1, "completions", prompt="x")
    talk.ask(2, "tokens.count", prompt="x")
    gate.set()
    assert {code(talk.answer(1)), code(talk.answer(2))} == {LOAD}
    refused = talk.call(3, "completions", prompt="x")
    assert refused["error"] == {"code": LOAD, "message": "the weights are not there"}
    about = talk.call(4, "initialize")["result"]["model"]
    assert (about["state"], about["error"]) == ("failed", "the weights are not there")
    assert code(talk.call(5, "session.close", session="s")) == LOAD
    assert talk.end() == 3


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
KEYS = ("messages", "prompt", "model", "session", "requestId", "protocol", "stream", "n", "stop")
PARAMS = ODD | st.dictionaries(st.sampled_from(KEYS), ODD, max_size=3)
KNOWN = "initialize models.list completions chat.completions session.close shutdown no.such"
METHOD = ODD | st.sampled_from([*KNOWN.split(), "$/cancel_request"])
MESSAGE = st.fixed_dictionaries(
    {},
    optional={"jsonrpc": st.just("2.0") | ODD, "id": ODD, "method": METHOD, "params": PARAMS},
)


def test_whatever_json_comes_is_answered_at_most_once():
    def load(progress):
        raise LoadError("there is no model")

    talk = Inside(service(load))
    talk.service.loaded.wait(10)
    lines = count()

    @settings(max_examples=200, deadline=None)
    @given(MESSAGE | ODD)
    def check(message):
        talk.seen.clear()
        talk.send(json.dumps(message).encode() + b"\n")
        assert "result" in talk.call(f"line {next(lines)}", "models.list")
        answers = talk.seen[:-1]
        assert len(answers) <= 1
        assert answers or (isinstance(message, dict) and "id" not in message)
        assert all(("result" in a) != ("error" in a) for a in answers)

    check()
    assert talk.end() in (0, 3)


# -- the end --------------------------------------------------------------------------------------


def test_shutdown_takes_no_more_work(talk):
    started(talk, 1)
    assert talk.call(2, "shutdown")["result"] is None
    assert code(talk.call(3, "completions", prompt="x")) == CLOSING
    assert "result" in talk.call(4, "initialize")
    talk.cancel(1)
    assert code(talk.answer(1)) == CANCELLED


def test_exit_answers_everyone_and_ends(running):
    talk = Inside(running)
    started(talk, 1)
    talk.ask(2, "completions", prompt="x")
    talk.ask(3, "exit")
    asked = time.monotonic()
    assert talk.answer(3)["result"] is None
    assert {code(talk.answer(1)), code(talk.answer(2))} == {CANCELLED}
    talk.thread.join(5)
    assert talk.code == 0
    assert time.monotonic() - asked < 2


def test_exit_while_the_model_loads_is_heard():
    gate = threading.Event()
    talk = Inside(service(lambda progress: gate.wait(20)))
    talk.ask(1, "completions", prompt="x")
    talk.ask(2, "tokens.count", prompt="x")
    talk.ask(3, "exit")
    assert {code(talk.answer(1)), code(talk.answer(2))} == {CANCELLED}
    talk.thread.join(2)
    assert talk.code == 0
    gate.set()


def test_h10_eof_finishes_what_was_asked(running):
    talk = Inside(running)
    for name in (1, 2, 3):
        talk.ask(name, "completions", prompt="x", max_tokens=20)
    assert talk.end() == 0
    assert [talk.answer(name)["result"]["usage"] for name in (1, 2, 3)]


def run(stdin, *arguments, shell="", **how):
    command = [*COMMAND, "stdio", *arguments]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    done = subprocess.run(
        command, input=stdin, capture_output=True, env=environment(), timeout=30, **how
    )
    return done, [json.loads(line) for line in done.stdout.splitlines()]


RAW = b"".join(line for line, _ in GARBAGE) + b"x" * (20 << 20) + b"\n"


def test_a_raw_pipe_with_stderr_closed_and_no_newline_at_the_end():
    last = b'{"prompt": "def gcd(a, b):", "max_tokens": 4}'
    done, found = run(RAW + last, shell="2>&-")  # H07, H13, H01
    assert done.returncode == 0
    assert [code(m) for m in found[:-1]] == [wanted for _, wanted in GARBAGE] + [-32700]
    assert found[-1]["id"] == len(GARBAGE) + 2
    assert found[-1]["result"]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("size", [65535, 65537, 1 << 20, 20 << 20])
def test_h01_long_lines_are_read_and_eof_in_the_middle_answered(size):
    long = {"prompt": "x", "max_tokens": 1, "padding": "x" * size}
    done, found = run(json.dumps(long).encode() + b'\n{"prompt": "x')
    assert done.returncode == 0
    assert found[0]["error"]["code"] == -32700
    assert found[1]["result"]["mlx_mtp"]["ignored"] == ["padding"]
    assert done.stderr == b""


@pytest.mark.parametrize("shell", ["0<&-", "</dev/null"])
def test_no_stdin(shell):
    done, found = run(None, shell=shell)
    assert (done.returncode, found, done.stderr) == (0, [], b"")


@pytest.mark.parametrize("shell", [">&-", ">/dev/full"])
def test_a_stdout_that_takes_nothing_is_exit_1(shell):
    done, _ = run(b'{"prompt": "x", "max_tokens": 1}\n', shell=shell)
    assert done.returncode == 1
    assert b"stdout" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_stray_print_does_not_get_among_the_lines():
    program = """
import os
from mlx_mtp.weights import load
before = load.load_pair
def load_pair(*given, **more):
    print("stray", flush=True)
    os.write(1, b"native\\n")
    os.system("echo child")
    return before(*given, **more)
load.load_pair = load_pair
from mlx_mtp.cli.main import run
run()
"""
    command = [COMMAND[0], "-c", program, "stdio"]
    asked = b'{"prompt": "x", "max_tokens": 1}\n'
    done = subprocess.run(command, input=asked, capture_output=True, timeout=30)
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [1]
    assert done.stderr == b"stray\nnative\nchild\n"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--parallel", "0"], "--parallel"),
        (["--parallel", "17"], "--parallel"),
        (["--max-queue", "-1"], "--max-queue"),
        (["--cache-gb", "-1"], "--cache-gb"),
        (["--draft-len", "9"], "9"),
        (["--draft-len", "x"], "--draft-len is 'x'"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(inside, arguments, word):
    ended, out, err = inside("stdio", *arguments)
    assert (ended, out) == (2, "")
    assert word in err


def test_a_folder_that_is_not_there_is_exit_3_if_something_was_asked():
    done, found = run(b'{"prompt": "x"}\n', "--model", "/nowhere")
    assert (done.returncode, code(found[0])) == (3, LOAD)
    assert done.stderr.count(b"\n") == 1
    assert run(b"", "--model", "/nowhere")[0].returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_h19_signals_end_it(number):
    child = Child()
    started(child, 1)
    sent = time.monotonic()
    child.process.send_signal(number)
    assert child.process.wait(timeout=5) == 128 + number
    assert time.monotonic() - sent < 2
    assert child.process.stderr.read() == b""


ASKED = json.dumps({"prompt": "x", **ENDLESS}).encode() + b"\n"


@pytest.mark.parametrize("asked", [b"", ASKED, ASKED.replace(b"{", b'{"stream": true,', 1)])
def test_h11_a_reader_that_goes_ends_it(asked):
    command = [*COMMAND, "stdio"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        process.stdin.write(asked + b'{"jsonrpc":"2.0","id":"x","method":"initialize"}\n')
        process.stdin.flush()
        process.stdout.readline()
        time.sleep(0.5)
        process.stdout.close()
        assert process.wait(timeout=2.5) == 0
        assert process.stderr.read() == b""


def test_h11_a_killed_parent_leaves_no_orphan():
    program = f"""
import subprocess, time
child = subprocess.Popen({[*COMMAND, "stdio"]}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdin.write({ASKED!r})
child.stdin.flush()
time.sleep(1)
print("started", flush=True)
time.sleep(60)
"""
    command = [COMMAND[0], "-c", program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as parent:
        assert parent.stdout.readline() == b"started\n"
        parent.kill()
        killed = time.monotonic()
        assert parent.stderr.read() == b""  # which the child has open, too, until it ends
        assert time.monotonic() - killed < 2.5


def resident(process):
    """Bytes."""
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(process.pid)], capture_output=True)
    return int(shown.stdout) * 1024


@pytest.mark.long
def test_a_reader_that_pauses_costs_no_memory():
    command = [*COMMAND, "stdio"]
    asked = json.dumps({"prompt": "x", "stream": True, "max_tokens": 30_000, "min_tokens": 30_000})
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(asked.encode() + b"\n")
        process.stdin.flush()
        for _ in range(200):
            process.stdout.readline()
        level = 0
        while level + (1 << 16) < (now := resident(process)):  # until all that may wait does
            level = now
            time.sleep(3)
        time.sleep(5)
        assert resident(process) - level < 1 << 18
        cancel = {"jsonrpc": "2.0", "method": "$/cancel_request", "params": {"requestId": 1}}
        process.stdin.write(json.dumps(cancel).encode() + b"\n")
        process.stdin.close()
        *chunks, last = map(json.loads, process.stdout)
        assert code(last) == CANCELLED
        assert all(m["method"] in ("completions.chunk", "progress") for m in chunks)
        assert process.wait(timeout=5) == 0


@pytest.mark.long
def test_j05_j06_requests_and_cancelled_ones_leave_no_memory():
    child = Child()
    levels = []
    for n in range(400):
        body = {"messages": [{"role": "user", "content": f"def f{n}(a, b):"}], "max_tokens": 16}
        if n % 4:
            assert "result" in child.call(n, "chat.completions", **body)
        else:
            child.ask(n, "chat.completions", stream=True, **body | ENDLESS)
            child.until(lambda m: m.get("method") == "chat.completions.chunk")
            child.cancel(n)
            assert code(child.answer(n)) == CANCELLED
        child.seen.clear()
        if n % 100 == 99:
            levels.append(resident(child.process))
    assert levels[-1] - levels[1] < 8 << 20, levels
    assert child.end()[0] == 0
