"""`mlx-mtp acp` in this process, with an engine that says what the test wants: turns, tools,
permissions, cancelling, and what is refused."""

from __future__ import annotations

import json
import threading

import pytest

from mlx_mtp.cli import options
from mlx_mtp.cli.backends import acp, agent
from mlx_mtp.cli.backends.service import Service
from mlx_mtp.errors import LoadError, UsageError
from tests.cli.editor import Inside, words
from tests.clients.scripted import ScriptedEngine

Q = '<|"|>'


def call(name, **given):
    texts = [f"{k}:{Q}{v}{Q}" if isinstance(v, str) else f"{k}:{v}" for k, v in given.items()]
    return f"<|tool_call>call:{name}{{{','.join(texts)}}}<tool_call|>"


EDIT = call("edit_file", path="a.txt", old_text="two", new_text="2")
SCRIPT = {
    "edit please": [EDIT, "Edited."],
    "edit twice": [EDIT, call("edit_file", path="/work/b.txt", old_text="one", new_text="1"), "x"],
    "edit nothing": [call("edit_file", path="a.txt", old_text="zwei", new_text="2"), "Not there."],
    "edit many": [call("edit_file", path="a.txt", old_text="o", new_text="0"), "Too many."],
    "make one": [call("edit_file", path="new/c.txt", old_text="", new_text="made"), "Made."],
    "make over": [call("edit_file", path="a.txt", old_text="", new_text="made"), "It is there."],
    "read please": [call("read_file", path="../a.txt", line=2, limit=1), "It says two."],
    "read both": [call("read_file", path="a.txt") + call("read_file", path="b.txt"), "Read."],
    "read none": [call("read_file", path="none.txt"), "No such file."],
    "read wrongly": [call("read_file", line=0), "I see."],
    "make none": [call("edit_file", path="none/x", old_text="", new_text=""), "Made."],
    "edit to same": [call("edit_file", path="a.txt", old_text="two", new_text="two"), "Same."],
    "edit lines": [call("edit_file", path="a.txt", old_text="one\ntwo", new_text="1\n2"), "Done."],
    "read on": [call("read_file", path="a.txt", line=2, skip=32000), "So it ends."],
    "run nothing": [call("run_command", command=" \n"), "Nothing."],
    "call badly": ["Look: <|tool_call>call:read_file{path<tool_call|>", "Now I read."],
    "run please": [call("run_command", command="ls -l | wc"), "It ran."],
    "unknown tool": [call("delete_all"), "There is none."],
    "think about it": ["<|channel>thought\nHm.<channel|>So it is."],
    "on and on": [call("read_file", path="a.txt")],
    "without end": None,
    "hello": ["Hello there."],
}
RULES = [
    {"when": when, "say": text} for when, texts in SCRIPT.items() for text in texts or ["word "]
]
for rule in RULES:
    rule["endless"] = rule["say"] == "word "


def load(progress):
    return options.load(
        None, None, False, None, None, None, quiet=True, progress=progress, calibrate=False
    )


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    log = tmp_path_factory.mktemp("acp") / "prompts"
    service = Service(load, lambda pair: ScriptedEngine(pair, RULES, log), rows=2)
    service.log = log
    return service


@pytest.fixture
def editor(scripted):
    if scripted._engine is not None:
        scripted._engine._used = [0] * len(RULES)
    editor = Inside(scripted)
    editor.files = {"/work/a.txt": "one\ntwo\n", "/work/b.txt": "one\n", "/a.txt": "two\n"}
    yield editor
    assert editor.end() == 0


@pytest.fixture
def told(scripted):
    """What was said before the model was asked the last time."""

    def read():
        last = json.loads(scripted.log.read_text().splitlines()[-1])
        return last["prompt"].split("\nuser\n", 1)[-1]

    return read


