"""What a folder may hold, and what a broken one is told: one line that names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mtp.errors import LoadError, UsageError
from mlx_mtp.weights.checkpoint import Checkpoint, Folder
from mlx_mtp.weights.load import load_target
from tests.checkpoints import SHAPES, write_target

INDEX = "model.safetensors.index.json"


def refused(folder: Path) -> str:
    """The one line that loading `folder` ends in."""
    with pytest.raises(LoadError) as error:
        load_target(folder)
    line = str(error.value)
    assert "\n" not in line
    return line


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_target(tmp_path / "sharded", shards=3)


def test_case_g16_a_shard_of_the_index_is_missing(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    line = refused(sharded)
    assert "model-00002-of-00003.safetensors is missing" in line
    assert INDEX in line


def test_case_g16_a_shard_is_missing_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in refused(sharded)


def test_case_g17_a_shard_is_cut_off(sharded: Path) -> None:
    shard = sharded / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    line = refused(sharded)
    assert "model-00003-of-00003.safetensors is cut off" in line


def test_case_g17_a_header_is_cut_off(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])
    assert "model.safetensors is not a safetensors file, or is cut off" in refused(folder)


def test_case_g17_a_header_that_promises_more_than_there_is(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    assert data.count(b'"shape":[128,64]') > 0
    weights.write_bytes(data.replace(b'"shape":[128,64]', b'"shape":[999,64]'))
    assert "model.safetensors is not a safetensors file" in refused(folder)


def test_tensors_that_overlap(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    norms = [name for name in header if name.endswith(".post_attention_layernorm.weight")]
    header[norms[1]] = header[norms[0]]
    changed = json.dumps(header).encode().ljust(size - 8)
    weights.write_bytes(len(changed).to_bytes(8, "little") + changed + data[size:])
    line = refused(folder)
    assert "model.safetensors is broken" in line
    assert all(name in line for name in norms[:2])


def test_case_g18_several_shards_without_an_index(sharded: Path, tmp_path: Path) -> None:
    (sharded / INDEX).unlink()
    whole = write_target(tmp_path / "whole")
    assert mx.array_equal(load_target(sharded).norm.weight, load_target(whole).norm.weight)


def test_case_g18_two_files_hold_the_same_tensor(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    copy = folder / "model-copy.safetensors"
    copy.write_bytes((folder / "model.safetensors").read_bytes())
    line = refused(folder)
    assert "model-copy.safetensors" in line
    assert "both hold" in line


def test_case_g19_the_index_is_stale(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.language_model.gone.weight"] = "model-00001-of-00003.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    line = refused(sharded)
    assert INDEX in line
    assert "stale" in line
    assert "model.language_model.gone.weight" in line


def test_case_g19_an_index_of_shards_beside_the_whole_model(tmp_path: Path, sharded: Path) -> None:
    folder = write_target(tmp_path / "whole")
    (folder / INDEX).write_text((sharded / INDEX).read_text())
    assert "if model.safetensors is the whole model, delete the index" in refused(folder)


def test_an_index_may_not_name_files_elsewhere(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../other/model.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    assert "outside its own folder" in refused(sharded)


def _pointer(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (folder / "model.safetensors").write_text(pointer)


def _only(suffix: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / f"gemma-4-e2b{suffix}").write_bytes(b"GGUF")

    return change


def _config(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "config.json").write_text(text)

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_pointer, "model.safetensors is a Git LFS pointer"),
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing: no weights"),
        (_config("{"), "config.json is not JSON"),
        (_config("[1]"), "config.json is not a JSON object"),
        (_config('{"model_type": "llama"}'), "model_type 'llama' is not Gemma 4"),
        (_only(".gguf"), "gemma-4-e2b.gguf: .gguf weights cannot be read"),
        (_only(".litertlm"), "gemma-4-e2b.litertlm: .litertlm weights cannot be read"),
    ],
)
def test_case_g27_broken_folders(tmp_path: Path, change: Callable[[Path], None], told: str) -> None:
    folder = write_target(tmp_path)
    change(folder)
    line = refused(folder)
    assert told in line
    assert str(folder) in line


def test_case_g27_a_gguf_folder_without_config_is_named_too(tmp_path: Path) -> None:
    (tmp_path / "gemma-4-e2b-it-Q4_K_M.gguf").write_bytes(b"GGUF")
    assert "gemma-4-e2b-it-Q4_K_M.gguf: .gguf weights cannot be read" in refused(tmp_path)


def test_case_g27_a_folder_without_tokenizer(tmp_path: Path) -> None:
    source = Folder.at(write_target(tmp_path))
    with pytest.raises(LoadError, match=r"tokenizer\.json is missing"):
        Checkpoint.open(source).need_tokenizer()


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_case_g13_weights_packed_by_others_are_refused_by_name(tmp_path: Path, method: str) -> None:
    folder = write_target(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    assert f"quantised with {method}" in refused(folder)


def test_case_k10_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model"}
    config["model_file"] = "evil.py"
    (folder / "config.json").write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Model: pass\n")
    load_target(folder)
    assert not ran.exists()


def test_paths_that_are_no_folder(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no such folder"):
        Folder.at(tmp_path / "nowhere")
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(LoadError, match="give the folder"):
        Folder.at(file)
    with pytest.raises(UsageError, match="has no revision"):
        Folder.at(tmp_path, "main")


def test_a_folder_of_a_hub_cache_is_recognised(tmp_path: Path) -> None:
    repo = tmp_path / "models--google--gemma-4-E2B-it"
    snapshot = repo / "snapshots" / "0123abc"
    write_target(snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123abc")
    for given in (repo, snapshot):
        folder = Folder.at(given)
        assert (folder.name, folder.revision) == ("google/gemma-4-E2B-it", "0123abc")
        assert folder.path == snapshot
    with pytest.raises(LoadError, match="revision v2 is not in this hub cache"):
        Folder.at(repo, "v2")


@pytest.mark.parametrize("shape", SHAPES)
def test_case_g29_all_layouts_load_the_same(tmp_path: Path, shape: str) -> None:
    from mlx.utils import tree_flatten

    from tests.checkpoints import PREFIXES

    first, *others = (
        dict(tree_flatten(load_target(write_target(tmp_path / p, shape, prefix=p)).parameters()))
        for p in PREFIXES
    )
    for other in others:
        assert first.keys() == other.keys()
        assert all(mx.array_equal(first[k], other[k]) for k in first)


def test_a_header_nested_without_end(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    header = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    whole = len(header).to_bytes(8, "little") + header
    (folder / "model.safetensors").write_bytes(whole)
    assert "model.safetensors is not a safetensors file" in refused(folder)
