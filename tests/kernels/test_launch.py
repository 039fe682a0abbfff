"""What every kernel's text must be, whatever it computes."""

from __future__ import annotations

import re

import pytest

from mlx_mtp.kernels import attention, experts, fused, head, matmul
from mlx_mtp.kernels.launch import Kernel

KERNELS = {
    kernel.name: kernel
    for module in (attention, experts, fused, head, matmul)
    for kernel in vars(module).values()
    if isinstance(kernel, Kernel)
}


@pytest.mark.parametrize("name", KERNELS)
def test_mlx_hands_it_to_metal_as_ascii(name):
    assert (KERNELS[name].header + KERNELS[name].source).isascii()


@pytest.mark.parametrize("name", KERNELS)
def test_unrolled_loops_have_one_exit(name):
    assert not re.search(r"\bbreak\b", KERNELS[name].source)