def test_a_session_goes_on(editor, told):
    session = editor.open()
    answer = editor.prompt(session, "hello")
    assert answer["stopReason"] == "end_turn"
    assert answer["usage"]["totalTokens"] > answer["usage"]["outputTokens"] > 0
    assert editor.said() == "Hello there."
    assert editor.prompt(session, "say hello again")["stopReason"] == "end_turn"
    assert "Hello there." in told()


def test_sessions_are_apart(editor, told):
    editor.prompt(editor.open(), "hello from the first")
    editor.prompt(editor.open(), "hello from the second")
    assert "second" in told()
    assert "first" not in told()


def test_answers_come_before_the_weights():
    there = threading.Event()

    def slowly(progress):
        assert there.wait(20)
        raise LoadError("the weights are damaged")

    editor = Inside(Service(slowly, lambda pair: None))
    session = editor.open()
    editor.start(1, session, "hello")
    assert editor.do("session/new", cwd="/", mcpServers=[])["result"]["sessionId"] != session
    there.set()
    error = editor.answer(1)["error"]
    assert error == {"code": -32603, "message": "the weights are damaged"}
    # The session is not worse for it, and it is said again.
    assert editor.do("session/prompt", sessionId=session, prompt=words("x"))["error"] == error
    assert editor.end() == 3


def test_an_edit_is_asked_for_and_done(editor, told):
    session = editor.open()
    assert editor.prompt(session, "edit please")["stopReason"] == "end_turn"
    assert editor.files["/work/a.txt"] == "one\n2\n"
    (asked,) = [one for one in editor.asked if one["method"] == "session/request_permission"]
    (diff,) = asked["params"]["toolCall"]["content"]
    assert (diff["path"], diff["oldText"], diff["newText"]) == (
        "/work/a.txt",
        "one\ntwo\n",
        "one\n2\n",
    )
    assert editor.calls() == [("edit_file a.txt", "completed")]
    assert "done" in told()
    assert editor.said() == "Edited."


@pytest.mark.parametrize("permit", ["reject_once", "whatever"])
def test_a_denied_edit_is_told_the_model(editor, told, permit):
    editor.permit = permit
    assert editor.prompt(editor.open(), "edit please")["stopReason"] == "end_turn"
    assert editor.files["/work/a.txt"] == "one\ntwo\n"
    assert not any(one["method"] == "fs/write_text_file" for one in editor.asked)
    assert editor.calls() == [("edit_file a.txt", "failed")]
    assert "the user denied this" in told()


def test_always_is_for_a_kind_of_tool_and_a_session(editor):
    editor.permit = "allow_always"
    session = editor.open()
    editor.prompt(session, "edit twice")
    assert editor.files["/work/b.txt"] == "1\n"

    def asked():
        return sum(one["method"] == "session/request_permission" for one in editor.asked)

    assert asked() == 1
    editor.prompt(session, "run please")
    assert asked() == 2


def test_a_file_that_changes_meanwhile_is_left_alone(editor, told):
    def change(params):
        editor.files["/work/a.txt"] = "two, said the user"
        return {"outcome": {"outcome": "selected", "optionId": "allow_once"}}

    editor.on["session/request_permission"] = change
    editor.prompt(editor.open(), "edit please")
    assert editor.files["/work/a.txt"] == "two, said the user"
    assert "has changed meanwhile" in told()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("edit nothing", "in the file not once"),
        ("edit many", "in the file more than once"),
        ("edit to same", "changes nothing"),
        ("run nothing", "command is empty"),
        ("make over", "the file exists"),
        ("read none", "Resource not found"),
        ("read wrongly", "path is missing"),
        ("unknown tool", "the tools are: read_file, edit_file, run_command"),
    ],
)
def test_what_goes_wrong_is_told_the_model(editor, told, text, what):
    before = dict(editor.files)
    assert editor.prompt(editor.open(), text)["stopReason"] == "end_turn"
    assert what in told()
    assert [status for _, status in editor.calls()] == ["failed"]
    assert editor.files == before
    assert {one["method"] for one in editor.asked} <= {"fs/read_text_file"}


