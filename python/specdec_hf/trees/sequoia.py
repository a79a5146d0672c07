"""The tree of so many nodes with the largest expected accepted length: Sequoia's dynamic programme.

Source: Chen et al. 2024 (Sequoia), section 4.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def best_parents(chances: list[float], size: int, depth: int) -> list[int]:
    """Parents of at most ``size`` nodes, breadth first, at most ``depth`` deep.

    Args:
        chances: of the first, second, ... child to be the one that is accepted; one is not 0.
    """
    splits = _best_splits(chances, size, depth)
    parents: list[int] = []
    level = [(-1, size)]
    for left in range(len(splits), 0, -1):
        below: list[tuple[int, int]] = []
        for node, room in level:
            rest = room
            for split in splits[left]:
                share = int(split[rest])
                if share == 0:
                    break
                below.append((len(parents), share - 1))
                parents.append(node)
                rest -= share
        level = below
    return parents


def _best_splits(chances: list[float], size: int, depth: int) -> dict[int, list[NDArray[np.int64]]]:
    """``splits[d][k][n]``: of n nodes below a node that allows d levels, with k children placed
    already, how many the next child takes (itself and what is below it)."""
    worth = np.zeros(size + 1)  # of n nodes below a node, with one level fewer
    splits: dict[int, list[NDArray[np.int64]]] = {}
    for d in range(1, depth + 1):
        after = np.zeros(size + 1)  # of n nodes for the children from the next one on
        picked: list[NDArray[np.int64]] = []
        for chance in reversed(chances):
            best, share = np.zeros(size + 1), np.zeros(size + 1, dtype=np.int64)
            child = chance * (1 + worth[:size])  # of 1 to size nodes
            for n in range(1, size + 1):
                total = child[:n] + after[n - 1 :: -1][:n]
                m = int(total.argmax())
                if total[m] > 0:
                    best[n], share[n] = total[m], m + 1
            after = best
            picked.insert(0, share)
        splits[d] = picked
        if np.array_equal(after, worth):
            break  # deeper trees of so few nodes are no better
        worth = after
    return splits
