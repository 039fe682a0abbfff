"""The comparison with mlx-lm and mlx-vlm, without either: names, timing, tables, the pairs."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from benchmarks.compare import LANES, Column, as_json, main, table
from benchmarks.shapes import Shape, write_pair
from mlx_mtp.engine.draft_length import FixedLength
from mlx_mtp.engine.session import Engine, Request
from mlx_mtp.measure import peers
from mlx_mtp.weights.load import load_drafter, load_target
from tests.checkpoints import PREFIXES, F, S


@pytest.fixture
def columns() -> dict[str, list[Column]]:
    speeds = dict(zip(LANES, (30.0, 20.0, 18.0, 12.0), strict=True))

    def column(factor: float, same_text: bool = True) -> Column:
        rates = {lane: [speed * factor] * 3 for lane, speed in speeds.items()}
        return Column(rates, rates, dict.fromkeys(LANES, 0.5), 2.5, same_text)

    return {"embedded": [column(1), column(2, same_text=False)]}


def test_json_has_the_default_settings_figures(columns: dict[str, list[Column]]) -> None:
    written = as_json(columns, draft_len=4)
    assert written["pairs"]["embedded"] == {
        "ours_mtp": 30.0,
        "mlx_vlm_mtp": 20.0,
        "ours_plain": 18.0,
        "mlx_lm_plain": 12.0,
        "same_text": True,
    }
    assert written["compiled_pairs"]["embedded"]["ours_mtp"] == 60.0
    assert written["draft_len"] == 4


def test_table_has_two_columns_a_pair(columns: dict[str, list[Column]]) -> None:
    rows = [line.strip("| ").split(" | ") for line in table(columns).splitlines()]
    assert rows[0] == ["embedded, default", "embedded, compiled"]
    assert ["MTP, ours / mlx-vlm (by CPU time)", "1.50 (1.50)", "1.50 (1.50)"] in rows
    assert ["ours plain, tokens/s", "18.0", "36.0"] in rows
    assert ["same text", "yes", "NO"] in rows


@pytest.mark.parametrize("prefix", PREFIXES)
def test_text_weights_get_mlx_vlms_names(prefix: str) -> None:
    assert peers.text_name(f"{prefix}layers.3.mlp.up_proj.weight") == (
        "model.layers.3.mlp.up_proj.weight"
    )


def test_the_last_round_is_not_counted() -> None:
    rounds = [(10, 0), (11, 1), (12, 1), (13, 1), (14, 2), (15, 2), (99, 3)]
    result = peers.timed((pair for pair in rounds), max_tokens=50, eos=[99])
    assert result["tokens"] == [10, 11, 12, 13, 14, 15]
    assert (result["counted"], result["rounds"]) == (3, 1)


def test_a_planted_pair_counts_and_its_drafter_is_blind_to_some(tmp_path: Path) -> None:
    shape = Shape(
        "e2b",
        {"num_hidden_layers": 4, "layer_types": [S, F] * 2, "num_kv_shared_layers": 2},
        {"hidden_size": 64},
        {"vocab_size": 256},
    )
    folders = write_pair(tmp_path, shape)
    target, drafter = load_target(folders[0]), load_drafter(folders[1])
    request = Request([2, 100, 40], max_tokens=40, draft_len=3)
    engine = Engine(target, drafter, draft_length=FixedLength(3))
    engine.add(request)
    while engine.busy:
        engine.step()
    assert request.tokens == list(range(41, 81))
    first, tried = request.stats.accepted_by_position[0], request.stats.drafted_by_position[0]
    assert 0.3 < first / tried < 1


def test_weights_are_read_in_the_dtype_of_this_engine(tmp_path: Path) -> None:
    arrays = {"norm.weight": mx.ones((4,), mx.bfloat16), "order": mx.arange(3)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    read = peers.read(tmp_path)
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    assert read["norm.weight"].dtype == (mx.float32 if on_cpu else mx.bfloat16)
    assert read["order"].dtype == mx.int32


def test_a_missing_extra_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["compare"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "mlx-vlm is not installed; run: python3 -m pip install -e '.[bench]'\n"
    )


def test_an_answer_without_tokens_took_no_time() -> None:
    result = peers.timed((pair for pair in [(99, 0)]), max_tokens=5, eos=[99])
    assert result == {"tokens": [], "seconds": 0, "cpu_seconds": 0, "counted": 0, "rounds": 0}
