"""Checkpoints on a hub: what is asked of it, what is fetched, and every way it can refuse."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest
from huggingface_hub import constants

from mlx_mtp.errors import FitError, LoadError
from mlx_mtp.weights import fit, hub
from mlx_mtp.weights.checkpoint import Folder, cache_root
from mlx_mtp.weights.inspect import inspect_model
from mlx_mtp.weights.load import load_pair
from tests.checkpoints import add_tokenizer, write_drafter, write_target
from tests.weights.fake_hub import SECRET, FakeHub

TARGET, DRAFTER = "google/gemma-4-E2B-it", "google/gemma-4-E2B-it-assistant"


@pytest.fixture
def pair(fake: FakeHub, tmp_path: Path) -> FakeHub:
    """The hub with a target (in two shards) and its drafter."""
    target = write_target(tmp_path / "target", shards=2)
    fake.add(TARGET, add_tokenizer(target))
    fake.add(DRAFTER, write_drafter(tmp_path / "drafter"))
    return fake


def refused(model: str = TARGET, **options: object) -> str:
    with pytest.raises(LoadError) as error:
        load_pair(model, **options)  # type: ignore[arg-type]
    line = str(error.value)
    assert "\n" not in line
    assert SECRET not in line
    return line


def go_offline(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.close()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("network was used"))


def test_a_pair_by_id_with_progress(pair: FakeHub) -> None:
    seen: list[tuple[str, int, int]] = []
    loaded = load_pair(TARGET, progress=lambda *step: seen.append(step))
    assert loaded.name == TARGET
    assert loaded.drafter_name == DRAFTER  # found by name
    assert loaded.revision in pair.repos[TARGET]
    assert f"Bearer {SECRET}" in pair.tokens
    downloads = [step for step in seen if step[0] == f"download {TARGET}"]
    assert downloads[-1][1] == downloads[-1][2] > 0


def test_what_was_fetched_is_not_fetched_again(pair: FakeHub) -> None:
    load_pair(TARGET)
    pair.asked.clear()
    load_pair(TARGET)
    assert pair.fetched() == set()
    assert not any(ranged for *_, ranged in pair.asked)  # headers come from the cache too


def test_only_needed_files_are_fetched(fake: FakeHub, tmp_path: Path) -> None:
    def vision_last(tensors: dict[str, mx.array]) -> None:
        tensors["model.vision_tower.x.weight"] = mx.ones((8, 8))

    folder = add_tokenizer(write_target(tmp_path / "t", shards=2, change=vision_last))
    # A third shard of nothing but vision.
    index = folder / "model.safetensors.index.json"
    mx.save_safetensors(
        str(folder / "model-vision.safetensors"), {"model.embed_vision.y.weight": mx.ones((8, 8))}
    )
    index.write_text(
        index.read_text().replace(
            '"weight_map": {',
            '"weight_map": {"model.embed_vision.y.weight": "model-vision.safetensors", ',
        )
    )
    (folder / "original").mkdir()
    for name in ("a.bin", "b.gguf", "original/model.safetensors", "evil.py", "README.md"):
        (folder / name).write_bytes(b"x")
    fake.add(TARGET, folder)
    loaded = load_pair(TARGET, drafter=None)
    assert fake.fetched() == {
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
    }
    assert "vision_tower" in loaded.notices[0]


def test_a_drafter_needs_no_tokenizer(pair: FakeHub) -> None:
    add_tokenizer(pair.repos[DRAFTER]["main"])
    load_pair(TARGET)
    asked = [path for _, path, _ in pair.asked if path.startswith(f"/{DRAFTER}/")]
    assert {path.rpartition("/")[2] for path in asked} == {"config.json", "model.safetensors"}


def test_folders_of_a_repository_are_left_alone(fake: FakeHub, tmp_path: Path) -> None:
    folder = add_tokenizer(write_target(tmp_path / "t"))
    write_target(folder / "model-original")
    fake.add(TARGET, folder)
    load_pair(TARGET, drafter=None)
    assert not any("model-original" in path for _, path, _ in fake.asked)


def test_inspecting_fetches_no_weights(pair: FakeHub) -> None:
    found = inspect_model(TARGET)
    assert (found.drafter, found.drafter_why) == (DRAFTER, "found by name")
    assert not any(name.endswith(".safetensors") for name in pair.fetched())


def test_too_little_memory_or_disk_is_said_before_any_download(
    pair: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "device_bytes", lambda: 1000)
    with pytest.raises(FitError, match="the device has"):
        load_pair(TARGET)
    monkeypatch.undo()
    monkeypatch.setenv("HF_ENDPOINT", pair.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(Path(str(cache_root()))))
    monkeypatch.setattr(fit, "DISK_RESERVE", 1 << 60)
    with pytest.raises(FitError, match="free on the disk"):
        load_pair(TARGET)
    assert not any(name.endswith(".safetensors") for name in pair.fetched())
    assert load_pair(TARGET, force_fit=True).drafter is not None


@pytest.mark.parametrize("status", [401, 403])
def test_case_k01_gated(fake: FakeHub, pair: FakeHub, status: int) -> None:
    fake.refuse_files[TARGET] = (status, "GatedRepo")
    line = refused()
    assert f"accept its licence at {fake.url}/{TARGET}" in line
    assert "HF_TOKEN" in line


def test_case_k02_private_or_missing(fake: FakeHub) -> None:
    line = refused("someone/nothing")
    assert "not on the hub, or it is private" in line
    assert "HF_TOKEN" in line


def test_a_token_that_may_not(fake: FakeHub, pair: FakeHub) -> None:
    fake.refuse_files[TARGET] = (403, "")
    assert "token may not read" in refused()


def test_an_unknown_revision(pair: FakeHub) -> None:
    assert "has no revision v9" in refused(revision="v9")


def test_a_hub_that_is_ill(fake: FakeHub) -> None:
    fake.refuse[TARGET] = (500, "")
    assert "the hub answered 500" in refused()


def test_no_network_and_nothing_cached(fake: FakeHub) -> None:
    fake.close()
    line = refused()
    assert "the hub cannot be reached" in line
    assert "not in the cache" in line


def test_no_network_but_cached(pair: FakeHub) -> None:
    before = load_pair(TARGET)
    pair.close()
    after = load_pair(TARGET)
    assert (after.name, after.revision) == (before.name, before.revision)
    assert after.drafter_name == DRAFTER
    assert before.notices == []
    assert after.notices == [
        f"{TARGET}: the hub cannot be reached, the cached {str(after.revision)[:12]} is used"
    ]


def test_case_k04_offline_with_a_warm_cache(pair: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_pair(TARGET)
    go_offline(pair, monkeypatch)
    started = time.perf_counter()
    after = load_pair(TARGET)
    assert time.perf_counter() - started < 2
    assert after.revision == before.revision
    assert after.drafter_name == DRAFTER


def test_case_k05_offline_and_not_cached(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    go_offline(fake, monkeypatch)
    line = refused()
    assert "HF_HUB_OFFLINE is set; unset it and run once with a network" in line


@pytest.mark.parametrize("answer", [b"<html>Welcome</html>", b"[1]", b"{}", b"null"])
def test_an_endpoint_that_is_no_hub(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(fake, "answer", lambda request: fake.body(request, answer))
    assert f"{fake.url} is no hub; check HF_ENDPOINT" in refused()


def test_case_k06_main_tag_and_commit_resolve_offline(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = fake.add(TARGET, add_tokenizer(write_target(tmp_path / "new", seed=1)), "main")
    old = fake.add(TARGET, add_tokenizer(write_target(tmp_path / "old", seed=2)), "v1")
    for revision in (None, "v1"):
        load_pair(TARGET, drafter=None, revision=revision)
    go_offline(fake, monkeypatch)
    for revision, commit in ((None, new), ("main", new), ("v1", old), (new, new), (old, old)):
        assert load_pair(TARGET, drafter=None, revision=revision).revision == commit


def test_case_k07_the_drafters_own_revision(pair: FakeHub, tmp_path: Path) -> None:
    commit = pair.add(DRAFTER, write_drafter(tmp_path / "tuned", seed=9), "tuned")
    main, tuned = load_pair(TARGET), load_pair(TARGET, drafter_revision="tuned")
    assert tuned.drafter_revision == commit != main.drafter_revision
    assert tuned.revision == main.revision
    assert main.drafter is not None
    assert tuned.drafter is not None
    assert not mx.array_equal(main.drafter.norm.weight, tuned.drafter.norm.weight)


def test_case_k09_a_download_that_breaks_off_goes_on_later(
    pair: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.broken.add("model-00002-of-00002.safetensors")
    line = refused(drafter=None)
    assert "model-00002-of-00002.safetensors" in line
    assert "run the same command again" in line
    # Offline the half-made snapshot says what is missing, and how to get it.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    line = refused(drafter=None)
    assert "model-00002-of-00002.safetensors is missing" in line
    assert "run once with a network to fetch the rest" in line
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    pair.broken.clear()
    pair.asked.clear()
    load_pair(TARGET, drafter=None)
    assert "model-00002-of-00002.safetensors" in pair.fetched()
    assert "model-00001-of-00002.safetensors" not in pair.fetched()


def test_case_k09_a_blob_that_was_removed(pair: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_pair(TARGET, drafter=None)
    snapshot = cache_root() / "models--google--gemma-4-E2B-it/snapshots" / str(loaded.revision)
    shard = snapshot / "model-00001-of-00002.safetensors"
    shard.resolve().unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "model-00001-of-00002.safetensors is missing" in refused(drafter=None)


def test_the_drafter_is_found_by_shape_or_one_notice_says_so(fake: FakeHub, tmp_path: Path) -> None:
    fake.add("someone/tuned", add_tokenizer(write_target(tmp_path / "target")))
    loaded = load_pair("someone/tuned")
    assert loaded.drafter is None
    (notice,) = loaded.notices
    assert "no drafter found, plain decoding" in notice


def test_a_drafter_that_the_hub_lacks_is_one_notice(fake: FakeHub, tmp_path: Path) -> None:
    fake.add(TARGET, add_tokenizer(write_target(tmp_path / "target")))
    (notice,) = load_pair(TARGET).notices
    assert "no drafter found" in notice
    assert f"{DRAFTER} is not on the hub" in notice
    assert "not on the hub" in refused(drafter=DRAFTER)  # but one that was named is an error


def test_a_short_name_is_its_pinned_pair(fake: FakeHub, tmp_path: Path) -> None:
    from mlx_mtp.weights.known import SHORT

    known = SHORT["e2b"]
    add_tokenizer(write_target(tmp_path / "t"))
    fake.repos[known.target] = {known.target_revision: tmp_path / "t"}
    fake.repos[known.drafter] = {known.drafter_revision: write_drafter(tmp_path / "d")}
    found = inspect_model("E2B")
    assert (found.name, found.drafter) == (known.target, known.drafter)
    assert "was not tried by us yet" in found.notices[0]


def test_a_hub_checkpoint_reads_like_a_folder(pair: FakeHub) -> None:
    repo = hub.open_repo(TARGET)
    folder = Folder(pair.repos[TARGET]["main"])
    file = "model-00001-of-00002.safetensors"
    over_network, on_disk = repo.header(file), folder.header(file)
    assert {n: (t.dtype, t.shape, t.nbytes) for n, t in over_network.items()} == {
        n: (t.dtype, t.shape, t.nbytes) for n, t in on_disk.items()
    }


def test_no_telemetry() -> None:
    code = (
        "import mlx_mtp.weights.hub, huggingface_hub.constants as c;"
        "print(c.HF_HUB_DISABLE_TELEMETRY)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
