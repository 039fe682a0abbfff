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
        ("edit nothing", "in the file 0 times"),
        ("edit many", "in the file 2 times"),
        ("make over", "the file exists"),
        ("read none", "no such file"),
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
    assert len(released) == (text == "run please")
    editor.send({"jsonrpc": "2.0", "id": late["id"], "result": {}})
    assert editor.prompt(session, "hello")["stopReason"] == "end_turn"
    assert "The user cancelled this." in told()


def test_a_terminal_that_comes_after_the_cancel_is_released(editor):
    editor.on["terminal/create"] = lambda params: None
    session = editor.open()
    editor.start(1, session, "run please")
    created = editor.until(lambda m: m.get("method") == "terminal/create")
    editor.stop(session)
    editor.send({"jsonrpc": "2.0", "id": created["id"], "result": {"terminalId": "late"}})
    assert editor.answer(1)["result"]["stopReason"] == "cancelled"
    assert editor.asked[-1]["method"] == "terminal/release"
    assert editor.asked[-1]["params"]["terminalId"] == "late"


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
        ("session/prompt", {}, -32602),
        ("session/prompt", {"sessionId": "x", "prompt": words("x")}, -32002),
        ("session/close", {"sessionId": "x"}, -32002),
    ],
)
def test_wrong_methods_and_parameters_get_errors(editor, method, params, code):
    error = editor.do(method, **params)["error"]
    assert error["code"] == code
    assert error["message"]


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
        ([{"type": "text"}], r"text is missing"),
        ([{"type": "resource", "resource": {"uri": "x:y", "blob": "AA=="}}], "text is missing"),
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


def test_calls_without_a_result():
    said = {"role": "assistant", "tool_calls": [{"id": "a"}, {"id": "b"}]}
    result = {"role": "tool", "tool_call_id": "a", "content": ""}
    assert agent.unanswered([said]) == said["tool_calls"]
    assert agent.unanswered([said, result]) == [{"id": "b"}]
    assert agent.unanswered([{"role": "user", "content": "x"}]) == []
