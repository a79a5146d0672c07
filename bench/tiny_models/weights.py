"""Random weights with which a model's text depends on what it attends to."""

from __future__ import annotations

import re
from typing import Any

import torch

# Parameters whose initial values are part of the architecture: decay rates, time steps, gates.
KEEP = re.compile(
    r"A_log|\.A$|\.D$|dt_bias|dt_proj|time_(decay|first|mix|mu)|inv_freq|a_param|\.lambda"
)


def randomize(model: Any, seed: int) -> None:
    """Draw all matrices and vectors anew, wider than for training.

    Weights as small as those that training starts from make a random model repeat one token.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: torch.Size, std: float) -> torch.Tensor:
        return std * torch.randn(shape, generator=generator)

    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            bad = ~torch.isfinite(parameter)
            if KEEP.search(name):
                parameter.copy_(torch.where(bad, normal(parameter.shape, 0.1), parameter))
            elif id(parameter) in embeddings:
                parameter.copy_(normal(parameter.shape, 1.0))
            elif parameter.ndim >= 2:
                fan = max(parameter.shape[-1], parameter.numel() // parameter.shape[0] // 64, 1)
                parameter.copy_(normal(parameter.shape, 1.5 / min(fan, 256) ** 0.5))
            else:
                base = torch.where(bad, torch.zeros(()), parameter)
                parameter.copy_(base + normal(parameter.shape, 0.2))
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.nan_to_num_(0.0)
