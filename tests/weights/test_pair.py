"""What a checkpoint's files say about sampling and stopping."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_mtp.config import TargetConfig
from mlx_mtp.errors import LoadError
from mlx_mtp.pair import GenerationDefaults
from tests.checkpoints import target_config


def defaults(generation: dict[str, Any], eos: object = None) -> GenerationDefaults:
    raw = {**target_config(), "eos_token_id": eos}
    return GenerationDefaults.from_files(TargetConfig.from_dict(raw), generation)


@pytest.mark.parametrize(
    ("config", "generation", "union"),
    [
        ([1, 106], [1, 106, 50], (1, 106, 50)),
        (1, 106, (1, 106)),
        (None, [1, 106, 50], (1, 106, 50)),
        ([1, 106], None, (1, 106)),
        (None, None, ()),
    ],
)
def test_case_e01_every_eos_of_both_files(
    config: object, generation: object, union: tuple[int, ...]
) -> None:
    assert defaults({"eos_token_id": generation}, config).eos_token_ids == union


def test_case_e01_an_eos_that_is_no_id() -> None:
    with pytest.raises(LoadError, match="eos_token_id is 'end'"):
        defaults({"eos_token_id": "end"})


def test_case_e24_sampling_of_generation_config() -> None:
    found = defaults({"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95})
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (1.0, 64, 0.95, 0.0)


def test_case_e24_without_generation_config_decoding_is_greedy() -> None:
    found = defaults({})
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.0, 0, 1.0, 0.0)


def test_do_sample_decides_where_it_is_given() -> None:
    assert defaults({"do_sample": False, "temperature": 0.7}).temperature == 0.0
    assert defaults({"do_sample": True}).temperature == 1.0


def test_suppressed_tokens_outside_the_vocabulary_need_no_suppressing() -> None:
    assert defaults({"suppress_tokens": [258883, 7]}).suppress_tokens == (7,)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": "hot"},
        {"temperature": 1e9},
        {"top_p": 1.5},
        {"top_p": 0},
        {"top_k": -1},
        {"top_k": 1 << 31},
    ],
)
def test_impossible_values_are_refused(bad: dict[str, Any]) -> None:
    (key,) = bad
    with pytest.raises(LoadError, match=f"generation_config.json: {key}"):
        defaults(bad)
