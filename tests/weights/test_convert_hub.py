"""Conversions from a hub: what is fetched, noted and said, and that a token goes nowhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from huggingface_hub import constants

from mlx_mtp.errors import FitError, LoadError
from mlx_mtp.weights import fit
from mlx_mtp.weights import recipe as recipes
from mlx_mtp.weights.convert import Conversion, How, check_place, plan, write
from mlx_mtp.weights.load import load_pair
from tests.checkpoints import write_drafter
from tests.weights.conversions import arrays, hashes, leftovers, raw, target
from tests.weights.fake_hub import SECRET, FakeHub

TARGET, DRAFTER = "google/gemma-4-E2B-it", "google/gemma-4-E2B-it-assistant"


@pytest.fixture
def pair(fake: FakeHub, tmp_path: Path) -> FakeHub:
    """The hub with a target (in two shards) and its drafter."""
    fake.add(TARGET, target(tmp_path / "target", shards=2, vision=True))
    fake.add(DRAFTER, write_drafter(tmp_path / "drafter"))
    return fake


def ready(model: str = TARGET, bits: int | None = 4, **options: str) -> Conversion:
    return plan(model, How(recipes.make(bits)), **options)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_pair_by_id(pair: FakeHub, tmp_path: Path, bits: int | None) -> None:
    seen: list[tuple[str, int, int]] = []
    planned, out = ready(bits=bits), tmp_path / "out"
    assert not any(name.endswith(".safetensors") for name in pair.fetched())
    assert planned.to_download > 0
    assert "to download" in planned.summary(out)
    fetched = planned.fetch(lambda *step: seen.append(step))
    assert fetched.to_download == 0
    write(fetched, out, lambda *step: seen.append(step))
    for what in (f"download {TARGET}", f"download {DRAFTER}", "write out"):
        steps = [(done, total) for said, done, total in seen if said == what]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1] > 0
    listed = json.loads((out / "mlx_mtp.json").read_text())
    for side, name in (("target", TARGET), ("drafter", DRAFTER)):
        assert listed[side]["source"] == name
        assert len(listed[side]["revision"]) == 40
        assert listed[side]["revision"] in pair.repos[name]
    assert f"base_model:\n- {TARGET}\n- {DRAFTER}\n" in (out / "README.md").read_text()
    if bits is None:
        assert raw(out) == raw(tmp_path / "target")
        assert raw(out / "drafter") == raw(tmp_path / "drafter")
    assert load_pair(str(out)).drafter is not None
    assert f"Bearer {SECRET}" in pair.tokens
    assert not any(SECRET.encode() in p.read_bytes() for p in out.rglob("*") if p.is_file())


def test_a_revision_is_what_is_converted(pair: FakeHub, tmp_path: Path) -> None:
    commit = pair.add(TARGET, target(tmp_path / "older", seed=7), "v1")
    out = tmp_path / "out"
    write(ready(bits=None, revision="v1").fetch(None), out)
    assert raw(out) == raw(tmp_path / "older")
    assert json.loads((out / "mlx_mtp.json").read_text())["target"]["revision"] == commit


def test_case_k04_offline(pair: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(ready().fetch(None), tmp_path / "one" / "out")
    pair.close()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("network was used"))
    write(ready().fetch(None), tmp_path / "two" / "out")
    assert hashes(tmp_path / "one" / "out") == hashes(tmp_path / "two" / "out")
    with pytest.raises(LoadError, match=r"is not in the hub cache .* and HF_HUB_OFFLINE is set"):
        ready("google/gemma-4-E4B-it")


def test_case_k01_gated(pair: FakeHub) -> None:
    pair.refuse[TARGET] = (403, "GatedRepo")
    with pytest.raises(LoadError) as error:
        ready()
    assert f"{TARGET} is gated: accept its licence at {pair.url}/{TARGET}" in str(error.value)
    assert "\n" not in str(error.value)
    assert SECRET not in str(error.value)


def test_case_k09_a_download_that_breaks_off(pair: FakeHub, tmp_path: Path) -> None:
    pair.broken.add("model-00002-of-00002.safetensors")
    with pytest.raises(LoadError, match="run the same command again"):
        ready().fetch(None)
    pair.broken.clear()
    pair.asked.clear()
    write(ready().fetch(None), tmp_path / "out")
    assert "model-00001-of-00002.safetensors" not in pair.fetched()
    assert leftovers(tmp_path / "out") == []


def test_room_is_needed_for_the_download_too(
    pair: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, real = ready(), shutil.disk_usage(tmp_path)
    needed = planned.nbytes + planned.to_download
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: real._replace(free=fit.DISK_RESERVE + needed)
    )
    check_place(tmp_path / "out", planned, False)
    check_place(Path("google"), planned, False)  # no folder of ours, whatever its name
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: real._replace(free=fit.DISK_RESERVE + needed - 1)
    )
    with pytest.raises(FitError, match="2 GB are to stay free"):
        check_place(tmp_path / "out", planned, False)


def test_a_drafter_alone(pair: FakeHub, tmp_path: Path) -> None:
    write(ready(DRAFTER, None).fetch(None), tmp_path / "out")
    assert raw(tmp_path / "out") == raw(tmp_path / "drafter")
    listed = json.loads((tmp_path / "out" / "mlx_mtp.json").read_text())
    assert (listed["target"], listed["drafter"]["source"]) == (None, DRAFTER)


def test_a_grid_is_found_after_the_download(fake: FakeHub, tmp_path: Path) -> None:
    name = "model.language_model.layers.0.mlp.up_proj.weight"

    def gridded(tensors: dict[str, mx.array]) -> None:
        signs = mx.where(mx.arange(64) % 2 == 0, -8, 7)
        tensors[name] = mx.broadcast_to(0.25 * signs, (128, 64)).astype(mx.bfloat16)

    fake.add(TARGET, target(tmp_path / "target", change=gridded))
    write(plan(TARGET, How(recipes.make(4)), drafter=None).fetch(None), tmp_path / "out")
    scales = arrays(tmp_path / "out")["language_model.model.layers.0.mlp.up_proj.scales"]
    assert scales.shape == (128, 2)
    assert (scales == 0.25).all()


def test_a_pair_that_was_uploaded_is_found_by_its_id(fake: FakeHub, tmp_path: Path) -> None:
    """What `hf upload` makes of our folder: the drafter lies inside, and is fetched from there."""
    source = target(tmp_path / "source")
    planned = plan(str(source), How(recipes.make(4)), drafter=str(write_drafter(tmp_path / "d")))
    write(planned.fetch(None), tmp_path / "out")
    fake.add("someone/e2b", tmp_path / "out")
    pair = load_pair("someone/e2b")
    assert pair.drafter_name == "someone/e2b/drafter"
    assert pair.revision == pair.drafter_revision
    assert load_pair(str(tmp_path / "out")).weights_bytes == pair.weights_bytes
    fake.asked.clear()
    assert load_pair("someone/e2b").drafter is not None
    assert not any(name.endswith(".safetensors") for name in fake.fetched())
