import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.errors import UsageError
from mlx_mtp.text.messages import checked_messages, checked_tools
from tests.text.test_turns import TEMPLATES, TOKENIZER, result, said, text, user


def test_parts_are_joined_and_old_thoughts_are_taken_out():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    thought = "<|channel>thought\nhm <|tool_call>\n<channel|>\nYes. <|channel> is a marker."
    messages = checked_messages([user(parts), {"role": "assistant", "content": thought}])
    assert messages[0] == user("a b")
    assert messages[1] == said("Yes. <|channel> is a marker.")
    assert checked_messages(messages) == messages


def test_e12_system_messages_at_the_start_become_one():
    messages = [
        {"role": "developer", "content": "One."},
        {"role": "system", "content": "Two."},
        user("Hi"),
        {"role": "developer", "content": "Three."},
    ]
    checked = checked_messages(messages)
    assert [m["role"] for m in checked] == ["system", "user", "system"]
    for template in TEMPLATES.values():
        rendered = template.render(checked)
        assert "<|turn>system\nOne.\n\nTwo.<turn|>" in rendered
        assert "<|turn>system\nThree.<turn|>" in rendered


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ('{"a": [1, null]}', {"a": [1, None]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("{}", {}),
        ('{"a": 1', {"input": '{"a": 1'}),
        (r"\d+", {"input": r"\d+"}),
        ("[1]", {"input": "[1]"}),
        ([1], {"input": "[1]"}),
        ("[" * 5000, {"input": "[" * 5000}),
        ('{"a":' * 500 + "1" + "}" * 500, {"input": '{"a":' * 500 + "1" + "}" * 500}),
    ],
)
def test_e22_arguments_never_fail(given, arguments):
    message = said("", ("read", {}))
    message["tool_calls"][0]["function"]["arguments"] = given
    (checked,) = checked_messages([message])
    assert checked["tool_calls"][0]["function"]["arguments"] == arguments


def test_results_get_their_name_and_the_order_of_the_calls():
    calls = said("", ("read", {}), ("add", {}))
    checked = checked_messages(
        [user("a"), calls, result(1, "3"), result(0, "x"), user("b"), calls, result(1, "4")]
    )
    assert [(m["role"], m.get("name"), m["content"]) for m in checked] == [
        ("user", None, "a"),
        ("assistant", None, ""),
        ("tool", "read", "x"),
        ("tool", "add", "3"),
        ("user", None, "b"),
        ("assistant", None, ""),
        ("tool", "add", "4"),
    ]


def test_an_answer_may_be_empty_and_have_thoughts():
    (checked,) = checked_messages([{"role": "assistant", "content": None, "reasoning": "hm"}])
    assert checked == said("", thoughts="hm")
    (checked,) = checked_messages([said("", ("read", {})) | {"content": None}])
    assert checked["content"] == ""


def nested(levels):
    return [] if levels == 0 else [nested(levels - 1)]


