import io
import os
import subprocess
import sys

import pytest

from mlx_mtp.cli import main
from tests.cli.pairs import write_pair

COMMAND = [sys.executable, "-m", "mlx_mtp.cli.main"]


def environment(**changes):
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM", "COLUMNS")}
    return kept | {"TERM": "xterm"} | changes


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a small random pair."""
    return str(write_pair(tmp_path_factory.mktemp("cli"), positions=60000))


@pytest.fixture
def generate(model):
    """Runs `mlx-mtp generate` on the random pair; bytes in, bytes out."""

    def run(*arguments, stdin=b"", env=None, **options):
        command = [*COMMAND, "generate", *arguments, "--model", model]
        return subprocess.run(
            command,
            input=stdin,
            stdout=options.pop("stdout", subprocess.PIPE),
            stderr=options.pop("stderr", subprocess.PIPE),
            env=environment(**(env or {})),
            timeout=60,
            **options,
        )

    return run


@pytest.fixture
def inside(monkeypatch, capsys):
    """Runs a command in this process: quick, for what ends before a model is loaded."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(main.signals, "install", lambda: None)
        monkeypatch.setattr(sys, "argv", ["mlx-mtp", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            main.run()
        return ended.value.code, *capsys.readouterr()

    return run
