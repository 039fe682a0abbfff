"""The drafter that belongs to a target, by name and by shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_mtp.config import TargetConfig
from mlx_mtp.weights.known import SHORT, drafter_by_shape, drafters_by_name
from tests.checkpoints import target_config

QAT = "-qat-q4_0-unquantized"


@pytest.mark.parametrize(
    ("target", "drafters"),
    [
        ("google/gemma-4-E2B-it", ["google/gemma-4-E2B-it-assistant"]),
        ("google/gemma-4-26B-A4B-it", ["google/gemma-4-26B-A4B-it-assistant"]),
        (
            f"google/gemma-4-12B-it{QAT}",
            [f"google/gemma-4-12B-it{QAT}-assistant", "google/gemma-4-12B-it-assistant"],
        ),
        (
            "mlx-community/gemma-4-e4b-it-4bit",
            ["mlx-community/gemma-4-E4B-it-assistant-bf16", "google/gemma-4-E4B-it-assistant"],
        ),
        (
            "mlx-community/gemma-4-26b-a4b-it-mxfp4",
            [
                "mlx-community/gemma-4-26B-A4B-it-assistant-bf16",
                "google/gemma-4-26B-A4B-it-assistant",
            ],
        ),
        (
            "mlx-community/gemma-4-31B-it-qat-4bit",
            [
                "mlx-community/gemma-4-31B-it-qat-assistant-bf16",
                f"google/gemma-4-31B-it{QAT}-assistant",
                "google/gemma-4-31B-it-assistant",
            ],
        ),
        ("someone/Gemma-4-E2B-it-OptiQ-4bit", ["google/gemma-4-E2B-it-assistant"]),
        ("google/gemma-4-E2B", []),  # a base model: by shape, if at all
        ("google/gemma-4-E2B-it-assistant", []),  # a drafter itself
        ("google/gemma-3-4b-it", []),
        ("someone/gemma-4-120b-it", []),
        ("someone/gemma-4-e2b-italian", []),
    ],
)
def test_drafters_by_name(target: str, drafters: list[str]) -> None:
    assert list(drafters_by_name(target)) == drafters


def test_short_names_are_pinned_pairs_that_belong_together() -> None:
    assert list(SHORT) == ["e2b", "e4b", "12b", "26b", "31b"]
    for pair in SHORT.values():
        assert pair.drafter in drafters_by_name(pair.target)
        for revision in (pair.target_revision, pair.drafter_revision):
            assert len(revision) == 40
            assert set(revision) <= set("0123456789abcdef")


def test_drafter_by_shape_of_a_strange_model() -> None:
    assert drafter_by_shape(TargetConfig.from_dict(target_config()).text) is None


@pytest.mark.parametrize("size", ["E2B", "E4B", "12B", "26B-A4B", "31B"])
def test_drafter_by_shape_of_the_published_models(size: str) -> None:
    file = Path(__file__).parents[3] / f"shared/configs/gemma-4-{size}-it.json"
    if not file.exists():
        pytest.skip("the published configs are not at hand")
    text = TargetConfig.from_dict(json.loads(file.read_text())).text
    assert drafter_by_shape(text) == f"google/gemma-4-{size}-it-assistant"
