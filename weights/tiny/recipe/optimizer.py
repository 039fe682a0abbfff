"""Muon for matrices, AdamW for the rest, on one schedule."""

from __future__ import annotations

import collections

import torch
from torch import Tensor, nn


def orthogonal(stack: Tensor) -> Tensor:
    """Newton-Schulz: every matrix of [N, m, n] made nearly orthogonal (Keller Jordan's Muon)."""
    x = stack.bfloat16()
    turned = x.shape[1] > x.shape[2]
    x = x.mT if turned else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if turned else x).float()


class Optimizer:
    def __init__(self, model: nn.Module, matrices: float = 0.02, others: float = 3e-3):
        self.rate = matrices
        self.groups: dict[torch.Size, list[nn.Parameter]] = collections.defaultdict(list)
        tables, scalars = [], []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim == 2 and "embed_tokens" not in name:
                self.groups[parameter.shape].append(parameter)
            elif parameter.ndim == 2:
                tables.append(parameter)
            else:
                scalars.append(parameter)
        self.momentum = {
            shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()
        }
        self.adam = torch.optim.AdamW(
            [{"params": tables, "base": others}, {"params": scalars, "base": others}],
            lr=others,
            betas=(0.9, 0.97),
            weight_decay=0.0,
            fused=True,
        )

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at `scale` times the base rates; gradients are cleared."""
        for shape, group in self.groups.items():
            gradient = torch.stack([p.grad for p in group])
            momentum = self.momentum[shape].lerp_(gradient, 0.05)
            update = orthogonal(gradient.lerp(momentum, 0.95))
            size = self.rate * scale * max(1, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(group, 1 - 0.05 * self.rate * scale)
            for parameter, delta in zip(group, update, strict=True):
                parameter.sub_(delta, alpha=size)
        for entry in self.adam.param_groups:
            entry["lr"] = entry["base"] * scale
        self.adam.step()
        for group in [*self.groups.values(), *(g["params"] for g in self.adam.param_groups)]:
            for parameter in group:
                parameter.grad = None


def schedule(done: float) -> float:
    """Share of the base rates at `done` in 0..1: short warm-up, linear over the last 60 %."""
    return min(done / 0.01 + 0.05, 1.0, (1.02 - done) / 0.6)
