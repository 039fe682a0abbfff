"""Chips by name, and what is known where there is none."""

from __future__ import annotations

import math
import subprocess
from itertools import pairwise

import mlx.core as mx
import pytest

from mlx_mtp.errors import UsageError
from mlx_mtp.measure import machine
from mlx_mtp.measure.machine import CHIPS, named, this_machine


@pytest.mark.parametrize(
    "spelled", ["M4 Pro", "m4 pro", "M4Pro", "Apple M4 Pro", " apple  M4  pro "]
)
def test_a_chip_goes_by_what_macos_calls_it(spelled):
    found = named(spelled, 24)
    assert (found.name, found.chip.generation, found.chip.bandwidth) == ("M4 Pro", 16, 273e9)
    assert found.memory == 24 << 30


def test_metal_recommends_two_thirds_of_a_small_memory_and_three_quarters_of_others():
    assert named("M1", 16).limit == (16 << 30) * 2 // 3
    assert named("M3 Max", 36).limit == 28991029248  # as macOS reports it


def test_a_max_of_the_smaller_kind_is_known_by_its_memory():
    small, large = named("M4 Max", 36).chip, named("M4 Max", 64).chip
    assert small.bandwidth < large.bandwidth
    assert small.cores < large.cores


def test_an_unknown_chip_is_answered_with_the_known_ones():
    with pytest.raises(UsageError, match=r"'M9' is not known; known are M1, M1 Pro, .* M5 Max"):
        named("M9", 16)


@pytest.mark.parametrize("memory", [0, -1, math.nan, math.inf, 5000])
def test_no_memory_is_refused(memory):
    with pytest.raises(UsageError, match="it must be 1 to 4096"):
        named("M1", memory)


def test_chips_of_a_family_differ_in_what_they_do():
    assert len({c.name for c in CHIPS}) == len(CHIPS)
    for one, next_ in pairwise(CHIPS):
        if one.generation == next_.generation:
            assert (one.bandwidth, one.flops) < (next_.bandwidth, next_.flops)


def answers(monkeypatch, answer):
    monkeypatch.setattr(machine.subprocess, "run", lambda *_args, **_kwargs: answer())


@pytest.mark.parametrize("output", [None, "", "Some CPU\n", "Some CPU\nmuch\n"])
def test_a_machine_that_is_no_mac_has_no_chip(monkeypatch, output):
    def answer():
        if output is None:
            raise FileNotFoundError
        return subprocess.CompletedProcess([], 0, output)

    answers(monkeypatch, answer)
    here = this_machine()
    assert (here.name, here.chip) == (mx.device_info()["device_name"].strip(), None)
    assert 0 < here.limit <= here.memory


def test_a_mac_is_asked_for_its_chip_and_memory(monkeypatch):
    told = f"Apple M4 Max\n{36 << 30}\n"
    answers(monkeypatch, lambda: subprocess.CompletedProcess([], 0, told))
    here = this_machine()
    assert (here.name, here.memory) == ("Apple M4 Max", 36 << 30)
    assert here.chip == named("M4 Max", 36).chip


def test_a_chip_newer_than_the_table_is_not_guessed(monkeypatch):
    told = f"Apple M7 Pro\n{64 << 30}\n"
    answers(monkeypatch, lambda: subprocess.CompletedProcess([], 0, told))
    assert (this_machine().name, this_machine().chip) == ("Apple M7 Pro", None)