UNREADABLE = [
    {"code": -32603, "message": "Internal error"},
    {"code": -32603, "message": "stream did not contain valid UTF-8"},
    {"code": -32603, "message": "EACCES: permission denied, open '/work/new/c.txt'"},
    {"code": -32603, "message": "Internal error", "data": {"details": "EISDIR: is a directory"}},
    {"code": -32000, "message": "Auth required"},
    "ENOTENT",
    7,
    None,
]
GONE = [
    {"code": -32002, "message": "Resource not found", "data": {"uri": "file:///work/new/c.txt"}},
    # As of clients that pass on what the system says: acpx 0.1, Rust's, Python's.
    {"code": -32603, "message": "Internal error", "data": {"details": "ENOENT: no such file"}},
    {"code": -32603, "message": "No such file or directory (os error 2)"},
    {"code": -32000, "message": "[Errno 2] No such file or directory: 'c.txt'"},
]


@pytest.mark.parametrize("error", UNREADABLE)
def test_a_file_that_cannot_be_read_is_not_made_anew(editor, told, error):
    editor.on["fs/read_text_file"] = lambda _: {"error": error}
    editor.prompt(editor.open(), "make one")
    assert [one["method"] for one in editor.asked] == ["fs/read_text_file"]
    assert "fs/read_text_file: " in told()
    assert [status for _, status in editor.calls()] == ["failed"]


@pytest.mark.parametrize("error", GONE)
def test_a_file_that_is_not_there_is_made(editor, error):
    editor.on["fs/read_text_file"] = lambda _: {"error": error}
    editor.prompt(editor.open(), "make one")
    assert editor.files["/work/new/c.txt"] == "made"


def test_an_empty_new_file(editor):
    editor.prompt(editor.open(), "make none")
    assert editor.files["/work/none/x"] == ""


def test_what_is_too_large_is_not_edited(editor, told, monkeypatch):
    monkeypatch.setattr(agent, "LARGEST", 7)
    editor.prompt(editor.open(), "edit please")
    assert [one["method"] for one in editor.asked] == ["fs/read_text_file"]
    assert "the file has 8 characters; 7 are the most to edit" in told()


def test_a_file_keeps_its_line_ends(editor):
    editor.files["/work/a.txt"] = "zero\r\none\r\ntwo\r\n"
    editor.prompt(editor.open(), "edit lines")
    assert editor.files["/work/a.txt"] == "zero\r\n1\r\n2\r\n"


def test_a_new_file(editor):
    editor.prompt(editor.open(), "make one")
    assert editor.files["/work/new/c.txt"] == "made"
    (asked,) = [one for one in editor.asked if one["method"] == "session/request_permission"]
    (diff,) = asked["params"]["toolCall"]["content"]
    assert diff["oldText"] is None


def test_reading_is_the_clients_and_asks_nobody(editor, told):
    editor.prompt(editor.open(), "read please")
    (read,) = editor.asked
    assert read["method"] == "fs/read_text_file"
    assert read["params"].items() >= {"path": "/a.txt", "line": 2, "limit": 1}.items()
    assert "two" in told()


def test_several_calls_in_one_answer(editor, told):
    editor.prompt(editor.open(), "read both")
    assert [title for title, _ in editor.calls()] == ["read_file a.txt", "read_file b.txt"]


def test_a_long_file_is_cut_and_says_where(editor, told):
    editor.files["/work/a.txt"] = "a line of text\n" * 5000
    editor.prompt(editor.open(), "read both")
    lines = agent.MOST // 15
    assert f"[cut off here; line {lines + 1} is the next]" in told()


def test_a_long_line_can_be_read_on(editor, told):
    editor.files["/work/a.txt"] = "x" * agent.MOST + "the rest\n"
    editor.prompt(editor.open(), "read both")
    assert "[cut off inside line 1; go on with line 1, skip 32000]" in told()
    editor.prompt(editor.open(), "read on")  # the file is as if it began with its second line
    assert "{value:the rest\n}" in told()


