"""`aider FILE --message`."""

import subprocess

import pytest

from tests.clients.conftest import asked

TASK = "Handle negative numbers"
BEFORE = "def gcd(a, b):\n    return a if b == 0 else gcd(b, a % b)\n"
AFTER = BEFORE.replace("return a if", "return abs(a) if")
EDIT = f"""Sure.

gcd.py
```python
<<<<<<< SEARCH
{BEFORE}=======
{AFTER}>>>>>>> REPLACE
```
"""
RULES = [
    {"when": "SEARCH/REPLACE", "say": EDIT},
    {"when": "gcd.py", "say": "fix: gcd of negative numbers"},
]


@pytest.fixture
def repository(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "gcd.py").write_text(BEFORE)
    (work / ".gitignore").write_text(".aider*\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=work, check=True)
    return work


def test_a_diff_is_applied_and_committed(serve, run, repository):
    server = serve(RULES)
    ran = run("aider", server, TASK)
    assert ran.code == 0, ran
    assert (repository / "gcd.py").read_text() == AFTER
    log = ["git", "log", "--format=%s"]
    subjects = subprocess.run(log, cwd=repository, capture_output=True, text=True, check=True)
    assert subjects.stdout.splitlines() == ["fix: gcd of negative numbers", "first"]
    assert "context window" not in ran.out  # it knows the model's
    asked(server, at_least=2)


def test_it_lives_with_the_embedded_pair(serve, run, repository):
    server = serve(None, "--max-kv", "6144")
    ran = run("aider", server, TASK, most_tokens="64")
    assert ran.code == 0, ran
    asked(server)
