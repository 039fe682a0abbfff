"""OpenAI's messages and tools, checked and brought into the form that chat templates read.

Every content becomes a text, every call's arguments an object; developers speak as the system, and
what is said by it at the start becomes one message. Tool results get their function's name and the
order of the calls, because Gemma's format has no ids. Thoughts that a client sent back inside of an
answer's text are taken out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from mlx_mtp.errors import UsageError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_NAME = re.compile(r"[\w.:/-]{1,128}")
_THOUGHT = re.compile(r"<\|channel>thought\n.*?(?:<channel\|>\s*|\Z)", re.DOTALL)
_DEPTH = 50  # of JSON: a template calls itself at each level

# A schema's keywords: the types that they must have, and those that Google's template leaves out.
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("$schema", "$id", "$defs", "definitions"), ()),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "enum", "required"), list),
    **{"$ref": str, "description": str, "type": (str, list)},
    **{"properties": Mapping, "additionalProperties": Mapping},
}
_NOTED = (
    *("anyOf", "oneOf", "allOf", "not", "const", "default", "format", "pattern"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "prefixItems", "additionalProperties"),
)
_NODES = 20_000


def checked_messages(messages: Any, where: str = "messages") -> list[dict[str, Any]]:
    """Messages for a template. Raises UsageError naming the place."""
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where}: give a list with at least one message")
    checked: list[tuple[tuple[int, int], dict[str, Any]]] = []
    calls: dict[Any, tuple[tuple[int, int], str]] = {}
    system: list[str] = []  # what it says at the start
    for i, given in enumerate(messages):
        place, rank = f"{where}[{i}]", (i, -1)
        role = given.get("role") if isinstance(given, Mapping) else None
        if role not in _ROLES:
            raise UsageError(f"{place}.role: give one of {', '.join(_ROLES)}")
        if _deeper(given):
            raise UsageError(f"{place}: nested more than {_DEPTH} levels deep")
        if role == "assistant":
            message = _answer(given, place)
            made = enumerate(message.get("tool_calls", ()))
            calls = {call["id"]: ((i, n), call["function"]["name"]) for n, call in made}
        else:
            message = {"role": role, "content": _text(given.get("content"), f"{place}.content")}
        if role == "tool":
            of = str(given.get("tool_call_id"))
            if of not in calls:
                raise UsageError(f"{place}.tool_call_id: not the id of a call just before it")
            rank, name = calls[of]
            message |= {"tool_call_id": of, "name": name}
        elif role != "assistant":
            calls = {}
        if role in ("system", "developer"):
            message["role"] = "system"
            if len(checked) == len(system):
                system.append(message["content"])
        checked.append((rank, message))
    if system:
        checked[: len(system)] = [((0, -1), {"role": "system", "content": "\n\n".join(system)})]
    return [message for _, message in sorted(checked, key=lambda item: item[0])]


def _answer(given: Mapping[str, Any], place: str) -> dict[str, Any]:
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list):
        raise UsageError(f"{place}.tool_calls: give a list")
    content = given.get("content")
    if content is None and (calls or "content" in given):
        content = ""  # it was cancelled, or there were only thoughts or calls
    text = _text(content, f"{place}.content")
    answer: dict[str, Any] = {"role": "assistant", "content": _THOUGHT.sub("", text)}
    if thoughts := given.get("reasoning_content") or given.get("reasoning"):
        answer["reasoning_content"] = _text(thoughts, f"{place}.reasoning_content")
    if calls:
        answer["tool_calls"] = [_call(c, f"{place}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return answer


def _call(given: Any, place: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(given.get("id"), str):
        raise UsageError(f"{place}: give an id and a function with its name and arguments")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise UsageError(f"{place}.function.name: give the function's name")
    called = {"name": name, "arguments": _arguments(function.get("arguments"))}
    return {"id": given["id"], "type": "function", "function": called}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"{where}: give a text or a list of text parts")
    for i, part in enumerate(content):
        text = isinstance(part, Mapping) and part.get("type") == "text" and part.get("text")
        if not isinstance(text, str):
            raise UsageError(f'{where}[{i}]: only parts {{"type": "text", "text": ...}} are read')
    return "".join(part["text"] for part in content)


def _arguments(given: Any) -> dict[str, Any]:
    """What a model wrote may be no object, and must not fail: then it is the text `input`."""
    text = given if isinstance(given, str) else json.dumps(given or {})
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) and not _deeper(value) else {"input": text}


def _deeper(value: Any, levels: int = _DEPTH) -> bool:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return levels == 0 or any(_deeper(item, levels - 1) for item in value)


def checked_tools(tools: Any, where: str = "tools") -> list[dict[str, Any]] | None:
    """Function declarations for a template, None for none. Raises UsageError naming the place."""
    if not isinstance(tools, (list, type(None))):
        raise UsageError(f"{where}: give a list")
    nodes = count(1)
    checked = [_tool(tool, f"{where}[{i}]", nodes) for i, tool in enumerate(tools or [])]
    names = set()
    for i, tool in enumerate(checked):
        names.add(tool["function"]["name"])
        if len(names) == i:
            raise UsageError(f"{where}[{i}]: a tool before it has the same name")
    return checked or None


def _tool(given: Any, place: str, nodes: Iterator[int]) -> dict[str, Any]:
    if not isinstance(given, Mapping) or given.get("type") != "function":
        raise UsageError(f'{place}.type: only tools of the type "function" can be called')
    if _deeper(given):
        raise UsageError(f"{place}: nested more than {_DEPTH} levels deep")
    function = given.get("function", given)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{place}: its name must be 1 to 128 letters, digits and _ . : / -")
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise UsageError(f"{place}: its description must be a text")
    schema = {} if function.get("parameters") is None else function["parameters"]
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise UsageError(f"{place}: its parameters must be the schema of an object")
    tool: dict[str, Any] = {"name": name, "description": description}
    if schema:
        tool["parameters"] = {"type": "object"} | _Schema(schema, place, nodes).plain(schema)
        about = tool["parameters"].pop("description", "")  # which not every template prints
        if about not in description:
            tool["description"] = f"{description}\n{about}".strip()
    return {"type": "function", "function": tool}


class _Schema:
    """Makes a JSON schema one that templates print without loss: each part has one type and
    `nullable`, references are filled in, and what is in no template's words goes into the
    description as JSON. `nodes` counts the parts of all the tools' schemas."""

    def __init__(self, root: Mapping[str, Any], where: str, nodes: Iterator[int]) -> None:
        self._root = root
        self._where = where
        self._nodes = nodes

    def plain(self, given: Any, within: tuple[str, ...] = ()) -> dict[str, Any]:
        """`within`: the references and other steps on the way to this part."""
        if next(self._nodes) > _NODES or len(within) > _DEPTH:
            raise UsageError(f"{self._where}: the schema of its parameters is too large")
        items = given.items() if isinstance(given, Mapping) else ()
        schema = {k: v for k, v in items if isinstance(v, _KINDS.get(k, object))}
        if ref := schema.pop("$ref", None):
            if ref in within:
                return {"type": "object", "description": f"again as in {ref}", "properties": {}}
            return self.plain({**self._target(ref), **schema}, (*within, ref))
        if isinstance(schema.get("type"), list):
            schema.setdefault("anyOf", [{"type": kind} for kind in schema.pop("type")])
        for key in ("anyOf", "oneOf", "allOf"):
            if key not in schema:
                continue
            options = [option for option in schema[key] if option != {"type": "null"}]
            if len(options) < len(schema[key]):
                schema["nullable"] = True
            if len(options) == 1 and isinstance(options[0], Mapping):
                del schema[key]
                return self.plain({**options[0], **schema}, (*within, key))
            schema[key] = [self.plain(option, (*within, key)) for option in options]
            kinds = [option["type"] for option in schema[key] if "type" in option]
            schema.setdefault("type", kinds[0] if kinds else "string")
        return self._printable(schema, (*within, ""))

    def _printable(self, schema: dict[str, Any], within: tuple[str, ...]) -> dict[str, Any]:
        noted = list(_NOTED)
        if "properties" in schema or schema.get("type") == "object":
            schema.setdefault("type", "object")
            named = schema.get("properties", {}).items()
            schema["properties"] = {name: self.plain(part, within) for name, part in named}
        if isinstance(schema.get("items"), Mapping):
            schema.setdefault("type", "array")
            schema["items"] = self.plain(schema["items"], within)
        else:
            noted.append("items")
        if all(isinstance(value, str) for value in schema.get("enum", [0])):
            schema.setdefault("type", "string")
        if schema.get("type") != "string":
            noted.append("enum")
        notes = {key: schema.pop(key) for key in noted if schema.get(key) is not None}
        note = "; ".join(f"{k}: {json.dumps(v, ensure_ascii=False)}" for k, v in notes.items())
        about = schema.pop("description", "")
        if about or note:
            schema["description"] = f"{about} ({note})".strip() if note else about
        return schema

    def _target(self, ref: str) -> Mapping[str, Any]:
        node: Any = self._root
        for key in ref.removeprefix("#").split("/")[1:]:
            name = key.replace("~1", "/").replace("~0", "~")
            node = node.get(name) if isinstance(node, Mapping) else None
        return node if isinstance(node, Mapping) else {}
