"""The `openai` SDK on `mlx-mtp stdio`: a client that others wrote, over a small transport."""

from __future__ import annotations

import json
import queue
import threading

import pytest

from tests.cli.talk import Child

openai = pytest.importorskip("openai")
# The SDK's own HTTP library, whichever it is.
httpx = pytest.importorskip(openai.DefaultHttpxClient.__mro__[1].__module__.split(".")[0])

STATUS = {-32602: 400, -32601: 404, -32001: 429, -32002: 503, -32003: 507, -32004: 503, -32800: 499}
METHODS = {
    "/v1/chat/completions": "chat.completions",
    "/v1/completions": "completions",
    "/v1/models": "models.list",
}
CODE = [
    {"role": "system", "content": "You complete Python. " * 12},
    {"role": "user", "content": "def gcd(a, b):"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


class Stdio(httpx.BaseTransport):
    """Requests of the SDK as JSON-RPC requests of one process; a stream that is closed before its
    end is cancelled."""

    def __init__(self):
        self.child = Child()
        self._inboxes = {}
        self._last = 0
        threading.Thread(target=self._deliver, daemon=True).start()

    def _deliver(self):
        for message in self.child.rest():
            params = message.get("params", message)
            self._inboxes[params["id"]].put(message)

    def handle_request(self, request):
        body = json.loads(request.read() or b"{}")
        self._last += 1
        name = self._last
        inbox = self._inboxes[name] = queue.Queue()
        self.child.ask(name, METHODS[request.url.path], **body)
        if body.get("stream"):
            events = {"content-type": "text/event-stream"}
            return httpx.Response(200, headers=events, stream=Events(self, name, inbox))
        while "method" in (message := inbox.get(timeout=30)):
            pass
        if "error" not in message:
            return httpx.Response(200, json=message["result"])
        error = message["error"]
        return httpx.Response(STATUS.get(error["code"], 500), json={"error": error})

    def close(self):
        self.child.process.stdin.close()
        assert self.child.process.wait(timeout=10) == 0


class Events(httpx.SyncByteStream):
    """The chunks of one answer as server-sent events."""

    def __init__(self, transport, name, inbox):
        self._transport, self._name, self._inbox = transport, name, inbox
        self._over = False

    def __iter__(self):
        while not self._over:
            message = self._inbox.get(timeout=30)
            if "error" in message:
                self._over = True
                yield f"data: {json.dumps({'error': message['error']})}\n\n".encode()
            elif "result" in message:
                self._over = True
                yield b"data: [DONE]\n\n"
            elif message["method"] != "progress":
                yield f"data: {json.dumps(message['params']['chunk'])}\n\n".encode()

    def close(self):
        if not self._over:
            self._transport.child.cancel(self._name)
            while "method" in (message := self._inbox.get(timeout=30)):
                pass
            assert message["error"]["code"] == -32800


@pytest.fixture(scope="module")
def client():
    transport = Stdio()
    http = openai.DefaultHttpxClient(transport=transport)
    with openai.OpenAI(api_key="-", base_url="http://stdio/v1", http_client=http) as client:
        yield client
    transport.child.process.kill()


@pytest.fixture(scope="module")
def model(client):
    (model,) = client.models.list().data
    return model.id


@pytest.fixture
def ask(client, model):
    def create(messages, **more):
        asked = {"max_tokens": 12, "temperature": 0} | more
        return client.chat.completions.create(model=model, messages=messages, **asked)

    return create


def test_plain(ask):
    answer = ask(CODE)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.mlx_mtp["ignored"] == []


def test_a_stream_is_the_plain_answer(ask):
    plain = ask(CODE, max_tokens=60)
    chunks = list(ask(CODE, max_tokens=60, stream=True, stream_options={"include_usage": True}))
    *deltas, last, counted = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in deltas)
    assert text == plain.choices[0].message.content
    assert last.choices[0].finish_reason == plain.choices[0].finish_reason
    assert (counted.choices, counted.usage.completion_tokens) == ([], plain.usage.completion_tokens)


def test_tools_and_the_turn_after_them_goes_on_from_what_is_in_kv(ask):
    """A call is begun for certain; the demo pair, which knows none, may not get to its end, and
    then it is text, which is read anew."""
    first = ask(CODE, tools=[TOOL], tool_choice="required", max_tokens=60)
    message, prompt = first.choices[0].message, first.usage.prompt_tokens
    if message.tool_calls:
        assert first.choices[0].finish_reason == "tool_calls"
        assert {call.function.name for call in message.tool_calls} == {"read_file"}
        assert all(isinstance(json.loads(c.function.arguments), dict) for c in message.tool_calls)
        names = [call.id for call in message.tool_calls]
        results = [{"role": "tool", "tool_call_id": n, "content": "no file"} for n in names]
    else:
        assert message.content.startswith("<|tool_call>call:read_file{")
        results = [{"role": "user", "content": "go on"}]
    history = [*CODE, message.model_dump(exclude_none=True), *results]
    second = ask(history, tools=[TOOL])
    assert second.usage.prompt_tokens_details.cached_tokens >= 0.95 * prompt


def test_json_by_schema(ask):
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = ask(CODE, response_format=wanted, max_tokens=400)
    assert json.loads(answer.choices[0].message.content)["n"] in (1, 2)
    wanted["json_schema"]["schema"] = {"type": "objekt"}
    with pytest.raises(openai.BadRequestError, match=r"response_format\.json_schema\.schema"):
        ask(CODE, response_format=wanted)


def test_a_closed_stream_is_cancelled_and_the_next_turn_reuses_it(ask):
    with ask(CODE, stream=True, max_tokens=4000, extra_body={"min_tokens": 4000}) as stream:
        said = ""
        for chunk in stream:
            said += chunk.choices[0].delta.content or ""
            if len(said) > 20:
                break
    history = [*CODE, {"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    answer = ask(history)
    prompt = ask(CODE).usage.prompt_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0.95 * prompt


def test_errors_are_the_sdks(ask, client):
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        ask(CODE, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="model is 'gpt-4o'"):
        client.completions.create(model="gpt-4o", prompt="x")
    text = client.completions.create(model="embedded target", prompt="x = ", max_tokens=3)
    assert text.choices[0].finish_reason == "length"
