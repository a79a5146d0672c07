"""Draft trees that are put together on the host, where the loop holds all tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from specdec_hf.drafting.drafter import Draft

ROOT = -1


class HostTree:
    """The tree of one sequence, which grows node by node.

    Args:
        limit: no node is deeper.

    Attributes:
        tokens, parents, depths: of each node; a parent is `ROOT` at depth 1.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int | None:
        """The child of a node that holds ``token``, which is added where it is not there yet.

        Returns:
            The number of the child; None below the limit.
        """
        depth = 1 if parent == ROOT else self.depths[parent] + 1
        if depth > self.limit:
            return None
        number = self._nodes.setdefault((parent, token), len(self.tokens))
        if number == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(depth)
        return number

    def path(self, tokens: Iterable[int], above: int = ROOT) -> list[int]:
        """The nodes of tokens that follow one another below a node, as far as the limit goes."""
        nodes: list[int] = []
        for token in tokens:
            node = self.child(above, token)
            if node is None:
                break
            nodes.append(node)
            above = node
        return nodes


def as_draft(trees: Sequence[HostTree]) -> Draft | None:
    """The trees of all sequences, deterministic drafts; None if none has a node."""
    size = max(len(tree.tokens) for tree in trees)
    if size == 0:
        return None
    tokens = np.full((len(trees), size), -1, dtype=np.int64)
    parents = np.full((len(trees), size), ROOT, dtype=np.int64)
    for b, tree in enumerate(trees):
        tokens[b, : len(tree.tokens)] = tree.tokens
        parents[b, : len(tree.parents)] = tree.parents
    depth = max(max(tree.depths, default=0) for tree in trees)
    return Draft(torch.from_numpy(tokens), torch.from_numpy(parents), depth=depth)
