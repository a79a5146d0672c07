"""Token recycling: a tree of the target's latest most likely next tokens after each token.

The adjacency matrix has a row for every token: its most likely next tokens, as the target gave them
the last time that it read this token, in whatever context, also that of a rejected draft.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec_hf.arguments import check_flag, check_integer, shown
from specdec_hf.drafters.host_tree import ROOT, HostTree, as_draft
from specdec_hf.drafters.kept_texts import note_earlier_calls
from specdec_hf.drafting.context import Candidates, DraftContext, History
from specdec_hf.drafting.drafter import Draft, Drafter
from specdec_hf.runner.protocol import vocab_size_of
from specdec_hf.trees import MAX_NODES, TreeSpec

# Ten nodes suit a CPU, where a forward costs more with each token that it reads.
DEFAULT_TREE = TreeSpec((-1, -1, -1, -1, -1, 0, 0, 1, 2, 5), (0, 1, 2, 3, 4, 0, 1, 0, 0, 0))


class TokenRecyclingDrafter(Drafter, entry="token_recycling"):
    """Fills a tree of fixed shape from the adjacency matrix, breadth first.

    A node of rank r holds token r of its parent's row; a row that is unknown or too short leaves
    its node out. Each sequence has a matrix of its own. The loop computes no logits of the prompt,
    so there the tokens that followed a token in the text, the latest first, are its row until the
    target has read it again.

    Args:
        tree: shape; None is one of 10 nodes, for two CPU cores. The source has 80 in 6 levels.
        top_k: tokens of a row.
        inherit: whether a call begins with the rows of the last call whose sequences have all
            ended, those of all of them together, if the vocabulary has the same size. Text of the
            lossless rules does not depend on that. Under rule typical the same seed may give
            another text than in the call before, and a note says so. A call begins with an empty
            matrix otherwise.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: a rank of ``tree`` that ``top_k`` does not cover.

    Source: Luo et al. 2024, arXiv 2408.08696.
    """

    candidates = 8

    def __init__(
        self, tree: TreeSpec | None = None, top_k: int = 8, *, inherit: bool = False
    ) -> None:
        if not isinstance(tree, TreeSpec | None):
            raise TypeError(f"tree must be None or a TreeSpec, got {shown(tree)}")
        check_flag("inherit", inherit)
        self.tree = DEFAULT_TREE if tree is None else tree
        self.candidates = check_integer("top_k", top_k, 1, MAX_NODES)
        if max(self.tree.ranks) >= self.candidates:
            raise ValueError(
                f"ranks of tree must be below top_k={self.candidates}, got {max(self.tree.ranks)}"
            )
        self.inherit = inherit
        self.size, self.depth = self.tree.size, self.tree.depth
        self._rows: list[dict[int, list[int]]] = []  # one matrix a sequence
        self._inherited: tuple[int, dict[int, list[int]]] = (0, {})  # vocabulary size, and matrix

    def start(self, context: DraftContext) -> None:
        """Begin with an empty matrix, or with what the last call knew."""
        self._vocab_size = vocab_size_of(context.model)
        vocab_size, known = self._inherited
        if vocab_size != self._vocab_size:
            known = {}
        if known:
            note_earlier_calls(self, context)
        self._rows = [known.copy() for _ in range(context.batch_size)]
        self._has_prompt = False

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        self._read_prompt(history)
        trees = [HostTree(int(limit)) for limit in limits]
        for b in np.flatnonzero(history.active).tolist():
            self._fill(trees[b], self._rows[b], int(history.tokens[b, history.lengths[b] - 1]))
        return as_draft(trees)

    def _fill(self, tree: HostTree, rows: dict[int, list[int]], last: int) -> None:
        numbers = {ROOT: ROOT}  # node of the shape -> node of the tree
        for n, (parent, rank) in enumerate(zip(self.tree.parents, self.tree.ranks, strict=True)):
            if (above := numbers.get(parent)) is None:
                continue
            row = rows.get(last if above == ROOT else tree.tokens[above], [])
            if rank < len(row) and (node := tree.child(above, row[rank])) is not None:
                numbers[n] = node

    def observe(self, history: History, candidates: Candidates) -> None:
        self._read_prompt(history)
        for b, n in np.argwhere((candidates.tokens >= 0) & history.active[:, None]).tolist():
            self._rows[b][int(candidates.tokens[b, n])] = candidates.ids[b, n].tolist()

    def finish(self, history: History) -> None:
        if self.inherit:
            known = {token: row for rows in self._rows for token, row in rows.items()}
            self._inherited = self._vocab_size, known

    def _read_prompt(self, history: History) -> None:
        if self._has_prompt:
            return
        self._has_prompt = True
        for b in np.flatnonzero(history.active).tolist():
            text = history.tokens[b, : history.lengths[b]].tolist()
            followers: dict[int, dict[int, None]] = {}
            for token, after in zip(text[-2::-1], text[:0:-1], strict=True):
                followers.setdefault(token, {})[after] = None
            for token, row in followers.items():
                self._rows[b].setdefault(token, list(row)[: self.candidates])
