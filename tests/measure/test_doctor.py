"""Faults are planted; doctor finds them, and says nothing of whose machine it is."""

from __future__ import annotations

import json
import os
import shutil
import socket
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp import generation
from mlx_mtp.engine.calibrate import contest, norms_site
from mlx_mtp.engine.requests import Stats
from mlx_mtp.errors import LoadError, MtpError
from mlx_mtp.folders import data_folder
from mlx_mtp.kernels import fused, launch, race
from mlx_mtp.kernels.profile import Profile, machine
from mlx_mtp.kernels.race import Contest
from mlx_mtp.measure import doctor
from mlx_mtp.measure.doctor import OK, SKIPPED, WARNING, WRONG
from mlx_mtp.models.rows import wrap
from mlx_mtp.pair import GenerationDefaults, Pair
from mlx_mtp.weights import load, tuned
from mlx_mtp.weights.known import SHORT
from mlx_mtp.weights.tuned import Tuned
from tests.metal.pairs import make_pair, through_the_emulator
from tests.weights.fake_hub import SECRET, FakeHub

TINY = Path(load.__file__).parent / "tiny"


def way(*numbers):
    return lambda _, after=None: mx.array([numbers])


@pytest.fixture
def pair():
    return mlx_mtp.load()


def test_a_wrong_kernel():
    def contests(*numbers):
        ways = {"tile": way(1.0, 2.0), "matrix": way(*numbers)}
        return [lambda: Contest("product", 5, way(1.0, 2.0), ways, 1e-3)]

    told = "1 shapes compared with MLX's operations"
    assert doctor.kernels(contests(1.0, 2.0)) == (OK, f"{told}, all give the same")
    for wrong in (2.1, float("nan")):
        state, found, advice = doctor.kernels(contests(1.0, wrong))
        assert (state, found.startswith(f"{told}, wrong: matrix at product, 5 rows: off by")) == (
            WRONG,
            True,
        )
        assert "open an issue" in advice


def test_a_wrong_kernel_among_a_pairs_own(monkeypatch):
    """As on Metal, where its ways are kernels; here they are MLX's operations, too."""
    target, drafter = make_pair(ordered=True)
    wrap(target)
    wrap(drafter)
    random = Pair(target, drafter, None, None, GenerationDefaults(), "random")
    assert doctor.kernels_of(random)[0] == SKIPPED
    monkeypatch.setattr(launch, "on_metal", lambda: True)
    monkeypatch.setattr(race, "_fastest", lambda *_: race.STOCK)
    state, found = doctor.kernels_of(random)
    assert state == OK, found
    right = fused.add_norm
    monkeypatch.setattr(fused, "add_norm", lambda *a, **k: [2 * x for x in right(*a, **k)])
    state, found, _ = doctor.kernels_of(random)
    assert state == WRONG
    assert found.count("fused at norms") == found.count(" at ") == 9


def test_a_wrong_sign_in_a_kernels_source(monkeypatch):
    """Its source, through the emulator of a Metal device."""
    through_the_emulator(monkeypatch)
    monkeypatch.setattr(race, "_fastest", lambda *_: race.STOCK)
    site = norms_site(make_pair()[0].layers[0], mx.float32)
    raced = [partial(contest, [site], 2)]
    assert doctor.kernels(raced)[0] == OK
    source = fused.ADD_NORM.source.replace(" + part", " - part")
    monkeypatch.setattr(fused, "ADD_NORM", replace(fused.ADD_NORM, source=source))
    state, found, _ = doctor.kernels(raced)
    assert state == WRONG
    assert "fused at norms 64 float32, 2 rows: off by" in found


@pytest.mark.parametrize(
    ("look", "variable", "inside"),
    [(doctor.data, "XDG_DATA_HOME", "mlx-mtp"), (doctor.cache, "HF_HOME", "hub")],
)
def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path, look, variable, inside):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    state, found = look()
    assert (state, found.startswith(str(tmp_path / inside))) == (OK, True)
    assert not any(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "folder"):
        monkeypatch.setenv(variable, str(place))
        state, found, advice = look()
        assert (state, found) == (WRONG, f"{place / inside}: {tmp_path / 'file'} is no folder")
        assert variable in advice
    for place in filter(Path.is_dir, (Path("/proc"), Path("/sys"))):
        monkeypatch.setenv(variable, str(place / "nope"))
        told = f"{place / 'nope' / inside}: {place} cannot be written to"
        assert look()[:2] == (WRONG, told)

    def full(path, _):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(Path, "write_text", full)
    assert look()[:2] == (WRONG, f"{tmp_path / inside}: {tmp_path} cannot be written to")


