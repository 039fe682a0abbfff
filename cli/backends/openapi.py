"""What the HTTP server takes and answers, as OpenAPI 3.1; its numbers are those that bodies are
checked by."""

from __future__ import annotations

from typing import Any

from mlx_mtp.cli.backends import openai

Schema = dict[str, Any]
TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", dict: "object"}
OPEN = {"type": "object", "additionalProperties": True}


def document(key: bool) -> Schema:
    """key: whether one must be sent."""
    from importlib.metadata import version

    found = {
        "openapi": "3.1.0",
        "info": {"title": "mlx-mtp serve", "version": version("mlx-mtp")},
        "paths": {
            "/health": {"get": _operation("Whether the model is there.", 503)},
            "/metrics": {"get": _operation("Counters for Prometheus.", kind="text/plain")},
            "/openapi.json": {"get": _operation("This page.")},
            "/v1/models": {"get": _operation("The model.")},
            "/v1/models/{name}": {
                "get": _operation("The model, by one of its names.", 404)
                | {"parameters": [{"name": "name", "in": "path", "required": True} | _STRING]}
            },
            "/v1/chat/completions": {"post": _generation("The next turn of a chat.", _chat())},
            "/v1/completions": {"post": _generation("How a prompt goes on.", _completion())},
        },
        "components": {"schemas": {"Error": _ERROR}},
    }
    if key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _operation(about: str, *errors: int, kind: str = "application/json") -> Schema:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answers: Schema = {"200": {"description": "OK", "content": {kind: {"schema": {}}}}}
    for status in (401, 403, *errors):
        answers[str(status)] = {"description": "Error", "content": error}
    return {"summary": about, "responses": answers}


def _generation(about: str, body: Schema) -> Schema:
    operation = _operation(about, 400, 404, 413, 429, 500, 503, 507)
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    content = {"application/json": {"schema": body}}
    return operation | {"requestBody": {"required": True, "content": content}}


def _value(kind: type, low: float | None = None, high: float | None = None) -> Schema:
    """Null is the default, everywhere."""
    bounds = {"minimum": low, "maximum": high}
    found = {name: value for name, value in bounds.items() if value is not None}
    return {"type": [TYPES[kind], "null"]} | found


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, {"type": "null"}]}


def _body(required: str, **properties: Schema) -> Schema:
    numbers = {name: _value(*how) for name, how in openai.NUMBERS.items()}
    tokens = _value(int, 0, openai.MOST_TOKENS)
    text = {"type": "string", "minLength": 1}
    stops = {"type": "array", "items": text, "maxItems": openai.MOST_STOPS}
    common = {
        "max_tokens": tokens,
        "seed": _value(int, -(1 << 63), (1 << 64) - 1),
        "stop": _either(text, stops),
        "draft_len": _either({"type": "integer", "minimum": 0, "maximum": 8}, {"const": "auto"}),
        "logit_bias": _either(
            OPEN
            | {"additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}
            | {"propertyNames": {"pattern": "^[0-9]{1,9}$"}}
        ),
        "n": _value(int, 1, 1),
        "model": _value(str),
        "stream": _value(bool),
        "stream_options": _either(OPEN | {"properties": {"include_usage": _value(bool)}}),
        "return_token_ids": _value(bool),
    }
    return OPEN | {"required": [required], "properties": numbers | common | properties}


def _chat() -> Schema:
    return _body(
        "messages",
        messages={"type": "array", "minItems": 1, "items": _MESSAGE},
        tools=_either({"type": "array", "items": _TOOL}),
        tool_choice=_either({"enum": ["auto", "none", "required"]}, OPEN),
        parallel_tool_calls=_value(bool),
        response_format=_either(
            OPEN
            | {"properties": {"type": {"enum": ["text", *openai.FORMATS]}}}
            | {"required": ["type"]}
        ),
        reasoning_effort={"enum": [*openai.THINKING, None]},
        max_completion_tokens=_value(int, 0, openai.MOST_TOKENS),
        logprobs=_value(bool),
        top_logprobs=_value(int, 0, openai.MOST_LOGPROBS),
        session={"type": ["string", "null"], "minLength": 1, "maxLength": 256},
        chat_template_kwargs=_either(
            OPEN
            | {"properties": dict.fromkeys(("enable_thinking", "preserve_thinking"), _value(bool))}
        ),
    )


def _completion() -> Schema:
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
    return _body(
        "prompt",
        prompt={"anyOf": [{"type": "string"}, ids]},
        logprobs=_value(int, 0, openai.MOST_LOGPROBS),
    )


_STRING: Schema = {"schema": {"type": "string"}}
_TEXT = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGE = OPEN | {
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT}]},
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": OPEN
        | {
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": r"^[\w.:/-]{1,128}$"},
                "description": _value(str),
                "parameters": _either(OPEN),
            },
        },
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
