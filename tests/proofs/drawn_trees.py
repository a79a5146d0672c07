"""All token assignments of a tree that a drafter may draw, with their probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SiblingDraw = Callable[[tuple[int, ...], list[int]], tuple[Tensor, Tensor]]


def drawn_trees(parents: Sequence[int], draw: SiblingDraw) -> tuple[Tensor, Tensor]:
    """Every tuple of drafted tokens of a tree: drafts [C, N] int64, probabilities [C] float64.

    Args:
        parents: [N], -1 the root; parents[n] < n.
        draw: (tokens from the root to a node, its children) -> (tokens [K, children],
            probabilities [K]): the joint distribution of the children. Token -1 makes a node
            absent, and its descendants with it.

    >>> def draw(path, nodes):
    ...     return torch.tensor([[0], [1]]), torch.tensor([0.25, 0.75])
    >>> drawn_trees([-1, 0], draw)[1]
    tensor([0.0625, 0.1875, 0.1875, 0.5625], dtype=torch.float64)
    """
    n = len(parents)
    tuples: list[tuple[list[int], float]] = [([-1] * n, 1.0)]
    for parent in range(-1, n):
        nodes = [m for m in range(n) if parents[m] == parent]
        if not nodes:
            continue
        grown = []
        for tokens, weight in tuples:
            path = tuple(tokens[m] for m in lineage(parents, parent))
            if -1 in path:
                grown.append((tokens, weight))
                continue
            for given, probability in zip(*draw(path, nodes), strict=True):
                if float(probability) > 0:
                    row = list(tokens)
                    for m, x in zip(nodes, given.tolist(), strict=True):
                        row[m] = x
                    grown.append((row, weight * float(probability)))
        tuples = grown
    drafts = torch.tensor([t for t, _ in tuples], dtype=torch.int64).reshape(-1, n)
    return drafts, torch.tensor([w for _, w in tuples], dtype=torch.float64)


def lineage(parents: Sequence[int], node: int) -> list[int]:
    """The nodes of the path from the root down to a node, the root left out; none for -1."""
    out = []
    while node >= 0:
        out.append(node)
        node = parents[node]
    return out[::-1]