def test_a_call_that_cannot_be_read_is_told_the_model(editor, told):
    assert editor.prompt(editor.open(), "call badly")["stopReason"] == "end_turn"
    assert editor.said() == "Look: Now I read."
    assert "call:read_file{path" in told()
    assert "cannot be read, so nothing was done; write it again" in told()


def test_a_full_context_is_said(editor):
    session = editor.open()
    editor.prompt(session, "hello")
    editor.said()
    engine = editor.connection.service._engine
    context, engine.context = engine.context, 800
    assert editor.prompt(session, "without end")["stopReason"] == "max_tokens"
    engine.context = context
    said = editor.said()
    assert said.startswith("word word")
    assert said.endswith(" tokens is full; go on in a new session]")


def test_a_command_runs_in_the_clients_terminal(editor, told):
    editor.prompt(editor.open(), "run please")
    (ran,) = editor.ran
    assert (ran["command"], ran["args"], ran["cwd"]) == (
        "/bin/sh",
        ["-c", "ls -l | wc"],
        "/work",
    )
    methods = [one["method"] for one in editor.asked]
    assert methods[0] == "session/request_permission"
    assert methods[-1] == "terminal/release"
    assert "so it says" in told()
    assert "[exit code 3]" in told()


def test_a_denied_command_does_not_run(editor):
    editor.permit = "reject_once"
    editor.prompt(editor.open(), "run please")
    assert editor.ran == []


@pytest.mark.parametrize(
    ("able", "tools"),
    [
        ({}, []),
        ({"fs": {"readTextFile": True}}, ["read_file"]),
        ({"fs": {"writeTextFile": True}}, []),
        ({"terminal": True}, ["run_command"]),
        ({"fs": {"readTextFile": True, "writeTextFile": True}}, ["read_file", "edit_file"]),
    ],
)
def test_tools_that_the_client_cannot_do_are_not_offered(editor, able, tools):
    session = editor.connection._sessions[editor.open(able)]
    assert [tool.name for tool in session.tools] == tools


def test_a_model_that_calls_on_and_on_is_stopped(editor, monkeypatch):
    monkeypatch.setattr(agent, "ROUNDS", 3)
    session = editor.open()
    assert editor.prompt(session, "on and on")["stopReason"] == "max_turn_requests"
    assert len(editor.calls()) == 3
    assert editor.prompt(session, "on and on")["stopReason"] == "max_turn_requests"


def test_cancelling_what_the_model_says(editor, told):
    session = editor.open()
    editor.start(1, session, "without end")
    editor.until(lambda m: m.get("method") == "session/update")
    editor.stop(session)
    assert editor.answer(1)["result"]["stopReason"] == "cancelled"
    editor.prompt(session, "hello")
    assert "word word" in told()


def test_cancelling_by_the_requests_id(editor):
    session = editor.open()
    editor.start("mine", session, "without end")
    editor.until(lambda m: m.get("method") == "session/update")
    editor.cancel("another's")
    editor.cancel("mine")
    assert editor.answer("mine")["result"]["stopReason"] == "cancelled"


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("edit please", "session/request_permission"),
        ("edit please", "fs/write_text_file"),
        ("run please", "terminal/create"),
        ("read please", "fs/read_text_file"),
        ("run please", "terminal/wait_for_exit"),
    ],
)
def test_cancelling_while_the_client_is_asked(editor, told, text, at):
    editor.on[at] = lambda params: None
    session = editor.open()
    editor.start(1, session, text)
    late = editor.until(lambda m: m.get("method") == at)
    editor.stop(session)
    assert editor.answer(1)["result"]["stopReason"] == "cancelled"
    released = [one for one in editor.asked if one["method"] == "terminal/release"]
    assert len(released) == (at == "terminal/wait_for_exit")
    assert [status for _, status in editor.calls()] == ["failed"]
    editor.send({"jsonrpc": "2.0", "id": late["id"], "result": {}})
    assert editor.prompt(session, "hello")["stopReason"] == "end_turn"
    assert "The user cancelled this." in told()
    # What the client was told to do may be done.
    assert ("may have been done" in told()) == (at in BEGUN)


