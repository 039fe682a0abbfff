"""`weights.verify`: a whole folder passes, and each planted fault is told with file and tensor."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mtp.errors import LoadError
from mlx_mtp.weights.checkpoint import Folder
from mlx_mtp.weights.verify import Report, check_folder
from tests.checkpoints import (
    add_tokenizer,
    drafter_config,
    write_drafter,
    write_target,
    write_vlm_quantized,
)

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"
NORM = "model.language_model.norm.weight"
Edit = Callable[[dict[str, Any]], object]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def edit(path: Path, change: Edit) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def list_hashes(folder: Path) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    hashes = {str(p.relative_to(folder)): sha256(p) for p in files}
    (folder / "mlx_mtp.json").write_text(json.dumps({"format": 1, "files": hashes}))


def in_cache(folder: Path, cache: Path) -> Path:
    """`folder` as the hub cache keeps a download: links to blobs, large ones named by sha256."""
    repo = cache / "models--some--model"
    snapshot = repo / "snapshots" / "c0ffee"
    for made in (snapshot, repo / "blobs", repo / "refs"):
        made.mkdir(parents=True)
    (repo / "refs" / "main").write_text("c0ffee")
    for path in folder.iterdir():
        blob = sha256(path) if path.suffix == ".safetensors" else sha256(path)[:40]
        shutil.copy(path, repo / "blobs" / blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob)
    return snapshot


def one_problem(folder: Path) -> str:
    report = check_folder(folder)
    assert not report.ok
    (line,) = report.problems
    assert "\n" not in line
    return line


def with_tensors(folder: Path, change: Edit) -> None:
    """Rewrites the only weight file of `folder`."""
    path = folder / "model.safetensors"
    tensors = mx.load(str(path))
    assert isinstance(tensors, dict)
    mx.eval(tensors)
    change(tensors)
    mx.save_safetensors(str(path), tensors)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    add_tokenizer(write_target(folder / "single"))
    add_tokenizer(write_target(folder / "sharded", shards=3))
    size = sum(t.nbytes for t in Folder(folder / "single").header("model.safetensors").values())
    edit(folder / "sharded" / INDEX, lambda i: i["metadata"].update(total_size=size))
    write_drafter(folder / "drafter")
    return folder


@pytest.fixture
def single(made: Path, tmp_path: Path) -> Path:
    """A target in one file."""
    return Path(shutil.copytree(made / "single", tmp_path / "single"))


@pytest.fixture
def sharded(made: Path, tmp_path: Path) -> Path:
    """A target in three files with an index."""
    return Path(shutil.copytree(made / "sharded", tmp_path / "sharded"))


@pytest.fixture
def pair(made: Path, tmp_path: Path) -> Path:
    """Target, drafter in drafter/ and hashes, as `mlx-mtp convert` leaves them."""
    folder = Path(shutil.copytree(made / "sharded", tmp_path / "pair"))
    shutil.copytree(made / "drafter", folder / "drafter")
    list_hashes(folder)
    return folder


def test_a_whole_target(sharded: Path) -> None:
    assert check_folder(sharded) == Report(str(sharded), files={"target": 6})


def test_a_drafter_alone_needs_no_tokenizer(made: Path) -> None:
    assert check_folder(made / "drafter") == Report(str(made / "drafter"), files={"drafter": 2})


def test_a_whole_pair_with_hashes_and_progress(pair: Path) -> None:
    told: list[tuple[str, int, int]] = []
    report = check_folder(pair, lambda *step: told.append(step))
    assert report == Report(str(pair), files={"target": 7, "drafter": 2}, hashed=8)
    total = sum(p.stat().st_size for p in pair.rglob("*") if p.is_file())
    total -= (pair / "mlx_mtp.json").stat().st_size
    assert told[-1][1:] == (total, total)
    assert report.to_dict()["files"] == 9


@pytest.mark.parametrize("shape", ["e4b", "12b", "26b", "31b"])
def test_every_shape(shape: str, tmp_path: Path) -> None:
    folder = add_tokenizer(write_target(tmp_path / "t", shape, vision=True))
    write_drafter(folder / "drafter", shape)
    report = check_folder(folder)
    assert report.ok
    (notice,) = report.notices
    assert "not compared with the config: embed_vision, vision_tower" in notice


@pytest.mark.parametrize("shape", ["e2b", "26b"])
def test_an_mlx_conversion(shape: str, tmp_path: Path) -> None:
    source = add_tokenizer(write_target(tmp_path / "source", shape))
    folder = write_vlm_quantized(source, tmp_path / "vlm", down_proj=8)
    assert check_folder(folder).ok

    def change(tensors: dict[str, Any]) -> None:
        layer = "language_model.model.layers.2.mlp.up_proj"
        weight, scales = mx.quantize(mx.ones((128, 64)), 32, 4, mode="mxfp4")
        del tensors[f"{layer}.biases"]
        tensors.update({f"{layer}.weight": weight, f"{layer}.scales": scales})

    with_tensors(folder, change)
    assert check_folder(folder).ok


def test_a_hub_cache(sharded: Path, tmp_path: Path) -> None:
    snapshot = in_cache(sharded, tmp_path / "hub")
    report = check_folder(snapshot)
    assert report == Report(str(snapshot), files={"target": 6}, hashed=3)
    assert check_folder(snapshot.parent.parent) == report  # found through refs/main
    blob = (snapshot / SECOND).resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    line = one_problem(snapshot)
    assert line.startswith(f"{snapshot / SECOND} has changed or is damaged: its sha256 is")
    assert line.endswith(f"its blob is called {blob.name}")
    blob.unlink()
    assert one_problem(snapshot).endswith(
        f"{SECOND} is missing, but {INDEX} names it; the download was not finished: run once with "
        "a network to fetch the rest"
    )


def test_flipped_bytes_under_a_hash(pair: Path) -> None:
    listed = json.loads((pair / "mlx_mtp.json").read_text())["files"]
    names = ("drafter/model.safetensors", "model-00001-of-00003.safetensors")
    for name in names:
        data = bytearray((pair / name).read_bytes())
        data[-5] ^= 0x40
        (pair / name).write_bytes(data)
    for line, name in zip(check_folder(pair).problems, names, strict=True):
        assert line.startswith(f"{pair / name} has changed or is damaged: its sha256 is ")
        assert line.endswith(f", mlx_mtp.json has {listed[name]}")


def test_listed_but_missing_and_there_but_not_listed(pair: Path) -> None:
    (pair / "tokenizer.json").rename(pair / "tokenizer.model")
    mx.save_safetensors(str(pair / "drafter" / "more.safetensors"), {"a": mx.ones(2)})
    missing, foreign = check_folder(pair).problems
    assert missing == f"{pair}/tokenizer.json is missing, but mlx_mtp.json lists it"
    assert foreign == f"{pair}/drafter/more.safetensors is not listed in mlx_mtp.json"


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (None, "files must give each file's sha256"),
        ({"config.json": 5}, "files must give each file's sha256"),
        ({"../config.json": "0" * 64}, "lists ../config.json, which is outside its folder"),
        ({"/etc/hosts": "0" * 64}, "lists /etc/hosts, which is outside its folder"),
    ],
)
def test_a_listing_that_cannot_be_used(single: Path, files: object, told: str) -> None:
    (single / "mlx_mtp.json").write_text(json.dumps({"files": files}))
    line = one_problem(single)
    assert "mlx_mtp.json" in line
    assert told in line


def test_case_g16_missing_shards_and_a_cut_off_one(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    (sharded / "model-00001-of-00003.safetensors").unlink()
    last = sharded / "model-00003-of-00003.safetensors"
    last.write_bytes(last.read_bytes()[:-100])
    cut, first, second = check_folder(sharded).problems
    assert cut.startswith(f"{last} is cut off")
    assert first.endswith(f"model-00001-of-00003.safetensors is missing, but {INDEX} names it")
    assert second == f"{sharded / SECOND} is missing, but {INDEX} names it"


def test_a_missing_shard_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert check_folder(sharded).ok
    (sharded / SECOND).unlink()
    assert one_problem(sharded) == f"{sharded / SECOND} is missing"


def test_case_g19_an_index_that_says_something_else(sharded: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        weights = index["weight_map"]
        weights["model.gone"] = SECOND
        assert weights[NORM] == SECOND
        weights[NORM] = "model-00003-of-00003.safetensors"
        del weights["model.language_model.embed_tokens.weight"]
        index["metadata"]["total_size"] = 12

    edit(sharded / INDEX, change)
    mx.save_safetensors(str(sharded / "other.safetensors"), {"a": mx.ones(2)})
    report = check_folder(sharded)
    assert sorted(report.problems) == sorted(
        [
            f"{sharded / INDEX} is stale: model.gone is not in {SECOND}",
            f"{sharded / INDEX} is stale: {NORM} is not in model-00003-of-00003.safetensors but "
            f"in {SECOND}",
            f"{sharded / INDEX} does not know model.language_model.embed_tokens.weight, which is "
            "in model-00001-of-00003.safetensors",
            f"{sharded / 'other.safetensors'} is not in {INDEX}; remove one of the two",
        ]
    )
    (notice,) = report.notices
    assert "total_size is 12, the tensors have" in notice


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_an_index_that_is_none(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert one_problem(sharded).startswith(str(sharded / INDEX))


def test_an_index_whose_files_are_no_names(sharded: Path) -> None:
    edit(sharded / INDEX, lambda i: i["weight_map"].update({NORM: [SECOND], "x": None}))
    problems = check_folder(sharded).problems
    assert [line.partition(" is ")[0] for line in problems] == [
        f"{sharded / 'None'}",
        f"{sharded / repr([SECOND])}",
    ]


def test_an_index_may_not_name_files_elsewhere(single: Path, sharded: Path) -> None:
    for file in ("../single/model.safetensors", "/etc/passwd", "a\\b.safetensors"):
        edit(sharded / INDEX, lambda i, file=file: i["weight_map"].update(x=file))
        assert "names files outside its own folder" in one_problem(sharded)


def test_what_git_left_as_pointers(single: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    for name in ("model.safetensors", "tokenizer.json", "tokenizer.model"):
        (single / name).write_text(pointer)
    problems = check_folder(single).problems
    assert len(problems) == 3
    for line in problems:
        assert "is a Git LFS pointer" in line
        assert line.endswith("run `git lfs pull` there")


def test_missing_wrong_and_unknown_tensors_are_all_told(single: Path) -> None:
    layer = "model.language_model.layers.0"

    def change(tensors: dict[str, Any]) -> None:
        tensors[f"{layer}.mlp.foo.weight"] = tensors.pop(f"{layer}.mlp.up_proj.weight")
        tensors[f"{layer}.mlp.down_proj.weight"] = mx.ones((64, 999))
        tensors[f"{layer}.layer_scalar"] = mx.ones(1, dtype=mx.int32)
        tensors[NORM] = mx.ones(3)

    with_tensors(single, change)
    weights = f"{single / 'model.safetensors'}:"
    assert sorted(check_folder(single).problems) == sorted(
        [
            f"{single / 'config.json'} asks for layers.0.mlp.up_proj.weight, which no weight file "
            "holds",
            f"{weights} {layer}.mlp.down_proj.weight has shape [64, 999], but the config asks for "
            "[64, 128] in layers.0.mlp.down_proj.weight",
            f"{weights} {layer}.layer_scalar is stored as I32, which cannot be used here",
            f"{weights} {NORM} has shape [3], but the config asks for [64] in norm.weight",
            f"{weights} {layer}.mlp.foo.weight is not known, config.json has no place for it",
        ]
    )


def test_packed_wrongly(single: Path, tmp_path: Path) -> None:
    folder = write_vlm_quantized(single, tmp_path / "q")
    layer = "language_model.model.layers.1.mlp"

    def change(tensors: dict[str, Any]) -> None:
        tensors[f"{layer}.down_proj.scales"] = tensors[f"{layer}.down_proj.scales"][:, :3]
        del tensors[f"{layer}.gate_proj.biases"]

    with_tensors(folder, change)
    own = {"embed_tokens": {"bits": 8, "group_size": 32}}
    edit(folder / "config.json", lambda c: c["quantization"].update(own))
    problems = "\n".join(check_folder(folder).problems)
    assert len(problems.splitlines()) == 3
    assert "is no quantisation of a matrix 128 wide that MLX knows" in problems
    assert "asks for layers.1.mlp.gate_proj.biases, which no weight file holds" in problems
    assert "quantization says bits 8 for embed_tokens, but the tensors in" in problems


def test_a_missing_shard_of_packed_tensors_is_all_that_is_told(
    single: Path, tmp_path: Path
) -> None:
    folder = write_vlm_quantized(single, tmp_path / "q")
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    names = sorted(tensors)
    for i in range(3):
        part = {name: tensors[name] for name in names[i::3]}
        mx.save_safetensors(str(folder / f"model-{i + 1:05d}-of-00003.safetensors"), part)
    (folder / "model.safetensors").unlink()
    assert check_folder(folder).ok
    (folder / SECOND).unlink()
    assert one_problem(folder) == f"{folder / SECOND} is missing"


def test_two_tensors_that_are_one(single: Path) -> None:
    with_tensors(single, lambda t: t.update({"model.norm.weight": t[NORM]}))
    assert "are both norm.weight" in one_problem(single)


def test_a_drafter_that_does_not_fit(pair: Path) -> None:
    shutil.rmtree(pair / "drafter")
    write_drafter(pair / "drafter", config=drafter_config(backbone=128))
    (pair / "mlx_mtp.json").unlink()
    line = one_problem(pair)
    assert line == (
        f"{pair / 'drafter/config.json'}: the drafter does not fit: hidden size is 64 in the "
        "target, 128 in the drafter"
    )


def test_a_target_where_the_drafter_should_be(pair: Path, made: Path) -> None:
    shutil.rmtree(pair / "drafter")
    shutil.copytree(made / "single", pair / "drafter")
    (pair / "mlx_mtp.json").unlink()
    assert "drafter/config.json: not an assistant checkpoint" in one_problem(pair)


def test_no_tokenizer(single: Path) -> None:
    (single / "tokenizer.json").unlink()
    assert one_problem(single).startswith(f"{single / 'tokenizer.json'} is missing")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_json_that_is_none(single: Path, name: str) -> None:
    (single / name).write_text('{"a": ')
    line = one_problem(single)
    assert line.startswith(f"{single / name} is not JSON")


def test_case_g27_other_models_and_formats(single: Path) -> None:
    edit(single / "config.json", lambda c: c.update(model_type="llama"))
    assert "config.json: model_type 'llama' is not Gemma 4" in one_problem(single)
    (single / "config.json").unlink()
    assert one_problem(single) == f"{single / 'config.json'} is missing"
    (single / "model.safetensors").rename(single / "model.gguf")
    assert ".gguf weights cannot be read" in one_problem(single)


def test_a_foreign_quantisation_is_told_once(single: Path) -> None:
    awq = {"quant_method": "awq"}
    edit(single / "config.json", lambda c: c.update(quantization_config=awq))
    assert "quantised with awq" in one_problem(single)


def test_an_empty_folder(tmp_path: Path) -> None:
    assert check_folder(tmp_path).problems == [
        f"{tmp_path / 'model.safetensors'} is missing: no weights",
        f"{tmp_path / 'config.json'} is missing",
    ]


def test_no_folder(single: Path) -> None:
    for given in (single / "none", single / "config.json", "x" * 5000):
        with pytest.raises(LoadError):
            check_folder(given)


def test_a_config_that_is_a_pipe(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert any("config.json is missing" in line for line in check_folder(folder).problems)
