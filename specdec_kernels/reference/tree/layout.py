"""Specification of `tree_attention`, `rerank_tree` and `build_trie`.

Node n is in row n + 1 of masks and positions, row 0 is the root; parents come before children.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LENGTH = 2**62  # lengths are clamped to it, so that sums with them cannot overflow


def valid_parents(parents: Tensor) -> Tensor:
    """[B, N] int64 parents; a parent outside [-1, n) counts as the root."""
    parents = parents.to(torch.int64)
    inside = (parents >= 0) & (parents < torch.arange(parents.shape[1]))
    return torch.where(inside, parents, -1)


def tree_attention(
    parents: Tensor, lengths: Tensor, slots: int, window: int
) -> tuple[Tensor, Tensor]:
    """The mask [B, N+1, slots] that lets a node see the prefix and its path, and positions."""
    b, n = parents.shape
    parents, lengths = valid_parents(parents), lengths.to(torch.int64).clamp(0, MAX_LENGTH)
    sees = torch.zeros(b, n + 1, n + 1, dtype=torch.bool)  # [B, row, row that it sees]
    sees[:, 0, 0] = True
    for row in range(1, n + 1):
        sees[:, row] = sees[torch.arange(b), parents[:, row - 1] + 1]
        sees[:, row, row] = True
    positions = lengths[:, None] + sees.sum(-1) - 1

    slot = torch.arange(slots).expand(b, slots)
    row_of = slot - lengths[:, None]  # the row of the tree that a slot holds
    in_tree = (row_of >= 0) & (row_of <= n)
    row_of = torch.where(in_tree, row_of, 0)
    key_positions = torch.where(in_tree, positions.gather(1, row_of), slot)
    mask = sees.gather(2, row_of[:, None].expand(b, n + 1, slots)) & in_tree[:, None]
    mask |= (slot < lengths[:, None])[:, None]
    if window:
        # The native op reads True as 1; PyTorch subtracts no bool.
        mask &= key_positions[:, None] > positions[..., None] - int(window)
    return mask, positions


def rerank_tree(
    tokens: Tensor, parents: Tensor, scores: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The `size` best nodes with their ancestors; a node scores no better than its parent."""
    b, m = tokens.shape
    parent = valid_parents(parents)
    score = torch.where((tokens < 0) | scores.isnan(), -torch.inf, scores)
    for i in range(m):
        score_of_parent = score.gather(1, parent[:, i : i + 1].clamp(min=0))[:, 0]
        score_of_parent = torch.where(parent[:, i] < 0, torch.inf, score_of_parent)
        score[:, i] = torch.minimum(score[:, i], score_of_parent)
    ranked, order = score.sort(descending=True, stable=True)
    nodes = torch.where(ranked > -torch.inf, order, m)[:, :size].sort().values
    nodes = torch.cat([nodes, nodes.new_full((b, size - nodes.shape[1]), m)], 1)
    chosen = torch.zeros(b, m + 1, dtype=torch.int64).scatter_(1, nodes, 1)[:, :m]
    place = torch.nn.functional.pad(chosen.cumsum(1) - 1, (0, 1), value=-1)  # place[m] is -1

    def gathered(of_nodes: Tensor) -> Tensor:
        return torch.nn.functional.pad(of_nodes, (0, 1), value=-1).gather(1, nodes)

    parent_node = gathered(parent)
    return (
        gathered(tokens),
        place.gather(1, torch.where(parent_node < 0, m, parent_node)).to(parents.dtype),
        torch.where(nodes < m, nodes, -1).to(parents.dtype),
    )


def build_trie(sequences: Tensor, size: int, merge: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A tree of several sequences, which share the nodes of common prefixes if `merge`."""
    b = sequences.shape[0]
    tokens = sequences.new_full((b, size), -1)
    parents = torch.full((b, size), -1, dtype=torch.int32)
    nodes = torch.full(sequences.shape, -1, dtype=torch.int32)
    num_nodes = torch.zeros(b, dtype=torch.int32)
    for i in range(b):
        node_of: dict[tuple[int, ...], int] = {}
        for k, sequence in enumerate(sequences[i].tolist()):
            node = -1
            for j, token in enumerate(sequence):
                prefix = tuple(sequence[: j + 1]) if merge else (k, j)
                if token < 0 or (prefix not in node_of and len(node_of) == size):
                    break
                if prefix not in node_of:
                    n = node_of[prefix] = len(node_of)
                    tokens[i, n], parents[i, n] = token, node
                node = node_of[prefix]
                nodes[i, k, j] = node
        num_nodes[i] = len(node_of)
    return tokens, parents, nodes, num_nodes