BEGUN = ("fs/write_text_file", "terminal/create", "terminal/wait_for_exit")


@pytest.mark.parametrize("how", ["session/cancel", "$/cancel_request", "session/close"])
def test_a_terminal_that_comes_after_the_cancel_is_released(editor, how):
    editor.on["terminal/create"] = lambda params: None
    session = editor.open()
    editor.start(1, session, "run please")
    created = editor.until(lambda m: m.get("method") == "terminal/create")
    if how == "session/close":
        editor.do(how, sessionId=session)
    else:
        params = {"sessionId": session, "requestId": 1}
        editor.send({"jsonrpc": "2.0", "method": how, "params": params})
    assert editor.answer(1)["result"]["stopReason"] == "cancelled"
    editor.send({"jsonrpc": "2.0", "id": created["id"], "result": {"terminalId": "late"}})
    released = editor.until(lambda m: m.get("method") == "terminal/release")
    assert released["params"] == {"sessionId": session, "terminalId": "late"}


def test_a_permission_that_the_client_cancels(editor):
    editor.on["session/request_permission"] = lambda _: {"outcome": {"outcome": "cancelled"}}
    assert editor.prompt(editor.open(), "edit please")["stopReason"] == "cancelled"


@pytest.mark.parametrize("answer", [{}, {"content": 7}, [], 7, {"outcome": []}])
def test_a_client_that_answers_nonsense(editor, told, answer):
    editor.on["fs/read_text_file"] = lambda _: answer
    assert editor.prompt(editor.open(), "read please")["stopReason"] == "end_turn"
    assert "content" in told()
    editor.on["session/request_permission"] = lambda _: answer
    editor.prompt(editor.open(), "run please")
    assert editor.ran == []


YES = {"outcome": {"outcome": "selected", "optionId": "allow_once"}}


@pytest.mark.parametrize(
    "answer",
    [
        {"jsonrpc": "2.0", "result": YES, "error": {"code": 1, "message": "no"}},
        {"result": YES},
        {"jsonrpc": "1.0", "result": YES},
        {"jsonrpc": "2.0"},
        {"jsonrpc": "2.0", "result": {"outcome": YES["outcome"] | {"outcome": "whatever"}}},
        {"jsonrpc": "2.0", "result": {"outcome": {"optionId": "allow_once"}}},
    ],
)
def test_what_is_no_clear_yes_is_none(editor, answer):
    editor.on["session/request_permission"] = lambda _: None
    session = editor.open()
    editor.start(1, session, "run please")
    asked = editor.until(lambda m: m.get("method") == "session/request_permission")
    editor.send({"id": asked["id"], **answer})
    assert editor.answer(1)["result"]["stopReason"] == "end_turn"
    assert [status for _, status in editor.calls()] == ["failed"]
    # Nothing was said with the agent's own id, and its answer counts once.
    assert not [m for m in editor.seen if m.get("id") == asked["id"] and "method" not in m]
    editor.send({"jsonrpc": "2.0", "id": asked["id"], "result": YES})
    editor.send({"jsonrpc": "2.0", "id": asked["id"]})
    assert editor.until(lambda m: "error" in m)["id"] is None
    assert editor.ran == []


def test_an_answer_that_is_too_long_fails_the_call(editor, told):
    editor.on["fs/read_text_file"] = lambda _: None
    session = editor.open()
    editor.start(1, session, "read please")
    asked = editor.until(lambda m: m.get("method") == "fs/read_text_file")
    answer = {"jsonrpc": "2.0", "id": asked["id"], "result": {"content": "x" * (64 << 20)}}
    editor.send(answer)
    assert editor.until(lambda m: "error" in m)["error"]["code"] == -32700
    assert editor.answer(1)["result"]["stopReason"] == "end_turn"
    assert "more than 67108864 bytes" in told()


