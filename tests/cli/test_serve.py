"""`mlx-mtp serve` from a client's side; what bodies mean is tested with `mlx-mtp stdio`."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import threading
import weakref
from http.client import HTTPConnection
from types import SimpleNamespace

import pytest
from starlette.datastructures import Headers

from mlx_mtp.cli.backends import http
from mlx_mtp.cli.backends.service import Busy, NotLoaded
from mlx_mtp.conversation import TURN
from mlx_mtp.errors import ContextError, FitError, LoadError, UsageError
from mlx_mtp.text.chat import ChatTemplate
from mlx_mtp.text.tokenizer import Tokenizer
from mlx_mtp.text.turns import TurnMemory
from mlx_mtp.weights.load import load_pair
from tests.cli.web import ENDLESS, USER, Web, events, hang_up, service, until
from tests.clients.scripted import STEP, ScriptedEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def running():
    """The embedded pair: four at once, two may wait."""
    found = service(most_waiting=2)
    assert found.loaded.wait(30)
    return found


@pytest.fixture(scope="module")
def web(running):
    web = Web(running)
    yield web
    web.close()


@pytest.fixture(scope="module")
def hasty(running):
    """Says that it is alive all the time."""
    web = Web(running, silence_s=0.01)
    yield web
    web.close()


@pytest.fixture(autouse=True)
def idle(running):
    yield
    until(lambda: not running.running and not running.waiting, "a request was left")


def said(chunks):
    return "".join(c["choices"][0].get("text", "") for c in chunks if c["choices"])


# -- answers --------------------------------------------------------------------------------------


def test_models_by_each_of_its_names(web, running):
    status, found = web.ask("/v1/models")
    (model,) = found["data"]
    assert (status, model["id"], model["object"]) == (200, "embedded target", "model")
    assert model["context_length"] == running.model.context > 0
    assert model["drafter"] == "embedded drafter"
    for name in ("embedded%20target", "default"):
        assert web.ask(f"/v1/models/{name}") == (200, model)
        assert web.complete(model=name.replace("%20", " "))["model"] == model["id"]


def test_no_client_sees_where_weights_lie():
    def load(progress):
        pair = load_pair()
        pair.name, pair.drafter_name = "/home/me/mine", "/home/me/theirs"
        return pair

    web = Web(service(load), asked="/home/me/mine/")
    assert web.service.loaded.wait(30)
    (model,) = web.ask("/v1/models")[1]["data"]
    assert (model["id"], model["drafter"]) == ("mine", "theirs")
    for name in ("mine", "/home/me/mine", "/home/me/mine/", "default"):
        assert web.complete(model=name)["model"] == "mine"
        assert (
            json.loads(events(web.open(CHAT, body(model=name, stream=True)))[0])["model"] == "mine"
        )
    assert "/home" not in web.refused(body(model="x"))[1]["message"]
    web.close()


@pytest.mark.parametrize("name", ["gpt-4o", "google/gemma-4-E2B-it", "../../etc/passwd", "/", ""])
def test_another_model_is_none(web, name):
    for status, found in (web.ask(f"/v1/models/{name}"), web.ask(CHAT, body(model=name))):
        assert (status, found["error"]["code"]) == (404, "model_not_found")
        assert found["error"]["param"] == "model"
        assert "default or embedded target" in found["error"]["message"]


def body(**more):
    return {"messages": USER, "max_tokens": 4} | more


def test_i02_i04_a_stream_says_what_the_plain_answer_says(web):
    plain = web.chat(max_tokens=60, temperature=0)
    asked = body(max_tokens=60, temperature=0, stream=True)
    response = web.open(CHAT, asked | {"stream_options": {"include_usage": True}})
    assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
    *chunks, done = events(response)
    *deltas, last, counted = [json.loads(chunk) for chunk in chunks]
    assert done == "[DONE]"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in deltas)
    assert text == plain["choices"][0]["message"]["content"]
    assert deltas[0]["choices"][0]["delta"]["role"] == "assistant"
    assert last["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"] == "stop"
    assert (counted["choices"], counted["usage"]["total_tokens"]) == (
        [],
        plain["usage"]["total_tokens"],
    )
    assert "usage" not in "".join(events(web.open(CHAT, asked)))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_ends_with_all_that_the_plain_answer_has_beside_its_text(web, path):
    more = {"logprobs": True if path == CHAT else 1, "return_token_ids": True, "x": 1}
    asked = (body() if path == CHAT else {"prompt": "x", "max_tokens": 4}) | more
    _, plain = web.ask(path, asked | {"temperature": 0})
    *_, last, _ = events(web.open(path, asked | {"temperature": 0, "stream": True}))
    found, wanted = json.loads(last), plain["choices"][0]
    for name in ("logprobs", "token_ids", "prompt_token_ids", "finish_reason"):
        assert found["choices"][0][name] == wanted[name] != []
    assert found["mlx_mtp"]["ignored"] == plain["mlx_mtp"]["ignored"] == ["x"]


def test_i03_a_cut_is_length_and_the_default_budget_is_the_room(web, running):
    assert web.chat(max_tokens=3)["choices"][0]["finish_reason"] == "length"
    left = running.model.context - web.chat(max_tokens=1)["usage"]["prompt_tokens"]
    found = web.chat(max_tokens=running.model.context)
    assert f"room for {left} more tokens" in found["mlx_mtp"]["notices"][0]
    assert web.chat(max_tokens=None, stop=["a"])["choices"][0]["finish_reason"] == "stop"


def test_i07_stop_is_a_text_or_a_list_or_null(web):
    texts = [web.chat(max_tokens=30, temperature=0, stop=stop) for stop in ("a", ["a"], None, [])]
    said = [found["choices"][0]["message"]["content"] for found in texts]
    assert said[0] == said[1] == said[2].partition("a")[0] != said[2] == said[3]


def test_i08_text_parts_are_joined(web):
    halves = [{"type": "text", "text": text} for text in ("def gcd", "(a, b", "", "):")]
    asked = {"temperature": 0, "return_token_ids": True}
    found = web.chat(messages=[{"role": "user", "content": halves}], **asked)
    assert found["choices"] == web.chat(**asked)["choices"]


def test_i12_i13_several_at_once_are_each_as_alone(web, running):
    asked = [
        {"prompt": f"def f{i}(x):", "max_tokens": 12 * (i + 1), "temperature": 0} for i in range(4)
    ]
    alone = [web.complete(**one)["choices"] for one in asked]
    together = [None] * 4
    with web.held() as go:
        threads = [
            threading.Thread(target=lambda i=i: together.__setitem__(i, web.complete(**asked[i])))
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        until(lambda: running.waiting == 4)
        go.set()
        for thread in threads:
            thread.join(30)
    assert [one["choices"] for one in together] == alone


def test_i16_an_end_as_the_first_token(web):
    eos = {"logit_bias": {"1": 100}}
    found = web.complete(**eos)
    assert found["choices"][0] | {"text": "", "finish_reason": "stop"} == found["choices"][0]
    assert found["usage"]["completion_tokens"] == 0
    last, done = events(web.open(COMPLETIONS, {"prompt": "x", "stream": True} | eos))
    assert (json.loads(last)["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")


def test_health_and_metrics(web, running):
    assert web.ask("/health") == (200, {"status": "ready"})
    before = figures(web)
    web.complete(max_tokens=5)
    after = figures(web)
    ended = 'mlx_mtp_requests_total{finish_reason="length"}'
    assert after[ended] == before.get(ended, 0) + 1
    assert after["mlx_mtp_completion_tokens_total"] - 5 == before["mlx_mtp_completion_tokens_total"]
    assert after['mlx_mtp_drafted_by_position_total{position="1"}'] > 0
    assert after['mlx_mtp_memory_bytes{kind="active"}'] > 1e6
    assert (after["mlx_mtp_model_loaded"], after["mlx_mtp_requests_running"]) == (1, 0)
    with web.held():
        response = threading.Thread(target=web.complete)
        response.start()
        until(lambda: figures(web)["mlx_mtp_requests_waiting"] == 1)
    response.join(20)


def figures(web):
    response = web.open("/metrics")
    assert response.getheader("content-type").startswith("text/plain; version=0.0.4")
    lines = [line for line in response.read().decode().splitlines() if line[0] != "#"]
    assert len(lines) == len({line.rpartition(" ")[0] for line in lines})
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_weights_that_were_let_go_come_back(running):
    web = Web(service(idle_s=0.01))
    until(lambda: web.service.state == "unloaded")
    assert web.ask("/health") == (200, {"status": "unloaded"})
    assert web.ask("/v1/models")[1]["data"][0]["context_length"] == running.model.context
    assert web.refused(body(model="gpt-4o"))[0] == 404
    assert web.complete(max_tokens=2)["usage"]["completion_tokens"] == 2
    web.close()


def test_weights_that_do_not_come_back_are_no_health():
    outcomes = iter([None, LoadError("the disk is gone"), None])

    def load(progress):
        if (outcome := next(outcomes)) is not None:
            raise outcome
        return load_pair()

    web = Web(service(load, idle_s=0.01))
    until(lambda: web.service.state == "unloaded")
    assert web.refused(body())[0] == 503
    assert web.ask("/health") == (503, {"status": "failed"})
    web.complete(max_tokens=2)
    assert web.ask("/health")[0] == 200
    web.close()


def test_bodies_are_read_and_prompts_rendered_beside_the_loop_and_the_model(web, monkeypatch):
    threads = []

    def watched(real):
        def run(*args, **how):
            threads.append(threading.current_thread().name)
            return real(*args, **how)

        return run

    monkeypatch.setattr(http, "parse", watched(http.parse))
    monkeypatch.setattr(TurnMemory, "prompt", watched(TurnMemory.prompt))
    monkeypatch.setattr(Tokenizer, "encode", watched(Tokenizer.encode))
    web.chat()
    web.complete()
    assert len(threads) >= 5
    assert all(name.startswith("asyncio") for name in threads), threads


def test_a_turn_goes_on_from_the_one_before(web):
    first = web.chat(max_tokens=40, return_token_ids=True)["choices"][0]
    more = [*USER, first["message"], {"role": "user", "content": "Shorter."}]
    ids = web.chat(messages=more, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    known = first["prompt_token_ids"] + [t for t in first["token_ids"] if t > 1]
    assert ids[: len(known) - 2] == known[:-2]


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (b"", None),  # I10
        (b"{", None),
        (b"\xff\xfe", None),
        (b"NaN", None),
        (b"[" * 100_000, None),
        ([], None),
        ({}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "foo", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (body(temperature=-1), "temperature"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (body(stop=""), "stop"),  # I07
        (body(stop=[""]), "stop"),
        (body(stop=["a"] * 5), "stop"),
        (body(n=2), "n"),
        (body(tools=[{"type": "x"}]), "tools[0].type"),
        (body(response_format={"type": "x"}), "response_format.type"),
        (body(stream="yes"), "stream"),
        (body(messages=[{"role": "user", "content": "\ud800"}]), "messages[0].content"),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_bad_bodies_are_400_and_name_the_parameter(web, wrong, param):
    status, error = web.refused(wrong)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
@pytest.mark.parametrize("stream", [False, True])
def test_images_and_sounds_are_400(web, kind, stream):
    part = {"type": kind, kind: {"url": "file:///etc/passwd", "data": ""}}
    content = [{"type": "text", "text": "what is this?"}, part]
    wrong = {"messages": [{"role": "user", "content": content}], "stream": stream}
    status, error = web.refused(wrong)
    assert (status, error["param"]) == (400, "messages[0].content[1]")


def test_a_prompt_that_is_too_long_is_400_with_both_numbers(web, running):
    long = {"prompt": [5] * (running.model.context + 7)}
    for stream in (False, True):
        status, error = web.refused(long | {"stream": stream}, COMPLETIONS)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert (error["tokens"], error["limit"]) == (
            running.model.context + 7,
            running.model.context,
        )
        assert str(error["tokens"]) in error["message"]
        assert str(error["limit"]) in error["message"]


def test_so_many_messages_are_refused_before_they_are_rendered(web, running, monkeypatch):
    monkeypatch.setattr(TurnMemory, "prompt", None)
    limit = running.model.tokenizer.most_tokens
    asked = [{"role": "user", "content": ""}] * (limit // TURN + 1)
    status, error = web.refused(body(messages=asked))
    assert (status, error["code"], error["limit"]) == (400, "context_length_exceeded", limit)
    assert error["message"].startswith(f"the prompt has more than {limit + TURN} tokens")


def test_a_message_costs_what_is_counted_for_it(running):
    known, one = running.model, [{"role": "user", "content": ""}]
    counts = [len(known.template.encode(one * n, known.tokenizer)) for n in (1, 2, 3)]
    assert counts[2] - counts[1] == counts[1] - counts[0] >= TURN


class Given(dict):
    """A body that can be watched."""


@pytest.mark.parametrize(
    ("path", "wrong", "status"),
    [
        (CHAT, {"messages": [{"role": "x"}]}, 400),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 40_000}]}, 400),
        (COMPLETIONS, {"prompt": [5] * 40_000}, 400),  # by the engine
        (COMPLETIONS, {"prompt": "x", "stream": True, "logit_bias": {"999999999": 1}}, 400),
        (CHAT, {"messages": USER, "response_format": {"type": "regex", "regex": "("}}, 400),
        (CHAT, {"messages": USER, "model": "x"}, 404),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_nothing_is_left_of_a_refused_request(web, monkeypatch, path, wrong, status):
    watched, parse = [], http.parse

    def given(content):
        found = Given(parse(content))
        watched.append(weakref.ref(found))
        return found

    init = http._Asked.__init__

    def asked(job, *args):
        watched.extend(map(weakref.ref, (job, args[0])))
        init(job, *args)

    class Rendered(list):
        pass

    render = ChatTemplate.render

    def rendered(template, messages, **how):
        found = Rendered(messages)
        watched.append(weakref.ref(found))
        return render(template, found, **how)

    monkeypatch.setattr(ChatTemplate, "render", rendered)
    monkeypatch.setattr(http, "parse", given)
    monkeypatch.setattr(http._Asked, "__init__", asked)
    gc.collect()
    gc.disable()
    try:
        assert web.refused(wrong, path)[0] == status
        until(lambda: not any(one() for one in watched), "it is still there")
        assert watched
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "objekt"},
        {"$ref": "file:///etc/passwd"},
        {"$ref": "https://example.org/schema.json"},
        {"$ref": "#/$defs/none"},
        {"type": "string", "pattern": "("},
    ],
    ids=str,
)
def test_i14_odd_schemas_are_400(web, schema):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    status, error = web.refused(body(response_format=wanted))
    assert (status, error["type"]) == (400, "invalid_request_error")


def test_i14_a_schema_within_itself_is_taken(web):
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}}, "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": tree}}
    assert web.chat(response_format=wanted)["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/responses", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/../../../../etc/passwd", 404),
        ("GET", "/v1/models/../../../../../etc/passwd", 404),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
        ("GET", "//etc/passwd", 404),
        ("GET", "/%00", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PATCH", COMPLETIONS, 405),
        ("OPTIONS", CHAT, 405),
    ],
)
def test_paths_and_methods_that_there_are_not(web, method, path, status):
    name = f'mlx_mtp_http_responses_total{{status="{status}"}}'
    before = figures(web).get(name, 0)
    found, content = web.ask(path, method=method)
    assert figures(web)[name] == before + 1
    assert (found, content["error"]["type"]) == (status, "invalid_request_error")


def test_a_full_queue_is_429_and_says_when_to_come_again(web, running):
    with web.held() as go:
        waiting = [threading.Thread(target=web.complete) for _ in range(6)]
        for thread in waiting:
            thread.start()
        until(lambda: running.waiting == 6)
        response = web.open(COMPLETIONS, {"prompt": "x", "stream": True})
        error = json.loads(response.read())["error"]
        assert (response.status, error["type"]) == (429, "rate_limit_error")
        assert int(response.getheader("retry-after")) > 0
        assert web.refused(b"[" * 100_000)[0] == 429  # and does not parse it
        go.set()
        for thread in waiting:
            thread.join(30)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (UsageError("x"), 400, "invalid_request_error"),
        (ContextError(7, 5), 400, "invalid_request_error"),
        (http.openai.ModelError("x"), 404, "invalid_request_error"),
        (Busy("x"), 429, "rate_limit_error"),
        (NotLoaded(LoadError("x")), 503, "server_error"),
        (FitError("x"), 507, "server_error"),
        (RuntimeError("[malloc] Unable to allocate 7 bytes"), 507, "server_error"),
        (KeyError("x"), 500, "server_error"),
    ],
    ids=repr,
)
def test_the_status_of_an_error(error, status, kind):
    found, content = http.failure(error)
    assert (found, content["error"]["type"]) == (status, kind)
    assert content["error"]["message"]


def test_a_model_that_cannot_be_loaded_is_503():
    def load(progress):
        raise LoadError("there is no such model")

    broken = service(load)
    web = Web(broken)
    broken.loaded.wait(10)
    assert web.ask("/health") == (503, {"status": "failed"})
    status, error = web.refused(body())
    assert (status, error["message"]) == (503, "there is no such model")
    assert web.ask("/v1/models")[1]["data"][0]["context_length"] is None
    web.close()


def fails(engine):
    def step():
        raise RuntimeError("[malloc] Unable to allocate 7 bytes")

    engine.step = step


@pytest.mark.parametrize("stream", [False, True])
def test_i11_what_fails_before_the_first_word_has_a_status(web, running, stream):
    with web.held() as go:
        running.between_steps(fails)
        found = []
        asking = threading.Thread(
            target=lambda: found.append(web.ask(COMPLETIONS, {"prompt": "x", "stream": stream}))
        )
        asking.start()
        until(lambda: running.waiting == 1)
        go.set()
        asking.join(20)
    ((status, content),) = found
    assert (status, content["error"]["type"]) == (507, "server_error")
    assert web.complete()["usage"]["completion_tokens"] == 8


def test_i11_what_fails_later_ends_the_stream_with_an_error(web, running):
    response = web.open(COMPLETIONS, ENDLESS | {"stream": True})
    assert response.status == 200
    running.between_steps(fails)
    *chunks, last = events(response)
    error = json.loads(last)["error"]
    assert error["message"].endswith("Unable to allocate 7 bytes")
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)


def test_i11_what_fails_after_a_long_wait_is_an_error_in_the_stream(hasty, running):
    long = {"prompt": [5] * (running.model.context + 1), "stream": True}
    with hasty.held() as go:
        response = hasty.open(COMPLETIONS, long)
        assert response.status == 200
        go.set()
    *pings, last = events(response)
    assert set(pings) == {": ping"}
    assert json.loads(last)["error"]["code"] == "context_length_exceeded"


# -- clients that go, or read slowly --------------------------------------------------------------


def test_a_silent_stream_says_that_it_is_alive(hasty):
    with hasty.held() as go:
        response = hasty.open(CHAT, body(stream=True))
        assert [response.readline() for _ in range(4)] == [b": ping\n", b"\n"] * 2
        go.set()
    found = [one for one in events(response) if one != ": ping"]
    assert json.loads(found[0])["choices"][0]["delta"]["role"] == "assistant"
    assert found[-1] == "[DONE]"


def test_i01_a_client_that_goes_ends_its_stream(web, running):
    cancelled = running.totals.requests["cancelled"]
    response = web.open(COMPLETIONS, ENDLESS | {"stream": True})
    for _ in range(3):
        assert response.readline()
    hang_up(response)
    until(lambda: running.totals.requests["cancelled"] == cancelled + 1)
    assert not running.running
    web.complete()


def test_i01_a_client_that_goes_ends_its_plain_request(web, running):
    cancelled = running.totals.requests["cancelled"]
    connection = HTTPConnection("127.0.0.1", web.port)
    connection.request("POST", COMPLETIONS, json.dumps(ENDLESS))
    until(lambda: running.running)
    connection.close()
    until(lambda: running.totals.requests["cancelled"] == cancelled + 1)


def test_i01_a_client_that_goes_leaves_the_queue(web, running):
    with web.held():
        connection = HTTPConnection("127.0.0.1", web.port)
        connection.request("POST", COMPLETIONS, json.dumps(ENDLESS))
        until(lambda: running.waiting == 1)
        connection.close()
        until(lambda: running.waiting == 0)


def test_a_client_that_goes_within_its_body(web):
    connection = HTTPConnection("127.0.0.1", web.port)
    connection.putrequest("POST", COMPLETIONS)
    connection.putheader("Content-Length", "1000")
    connection.endheaders(b'{"prompt": ')
    connection.close()
    web.complete()


def test_what_a_slow_reader_did_not_take_is_joined():
    class Body:
        stream = True

        def deltas(self, answer, piece):
            return piece

    async def slow():
        job = http._Asked(Body(), SimpleNamespace(model=None), list)
        job.answer = object()
        for piece in ([{"reasoning_content": "a"}], [{"reasoning_content": "b"}, {"content": "c"}]):
            job.show(piece)
        for _ in range(3):
            job.show([{"content": "d"}])
        call = {"tool_calls": [1]}
        job.show([call])
        job.show([{"tool_calls": [2]}])
        first = await job.news(None)
        nothing = await job.news(0.001)
        job.show([{"content": "e"}])
        job.end(None)
        return first, nothing, await job.news(None)

    first, nothing, last = asyncio.run(slow())
    assert first == (
        [{"reasoning_content": "ab"}, {"content": "cddd"}, {"tool_calls": [1, 2]}],
        False,
    )
    assert nothing == ([], False)
    assert last == ([{"content": "e"}], True)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """Says "word " over and over, and has next to no room on the way to its clients."""
    log, rules = tmp_path_factory.mktemp("narrow") / "log", [{"say": "word ", "endless": True}]
    web = Web(service(make=lambda pair: ScriptedEngine(pair, rules, log)), buffer=4096)
    assert web.service.loaded.wait(30)
    yield web
    web.close()


def test_who_does_not_read_makes_nobody_wait(narrow):
    silent = narrow.open(COMPLETIONS, {"prompt": "x", "max_tokens": 6000, "stream": True})
    assert narrow.complete(max_tokens=80)["usage"]["completion_tokens"] == 80
    until(lambda: not narrow.service.running)
    *chunks, done = events(silent)
    assert done == "[DONE]"
    assert said([json.loads(chunk) for chunk in chunks]).split() == ["word"] * 3000
    assert len(chunks) < 6000 / STEP  # as many as steps would be if none were joined


def test_who_does_not_read_and_goes_ends_its_stream(narrow):
    cancelled = narrow.service.totals.requests["cancelled"]
    silent = narrow.open(COMPLETIONS, {"prompt": "x", "max_tokens": 100_000, "stream": True})
    (job,) = narrow.service._running.values()
    until(lambda: len("".join(delta["text"] for delta in list(job._deltas))) > 1000)
    hang_up(silent)
    until(lambda: narrow.service.totals.requests["cancelled"] == cancelled + 1)


# -- who may ask ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "host", "known"),
    [
        ("127.0.0.1:8765", "127.0.0.1", True),
        ("localhost", "127.0.0.1", True),
        ("LocalHost:1", "127.0.0.1", True),
        ("[::1]:8765", "127.0.0.1", True),
        ("127.0.0.7:8765", "127.0.0.1", True),
        ("box:8765", "Box", True),
        ("evil.example", None, True),
        ("", "127.0.0.1", False),
        ("evil.example", "127.0.0.1", False),
        ("evil.example:8765", "127.0.0.1", False),
        ("localhost.evil.example", "127.0.0.1", False),
        ("127.0.0.1.evil.example:8765", "127.0.0.1", False),
        ("localhost:1:2", "127.0.0.1", False),
        ("192.168.0.1:8765", "127.0.0.1", False),
        ("0.0.0.0:8765", "127.0.0.1", False),
    ],
)
def test_which_hosts_are_this_one(header, host, known):
    assert http.known_host(header, host) is known


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/openapi.json", "/nothing"])
def test_another_host_header_is_refused(web, path):
    status, found = web.ask(path, Host="evil.example:8765")
    assert (status, found["error"]["type"]) == (403, "permission_error")


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://127.0.0.1:3000", "http://localhost", "file://"],
)
def test_web_pages_are_refused(web, origin):
    for path, asked, method in ((CHAT, body(), "POST"), ("/v1/models", None, "GET")):
        response = web.open(path, asked, method, Origin=origin)
        assert response.status == 403
        assert response.getheader("access-control-allow-origin") is None
    preflight = {"Origin": origin, "Access_Control_Request_Method": "POST"}
    assert web.open(CHAT, method="OPTIONS", **preflight).status == 403


@pytest.mark.parametrize(
    ("headers", "may"),
    [
        ([("host", "localhost")], True),
        ([("host", "localhost"), ("host", "localhost")], False),
        ([("host", "localhost"), ("origin", "https://a"), ("sec-fetch-site", "cross-site")], True),
        ([("host", "localhost"), ("origin", "https://a"), ("origin", "https://a")], False),
        ([("host", "localhost"), ("sec-fetch-site", "none")], True),
        ([("host", "localhost"), ("sec-fetch-site", "same-site")], False),
        ([("host", "localhost"), ("sec-fetch-site", "cross-site")], False),
    ],
)
def test_who_is_a_stranger(headers, may):
    sent = Headers(raw=[(name.encode(), value.encode()) for name, value in headers])
    assert (http.stranger(sent, http.Settings(origins=("https://a",))) is None) is may


def test_an_origin_that_may(running):
    page = "https://example.org"
    web = Web(running, origins=(page,), key="secret")
    preflight = {
        "Origin": page,
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "authorization,content-type,x-stainless-os",
    }
    other = preflight | {"Access_Control_Request_Method": "PUT"}
    assert web.ask(CHAT, method="OPTIONS", **other)[1]["error"]["type"] == "invalid_request_error"
    preflight["Access_Control_Request_Private_Network"] = "true"
    response = web.open(CHAT, method="OPTIONS", **preflight)
    assert response.getheader("access-control-allow-private-network") == "true"
    assert response.status == 200  # without the key, which browsers do not send here
    assert response.getheader("access-control-allow-origin") == page
    assert "x-stainless-os" in response.getheader("access-control-allow-headers")
    for asked, status in ((body(stream=True), 200), (b"{", 400)):
        response = web.open(CHAT, asked, Origin=page, Authorization="Bearer secret")
        assert (response.status, response.read()[:5]) == (
            status,
            b"data:" if status == 200 else b'{"err',
        )
        assert response.getheader("access-control-allow-origin") == page
    assert web.open(CHAT, body(), Origin="https://other.example").status == 403
    assert web.open(CHAT, body(), Origin=page).status == 401
    web.close()


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://Example.org", "https://example.org"),
        ("app://x:1", "app://x:1"),
        ("http://a:80", "http://a"),
        ("HTTPS://a:443", "https://a"),
        ("https://a:80", "https://a:80"),
        ("http://a:443", "http://a:443"),
        ("http://[::80]:8080", "http://[::80]:8080"),
    ],
)
def test_what_an_origin_is(url, kept):
    assert http.origin(url) == kept


@pytest.mark.parametrize("url", ["*", "example.org", "https://example.org/", "https://*.org", ""])
def test_what_no_origin_is(url):
    with pytest.raises(UsageError, match="--allow-origin is"):
        http.origin(url)


def test_other_hosts_have_a_key():
    listening, local = http.listen("0.0.0.0", 0, "secret")
    listening.close()
    assert not local
    for host in ("localhost", "127.0.0.1"):
        listening, local = http.listen(host, 0, None)
        listening.close()
        assert local


def test_keys(running):
    web = Web(running, key="sécret")
    good = {"Authorization": "Bearer sécret".encode().decode("latin-1")}
    assert web.ask("/v1/models", **good)[0] == 200
    assert web.ask(CHAT, body(), **good)[0] == 200
    assert web.ask("/health")[0] == 200
    for path, asked in ((CHAT, body()), ("/v1/models", None), ("/metrics", None)):
        for wrong in ("", "Bearer", "Bearer x", "Basic secret", "sécret", "Bearer sécret x"):
            status, found = web.ask(path, asked, Authorization=wrong)
            assert (status, found["error"]["type"]) == (401, "authentication_error")
            assert "sécret" not in str(found)
        assert web.open(path, asked).getheader("www-authenticate") == "Bearer"
    web.close()


def test_keys_are_compared_in_constant_time(running, monkeypatch):
    compared = []
    monkeypatch.setattr(http.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    web = Web(running, key="secret")
    web.ask("/v1/models", Authorization="Bearer secreT")
    assert compared == [(b"secreT", b"secret")]
    web.close()


def test_a_body_that_is_too_long(running):
    web = Web(running, max_body=1000)
    long = json.dumps({"prompt": "x" * 1000})
    connection = HTTPConnection("127.0.0.1", web.port)
    connection.request("POST", COMPLETIONS, long)
    assert connection.getresponse().status == 413
    connection = HTTPConnection("127.0.0.1", web.port)
    connection.request("POST", COMPLETIONS, iter([long.encode()] * 2), encode_chunked=True)
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]["message"]) == (
        413,
        "the body is longer than 1000 bytes (--max-body)",
    )
    assert web.complete()["object"] == "text_completion"
    web.close()


def test_a_body_that_is_packed_or_does_not_come(running):
    web = Web(running, body_s=0)
    status, found = web.ask(COMPLETIONS, {"prompt": "x"}, Content_Encoding="gzip")
    assert (status, found["error"]["type"]) == (415, "invalid_request_error")
    connection = HTTPConnection("127.0.0.1", web.port, timeout=20)
    connection.putrequest("POST", COMPLETIONS)
    connection.putheader("Content-Length", "1000")
    connection.endheaders(b'{"prompt": ')
    response = connection.getresponse()
    assert (response.status, response.getheader("connection")) == (408, "close")
    web.close()


def test_no_request_opens_a_file(web, tmp_path):
    """Names that lead to files, wherever a body can hold one."""
    file = tmp_path / "schema.json"
    file.write_text('{"type": "string"}')
    web.chat(response_format={"type": "json_object"}, max_tokens=2)  # what is imported late
    opened, watching = [], True

    def audit(event, arguments):
        if watching and event in ("open", "os.listdir", "os.scandir", "socket.connect"):
            opened.append((event, arguments))

    sys.addaudithook(audit)
    file.read_text()
    assert opened.pop()[1][0] == str(file)
    uri = f"file://{file}"
    link = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": uri}}}
    image = [{"type": "image_url", "image_url": {"url": uri}}]
    for wrong in (
        body(model=str(file)),
        body(session=str(file), user=uri, logit_bias={uri: 1}),
        body(response_format=link),
        body(response_format={"type": "grammar", "grammar": f"%import {file}\nstart: x"}),
        body(messages=[{"role": "user", "content": image}]),
        body(
            messages=[{"role": "user", "content": uri}],
            chat_template=str(file),
            metadata={"a": uri},
        ),
        {"prompt": uri, "suffix": uri},
    ):
        for path in (CHAT, COMPLETIONS):
            web.ask(path, wrong)
    for path in (f"/{file}", f"/v1/models/{file}", f"/v1/models/{uri}", f"/openapi.json/..{file}"):
        assert web.ask(path)[0] == 404
    watching = False
    ours = [one for one in opened if one[0] != "socket.connect" or one[1][1][1] != web.port]
    assert ours == []


def test_prompts_and_keys_are_printed_nowhere(running, capfd, monkeypatch):
    monkeypatch.setenv("MLX_MTP_TRACEBACK", "1")
    web = Web(running, key="k3y")
    key = {"Authorization": "Bearer k3y"}
    web.ask(CHAT, body(messages=[{"role": "user", "content": "pr0mpt"}]), **key)
    web.ask(CHAT, body(messages=[{"role": "pr0mpt"}]), **key)
    web.ask(CHAT, b"pr0mpt", Authorization="Bearer k3y2")
    web.open("/v1/pr0mpt?k3y", b"pr0mpt").read()
    web.close()
    printed = "".join(capfd.readouterr())
    assert "pr0mpt" not in printed
    assert "k3y" not in printed
    assert "Traceback" not in printed


def test_lines_that_are_no_http(web):
    for sent in (
        b"\x16\x03\x01\x02\x00\x01",
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", web.port)) as plain:
            plain.sendall(sent)
            plain.settimeout(10)
            assert plain.recv(100).startswith(b"HTTP/1.1 400")
    web.complete()


def test_the_page_tells_the_numbers_that_are_checked(web):
    status, page = web.ask("/openapi.json")
    assert status == 200
    schema = page["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for name, (_, low, high) in http.openai.NUMBERS.items():
        found = schema["properties"][name]
        assert (found["minimum"], found["maximum"]) == (low, high)
