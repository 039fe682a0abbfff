"""`opencode run`."""

from tests.clients.conftest import asked

TASK = "Write Hello into hello.txt"
CALL = '<|tool_call>call:write{filePath:<|"|>hello.txt<|"|>,content:<|"|>Hello\n<|"|>}<tool_call|>'
RULES = [
    {"when": "itle", "say": "A greeting"},
    {"when": "Wrote file", "say": "Done."},
    {"when": "hello.txt", "say": f"I write it.{CALL}"},
]


def test_it_writes_a_file(serve, run):
    server = serve(RULES)
    ran = run("OpenCode", server, TASK)
    assert ran.code == 0, ran
    assert (ran.work / "hello.txt").read_text() == "Hello\n"
    assert "Done." in ran.out
    chats = asked(server, at_least=2)
    assert chats[-1]["messages"][-1]["role"] == "tool"


def test_a_servers_key(serve, run, tmp_path):
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    server = serve(RULES, "--api-key-file", str(key))
    ran = run("OpenCode", server, TASK, key="s3cret")
    assert ran.code == 0, ran
    asked(server)


def test_it_lives_with_the_embedded_pair(serve, run):
    server = serve(None, "--max-kv", "15000")
    ran = run("OpenCode", server, TASK, most_tokens="64")
    assert ran.code in (0, 1), ran
    asked(server)
