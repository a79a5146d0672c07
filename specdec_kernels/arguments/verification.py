"""The outputs that `verify_chain` and `verify_tree` share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Outputs(NamedTuple):
    """Those not asked for have no entries."""

    tokens: Tensor
    num_accepted: Tensor
    status: Tensor
    logprobs: Tensor
    accept_probs: Tensor


def new_outputs(
    drafted: Tensor, emitted: int, with_logprobs: bool, with_accept_probs: bool
) -> Outputs:
    """Uninitialised outputs for drafted tokens [B, N], of which at most `emitted` are emitted."""
    b, n = drafted.shape
    return Outputs(
        drafted.new_empty((b, emitted)),
        drafted.new_empty((b,), dtype=torch.int32),
        drafted.new_empty((b,), dtype=torch.int32),
        drafted.new_empty((b, emitted) if with_logprobs else (0, 0), dtype=torch.float32),
        drafted.new_empty((b, n) if with_accept_probs else (0, 0), dtype=torch.float32),
    )
