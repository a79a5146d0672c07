"""Calls that reach a rare path, made before the random ones."""

from __future__ import annotations

import torch
from fuzz.calls import Call

import specdec_kernels as sk

ZERO = torch.zeros(1, dtype=torch.int64)


def survivors_of_minus_infinity_with_a_draft_map():
    """Fewer finite logits than top-k keeps: the threshold is -inf, as are the padding lanes.

    The map ends with the vocabulary, which is no multiple of a vector's width.
    """
    v = 19
    target = torch.full((1, 2, v), -torch.inf)
    target[..., 7] = 0.0
    columns = torch.arange(v, dtype=torch.int32) % 5
    return Call(sk.verify_chain, {
        "target": target, "draft_token_ids": torch.tensor([[3]]), "draft": torch.zeros(1, 1, 5),
        "draft_map": sk.DraftMap(columns), "top_k": 5, "seeds": ZERO, "positions": ZERO,
    })  # fmt: skip


def no_slots():
    return Call(sk.tree_attention, {"parents": ZERO[None] - 1, "lengths": ZERO, "slots": 0})


def a_block_table_of_2_to_the_61_columns():
    """Expanded: columns times slots of a block would overflow."""
    tables = torch.zeros(1, 1, dtype=torch.int32).expand(1, 2**61)
    return Call(sk.paged_compact_, {
        "caches": [torch.zeros(1, 5, 1, 3)], "block_tables": tables, "base": ZERO,
        "path": torch.tensor([[1, -1]]),
    })  # fmt: skip


def a_row_that_threads_share():
    """One sequence of more row entries than a single thread is worth (csrc/cpu/each_sequence.h)."""
    g, v = torch.Generator().manual_seed(0), 2**16
    target, rows = torch.randn(1, 3, v, generator=g), torch.randn(1, 2, v, generator=g)
    return Call(sk.verify_chain, {
        "target": target, "draft_token_ids": rows.argmax(-1), "draft": rows, "top_k": 500,
        "top_p": 0.9, "min_p": 1e-4, "seeds": ZERO, "positions": ZERO, "with_accept_probs": True,
    })  # fmt: skip


CALLS = (
    survivors_of_minus_infinity_with_a_draft_map,
    no_slots,
    a_block_table_of_2_to_the_61_columns,
    a_row_that_threads_share,
)
