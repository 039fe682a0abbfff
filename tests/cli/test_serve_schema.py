"""schemathesis on what the server's own OpenAPI page says: no 5xx, no status or body that the page
does not tell."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.cli.web import Web, service

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")
CHECKS = [
    pytest.importorskip("schemathesis.checks").not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
POSTED = ("/v1/chat/completions", "/v1/completions")
PATHS = (*POSTED, "/v1/models", "/v1/models/{name}", "/health", "/metrics")


@pytest.fixture(scope="module")
def page():
    """Of a server whose model has room for few tokens: the least answer may be long."""
    web = Web(service(make=lambda pair: pair.engine(rows=4, max_kv=48)))
    assert web.service.loaded.wait(30)
    yield schemathesis.openapi.from_url(web.url.replace("/v1", "/openapi.json"))
    web.close()


def attack(page, path, examples, **how):
    (operation,) = (one.ok() for one in page.get_all_operations() if one.ok().path == path)
    good, bad = schemathesis.GenerationMode
    for mode in (good, bad) if path in POSTED else (good,):  # what is no text in a path?

        @settings(max_examples=examples, deadline=None, suppress_health_check=HealthCheck, **how)
        @given(operation.as_strategy(generation_mode=mode))
        def attacked(case):
            case.call_and_validate(checks=CHECKS)

        attacked()


@pytest.mark.parametrize("path", PATHS)
def test_what_the_page_says(page, path):
    attack(page, path, 8 if path in POSTED else 2, derandomize=True, database=None)


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS)
def test_what_the_page_says_at_length(page, path):
    attack(page, path, 400)
