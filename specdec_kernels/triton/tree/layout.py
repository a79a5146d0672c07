"""`tree_attention`, `rerank_tree` and `build_trie` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launch
from ..row.tile import INF
from .expand_tree import NOTHING, entries_of, load_entries

LONGEST = tl.constexpr(2**62)  # lengths are clamped to it, so that no sum with them overflows
SLOTS = 1024  # slots of the mask that one step writes
BLOCK = 128  # candidates of one program, and of one step of the comparison


@triton.jit
def parents_of(parents, stride, node, inside):
    """Parents, int64; -1 for the root, for parents out of range and where not `inside`."""
    parent = tl.load(parents + node * stride, mask=inside, other=-1).to(tl.int64)
    return tl.where((parent >= 0) & (parent < node), parent, -1)


@launch.kernel("mask", "slots", "parent_stride_n")
def attention_rows(
    parents, parent_stride_b, parent_stride_n, lengths, mask, positions, num_rows, slots, window,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid (B * num_rows,): each program writes one row of the mask."""
    r = tl.program_id(0).to(tl.int64)
    b = r // num_rows
    node = r % num_rows - 1
    parents += b * parent_stride_b
    length = tl.minimum(tl.maximum(tl.load(lengths + b).to(tl.int64), 0), LONGEST)
    position = length
    n = node
    while n >= 0:
        position += 1
        n = parents_of(parents, parent_stride_n, n, n >= 0)
    tl.store(positions + r, position)
    # Keys at positions below `first` are outside the sliding window.
    first = tl.where(window > 0, position - window + 1, 0)
    for start in range(0, slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        visible = (slot < length) & (slot >= first)
        if (start + SLOTS > length) & (start <= length + 1 + node):
            n = node
            node_position = position
            while node_position >= tl.maximum(first, length):
                visible = visible | (slot == length + 1 + n)
                node_position -= 1
                n = parents_of(parents, parent_stride_n, n, n >= 0)
        tl.store(mask + r * slots + slot, visible, mask=slot < slots)


def tree_attention(
    parents: Tensor, lengths: Tensor, slots: int, window: int
) -> tuple[Tensor, Tensor]:
    """`reference.tree_attention` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    b, n = parents.shape
    mask = parents.new_empty((b, n + 1, slots), dtype=torch.bool)
    positions = parents.new_empty((b, n + 1), dtype=torch.int64)
    (lengths,) = launch.packed(lengths)
    if b:
        with launch.on_device_of(parents):
            attention_rows[(b * (n + 1),)](
                parents, parents.stride(0), parents.stride(1), lengths, mask, positions,
                n + 1, slots, window, SLOTS=SLOTS, num_warps=4,
            )  # fmt: skip
    return mask, positions


@triton.jit
def own_score(tokens, token_stride, scores, score_stride, node, inside):
    """The scores of nodes: -inf where a node is absent, +inf where not `inside`."""
    score = tl.load(scores + node * score_stride, mask=inside, other=float("inf"))
    token = tl.load(tokens + node * token_stride, mask=inside, other=0)
    return tl.where((token >= 0) & (score > -INF), score, -INF)


@launch.kernel("token_stride_m", "parent_stride_m", "score_stride_m")
def score_nodes(
    tokens, token_stride_b, token_stride_m, parents, parent_stride_b, parent_stride_m,
    scores, score_stride_b, score_stride_m, entries, m, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B, blocks): an entry for each node, of the smallest score on its path from the root."""
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
        score_above = own_score(tokens, token_stride_m, scores, score_stride_m, above, there)
        score = tl.minimum(score, score_above)
        above = parents_of(parents, parent_stride_m, above, there)
    entry = tl.where(score > -INF, entries_of(score, node), NOTHING)
    tl.store(entries + b * m + node, entry, mask=inside)


@launch.kernel()
def choose_nodes(entries, chosen, m, size, BLOCK: tl.constexpr):
    """Grid (B, blocks): choose each node that has fewer than `size` better ones."""
    b = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = load_entries(entries + b * m, node, node < m)
    better = tl.zeros([BLOCK], tl.int32)
    for start in range(0, m, BLOCK):
        other = start + tl.arange(0, BLOCK)
        entry = load_entries(entries + b * m, other, other < m)
        better += tl.sum((entry[None, :] > own[:, None]).to(tl.int32), 1)
    tl.store(chosen + b * m + node, (own != NOTHING) & (better < size), mask=node < m)


@launch.kernel("token_stride_m", "parent_stride_m")
def place_nodes(
    tokens, token_stride_b, token_stride_m, parents, parent_stride_b, parent_stride_m,
    chosen, places, out_tokens, out_parents, nodes, m, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B, blocks): move the chosen nodes; `places` counts the chosen nodes up to each."""
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


@launch.kernel("stride_l")
def compare_sequences(
    sequences, stride_b, stride_k, stride_l, first, shared, owned, branches, length,
    MERGE: tl.constexpr, BRANCHES: tl.constexpr,
):  # fmt: skip
    """Grid (B * K,): the first sequence with the prefix up to each token, and how many are shared.

    A token is a new node if no sequence before has the same prefix; otherwise it is the node of the
    first sequence that has it. A sequence shares the tokens up to some length and owns the rest,
    and its own nodes are numbered after those of the sequences before. `first` is -1 where the
    sequence has no token.
    """
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
    """(node of token l of sequence r, int64, -1 where there is none; the sequence that owns it)."""
    holder = tl.load(first + r * length + l, mask=inside, other=-1)
    there = holder >= 0
    owner = b * branches + holder
    end = tl.load(ends + owner, mask=there, other=0)
    start = end - tl.load(owned + owner, mask=there, other=0)
    node = start + l - tl.load(shared + owner, mask=there, other=0)
    return tl.where(there & (node < size), node, -1), holder


@launch.kernel("stride_l")
def number_nodes(
    sequences, stride_b, stride_k, stride_l, first, shared, owned, ends, tokens, parents, nodes,
    branches, length, size, LENGTH: tl.constexpr,
):  # fmt: skip
    """Grid (B * K,): number the nodes of one sequence; `ends` counts nodes up to and with each."""
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
