"""`llm --schema`."""

import json
import re

from tests.clients.conftest import asked

DOG = {"name": "Rex", "age": 3}


def test_json_fits_the_schema(serve, run):
    server = serve([{"when": "dog", "say": json.dumps(DOG)}])
    ran = run("llm", server, "Invent a dog")
    assert ran.code == 0, ran
    assert json.loads(ran.out) == DOG
    (body,) = asked(server)
    assert body["response_format"]["type"] == "json_schema"


def test_the_embedded_pair_is_held_to_the_schema(serve, run):
    server = serve(None, "--max-kv", "256")
    ran = run("llm", server, "Invent a dog")
    assert ran.code == 0, ran
    asked(server)
    # It may end before the object does, where there is no more room.
    assert re.match(r'\{\s*"name"\s*:\s*"', ran.out), ran