@pytest.mark.parametrize("inside", ["tuned", "wired"])
def test_a_file_where_a_folder_should_be(monkeypatch, tmp_path, inside):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    data_folder().mkdir()
    (data_folder() / inside).write_text("")
    assert doctor.data()[:2] == (WRONG, f"{data_folder() / inside} is no folder")


def test_damaged_and_stale_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    Profile({"key": {5: "tile"}}).save(data_folder())
    assert doctor.data()[0] == OK
    path = data_folder() / "kernels.json"
    path.write_text(path.read_text().replace('"mlx": "', '"mlx": "9'))
    assert doctor.data()[0] == WARNING
    path.write_text("{")
    state, found, advice = doctor.data()
    assert (state, found, advice[:6]) == (WRONG, f"{path} cannot be read and is ignored", "delete")


def test_damaged_profiles(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    one = Tuned(dict.fromkeys(range(9), 0.01), (0.5,) * 8, False, True, 0, None, "2026-11-30")
    whole, cut, strange = (tuned.save(data_folder(), name, machine(), one) for name in "abc")
    assert doctor.data() == (OK, f"{data_folder()}, 3 tuned profiles")
    stale = tuned.save(data_folder(), "/a/secret", machine() | {"mlx": "0.1"}, one)
    told = f"{stale} is of another machine, MLX or version and is ignored"
    assert doctor.data()[:2] == (WARNING, told)
    line = doctor.anonymous()(told)
    assert ("/tuned/*-" in line, "secret" in line) == (True, False)
    cut.write_text(cut.read_text()[:-9])
    strange.write_text(strange.read_text().replace("0.01", "-1", 1))
    state, found, _ = doctor.data()
    assert state == WRONG
    assert str(cut) in found
    assert str(strange) in found
    assert str(whole) not in found


def test_what_may_never_end_is_not_read(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    pipe, endless, large = (data_folder() / "tuned" / f"{name}.json" for name in "abc")
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    endless.symlink_to("/dev/zero")
    with large.open("w") as file:
        file.truncate(17 << 20)
    (data_folder() / "kernels.json").symlink_to(pipe)

    def read(*_):
        raise AssertionError

    monkeypatch.setattr(Path, "read_text", read)
    state, found, _ = doctor.data()
    assert (state, found.count("cannot be read and is ignored")) == (WRONG, 4)


def install(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_wrong_version(monkeypatch, tmp_path):
    here = doctor.installed()
    state, found = doctor.versions()
    assert state == OK
    assert f"mlx {here['mlx']}" in found
    install(tmp_path, "mlx", "0.30.1")
    monkeypatch.syspath_prepend(tmp_path)
    state, found, advice = doctor.versions()
    assert state == WRONG
    assert "mlx 0.30.1" in found
    assert advice.startswith("pip install -U ")
    assert ">=0.32" in advice


def test_another_mlx_than_is_installed(monkeypatch, tmp_path):
    install(tmp_path, "mlx", "9.0")
    monkeypatch.syspath_prepend(tmp_path)
    state, found, _ = doctor.versions()
    assert state == WRONG
    assert f"the MLX that is imported is {mx.__version__}" in found


def test_a_missing_package(monkeypatch):
    here = doctor.installed()
    monkeypatch.setattr(doctor, "installed", lambda: {k: here[k] for k in here if k != "mlx-lm"})
    state, found, advice = doctor.versions()
    assert state == WRONG
    assert "mlx-lm missing" in found
    assert "mlx-lm>=" in advice


def test_a_package_without_its_folder(monkeypatch):
    right = doctor.find_spec
    monkeypatch.setattr(doctor, "find_spec", lambda name: name != "mlx_lm" and right(name))
    assert doctor.versions()[0] == OK
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "mlx_lm" else right(name))
    state, found, advice = doctor.versions()
    assert state == WRONG
    assert f"mlx-lm {doctor.installed()['mlx-lm']} without its folder, " in found
    assert advice.startswith('pip install -U --force-reinstall "mlx-lm>=')


def test_an_mlx_without_a_version(monkeypatch, tmp_path):
    (tmp_path / "mlx-0.1.dist-info").mkdir()
    (tmp_path / "mlx-0.1.dist-info" / "METADATA").write_text("Name: mlx\n")
    monkeypatch.setattr(doctor.metadata, "distributions", partial(distributions, path=[tmp_path]))
    assert "mlx missing" in doctor.versions()[1]
    monkeypatch.setattr(doctor, "installed", lambda: {"mlx-cpu": "1.0"})
    assert doctor.install()[1] == "mlx missing, mlx-cpu 1.0 do not belong together"


@pytest.mark.parametrize(
    ("there", "state", "told"),
    [
        ({"mlx-cpu": "1.0"}, OK, ""),
        ({"mlx-metal": "1.0"}, OK, ""),
        ({}, OK, ""),
        ({"mlx-cpu": "1.0", "mlx-cuda-13": "1.0"}, WRONG, "on top of each other"),
        ({"mlx-cuda-12": "1.0", "mlx-cuda-13": "1.0"}, WRONG, "on top of each other"),
        ({"mlx-metal": "1.1"}, WRONG, "do not belong together"),
    ],
)
def test_backends_that_are_mixed(monkeypatch, there, state, told):
    monkeypatch.setattr(doctor, "installed", lambda: {"mlx": "1.0", "mlx-lm": "3"} | there)
    found = doctor.install()
    assert found[0] == state
    assert told in found[1]
    if state == WRONG:
        wanted = {"mlx-metal": "mlx", "mlx-cpu": "mlx[cuda13]", "mlx-cuda-12": "mlx[cuda13]"}
        uninstall = f"pip uninstall -y mlx {' '.join(there)} && pip install "
        assert found[2] == f'{uninstall}"{wanted[next(iter(there))]}"'


def test_backends_that_lie_beside_each_other(monkeypatch, tmp_path):
    install(tmp_path, "mlx-cuda-13", doctor.installed()["mlx"])
    install(tmp_path, "mlx-cpu", doctor.installed()["mlx"])
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.install()[0] == WRONG


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded pair."""
    shutil.copytree(TINY / "drafter", tmp_path / "target" / "drafter")
    return shutil.copytree(TINY / "target", tmp_path / "target", dirs_exist_ok=True)


def test_weights_that_are_all_zero(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    path.write_bytes(whole[:header] + bytes(len(whole) - header))
    state, found, _ = doctor.weights(mlx_mtp.load(str(folder)))
    assert (state, "tensors are all zero: target " in found) == (WRONG, True)


def test_weights_that_are_not_those_of_the_listing(folder):
    path = folder / "drafter" / "model.safetensors"
    whole = path.read_bytes()
    listing = {"files": {"drafter/model.safetensors": sha256(whole).hexdigest()}}
    listing["files"]["model.safetensors"] = sha256((folder / path.name).read_bytes()).hexdigest()
    (folder / "mlx_mtp.json").write_text(json.dumps(listing))
    assert doctor.weights(mlx_mtp.load(str(folder)))[0] == OK
    path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
    state, found, _ = doctor.weights(mlx_mtp.load(str(folder)))
    assert (state, found.startswith(f"{path} has changed or is damaged")) == (WRONG, True)


def test_a_drafter_in_another_folder(folder, tmp_path):
    other = shutil.move(folder / "drafter", tmp_path / "other" / "secret")
    pairs = []
    state, _, advice = doctor.load(pairs, True, str(folder))
    assert (state, advice.endswith("--drafter")) == (WARNING, True)
    assert doctor.load(pairs, True, str(folder), drafter=str(other))[0] == OK
    checks = doctor.examine(str(folder), str(other), offline=True)
    check = next(check for check in checks if check.name == "pair")
    assert (check.state, check.found) == (OK, "... in float32; ...")


@pytest.mark.parametrize("offline", [True, False])
def test_options_that_doctor_has_not(monkeypatch, offline):
    def refused(*_, **__):
        raise LoadError("HF_HUB_OFFLINE is set; unset it and run; `--model e2b`; --force-fit loads")

    monkeypatch.setattr(load, "load_pair", refused)
    why = "--offline is given; leave it away" if offline else "HF_HUB_OFFLINE is set; unset it"
    with pytest.raises(MtpError, match=f"^{why} and run; `e2b`$"):
        doctor.load([], offline, "e4b")


def test_weights_that_are_not_finite(folder, pair):
    state, found = doctor.weights(pair)
    assert (state, found.endswith(" no matrix is all zero")) == (OK, True)
    tensors = mx.load(str(folder / "model.safetensors"))
    name = next(name for name in tensors if name.endswith("layers.2.mlp.down_proj.weight"))
    tensors[name][7, 3] = mx.nan
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    checks = {check.name: check for check in doctor.examine(str(folder), offline=True)}
    wrong = {name: check for name, check in checks.items() if check.state == WRONG}
    assert list(wrong) == ["weights", "exactness", "texts"]
    assert all(check.advice for check in wrong.values())
    assert "infinity: target layers.2.mlp.down_proj." in wrong["weights"].found


@pytest.mark.parametrize("bad", [mx.inf, -mx.inf])
def test_infinite_weights(pair, bad):
    pair.drafter.norm.weight[0] = bad
    assert doctor.weights(pair)[:2] == (
        WRONG,
        "1 of 149 tensors hold NaN or infinity: drafter norm.weight",
    )


def test_exactness():
    state, found = doctor.exact({2: 0.0, 3: 0.0, 4: 0.25})
    assert state == OK
    assert found.endswith("plain decoding: 1, 2; the others differ by 3: 2.5e-01")
    assert "none; the others" in doctor.exact({2: 0.5})[1]
    assert doctor.exact({2: 0.0, 3: float("nan")})[0] == WRONG


def test_texts_that_drafting_changes(monkeypatch, pair):
    right = generation.generate

    def generate(pair, prompt, options, *, engine):
        result = right(pair, prompt, options, engine=engine)
        if options.draft_len is None:
            result.token_ids[5] += 1
        return result

    monkeypatch.setattr(generation, "generate", generate)
    monkeypatch.setattr(doctor, "TOKENS", 12)
    state, found, advice = doctor.texts([], pair)
    assert state == WRONG
    assert "prompt 1 with auto at position 5 (scores " in found
    assert "with 4 drafts" not in found
    assert "--draft-len 0" in advice


def test_near_ties_are_no_fault():
    for apart, near_tie, state in ((0.1, 0.5, OK), (0.6, 0.5, WRONG), (1e-6, 0.0, WRONG)):
        assert doctor.compared([(0.0, "here"), (apart, "there")], near_tie)[0] == state
    assert doctor.compared([(float("nan"), "here")], 0.5)[0] == WRONG


@pytest.mark.parametrize(
    ("accepted", "rounds", "state"), [(8, 10, OK), (7, 10, WARNING), (0, 9, WARNING)]
)
def test_acceptance(accepted, rounds, state):
    stats = [Stats(rounds=rounds - 1, accepted=accepted), Stats(rounds=1)]
    found = doctor.acceptance(stats)
    assert found[0] == state
    assert (state == WARNING) == ("mlx-mtp verify FOLDER" in found[-1])
    assert doctor.acceptance([])[0] == SKIPPED


def test_metal(monkeypatch):
    assert mx.metal.is_available() or doctor.metal()[0] == SKIPPED
    info = {
        "device_name": "Apple M4 Pro",
        "architecture": "applegpu_g16s",
        "max_recommended_working_set_size": 18_000_000_000,
        "max_buffer_length": 14_000_000_000,
    }
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert doctor.metal() == (
        OK,
        "Apple M4 Pro, applegpu_g16s, GPU generation 16, working set 18.0 GB, largest buffer "
        "14.0 GB",
    )


def test_an_intel_python_on_a_mac(monkeypatch):
    assert doctor.machine()[0] == doctor.python()[0] == OK
    monkeypatch.setattr(doctor.platform, "mac_ver", lambda: ("15.1", ("", "", ""), ""))
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    state, found, advice = doctor.python()
    assert (state, found.endswith(" for x86_64 on macOS 15.1")) == (WRONG, True)
    assert "arm64" in advice
    monkeypatch.setattr(doctor.platform, "machine", lambda: "arm64")
    assert doctor.python()[0] == OK


@pytest.fixture
def fake(monkeypatch):
    server = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    yield server
    server.close()


def test_the_hub(fake, tmp_path):
    one = SHORT["e2b"]
    assert doctor.hub(offline=True) == (SKIPPED, "offline")
    assert fake.asked == []
    assert doctor.hub(offline=False)[:2] == (WARNING, f"{fake.url} answers 401")
    fake.add(one.target, tmp_path, one.target_revision)
    assert doctor.hub(offline=False) == (OK, f"{fake.url} answers 200")
    assert len(fake.asked) == 2
    assert set(fake.tokens) == {""}


def test_a_hub_that_is_not_there_or_silent(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setattr(doctor, "HUB_S", 0.2)
        assert doctor.hub(offline=False)[0] == WARNING
    state, found, _ = doctor.hub(offline=False)
    assert (state, found.startswith(f"{endpoint} cannot be reached (")) == (WARNING, True)


def test_what_raises_is_a_finding():
    def broken(error):
        raise error

    clean = doctor.anonymous()
    check = doctor.run("metal", partial(broken, RuntimeError("no\ndevice")), clean)
    assert (check.state, check.found) == (WRONG, "RuntimeError: no device")
    check = doctor.run("pair", partial(broken, LoadError("no such folder")), clean)
    assert (check.state, check.found) == (WRONG, "no such folder")


def test_nothing_personal_is_told(monkeypatch, tmp_path):
    home = tmp_path / "homes" / "zoe.doe"
    home.mkdir(parents=True)
    for name, value in {
        "HOME": str(home),
        "LOGNAME": "zoe.doe",
        "HF_TOKEN": SECRET,
        "HF_ENDPOINT": "http://hub.inner.example:1",
        "HF_HOME": str(home / "hf"),
        "XDG_DATA_HOME": str(tmp_path / "Disk" / "Zoe.Doe"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr(doctor.platform, "node", lambda: "zoes-mac.local")
    for model in (str(tmp_path / "secret" / "model"), "~/secret/model"):
        checks = list(doctor.examine(model))
        told = "\n".join(f"{check.found} {check.advice}" for check in checks).lower()
        for personal in ("zoe", "doe", str(tmp_path), "secret", "inner", SECRET.lower()):
            assert personal not in told, told
        assert "$hf_home/hub" in told
        assert "$hf_endpoint cannot be reached" in told
    clean = doctor.anonymous(str(tmp_path / "of" / "model"))
    assert clean(f"{home}/a of zoe.doe on zoes-mac.local, zoes-mac: {SECRET}") == (
        "~/a of USER on HOST, HOST: $HF_TOKEN"
    )
    assert doctor.anonymous(str(home / "model"))(f"{home}/x") == "~/x"
    assert clean(f"{tmp_path}/of/model/config.json") == ".../config.json"
    monkeypatch.setenv("HF_HOME", str(home / "secret user"))
    assert doctor.anonymous()(f"{home}/secret user/hub {home}/x") == "$HF_HOME/hub ~/x"
    monkeypatch.chdir(tmp_path)
    Path("secret").mkdir()
    assert doctor.placed("secret") == str(tmp_path / "secret")
    assert doctor.placed("../no") == str(tmp_path.parent / "no")
    assert [doctor.placed(name) for name in ("e2b", "a/b", None)] == ["e2b", "a/b", None]


def test_a_user_without_a_name(monkeypatch):
    def nobody():
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr(doctor.getpass, "getuser", nobody)
    monkeypatch.setattr(doctor.platform, "node", lambda: "")
    for home in ("/", "~"):
        monkeypatch.setenv("HOME", home)
        for model in (None, "", "~", "~nobody/x", "x" * 300, "a/b", "/"):
            assert doctor.anonymous(model)("a/b ~") == "a/b ~"
