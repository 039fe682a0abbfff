"""What the HTTP server takes and answers, as OpenAPI 3.1; its numbers are those that bodies are
checked by."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from mlx_mtp.cli.backends import openai

Schema = dict[str, Any]
KINDS = {int: "integer", float: "number", bool: "boolean", str: "string", dict: "object"}


def document(key: bool) -> Schema:
    """key: whether one must be sent."""
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths = {
        "/health": {"get": _operation("Whether the model is there.", 503)},
        "/metrics": {"get": _operation("Counters for Prometheus.", kind="text/plain")},
        "/v1/models": {"get": _operation("The model.")},
        "/v1/models/{name}": {
            "get": _operation("The model, by one of its names.", 404) | {"parameters": [name]}
        },
        "/v1/chat/completions": {"post": _generation("The next turn of a chat.", _chat())},
        "/v1/completions": {"post": _generation("How a prompt goes on.", _completion())},
    }
    found: Schema = {"openapi": "3.1.0", "paths": paths, "components": {}}
    if key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found | {"info": {"title": "mlx-mtp serve", "version": version("mlx-mtp")}}


def _operation(about: str, *errors: int, kind: str = "application/json") -> Schema:
    text = {"type": "string"}
    error = _object(
        message=text, type=text, param=_value(str), code=_value(str), required=["message", "type"]
    )
    content = {"application/json": {"schema": _object(error=error, required=["error"])}}
    answers: Schema = {"200": {"description": "OK", "content": {kind: {"schema": {}}}}}
    for status in (401, 403, *errors):
        answers[str(status)] = {"description": "Error", "content": content}
    return {"summary": about, "responses": answers}


def _generation(about: str, body: Schema) -> Schema:
    operation = _operation(about, 400, 404, 408, 413, 415, 429, 500, 503, 507)
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {}}
    content = {"application/json": {"schema": body}}
    return operation | {"requestBody": {"required": True, "content": content}}


def _value(kind: type, low: float | None = None, high: float | None = None) -> Schema:
    """Null is the default, everywhere."""
    bounds = {"minimum": low, "maximum": high}
    found = {name: value for name, value in bounds.items() if value is not None}
    return {"type": [KINDS[kind], "null"]} | found


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, {"type": "null"}]}


def _list(items: Schema, **more: int) -> Schema:
    return {"type": "array", "items": items} | more


def _object(required: list[str] | None = None, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required or []}


def _body(required: str, **properties: Schema) -> Schema:
    numbers = {name: _value(*how) for name, how in openai.NUMBERS.items()}
    text = {"type": "string", "minLength": 1}
    bias = _value(dict) | {"additionalProperties": _value(float, -100, 100)}
    common = {
        "max_tokens": _value(int, 0, openai.MOST_TOKENS),
        "seed": _value(int, -(1 << 63), (1 << 64) - 1),
        "stop": _either(text, _list(text, maxItems=openai.MOST_STOPS)),
        "draft_len": _either(_value(int, 0, 8), {"const": "auto"}),
        "logit_bias": bias | {"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
        "n": _value(int, 1, 1),
        "model": _value(str),
        "stream": _value(bool),
        "stream_options": _either(_object(include_usage=_value(bool))),
        "return_token_ids": _value(bool),
    }
    return _object([required], **numbers, **common, **properties)


def _chat() -> Schema:
    part = _object(["type", "text"], type={"const": "text"}, text={"type": "string"})
    message = _object(
        ["role", "content"],
        role={"enum": ["system", "developer", "user", "assistant", "tool"]},
        content={"anyOf": [{"type": "string"}, _list(part)]},
    )
    name = {"type": "string", "pattern": r"^[\w.:/-]{1,128}$"}
    function = _object(["name"], name=name, description=_value(str), parameters=_value(dict))
    return _body(
        "messages",
        messages=_list(message, minItems=1),
        tools=_either(
            _list(_object(["type", "function"], type={"const": "function"}, function=function))
        ),
        tool_choice=_either({"enum": ["auto", "none", "required"]}, _object()),
        parallel_tool_calls=_value(bool),
        response_format=_either(_object(["type"], type={"enum": ["text", *openai.FORMATS]})),
        reasoning_effort={"enum": [*openai.THINKING, None]},
        max_completion_tokens=_value(int, 0, openai.MOST_TOKENS),
        logprobs=_value(bool),
        top_logprobs=_value(int, 0, openai.MOST_LOGPROBS),
        session=_value(str) | {"minLength": 1, "maxLength": 256},
        chat_template_kwargs=_either(
            _object(enable_thinking=_value(bool), preserve_thinking=_value(bool))
        ),
    )


def _completion() -> Schema:
    ids = _list({"type": "integer", "minimum": 0}, minItems=1)
    prompt = {"anyOf": [{"type": "string"}, ids]}
    return _body("prompt", prompt=prompt, logprobs=_value(int, 0, openai.MOST_LOGPROBS))
