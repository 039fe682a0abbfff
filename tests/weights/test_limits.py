"""MLX's memory limits while a pair is loaded, and several processes on one machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mtp.errors import FitError
from mlx_mtp.weights import fit, load
from mlx_mtp.weights.limits import Limits, limit_memory, tell_others, wired_by_others

GB = 10**9
OTHER = """
import sys
from pathlib import Path
from mlx_mtp.weights.limits import tell_others
end = tell_others(Path(sys.argv[1]), 6_000_000_000)
print("told", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that keeps 6 GB wired."""
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "told\n"
        yield process
        process.kill()


@pytest.fixture
def metal(monkeypatch):
    """A Metal device of 10 GB; what the limits are."""
    now = {"wired": 0, "memory": 15 * GB, "cache": 14 * GB}

    def setter(name: str):
        def put(limit: int) -> int:
            assert name != "wired" or limit <= 10 * GB, "MLX raises"
            before, now[name] = now[name], limit
            return before

        return put

    for name in now:
        monkeypatch.setattr(mx, f"set_{name}_limit", setter(name))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 10 * GB})
    return now


def test_case_j02_wired_memory_is_model_and_headroom_and_can_be_restored(metal, tmp_path):
    before = dict(metal)
    restore, notice = limit_memory(3 * GB, GB, tmp_path)
    assert metal == {"wired": 4 * GB, "memory": 10 * GB, "cache": GB}
    assert notice is None
    restore()
    assert metal == before
    assert not [*tmp_path.iterdir()]


def test_case_j02_elsewhere_limits_are_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx, "set_wired_limit", lambda _: pytest.fail("not on this device"))
    restore, notice = limit_memory(3 * GB, GB, tmp_path)
    restore()
    assert notice is None
    assert not [*tmp_path.iterdir()]


def test_case_j03_a_wired_limit_above_the_maximum_is_clamped_and_said():
    found = Limits.of(9 * GB, 2 * GB, 10 * GB)
    assert (found.wired, found.total) == (10 * GB, 11 * GB)
    assert found.notice == ("wired memory is limited to 10.0 GB, the device's 10.0 GB, not 11.0 GB")


def test_case_j04_a_second_process_wires_what_the_first_left(metal, tmp_path, other):
    restore, notice = limit_memory(5 * GB, GB, tmp_path)
    assert metal["wired"] == 4 * GB
    assert notice == (
        "wired memory is limited to 4.0 GB, the device's 10.0 GB less 6.0 GB of other mlx-mtp "
        "processes, not 6.0 GB"
    )
    restore()


def test_case_j04_a_process_that_was_killed_holds_nothing(tmp_path, other):
    assert wired_by_others(tmp_path) == 6 * GB
    other.kill()
    other.wait()
    assert wired_by_others(tmp_path) == 0
    assert not [*tmp_path.iterdir()]


def test_case_j04_a_pair_that_does_not_fit_beside_another_is_refused(
    metal, tmp_path, other, monkeypatch
):
    monkeypatch.setattr(load, "data_folder", lambda: tmp_path.parent)
    (tmp_path.parent / "wired").unlink(missing_ok=True)
    (tmp_path.parent / "wired").symlink_to(tmp_path)
    monkeypatch.setattr(fit, "device_bytes", lambda: 6_010_000_000)
    with pytest.raises(FitError, match=r"has 10\.0 MB beside 6\.0 GB of other mlx-mtp processes"):
        load.load_pair()


def test_what_cannot_be_written_is_not_told(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    tell_others(file / "folder", GB)()
    assert wired_by_others(file / "folder") == 0


def test_files_of_others_that_make_no_sense_count_for_nothing(tmp_path: Path):
    (tmp_path / "1").write_text("x")
    (tmp_path / "2").mkdir()
    assert wired_by_others(tmp_path) == 0