def test_a_wait_that_says_nothing(editor, told):
    editor.on["terminal/wait_for_exit"] = lambda _: {"exitCode": None, "signal": None}
    editor.prompt(editor.open(), "run please")
    assert "[exit code unknown]" in told()


def test_a_busy_session_takes_no_second_prompt(editor):
    session, other = editor.open(), editor.open()
    editor.start(1, session, "without end")
    editor.until(lambda m: m.get("method") == "session/update")
    refused = editor.do("session/prompt", sessionId=session, prompt=words("hello"))
    assert refused["error"]["code"] == -32600
    # H21: nor is the id of a live request taken again, whose answer is the other's.
    editor.start(1, other, "hello")
    error = editor.until(lambda m: "error" in m)
    assert (error["id"], error["error"]["code"]) == (None, -32600)
    assert editor.prompt(other, "hello")["stopReason"] == "end_turn"
    editor.stop(session)
    assert editor.answer(1)["result"]["stopReason"] == "cancelled"


def test_a_full_queue(scripted, editor, monkeypatch):
    monkeypatch.setattr(scripted, "most_waiting", -2)
    session = editor.open()
    refused = editor.do("session/prompt", sessionId=session, prompt=words("hello"))
    assert refused["error"]["code"] == -32001
    monkeypatch.undo()
    assert editor.prompt(session, "hello")["stopReason"] == "end_turn"


def test_a_prompt_that_is_too_long(editor):
    session = editor.open()
    scripted = editor.connection.service
    changed = threading.Event()

    def narrow(engine, to=600):
        engine.context = to
        changed.set()

    editor.prompt(session, "hello")
    scripted.between_steps(narrow)
    assert changed.wait(10)
    prompt = words("word " * 1000)
    error = editor.do("session/prompt", sessionId=session, prompt=prompt)["error"]
    assert error["code"] == -32602
    assert error["data"]["tokens"] > error["data"]["limit"] == 600
    # In the middle of a turn the client is told so, too; what was done stays done.
    editor.files["/work/a.txt"] = "word " * 1000
    editor.said()
    assert editor.prompt(session, "read both")["stopReason"] == "max_tokens"
    assert "600" in editor.said()
    changed.clear()
    scripted.between_steps(lambda engine: narrow(engine, 1 << 17))
    assert changed.wait(10)
    assert editor.prompt(session, "hello")["stopReason"] == "end_turn"


def test_thinking_is_an_option(editor, told):
    session = editor.open()
    set_to = editor.do(
        "session/set_config_option", sessionId=session, configId="thought_level", value="on"
    )
    (option,) = set_to["result"]["configOptions"]
    assert (option["id"], option["currentValue"]) == ("thought_level", "on")
    editor.prompt(session, "think about it")
    assert (editor.said("agent_thought_chunk").strip(), editor.said()) == ("Hm.", "So it is.")
    for wrong in ({"value": "perhaps"}, {"value": True}, {"configId": "mode", "value": "on"}):
        given = {"sessionId": session, "configId": "thought_level"} | wrong
        assert editor.do("session/set_config_option", **given)["error"]["code"] == -32602


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("session/load", {"sessionId": "x", "cwd": "/", "mcpServers": []}, -32601),
        ("session/set_mode", {"sessionId": "x", "modeId": "y"}, -32601),
        ("authenticate", {"methodId": "x"}, -32601),
        ("_own/method", {}, -32601),
        ("initialize", {}, -32602),
        ("initialize", {"protocolVersion": "one"}, -32602),
        ("session/new", {}, -32602),
        ("session/new", {"cwd": "below", "mcpServers": []}, -32602),
        ("session/new", {"cwd": "/", "mcpServers": {}}, -32602),
        ("session/new", {"cwd": "/", "mcpServers": "none"}, -32602),
        ("session/prompt", {}, -32602),
        ("session/prompt", {"sessionId": "x", "prompt": words("x")}, -32002),
        ("session/close", {"sessionId": "x"}, -32002),
    ],
)
def test_wrong_methods_and_parameters_get_errors(editor, method, params, code):
    editor.open()
    error = editor.do(method, **params)["error"]
    assert error["code"] == code
    assert error["message"]
    assert "inf" not in error["message"]


