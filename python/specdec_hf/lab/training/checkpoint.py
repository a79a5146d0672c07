"""Checkpoints of training: weights and the optimiser's moments in one safetensors file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save_checkpoint(
    path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, step: int, cut: int | None
) -> None:
    """Write a checkpoint; one that was there is replaced once this one is whole.

    Args:
        path: of the file.
        module, optimizer: whose state is written.
        step: how many steps were made.
        cut: to how many steps a bound on the time cut the training; None where it did not yet.
    """
    tensors = {}
    for name, weight in module.named_parameters():
        tensors[f"weight/{name}"] = weight.detach()
        for kind, value in optimizer.state.get(weight, {}).items():
            tensors[f"{kind}/{name}"] = value
    staging = path.with_suffix(".new")
    numbers = {"step": str(step)} | ({} if cut is None else {"cut": str(cut)})
    save_file({name: x.contiguous() for name, x in tensors.items()}, staging, numbers)
    os.replace(staging, path)


def load_checkpoint(
    path: Path, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, int | None]:
    """Restore module and optimiser; returns ``step`` and ``cut`` of `save_checkpoint`.

    They are 0 and None without a checkpoint.
    """
    if not path.exists():
        return 0, None
    with safe_open(path, framework="pt") as file:
        numbers = {name: int(value) for name, value in file.metadata().items()}
        for name, weight in module.named_parameters():
            with torch.no_grad():
                weight.copy_(file.get_tensor(f"weight/{name}"))
            state: dict[str, Any] = optimizer.state[weight]
            for kind in _MOMENTS:
                value = file.get_tensor(f"{kind}/{name}")
                # AdamW counts steps on the host.
                state[kind] = value if kind == "step" else value.to(weight.device)
    return numbers["step"], numbers.get("cut")
