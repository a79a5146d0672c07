"""Validation of the arguments of the ops on histories, the tokens that each sequence has so far.

The fake kernels, the Triton provider and the reference call it; csrc/torch/ops/ngram_propose.cpp
validates the same with the same messages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.arguments.checks import (
    check_entries,
    check_ids,
    check_vector,
    require,
    shape,
)

_INT32 = 2**31 - 1  # indices of tokens and counts of drafts


def ngram_propose(
    history: Tensor, lengths: Tensor, gamma: int, max_ngram: int, min_ngram: int
) -> None:
    require(history.dim() == 2, f"history must be [B, L], got {shape(history)}")
    check_ids("history", history)
    b, columns = history.shape
    require(
        columns <= _INT32,
        f"history must have at most {_INT32} columns, got {shape(history)}",
    )
    check_vector("lengths", lengths, b, torch.int64, history.device, "history")
    require(0 <= gamma <= _INT32, f"gamma must be in [0, {_INT32}], got {gamma}")
    check_entries("gamma", "the tokens", "[B, gamma]", b, gamma)
    require(min_ngram >= 1, f"min_ngram must be at least 1, got {min_ngram}")
    require(
        max_ngram >= min_ngram,
        f"max_ngram must be at least min_ngram = {min_ngram}, got {max_ngram}",
    )