CALL = said("", ("read", {}))["tool_calls"][0]


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        (None, "messages: "),
        ([], "messages: "),
        (["Hi"], "messages[0].role: "),
        ([{"content": "Hi"}], "messages[0].role: "),
        ([user("a"), {"role": ["user"], "content": "Hi"}], "messages[1].role: "),
        ([{"role": "function", "content": "Hi"}], "messages[0].role: "),
        ([{"role": "user"}], "messages[0].content: "),
        ([user(None)], "messages[0].content: "),
        ([user(7)], "messages[0].content: "),
        ([{"role": "assistant"}], "messages[0].content: "),
        ([user([{"type": "text", "text": "a"}, {"type": "image_url"}])], "messages[0].content[1]"),
        ([user([{"type": "text", "text": None}])], "messages[0].content[0]"),
        ([user(["a"])], "messages[0].content[0]"),
        ([user("a") | {"more": nested(150)}], "messages[0]: nested"),
        ([said("") | {"tool_calls": "x"}], "messages[0].tool_calls: "),
        ([said("") | {"tool_calls": ["x"]}], "messages[0].tool_calls[0]: "),
        ([said("") | {"tool_calls": [CALL, {"id": "1"}]}], "messages[0].tool_calls[1]: "),
        ([said("") | {"tool_calls": [CALL | {"id": None}]}], "messages[0].tool_calls[0]: "),
        (
            [said("") | {"tool_calls": [CALL | {"function": {"name": ""}}]}],
            "messages[0].tool_calls[0].function.name: ",
        ),
        ([said("") | {"reasoning": 7}], "messages[0].reasoning_content: "),
        ([result(0, "x")], "messages[0].tool_call_id: "),
        ([said("", ("read", {})), user("a"), result(0, "x")], "messages[2].tool_call_id: "),
        ([said("", ("read", {})), {"role": "tool", "content": "x"}], "messages[1].tool_call_id: "),
        ([said("", ("read", {})), result(0, None)], "messages[1].content: "),
    ],
)
def test_what_is_wrong_is_named_with_its_place(messages, place):
    with pytest.raises(UsageError) as error:
        checked_messages(messages)
    assert str(error.value).startswith(place)
    assert "\n" not in str(error.value)


def tool(parameters, **more):
    return {"type": "function", "function": {"name": "read", "parameters": parameters} | more}


def test_both_forms_of_a_tool():
    flat = {"type": "function", "name": "read", "description": None, "strict": True}
    nested_form = {"type": "function", "function": {"name": "read"}}
    expected = [{"type": "function", "function": {"name": "read", "description": ""}}]
    assert checked_tools([flat]) == checked_tools([nested_form]) == expected
    assert checked_tools(None) is checked_tools([]) is None
    assert checked_tools(checked_tools([flat])) == expected


POINT = {
    "type": "object",
    "properties": {"x": {"type": "number", "minimum": 0}, "next": {"$ref": "#/$defs/Point"}},
    "required": ["x"],
}
SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "description": "All of it.",
    "$defs": {"Point": POINT},
    "properties": {
        "optional": {"anyOf": [{"type": "string", "maxLength": 7}, {"type": "null"}]},
        "listed": {"type": ["integer", "null"], "enum": [1, 2], "description": "Which"},
        "either": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Point"}]},
        "both": {"type": ["string", "number"]},
        "rows": {
            "type": "array",
            "items": {"type": "array", "items": {"type": ["string", "null"]}},
        },
        "pair": {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]},
        "any": True,
        "choice": {"enum": ["left", "right"]},
        "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "point": {"allOf": [{"$ref": "#/$defs/Point"}], "description": "Where"},
        "flag": {"type": "boolean", "default": False},
        "odd": {"type": "object", "properties": None, "required": True, "items": "x"},
        "gone": {"$ref": "#/$defs/None"},
        "bare": {"properties": {"deep": {"items": {"const": 5}}}},
    },
}
SURVIVES = [
    *("All of it.", "maxLength: 7", "Which (enum: [1, 2])", '"type": "object", "properties"'),
    *('anyOf: [{"type": "string"}, {"type": "number"}]', "left", "right", "default: false"),
    *('additionalProperties: {"type": "boolean"}', "Where", "(minimum: 0)", "const: 5"),
    *("again as in #/$defs/Point", 'items: [{"type": "string"}, {"type": "integer"}]'),
]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_no_template_loses_or_breaks_on_a_schema(template):
    tools = checked_tools([tool(SCHEMA, description="Reads.")])
    rendered = template.render([user("Hi")], tools=tools)
    for part in SURVIVES:
        assert part in rendered, part
    for name in SCHEMA["properties"]:
        assert f"{name}:{{" in rendered
    assert 'optional:{description:<|"|>(maxLength: 7)<|"|>,nullable:true,type:' in rendered
    assert 'nullable:true,type:<|"|>INTEGER<|"|>' in rendered
    assert "[&#39;" not in rendered
    assert "['" not in rendered
    declaration = rendered.partition("<|tool>")[2].partition("<tool|>")[0]
    plain = declaration.replace('<|"|>', "")
    assert plain.count("{") == plain.count("}")


