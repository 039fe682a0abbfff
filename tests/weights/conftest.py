from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import file_download

from tests.weights.fake_hub import SECRET, FakeHub


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """An empty hub, an empty cache and a token."""
    server = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    yield server
    server.close()