@pytest.mark.parametrize("prompt", ["hi", {}, 5, {"type": "text", "text": "hi"}])
def test_a_prompt_that_is_no_list(editor, prompt):
    error = editor.do("session/prompt", sessionId=editor.open(), prompt=prompt)["error"]
    assert error["code"] == -32602
    assert error["message"].startswith("prompt is ")
    assert error["message"].endswith("; it must be a list")


def test_initialize_comes_first(editor):
    assert editor.do("session/new", cwd="/work", mcpServers=[])["error"]["code"] == -32600
    assert editor.open()


@pytest.mark.parametrize(
    "line",
    [
        b'[{"jsonrpc": "2.0", "id": 1, "method": "initialize"}]\n',
        b"[]\n",
        b'{"id": 7,\n',
        b"\xff\xfe\n",
        b'"caf\xe9"\n',
        b"{}\n",
        b'{"jsonrpc": "2.0", "id": true, "method": "initialize"}\n',
        b'{"jsonrpc": "2.0", "id": {}, "result": 1}\n',
        b'{"jsonrpc": "2.0", "id": null, "method": 7}\n',
        b'{"jsonrpc": "1.0", "id": null, "method": "initialize"}\n',
    ],
)
def test_h_lines_that_are_no_request_get_an_error_and_nothing_more(editor, line):
    editor.send(line)
    message = editor.next()
    assert message["id"] is None
    assert message["error"]["code"] in (-32700, -32600)
    assert editor.open()


@pytest.mark.parametrize("size", [65535, 65537, 1 << 20, 20 << 20])
def test_h01_long_lines(editor, size):
    session = editor.open()
    editor.ask(1, "session/cancel", sessionId="x" * size)
    assert editor.answer(1)["error"]["code"] == -32601
    editor.do("session/close", sessionId=session)


def test_h06_h07_bom_crlf_blank_lines_and_no_end(editor):
    editor._methods |= dict.fromkeys((1, 2.5, "three"), "initialize")
    ask = '{"jsonrpc": "2.0", "id": %s, "method": "initialize", "params": {"protocolVersion": 9}}'
    editor.send(b"\xef\xbb\xbf" + (ask % "1").encode() + b"\r\n\r\n  \n")
    assert editor.answer(1)["result"]["protocolVersion"] == 1
    editor.send((ask % "2.5").encode() + b" \n" + (ask % '"three"').encode())
    assert editor.answer(2.5)["result"]["protocolVersion"] == 1
    editor.end()
    assert editor.answer("three")["result"]["protocolVersion"] == 1


def test_what_nobody_waits_for_is_ignored(editor):
    session = editor.open()
    for method in ("session/prompt", "nothing/known", "$/progress", "session/cancel"):
        editor.send({"jsonrpc": "2.0", "method": method, "params": {"sessionId": session}})
        editor.send({"jsonrpc": "2.0", "method": method, "params": [1]})
    editor.send({"jsonrpc": "2.0", "id": 99, "result": {}})
    editor.send({"jsonrpc": "2.0", "id": "99", "error": None})
    assert editor.open()


def test_a_closed_session_is_gone(editor):
    session = editor.open()
    editor.start(1, session, "without end")
    editor.until(lambda m: m.get("method") == "session/update")
    editor.do("session/close", sessionId=session)
    assert editor.answer(1)["result"]["stopReason"] == "cancelled"
    gone = editor.do("session/prompt", sessionId=session, prompt=words("hello"))
    assert gone["error"]["code"] == -32002


