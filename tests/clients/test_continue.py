"""Continue's `cn -p --auto`."""

from tests.clients.conftest import asked

TASK = "Write Hello into hello.txt"
CALL = '<|tool_call>call:Write{filepath:<|"|>hello.txt<|"|>,content:<|"|>Hello\n<|"|>}<tool_call|>'
RULES = [
    {"when": "Successfully created", "say": "Done."},
    {"when": "hello.txt", "say": f"I write it.{CALL}"},
]


def test_it_writes_a_file(serve, run):
    server = serve(RULES)
    ran = run("Continue", server, TASK)
    assert ran.code == 0, ran
    assert (ran.work / "hello.txt").read_text() == "Hello\n"
    assert ran.out.strip().endswith("Done.")
    assert asked(server, at_least=2)[-1]["messages"][-1]["role"] == "tool"


def test_it_lives_with_the_embedded_pair(serve, run):
    server = serve(None, "--max-kv", "5120")
    ran = run("Continue", server, TASK, most_tokens="64")
    assert ran.code in (0, 1), ran
    asked(server)
