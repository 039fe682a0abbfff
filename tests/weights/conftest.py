from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

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
    quick = vars(time) | {"sleep": lambda _: None}  # there alone: other threads do sleep
    monkeypatch.setattr(file_download, "time", SimpleNamespace(**quick))
    yield server
    server.close()