def refs(levels):
    """Each level names the next one twice."""
    two = {f"L{n}": {"anyOf": [{"$ref": f"#/$defs/L{n + 1}"}] * 2} for n in range(levels)}
    return {"properties": {"x": {"$ref": "#/$defs/L0"}}, "$defs": two | {f"L{levels}": {}}}


def chain(levels):
    deep = {f"L{n}": {"properties": {"a": {"$ref": f"#/$defs/L{n + 1}"}}} for n in range(levels)}
    return {"properties": {"x": {"$ref": "#/$defs/L0"}}, "$defs": deep}


@pytest.mark.parametrize(
    ("tools", "place"),
    [
        ("read", "tools: "),
        ({}, "tools: "),
        (["read"], "tools[0].type: "),
        ([{"type": "web_search"}], "tools[0].type: "),
        ([{"type": "function", "function": "read"}], "tools[0]: its name"),
        ([tool({}), tool({}, name="a b")], "tools[1]: its name"),
        ([tool({}), tool({}, name="a{")], "tools[1]: its name"),
        ([tool({}), tool({})], "tools[1]: a tool before it"),
        ([tool({}, description=7)], "tools[0]: its description"),
        ([tool("x")], "tools[0]: its parameters"),
        ([tool({"type": "string"})], "tools[0]: its parameters"),
        ([tool({"more": nested(150)})], "tools[0]: nested"),
        ([tool(refs(40))], "tools[0]: the schema"),
        ([tool(chain(400))], "tools[0]: the schema"),
    ],
)
def test_what_is_wrong_with_a_tool_is_named(tools, place):
    with pytest.raises(UsageError) as error:
        checked_tools(tools)
    assert str(error.value).startswith(place)


def test_schemas_share_what_they_may_have_of_parts():
    assert checked_tools([tool(refs(9))])
    too_large = r"^tools\[\d+\]: the schema of its parameters is too large"
    with pytest.raises(UsageError, match=too_large):
        checked_tools([tool(refs(9), name=f"t{n}") for n in range(20)])


def test_many_tools_and_system_messages_are_not_gone_through_again_for_each():
    class Name(str):
        __slots__ = ()
        compared = copied = 0
        __hash__ = str.__hash__

        def __eq__(self, other):
            Name.compared += 1
            return str.__eq__(self, other)

        def __radd__(self, before):
            Name.copied += len(before)
            return str.__add__(before, self)

    assert len(checked_tools([tool({}, name=Name(f"t{n}")) for n in range(200)])) == 200
    assert Name.compared < 2000
    messages = [{"role": "system", "content": Name("abc")} for _ in range(200)]
    assert checked_messages(messages)[0]["content"] == "\n\n".join(["abc"] * 200)
    assert Name.copied < 2000


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_the_deepest_that_is_taken_can_be_rendered(template):
    schema = {"type": "string"}
    for _ in range(22):
        schema = {"type": "object", "properties": {"a": schema}}
    value = {"a": 1}
    for _ in range(48):
        value = {"a": value}
    call = said("", ("read", value))
    template.encode(checked_messages([call]), TOKENIZER, tools=checked_tools([tool(schema)]))
    loop = {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/properties/a"}}}
    assert "again as in #" in json.dumps(checked_tools([tool(loop)]))


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=10,
)
KEYWORDS = ("type", "properties", "items", "anyOf", "$ref", "enum", "required", "description")
schemas = st.recursive(
    json_values,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
        st.lists(inner, max_size=2),
        st.sampled_from([["string", "null"], "object", "array", "#", "#/properties/a", []]),
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(schema=schemas)
def test_any_schema_is_taken_or_refused(schema):
    parameters = {"type": "object", "properties": {"a": schema}}
    try:
        tools = checked_tools([tool(parameters)])
    except UsageError:
        return
    for template in TEMPLATES.values():
        ids = template.encode([user("Hi")], TOKENIZER, tools=tools)
        assert text(ids).count("<|tool>") == 1
