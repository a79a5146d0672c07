"""One forward of a model over the next tokens of every sequence, or over a tree of drafts."""

from __future__ import annotations

from typing import Any

import torch

from specdec_hf.cache.model_call import run_inputs
from specdec_hf.cache.protocol import Lengths, RollbackCache
from specdec_hf.cache.spec_cache import SpecCache


def forward_window(
    model: Any, cache: RollbackCache, tokens: torch.Tensor, starts: Lengths, keep: int
) -> torch.Tensor:
    """Run the model over the next tokens of every sequence and cache their keys and values.

    Args:
        model: causal LM that the cache was made for, called through its unmodified forward.
        cache: holds ``starts[b] + n`` tokens of sequence ``b`` afterwards.
        tokens: [B, n] int64 on the model's device.
        starts: [B] position of each sequence's first token; a negative one is left padding.
        keep: how many rows of logits to return, counted from the end.

    Returns:
        Logits [B, keep, V].
    """
    return cache.forward(tokens, starts, keep)


def forward_embeddings(
    model: Any, cache: SpecCache, embeddings: torch.Tensor, starts: Lengths, keep: int
) -> torch.Tensor:
    """As `forward_window`, for tokens that are given as embeddings [B, n, H] of the model."""
    inputs = cache.window(starts, embeddings.shape[1])
    return run_inputs(model, {"inputs_embeds": embeddings, **inputs}, keep)


def forward_tree(
    model: Any, cache: SpecCache, tokens: torch.Tensor, roots: Lengths, parents: torch.Tensor
) -> torch.Tensor:
    """Run the model over a tree, or over its last nodes, and cache their keys and values.

    Args:
        model: causal LM, called through its unmodified forward.
        cache: holds the root and all nodes afterwards, in the order of their numbers.
        tokens: [B, n] int64: the last n tokens of [root, node 0, node 1, ...]. Tokens that are left
            out must be in the cache already.
        roots: [B] position of each sequence's root.
        parents: [B, N] of all nodes, -1 for children of the root.

    Returns:
        Logits [B, n, V].
    """
    return cache.forward_tree(tokens, roots, parents)
