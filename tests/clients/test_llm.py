"""`llm --schema`."""

import json
import re

from tests.clients.conftest import PAGE, asked

DOG = {"name": "Rex", "age": 3}


def test_json_fits_the_schema(serve, run):
    server = serve([{"when": "dog", "say": json.dumps(DOG)}])
    ran = run("llm", server, "Invent a dog")
    assert ran.code == 0, ran
    assert json.loads(ran.out) == DOG
    (body,) = asked(server)
    assert body["response_format"]["type"] == "json_schema"


def test_a_servers_key(serve, run, tmp_path):
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    server = serve([{"when": "dog", "say": json.dumps(DOG)}], "--api-key-file", str(key))
    (line,) = re.findall(r"add `(.*?)` to the file", PAGE.read_text())
    (name,) = re.findall(r"run `llm keys set (.*?)`", PAGE.read_text())
    keys = tmp_path / "home/.config/io.datasette.llm/keys.json"
    keys.parent.mkdir(parents=True)
    keys.write_text(json.dumps({name: "s3cret"}))
    ran = run("llm", server, "Invent a dog", more=f"  {line}\n")
    assert ran.code == 0, ran
    asked(server)


def test_the_embedded_pair_is_held_to_the_schema(serve, run):
    server = serve(None, "--max-kv", "256")
    ran = run("llm", server, "Invent a dog")
    assert ran.code == 0, ran
    asked(server)
    # It may end before the object does, where there is no more room.
    assert re.match(r'\{\s*"name"\s*:\s*"', ran.out), ran
