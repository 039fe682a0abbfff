"""The shapes in the package are those of the published configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_mtp.config import DrafterConfig, TargetConfig, check_pair
from mlx_mtp.weights.known import SHORT, drafter_by_shape
from mlx_mtp.weights.published import configs

CONFIGS = Path(__file__).parents[3] / "shared/configs"


@pytest.mark.parametrize("name", SHORT)
def test_shapes_are_those_of_the_published_configs(name):
    target, drafter = configs(name)
    check_pair(target, drafter)
    assert drafter_by_shape(target.text) == SHORT[name].drafter
    file = CONFIGS / f"{SHORT[name].drafter.partition('/')[2]}.json"
    if not file.exists():
        pytest.skip("the published configs are not at hand")
    assert drafter == DrafterConfig.from_dict(json.loads(file.read_text()))
    file = file.with_name(file.name.replace("-assistant", ""))
    assert target.text == TargetConfig.from_dict(json.loads(file.read_text())).text
