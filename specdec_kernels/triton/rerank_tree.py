"""`specdec_kernels::rerank_tree` in Triton: scores, ranks, places, each over all candidates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels import _tree_layout_checks as _checks
from specdec_kernels.triton import launch
from specdec_kernels.triton.expand_tree import NOTHING, entries_of, load_entries
from specdec_kernels.triton.row import INF

BLOCK = 128  # candidates a program, and a step of the comparison


@triton.jit
def own_score(tokens, token_stride, scores, score_stride, node, inside):
    """The scores of nodes, -inf where one is absent; +inf where not `inside`."""
    score = tl.load(scores + node * score_stride, mask=inside, other=float("inf"))
    token = tl.load(tokens + node * token_stride, mask=inside, other=0)
    return tl.where((token >= 0) & (score > -INF), score, -INF)


@triton.jit
def parents_of(parents, stride, node, inside):
    """int64; -1 for the root, for what is out of range and where not `inside`."""
    parent = tl.load(parents + node * stride, mask=inside, other=-1).to(tl.int64)
    return tl.where((parent >= 0) & (parent < node), parent, -1)


@triton.jit(do_not_specialize=["m"])
def score_nodes(
    tokens, token_stride_b, token_stride_m, parents, parent_stride_b, parent_stride_m,
    scores, score_stride_b, score_stride_m, entries, m, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B, blocks): each node as an entry of the smallest score on its way to the root."""
    b = tl.program_id(0).to(tl.int64)
    tokens += b * token_stride_b
    parents += b * parent_stride_b
    scores += b * score_stride_b
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = node < m
    score = own_score(tokens, token_stride_m, scores, score_stride_m, node, inside)
    above = parents_of(parents, parent_stride_m, node, inside)
    while tl.max(above, 0) >= 0:
        there = above >= 0
        on_the_way = own_score(tokens, token_stride_m, scores, score_stride_m, above, there)
        score = tl.minimum(score, on_the_way)
        above = parents_of(parents, parent_stride_m, above, there)
    entry = tl.where(score > -INF, entries_of(score, node), NOTHING)
    tl.store(entries + b * m + node, entry, mask=inside)


@triton.jit(do_not_specialize=["m", "size"])
def choose_nodes(entries, chosen, m, size, BLOCK: tl.constexpr):
    """Grid (B, blocks): whether fewer than `size` nodes are better."""
    b = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = load_entries(entries + b * m, node, node < m)
    better = tl.zeros([BLOCK], tl.int32)
    for start in range(0, m, BLOCK):
        other = start + tl.arange(0, BLOCK)
        entry = load_entries(entries + b * m, other, other < m)
        better += tl.sum((entry[None, :] > own[:, None]).to(tl.int32), 1)
    tl.store(chosen + b * m + node, (own != NOTHING) & (better < size), mask=node < m)


@triton.jit(do_not_specialize=["m", "size"])
def place_nodes(
    tokens, token_stride_b, token_stride_m, parents, parent_stride_b, parent_stride_m,
    chosen, places, out_tokens, out_parents, nodes, m, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B, blocks): `places` counts the chosen nodes up to each."""
    b = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    here = tl.load(chosen + b * m + node, mask=node < m, other=0) != 0
    place = b * size + tl.load(places + b * m + node, mask=here, other=1) - 1
    parent = parents_of(parents + b * parent_stride_b, parent_stride_m, node, here)
    new_parent = tl.load(places + b * m + parent, mask=parent >= 0, other=0) - 1
    token = tl.load(tokens + b * token_stride_b + node * token_stride_m, mask=here, other=-1)
    tl.store(out_tokens + place, token, mask=here)
    tl.store(out_parents + place, new_parent, mask=here)
    tl.store(nodes + place, node, mask=here)


def rerank_tree(
    tokens: Tensor, parents: Tensor, scores: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.rerank_tree` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    _checks.rerank_tree(tokens, parents, scores, size)
    b, m = tokens.shape
    out_tokens, out_parents, nodes = (t.new_full((b, size), -1) for t in (tokens, parents, parents))
    if b == 0 or m == 0:
        return out_tokens, out_parents, nodes
    entries = tokens.new_empty((b, m), dtype=torch.int64)
    chosen = tokens.new_empty((b, m), dtype=torch.int32)
    grid = (b, triton.cdiv(m, BLOCK))
    with launch.on_device_of(tokens):
        score_nodes[grid](
            tokens, *tokens.stride(), parents, *parents.stride(), scores, *scores.stride(),
            entries, m, BLOCK=BLOCK,
        )  # fmt: skip
        choose_nodes[grid](entries, chosen, m, size, BLOCK=BLOCK)
        places = chosen.cumsum(1)
        place_nodes[grid](
            tokens, *tokens.stride(), parents, *parents.stride(), chosen, places,
            out_tokens, out_parents, nodes, m, size, BLOCK=BLOCK,
        )  # fmt: skip
    return out_tokens, out_parents, nodes
