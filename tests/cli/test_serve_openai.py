"""The `openai` SDK on `mlx-mtp serve`, over HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest

from mlx_mtp.engine.session import Engine
from tests.cli.web import USER, Web, service, until
from tests.clients.scripted import ScriptedEngine

openai = pytest.importorskip("openai")

TOOL = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
CALLS = (
    '<|channel>thought\nHm.<channel|>Now:<|tool_call>call:write{path:<|"|>a.txt<|"|>}<tool_call|>'
)
CALLS += '<|tool_call>call:write{path:<|"|>b.txt<|"|>}<tool_call|>'
RULES = [{"when": "write two files", "say": CALLS}, {"when": "written", "say": "Both are there."}]


@pytest.fixture(scope="module")
def web():
    web = Web(service(), key="secret")
    assert web.service.loaded.wait(30)
    yield web
    web.close()


@pytest.fixture(scope="module")
def client(web):
    with openai.OpenAI(api_key="secret", base_url=web.url, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    log = tmp_path_factory.mktemp("scripted") / "log"
    web = Web(service(make=lambda pair: ScriptedEngine(pair, RULES, log)))
    with openai.OpenAI(api_key="-", base_url=web.url, max_retries=0) as client:
        yield client.chat.completions
    web.close()


@pytest.fixture
def ask(client):
    def create(messages=USER, **more):
        asked = {"model": "default", "max_tokens": 12, "temperature": 0} | more
        return client.chat.completions.create(messages=messages, **asked)

    return create


def test_models(client):
    (model,) = client.models.list().data
    assert client.models.retrieve("default") == model
    assert model.context_length == 32768


def test_plain(ask):
    answer = ask()
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.mlx_mtp["ignored"] == []


@pytest.mark.parametrize("usage", [None, False, True])
def test_a_stream_and_its_usage_only_when_asked(ask, usage):
    plain = ask()
    options = {} if usage is None else {"stream_options": {"include_usage": usage}}
    chunks = list(ask(stream=True, **options))
    counted = [chunk.usage for chunk in chunks if chunk.usage]
    assert counted == ([plain.usage] if usage else [])
    chunks = [chunk for chunk in chunks if chunk.choices]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == plain.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]


def test_tools(scripted):
    messages = [{"role": "user", "content": "write two files"}]
    how = {"model": "default", "tools": [TOOL], "reasoning_effort": "low"}
    plain = scripted.create(messages=messages, **how).choices[0]
    assert (plain.finish_reason, plain.message.content) == ("tool_calls", "Now:")
    assert plain.message.reasoning_content == "Hm."
    arguments = [json.loads(call.function.arguments) for call in plain.message.tool_calls]
    assert arguments == [{"path": "a.txt"}, {"path": "b.txt"}]
    with scripted.stream(messages=messages, **how) as stream:
        found = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert found.count("tool_calls.function.arguments.done") == 2
    assert [call.function for call in final.message.tool_calls] != []
    assert (final.finish_reason, final.message.content) == ("tool_calls", "Now:")
    history = [*messages, plain.message.model_dump(exclude_none=True)]
    for call in plain.message.tool_calls:
        history.append({"role": "tool", "tool_call_id": call.id, "content": "written"})
    last = scripted.create(messages=history, **how).choices[0]
    assert (last.finish_reason, last.message.content) == ("stop", "Both are there.")


def test_json_by_schema(ask):
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = ask(response_format=wanted, max_tokens=400)
    assert json.loads(answer.choices[0].message.content)["n"] in (1, 2)


def test_a_stream_that_is_closed_early_is_cancelled(ask, web):
    cancelled = web.service.totals.requests["cancelled"]
    with ask(stream=True, max_tokens=4000, extra_body={"min_tokens": 4000}) as stream:
        assert next(iter(stream))
    until(lambda: web.service.totals.requests["cancelled"] == cancelled + 1)
    assert ask().choices


def test_null_and_alias_parameters(ask):
    nothing = dict.fromkeys(
        [
            *("stop", "seed", "top_p", "tools", "tool_choice", "response_format", "logprobs", "n"),
            *("stream_options", "logit_bias", "presence_penalty", "reasoning_effort", "max_tokens"),
        ]
    )
    system = [{"role": "developer", "content": "You complete Python."}, *USER]
    answer = ask(system, **nothing, max_completion_tokens=3, prompt_cache_key="x", store=False)
    assert answer.usage.completion_tokens == 3
    assert set(answer.mlx_mtp["ignored"]) == {"prompt_cache_key", "store"}
    system[0]["role"] = "system"
    again = ask(system, max_tokens=3)
    assert again.choices[0].message == answer.choices[0].message


def test_logprobs(ask, client):
    (choice,) = ask(logprobs=True, top_logprobs=2).choices
    assert "".join(at.token for at in choice.logprobs.content) == choice.message.content
    chunks = [chunk.choices[0] for chunk in ask(logprobs=True, top_logprobs=2, stream=True)]
    found = [at for chunk in chunks if chunk.logprobs for at in chunk.logprobs.content]
    assert found == choice.logprobs.content
    text = client.completions.create(model="default", prompt="x = ", max_tokens=3, logprobs=1)
    assert len(text.choices[0].logprobs.tokens) == 3


def test_completions(client):
    how = {"model": "default", "prompt": "x = ", "max_tokens": 6, "temperature": 0}
    plain = client.completions.create(**how)
    chunks = list(client.completions.create(**how, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text


def test_many_at_once(web):
    async def all_of_them():
        async with openai.AsyncOpenAI(api_key="secret", base_url=web.url) as client:
            create = client.chat.completions.create
            how = {"model": "default", "messages": USER, "max_tokens": 6, "temperature": 0}
            return await asyncio.gather(*(create(**how) for _ in range(6)))

    texts = {answer.choices[0].message.content for answer in asyncio.run(all_of_them())}
    assert len(texts) == 1


def test_errors_are_the_sdks(ask, client, web):
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as refused:
        ask(temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="n is 2"):
        ask(n=2, stream=True)
    with pytest.raises(openai.NotFoundError, match="model is 'gpt-4o'"):
        client.completions.create(model="gpt-4o", prompt="x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="default", prompt=[5] * 32769)
    assert refused.value.code == "context_length_exceeded"
    with (
        openai.OpenAI(api_key="wrong", base_url=web.url) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_an_error_within_a_stream(ask, web):
    def fails(engine: Engine) -> None:
        def step() -> None:
            raise RuntimeError("it broke")

        engine.step = step

    with ask(stream=True, max_tokens=4000, extra_body={"min_tokens": 4000}) as stream:
        chunks = iter(stream)
        next(chunks)
        web.service.between_steps(fails)
        with pytest.raises(openai.APIError, match="it broke"):
            list(chunks)
