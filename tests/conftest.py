from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The whole suite runs in two processes, file by file: half the time. A part of it does not,
    as two processes take seconds to begin; nor do soaks, which measure."""
    given = config.option
    if (
        getattr(given, "numprocesses", 0) is None
        and config.args_source is not pytest.Config.ArgsSource.ARGS
        and given.markexpr == "not long"
        and not (given.keyword or given.collectonly or given.usepdb or given.lf)
    ):
        given.numprocesses, given.dist = 2, "loadfile"


@pytest.fixture(scope="session", autouse=True)
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """On a Mac loading a model races kernels and keeps what it learns: not in the user's folder."""
    before = os.environ.get("XDG_DATA_HOME")
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("data"))
    yield
    if before is None:
        del os.environ["XDG_DATA_HOME"]
    else:
        os.environ["XDG_DATA_HOME"] = before
