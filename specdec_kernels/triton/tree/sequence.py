"""The records of one sequence while its tree is verified, and how a program begins.

residual.py defines the terms of this room.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..row.status import DRAFT_OUT_OF_RANGE


class Tree(NamedTuple):
    """The nodes of one sequence, as vectors over the next power of two."""

    tokens: Any  # -1 where absent
    parents: Any
    draft_rows: Any
    num_nodes: Any


class TreeScratch(NamedTuple):
    """The scratch of one sequence."""

    maxima: Any
    sums: Any
    size: Any  # entries that the tile statistics of one row take
    tiles: Any
    d_tiles: Any
    entries: Any  # float64 [N, ENTRY]


class Limits(NamedTuple):
    """Where verification of one sequence stops."""

    max_new_tokens: Any
    max_depth: Any
    eos_token_ids: Any  # may be None
    num_eos: Any


class TreeOutputs(NamedTuple):
    """The outputs of one sequence."""

    path: Any
    tokens: Any
    logprobs: Any  # may be None
    accept_probs: Any  # may be None


@triton.jit
def read_tree(
    tree_tokens, parents, draft_rows, num_nodes, rows, id_limit, one_hot, NODES: tl.constexpr
):
    """(Tree, status). Nodes out of range are absent."""
    index = tl.arange(0, NODES)
    inside = index < tl.minimum(num_nodes, rows - 1)
    x = tl.load(tree_tokens + index, mask=inside, other=-1).to(tl.int64)
    parent = tl.load(parents + index, mask=inside, other=-1).to(tl.int64)
    good = (parent >= -1) & (parent < index) & (x >= -1) & (x < id_limit)
    wrong = tl.max((inside & (good == 0)).to(tl.int32), 0)
    own_rows = index
    if draft_rows is not None:
        own_rows = tl.load(draft_rows + index, mask=inside, other=0)
        own_rows = tl.where(one_hot, index, own_rows)  # each one-hot Q is a distribution of its own
    tree = Tree(tl.where(good, x, -1), parent.to(tl.int32), own_rows, num_nodes)
    return tree, tl.where(wrong > 0, DRAFT_OUT_OF_RANGE, 0).to(tl.int32)


@triton.jit
def clear_outputs(out, num_nodes, max_depth, NODES: tl.constexpr):
    """Fill the outputs with the values of entries that are not written later."""
    index = tl.arange(0, NODES)
    absent = tl.full([NODES], -1, tl.int32)
    tl.store(out.path + index, absent.to(out.path.dtype.element_ty), mask=index < max_depth)
    tl.store(out.tokens + index, absent.to(out.tokens.dtype.element_ty), mask=index <= max_depth)
    if out.logprobs is not None:
        tl.store(out.logprobs + index, tl.zeros([NODES], tl.float32), mask=index <= max_depth)
    if out.accept_probs is not None:
        nan = tl.full([NODES], float("nan"), tl.float32)
        tl.store(out.accept_probs + index, nan, mask=index < num_nodes)
    tl.debug_barrier()
