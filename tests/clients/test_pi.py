"""`pi -p`."""

from tests.clients.conftest import asked

TASK = "Write Hello into hello.txt"
CALL = '<|tool_call>call:write{path:<|"|>hello.txt<|"|>,content:<|"|>Hello\n<|"|>}<tool_call|>'
RULES = [
    {"when": "Successfully wrote", "say": "Done."},
    {"when": "hello.txt", "say": f"<|channel>thought\nA file.\n<channel|>I write it.{CALL}"},
]


def test_it_writes_a_file(serve, run):
    server = serve(RULES)
    ran = run("pi", server, TASK)
    assert ran.code == 0, ran
    assert (ran.work / "hello.txt").read_text() == "Hello\n"
    assert ran.out.strip() == "Done."
    first, second = asked(server, at_least=2)
    assert first["reasoning_effort"] == "medium"
    assert second["messages"][-1]["role"] == "tool"


def test_it_lives_with_the_embedded_pair(serve, run):
    server = serve(None, "--max-kv", "4096")
    ran = run("pi", server, TASK, most_tokens="64")
    assert ran.code in (0, 1), ran
    asked(server)
