"""`specdec_kernels::build_trie` in Triton.

The token (k, l) is a node of its own where no sequence before k has the same l + 1 tokens; else it
is the node of the first that has. Once a sequence leaves those before it, it never comes back: it
shares a number of tokens and owns the rest, and its nodes follow those of the sequences before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels import _tree_layout_checks as _checks
from specdec_kernels.triton import launch


@triton.jit(do_not_specialize=["branches", "length"])
def compare_sequences(
    sequences, stride_b, stride_k, stride_l, first, shared, owned, branches, length,
    MERGE: tl.constexpr, BRANCHES: tl.constexpr,
):  # fmt: skip
    """Grid (B * K,): which sequence has each token first (-1: none), and how many are shared."""
    r = tl.program_id(0).to(tl.int64)
    k = r % branches
    sequences += r // branches * stride_b
    other = tl.arange(0, BRANCHES)
    alike = other < (k if MERGE else 0)
    going = tl.full([], 1, tl.int32)
    num_shared = tl.full([], 0, tl.int32)
    num_owned = tl.full([], 0, tl.int32)
    for l in range(0, length):
        token = tl.load(sequences + k * stride_k + l * stride_l).to(tl.int64)
        going = tl.where(token >= 0, going, 0)
        theirs = tl.load(sequences + other * stride_k + l * stride_l, mask=alike, other=-1)
        alike = alike & (theirs.to(tl.int64) == token)
        sharer = tl.min(tl.where(alike, other, BRANCHES), 0)
        is_shared = sharer < BRANCHES
        num_shared += tl.where(is_shared, going, 0)
        num_owned += tl.where(is_shared, 0, going)
        holder = tl.where(is_shared, sharer, k.to(tl.int32))
        tl.store(first + r * length + l, tl.where(going != 0, holder, -1))
    tl.store(shared + r, num_shared)
    tl.store(owned + r, num_owned)


@triton.jit
def node_of(first, shared, owned, ends, b, branches, length, r, l, inside, size):
    """The node of tokens (r, l), int64; -1 where there is none."""
    holder = tl.load(first + r * length + l, mask=inside, other=-1)
    there = holder >= 0
    at = b * branches + holder
    start = tl.load(ends + at, mask=there, other=0) - tl.load(owned + at, mask=there, other=0)
    node = start + l - tl.load(shared + at, mask=there, other=0)
    return tl.where(there & (node < size), node, -1), holder


@triton.jit(do_not_specialize=["branches", "length", "size"])
def number_nodes(
    sequences, stride_b, stride_k, stride_l, first, shared, owned, ends, tokens, parents, nodes,
    branches, length, size, LENGTH: tl.constexpr,
):  # fmt: skip
    """Grid (B * K,): `ends` counts the nodes up to and with each sequence."""
    r = tl.program_id(0).to(tl.int64)
    b = r // branches
    k = r % branches
    l = tl.arange(0, LENGTH)
    inside = l < length
    node, holder = node_of(first, shared, owned, ends, b, branches, length, r, l, inside, size)
    tl.store(nodes + r * length + l, node, mask=inside)
    own = (node >= 0) & (holder == k)
    below = own & (l > 0)
    parent, _ = node_of(first, shared, owned, ends, b, branches, length, r, l - 1, below, size)
    token = tl.load(sequences + b * stride_b + k * stride_k + l * stride_l, mask=own, other=-1)
    tl.store(tokens + b * size + node, token, mask=own)
    tl.store(parents + b * size + node, parent, mask=own)


def build_trie(sequences: Tensor, size: int, merge: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.build_trie` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    _checks.build_trie(sequences, size)
    b, k, length = sequences.shape
    tokens = sequences.new_full((b, size), -1)
    parents = sequences.new_full((b, size), -1, dtype=torch.int32)
    nodes = sequences.new_empty((b, k, length), dtype=torch.int32)
    if nodes.numel() == 0:
        return tokens, parents, nodes, sequences.new_zeros((b,), dtype=torch.int32)
    first = torch.empty_like(nodes)
    shared, owned = (sequences.new_empty((b, k), dtype=torch.int32) for _ in range(2))
    with launch.on_device_of(sequences):
        compare_sequences[(b * k,)](
            sequences, *sequences.stride(), first, shared, owned, k, length, MERGE=merge,
            BRANCHES=triton.next_power_of_2(k),
        )  # fmt: skip
        ends = owned.cumsum(1)
        number_nodes[(b * k,)](
            sequences, *sequences.stride(), first, shared, owned, ends, tokens, parents, nodes,
            k, length, size, LENGTH=triton.next_power_of_2(length),
        )  # fmt: skip
    return tokens, parents, nodes, ends[:, -1].clamp(max=size).to(torch.int32)