def test_the_end_of_stdin_cancels_what_is_live(editor):
    session = editor.open()
    editor.start(1, session, "without end")
    editor.until(lambda m: m.get("method") == "session/update")
    assert editor.end() == 0
    assert editor.answer(1)["result"]["stopReason"] == "cancelled"


# -- without a model -----------------------------------------------------------------------------


def test_a_prompt_becomes_text():
    link = {"type": "resource_link", "uri": "file:///w/a%20b.py", "name": "a b.py"}
    inside = {"uri": "file:///w/c.py", "text": "x = 1", "mimeType": "text/x-python"}
    text = acp.text_of([*words("See "), link, {"type": "resource", "resource": inside}])
    assert text == "See /w/a b.py\n/w/c.py:\n```\nx = 1\n```\n"
    assert acp.text_of([{**link, "uri": "https://x.y/z"}]) == "https://x.y/z"
    assert acp.text_of(words("half \ud800")) == "half ?"


@pytest.mark.parametrize(
    ("blocks", "what"),
    [
        ([], "no text"),
        (words(" \n"), "no text"),
        (["x"], r"prompt\[0\] must be an object"),
        (
            [*words("x"), {"type": "image", "data": "", "mimeType": "image/png"}],
            r"prompt\[1\].type",
        ),
        ([{"type": "audio", "data": "", "mimeType": "audio/wav"}], r"prompt\[0\].type"),
        ([{"type": "text"}], r"prompt\[0\].text is missing"),
        (
            [{"type": "resource", "resource": {"uri": "x:y", "blob": "AA=="}}],
            r"prompt\[0\].resource.text is missing",
        ),
    ],
)
def test_what_is_no_text_is_refused(blocks, what):
    with pytest.raises(UsageError, match=what):
        acp.text_of(blocks)


def test_paths_are_only_text():
    session = agent.Session("s", "/work/x")
    assert session.path("a.txt") == "/work/x/a.txt"
    assert session.path("./b/../a.txt") == "/work/x/a.txt"
    assert session.path("/etc/a") == "/etc/a"


@pytest.mark.parametrize(
    ("text", "old", "new", "then"),
    [
        ("a\nb\n", "a\n", "c\n", "c\nb\n"),
        ("a\nb\n", "\n", "", None),
        ("aaa", "aa", "b", None),
        ("a.b", "a.b", r"\1", r"\1"),
        ("axb", "a.b", "", None),
        ("a\r\nb\r\n", "a", "c\nd", "c\r\nd\r\nb\r\n"),
        ("a\r\nb", "\n", "\n\n", "a\r\n\r\nb"),
        ("a\r\nb", "a\r\nb", "c\r\nd", "c\r\nd"),
        ("a\nb\nc\r\nd", "c\nd", "e\r\nf", "a\nb\ne\nf"),
    ],
)
def test_one_piece_is_replaced(text, old, new, then):
    if then is not None:
        assert agent.replaced(text, old, new) == then
        return
    with pytest.raises(agent.ToolError, match="must be there once"):
        agent.replaced(text, old, new)


def test_a_paths_own_words_are_no_error():
    path = '/work/ENOENT "x"'
    denied = agent.ClientError("fs/read_text_file", {"code": -32603, "data": f"EACCES: {path}"})
    assert not denied.says_missing(path)


def test_calls_without_a_result():
    said = {"role": "assistant", "tool_calls": [{"id": "a"}, {"id": "b"}]}
    result = {"role": "tool", "tool_call_id": "a", "content": ""}
    assert agent.unanswered([said]) == said["tool_calls"]
    assert agent.unanswered([said, result]) == [{"id": "b"}]
    assert agent.unanswered([{"role": "user", "content": "x"}]) == []
