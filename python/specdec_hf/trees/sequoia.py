"""The tree with the largest expected accepted length, by Sequoia's dynamic programme.

Source: Chen et al. 2024 (Sequoia), section 4.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def best_parents(accept_probs: list[float], size: int, depth: int) -> list[int]:
    """Parents of at most ``size`` nodes, breadth first, at most ``depth`` deep.

    Args:
        accept_probs: probability of the first, second, ... child to be the accepted one. At least
            one of them is not 0.
    """
    splits = _best_splits(accept_probs, size, depth)
    parents: list[int] = []
    level = [(-1, size)]
    for levels in range(len(splits), 0, -1):
        below: list[tuple[int, int]] = []
        for node, budget in level:
            remaining = budget
            for split in splits[levels]:
                share = int(split[remaining])
                if share == 0:
                    break
                below.append((len(parents), share - 1))
                parents.append(node)
                remaining -= share
        level = below
    return parents


def _best_splits(
    accept_probs: list[float], size: int, depth: int
) -> dict[int, list[NDArray[np.int64]]]:
    """How to divide a budget of nodes among the children of one node.

    Returns:
        ``splits[d][k][n]``: the size of child k's subtree, itself included, where d levels are
        allowed below the parent and n nodes are to be divided among child k and those after it.
    """
    values = np.zeros(size + 1)  # expected length of the best n nodes below a node, a level deeper
    splits: dict[int, list[NDArray[np.int64]]] = {}
    for d in range(1, depth + 1):
        after = np.zeros(size + 1)  # expected length of n nodes for the children after this one
        picked: list[NDArray[np.int64]] = []
        for accept_prob in reversed(accept_probs):
            best, share = np.zeros(size + 1), np.zeros(size + 1, dtype=np.int64)
            child = accept_prob * (1 + values[:size])  # of subtrees of 1 to size nodes
            for n in range(1, size + 1):
                total = child[:n] + after[n - 1 :: -1][:n]
                m = int(total.argmax())
                if total[m] > 0:
                    best[n], share[n] = total[m], m + 1
            after = best
            picked.insert(0, share)
        splits[d] = picked
        if np.array_equal(after, values):
            break  # more levels do not help so few nodes
        values = after
    return splits
