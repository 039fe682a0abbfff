"""Where a conversion is written: refused, replaced, out of room, interrupted; nothing half done."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mtp.errors import FitError, LoadError, MtpError, UsageError
from mlx_mtp.models.layers import cores
from mlx_mtp.weights import convert as conversion
from mlx_mtp.weights import fit, jobs, listing
from mlx_mtp.weights import recipe as recipes
from mlx_mtp.weights.convert import How, check_place, plan, write
from mlx_mtp.weights.load import load_pair, load_target
from tests.checkpoints import target_config, write_drafter
from tests.weights.conversions import convert, hashes, leftovers, target


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_drafter(tmp_path / "source-assistant")
    return target(tmp_path / "source")


def check(source: Path, out: Path, force: bool = False) -> None:
    check_place(out, plan(str(source), How()), force)


def refused(source: Path, out: Path, force: bool = False) -> str:
    before = hashes(source)
    with pytest.raises(UsageError) as error:
        check(source, out, force)
    assert hashes(source) == before
    assert "\n" not in str(error.value)
    assert str(out) in str(error.value)
    return str(error.value)


def empty(out: Path) -> None:
    out.mkdir()


def full(out: Path) -> None:
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")


def settings(out: Path) -> None:
    full(out)
    (out / "config.json").write_text("{}")


def checkpoint(out: Path) -> None:
    target(out, seed=4)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("make", [full, settings, Path.touch, checkpoint])
def test_case_g15_what_is_there_is_not_written_over(source: Path, make: Any, force: bool) -> None:
    """A checkpoint of somebody else's neither: it may be the only one."""
    out = source.parent / "out"
    make(out)
    assert "is there already" in refused(source, out, force)


def test_case_g15_a_conversion_is_replaced_by_force_alone_and_with_nothing_else_in_it(
    source: Path,
) -> None:
    out = convert(source, source.parent / "out", 4)
    assert "is there already; --force replaces it" in refused(source, out)
    check(source, out, force=True)
    (out / "drafter").mkdir(exist_ok=True)
    (out / "drafter" / "notes.txt").write_text("mine")
    assert "drafter/notes.txt was not written by convert" in refused(source, out, force=True)


def test_an_empty_folder_is_filled(source: Path) -> None:
    out = source.parent / "out"
    empty(out)
    check(source, out)
    assert load_target(convert(source, out))


