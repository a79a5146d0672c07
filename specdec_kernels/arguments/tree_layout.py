"""Validation of the arguments of the ops on tree layouts, and of `expand_tree`.

csrc/torch/ops/tree_layout.cpp and expand_tree.cpp validate the same with the same messages;
tests/tree/test_tree_layout_errors.py keeps both equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.arguments.checks import (
    check_entries,
    check_ids,
    check_rows,
    check_same_device,
    check_vector,
    dtype_name,
    require,
    shape,
)
from specdec_kernels.arguments.sample import SamplingArguments

MAX_WIDTH = 64


def tree_attention(parents: Tensor, lengths: Tensor, slots: int, window: int) -> None:
    require(parents.dim() == 2, f"parents must be [B, N], got {shape(parents)}")
    check_ids("parents", parents)
    b, n = parents.shape
    check_entries("parents", "the positions", "[B, N]", b, n)
    check_vector("lengths", lengths, parents.shape[0], torch.int64, parents.device, "parents")
    require(slots >= 0, f"slots must be at least 0, got {slots}")
    require(window >= 0, f"window must be at least 0 (0 sees every key), got {window}")
    check_entries("slots", "the mask", "[B, N+1, S]", b, n + 1, slots)


def beside(name: str, t: Tensor, tokens: Tensor) -> None:
    require(
        t.dim() == 2 and t.shape == tokens.shape,
        f"{name} must be [B, M] = {shape(tokens)}, got {shape(t)}",
    )


def float32(name: str, t: Tensor) -> None:
    require(t.dtype == torch.float32, f"{name} must be float32, got {dtype_name(t.dtype)}")


def check_size(size: int) -> None:
    require(0 <= size < 2**31, f"size must be in [0, 2147483647], got {size}")


def rerank_tree(tokens: Tensor, parents: Tensor, scores: Tensor, size: int) -> None:
    require(tokens.dim() == 2, f"tokens must be [B, M], got {shape(tokens)}")
    check_ids("tokens", tokens)
    beside("parents", parents, tokens)
    check_ids("parents", parents)
    check_same_device("parents", parents, tokens.device, "tokens")
    beside("scores", scores, tokens)
    float32("scores", scores)
    check_same_device("scores", scores, tokens.device, "tokens")
    check_size(size)
    check_entries("size", "the tree", "[B, size]", tokens.shape[0], size)


def build_trie(sequences: Tensor, size: int) -> None:
    require(sequences.dim() == 3, f"sequences must be [B, K, L], got {shape(sequences)}")
    check_ids("sequences", sequences)
    check_size(size)
    check_entries("size", "the tree", "[B, size]", sequences.shape[0], size)
    check_entries("sequences", "the nodes", "[B, K, L]", *sequences.shape)


def expand_tree(
    logits: Tensor, scores: Tensor, width: int, temperatures: Tensor | None, temperature: float
) -> None:
    require(logits.dim() == 3, f"logits must be [B, F, V], got {shape(logits)}")
    check_rows("logits", logits)
    b, f = logits.shape[:2]
    require(f >= 1, f"logits must have a frontier of at least one node, got {shape(logits)}")
    require(
        scores.dim() == 2 and scores.shape == logits.shape[:2],
        f"scores must be [B, F] = [{b}, {f}], got {shape(scores)}",
    )
    float32("scores", scores)
    check_same_device("scores", scores, logits.device, "logits")
    require(1 <= width <= MAX_WIDTH, f"width must be in [1, {MAX_WIDTH}], got {width}")
    SamplingArguments(temperatures, temperature).check(b, logits.device, "logits")
    check_entries("logits", "the children", "[B, F, width]", b, f, width)
