"""Argument checks of the small tree ops; csrc/torch/tree_layout.cpp makes them in the same words.

tests/test_tree_layout_errors.py holds the two together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels._checks import IDS, dtype_name, require, shape, vector


def ids(name: str, t: Tensor) -> None:
    require(t.dtype in IDS, f"{name} must be int32 or int64, got {dtype_name(t.dtype)}")


def tree_attention(parents: Tensor, lengths: Tensor, slots: int, window: int) -> None:
    require(parents.dim() == 2, f"parents must be [B, N], got {shape(parents)}")
    ids("parents", parents)
    vector("lengths", lengths, parents.shape[0], torch.int64, parents.device, "parents")
    require(slots >= 0, f"slots must be at least 0, got {slots}")
    require(window >= 0, f"window must be at least 0 (0 sees every key), got {window}")