@pytest.mark.parametrize("force", [False, True])
def test_what_comes_meanwhile_stays(
    source: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    out, card = source.parent / "out", listing.card
    ready = plan(str(source), How(recipes.make(4))).fetch(None)

    def slow(*given: Any) -> str:
        full(out)
        return card(*given)

    monkeypatch.setattr(listing, "card", slow)
    with pytest.raises(UsageError, match=r"thesis\.tex was not written by convert"):
        write(ready, out, force=force)
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    assert leftovers(out) == []


def test_a_proof_that_fails_leaves_the_old_one(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = convert(source, source.parent / "out", 4)
    before = hashes(out)

    def broken(*_: Any) -> None:
        raise LoadError("its logits are not finite")

    monkeypatch.setattr(conversion, "prove", broken)
    with pytest.raises(LoadError, match="not finite"):
        write(plan(str(source), How()).fetch(None), out, force=True, proof=True)
    assert hashes(out) == before
    assert leftovers(out) == []


def test_a_tokenizer_that_cannot_be_read_is_told_before_anything_is_written(source: Path) -> None:
    (source / "tokenizer.json").write_text("")
    with pytest.raises(LoadError, match="tokenizer"):
        plan(str(source), How()).fetch(None)


def test_case_g15_neither_the_source_nor_a_place_in_it(source: Path) -> None:
    told = "may not hold the source"
    assert told in refused(source, source, force=True)
    assert told in refused(source, source / "out")
    assert told in refused(source, source.parent / "source-assistant", force=True)
    link = source.parent / "link"
    link.symlink_to(source)
    assert told in refused(source, link, force=True)
    shutil.copy(source / "config.json", source.parent)
    shutil.copy(source / "model.safetensors", source.parent)
    assert told in refused(source, source.parent, force=True)


def test_case_g15_a_broken_link_and_a_link_to_a_checkpoint(source: Path) -> None:
    """A link stays one, and what it leads to is replaced."""
    out, other = source.parent / "out", convert(source, source.parent / "other", 8)
    out.symlink_to(source.parent / "nothing")
    assert "is there already" in refused(source, out)
    out.unlink()
    out.symlink_to(other)
    before = hashes(other)
    check(source, out, force=True)
    convert(source, out)
    assert out.is_symlink()
    assert hashes(other) != before
    assert leftovers(out) == leftovers(other) == []


def test_case_g15_a_checkpoint_is_replaced_as_a_whole(source: Path) -> None:
    out = convert(source, source.parent / "out", drafter="auto")
    check(source, out, force=True)
    convert(source, out, 4)
    assert hashes(out) == hashes(convert(source, source.parent / "again" / "out", 4))
    assert leftovers(out) == []


@pytest.mark.parametrize("parent", ["/proc/self/fdinfo", "file"])
def test_a_parent_that_cannot_be_written_to(
    source: Path, monkeypatch: pytest.MonkeyPatch, parent: str
) -> None:
    (source.parent / "file").touch()
    out = source.parent / parent / "out"
    if parent != "file":
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may do anything
    assert "is no folder that may be written to" in refused(source, out)


def test_names_that_are_no_utf8(source: Path) -> None:
    odd = source.parent / os.fsdecode(b"caf\xe9")
    try:
        source.rename(odd)
    except OSError:
        pytest.skip("this disk has no such names")
    out = convert(odd, source.parent / os.fsdecode(b"out\xff"))
    listed = json.loads((out / "mlx_mtp.json").read_text("utf-8"))
    assert listed["target"]["source"] == odd.name
    assert "# out\\udcff\n" in (out / "README.md").read_text("utf-8")


def test_less_than_two_gigabytes_left(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, out = plan(str(source), How()), source.parent / "deep" / "down" / "out"
    real = shutil.disk_usage(source)
    for spare, error in ((0, None), (-1, FitError)):
        free = fit.DISK_RESERVE + ready.nbytes + spare
        monkeypatch.setattr(shutil, "disk_usage", lambda _, f=free: real._replace(free=f))
        if error is None:
            check_place(out, ready, False)
            continue
        with pytest.raises(FitError, match=r"the conversion needs .* 2 GB are to stay free"):
            check_place(out, ready, False)
    assert f" in {out} (2.1 GB free there)" in ready.summary(out)
    assert not (source.parent / "deep").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 300 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a disk")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_case_g24_a_disk_that_is_full(source: Path, small_disk: Path) -> None:
    (small_disk / "out").mkdir()
    with pytest.raises(MtpError, match="out cannot be written: No space left on device"):
        convert(source, small_disk / "out", drafter="auto")
    assert os.listdir(small_disk) == ["out"]
    assert os.listdir(small_disk / "out") == []


@pytest.mark.parametrize("step", range(4))
def test_case_g24_a_disk_that_fills_up_at_any_moment(
    source: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    out = convert(source, source.parent / "out", 4)
    before = hashes(out)
    where = ((os, "pwrite"), (os, "fsync"), (shutil, "copyfileobj"), (listing, "card"))
    monkeypatch.setattr(*where[step], no_space)
    with pytest.raises(FitError, match="out cannot be written: No space left on device"):
        convert(source, out)
    assert hashes(out) == before
    assert leftovers(out) == []


def test_the_old_one_comes_back_if_the_new_cannot_take_its_place(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = convert(source, source.parent / "out", 4)
    before, rename = hashes(out), Path.rename

    def busy(path: Path, to: Path) -> Path:
        if ".out.part-" in path.name and to.name == "out":
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(MtpError, match="out cannot be written: Device or resource busy"):
        convert(source, out)
    assert hashes(out) == before
    assert leftovers(out) == []


def test_a_source_that_shrinks_meanwhile(source: Path) -> None:
    ready = plan(str(source), How(), drafter=None).fetch(None)
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    with pytest.raises(LoadError, match=r"model\.safetensors is cut off"):
        write(ready, source.parent / "out")
    assert not (source.parent / "out").exists()
    assert leftovers(source) == []


SLOW = """
import sys, time
from mlx_mtp.cli.main import run
from mlx_mtp.weights import convert, jobs
jobs.BLOCK = 2000
plain, count = convert._write_at, 0
def slow(*given):
    global count
    count += 1
    if count == 30:
        print("half", flush=True)
    time.sleep(0.02 if count > 30 else 0)
    plain(*given)
convert._write_at = slow
sys.argv = ["mlx-mtp", *sys.argv[1:]]
run()
"""


def interrupted(source: Path, out: Path, number: int) -> int:
    """The exit code of a conversion that gets the signal in its middle."""
    command = [sys.executable, "-c", SLOW, "convert", str(source), "-o", str(out), "-q", "4"]
    process = subprocess.Popen(
        [*command, "--no-verify", "--force"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"half\n"
    process.send_signal(number)
    sent = time.perf_counter()
    _, err = process.communicate(timeout=30)
    assert time.perf_counter() - sent < 2.5
    assert b"Traceback" not in err
    return process.returncode


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_interrupted_it_leaves_nothing(source: Path, number: int, code: int) -> None:
    out = source.parent / "out"
    assert interrupted(source, out, number) == code
    assert not out.exists()
    assert leftovers(out) == []


def test_killed_it_leaves_nothing_that_loads(source: Path) -> None:
    out = convert(source, source.parent / "out", 8)
    before = hashes(out)
    assert interrupted(source, out, signal.SIGKILL) == -signal.SIGKILL
    assert hashes(out) == before
    (left,) = leftovers(out)
    assert left.startswith(".out.part-")
    for loads in (load_target, load_pair):
        with pytest.raises(LoadError, match=r"config\.json is missing"):
            loads(str(out.parent / left))
    convert(source, out, 4, drafter="auto")
    assert leftovers(out) == []
    assert load_pair(str(out)).drafter is not None


@pytest.mark.parametrize("pid", [os.getpid(), 999_999_999], ids=["own", "none"])
def test_what_a_killed_one_left_is_cleared(source: Path, pid: int) -> None:
    """In a container a process has the same number again."""
    out = source.parent / "out"
    for kind in ("part", "old"):
        left = source.parent / f".out.{kind}-{pid}"
        (left / "drafter").mkdir(parents=True)
    other = source.parent / f".out.part-{os.getppid()}"  # at work
    other.mkdir()
    convert(source, out)
    assert leftovers(out) == [other.name]


def test_case_g23_memory_is_a_few_blocks_whatever_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BLOCK", 64 << 10)
    vocabulary = {"vocab_size": 1 << 16, "vocab_size_per_layer_input": 1 << 14}
    source = target(tmp_path / "a", config=target_config("e2b", **vocabulary))
    how = How(recipes.make(4))
    ready = plan(str(source), how, drafter=None).fetch(None)
    assert max(t.nbytes for job in ready.sides[0].jobs for t in job.sources) == 8 << 20
    before = mx.get_active_memory()
    mx.clear_cache()
    mx.reset_peak_memory()
    tracemalloc.start()
    write(ready, tmp_path / "b")
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A block as it is read, in float32 and packed, on every core; and the headers.
    blocks = min(cores(), 16) * 8 * jobs.BLOCK
    assert mx.get_peak_memory() - before < blocks
    assert python < blocks + (2 << 20)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted on Linux")
def test_threads_do_not_add_up(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX keeps something of every thread that ever used it."""
    monkeypatch.setattr(conversion, "SHARD", 50_000)
    counts = []
    for name in "abc":
        convert(source, source.parent / name, 4)
        counts.append(len(os.listdir("/proc/self/task")))
    assert counts[0] == counts[-1]
