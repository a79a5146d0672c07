"""Token recycling: a tree of the target's latest most likely next tokens after each token.

The adjacency matrix has a row for every token: its most likely next tokens, as the target gave them
the last time that it read this token, in whatever context, also that of a rejected draft.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from specdec_hf.arguments import check_flag, check_integer, shown
from specdec_hf.drafters.kept_texts import note_earlier_calls
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Draft, Drafter, Needs, Round, State
from specdec_hf.runner.protocol import vocab_size_of
from specdec_hf.trees import MAX_NODES, TreeSpec

from specdec_papers.host_tree import ROOT, HostTree, as_draft

# Ten nodes suit a CPU, where a forward costs more with each token that it reads.
DEFAULT_TREE = TreeSpec((-1, -1, -1, -1, -1, 0, 0, 1, 2, 5), (0, 1, 2, 3, 4, 0, 1, 0, 0, 0))


Rows = dict[int, list[int]]  # an adjacency matrix; no row is changed once it is there


class InheritedRows:
    """The matrix of the last call whose sequences have all ended."""

    def __init__(self) -> None:
        self._kept: tuple[int, Rows] = (0, {})  # vocabulary size, and matrix

    def of(self, vocab_size: int) -> Rows:
        """The rows of a vocabulary of this size, which may be none."""
        kept_for, rows = self._kept
        return rows if kept_for == vocab_size else {}

    def keep(self, vocab_size: int, rows: Rows) -> None:
        """Keep these rows in the place of all others."""
        self._kept = vocab_size, rows


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

    def __init__(
        self, tree: TreeSpec | None = None, top_k: int = 8, *, inherit: bool = False
    ) -> None:
        if not isinstance(tree, TreeSpec | None):
            raise TypeError(f"tree must be None or a TreeSpec, got {shown(tree)}")
        check_flag("inherit", inherit)
        self.tree = DEFAULT_TREE if tree is None else tree
        self.top_k = check_integer("top_k", top_k, 1, MAX_NODES)
        if max(self.tree.ranks) >= self.top_k:
            raise ValueError(
                f"ranks of tree must be below top_k={self.top_k}, got {max(self.tree.ranks)}"
            )
        self.needs = Needs(candidates=self.top_k)
        self.inherited = InheritedRows() if inherit else None
        self.size, self.depth = self.tree.size, self.tree.depth

    def begin(self, call: DrafterCall) -> State:
        """Begin with an empty matrix, or with what the last call knew."""
        return _RowsState(self, call)


class _RowsState(State):
    def __init__(self, drafter: TokenRecyclingDrafter, call: DrafterCall) -> None:
        self.drafter = drafter
        self._vocab_size = vocab_size_of(call.model)
        known = {} if drafter.inherited is None else drafter.inherited.of(self._vocab_size)
        if known:
            note_earlier_calls(drafter, call)
        self._rows: list[Rows] = [known.copy() for _ in range(call.batch_size)]
        self._has_prompt = False

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        self._read_prompt(texts, texts.lengths, texts.active)
        trees = [HostTree(int(limit)) for limit in limits]
        for b in np.flatnonzero(texts.active).tolist():
            self._fill(trees[b], self._rows[b], int(texts.tokens[b, texts.lengths[b] - 1]))
        return as_draft(trees)

    def _fill(self, tree: HostTree, rows: Rows, last: int) -> None:
        shape = self.drafter.tree
        numbers = {ROOT: ROOT}  # node of the shape -> node of the tree
        for n, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
            if (above := numbers.get(parent)) is None:
                continue
            row = rows.get(last if above == ROOT else tree.tokens[above], [])
            if rank < len(row) and (node := tree.child(above, row[rank])) is not None:
                numbers[n] = node

    def commit(self, texts: History, done: Round) -> None:
        if done.candidates is None:
            return
        self._read_prompt(texts, done.lengths, done.active)
        tokens, ids = done.candidates.tokens, done.candidates.ids
        for b, n in np.argwhere((tokens >= 0) & done.active[:, None]).tolist():
            self._rows[b][int(tokens[b, n])] = ids[b, n].tolist()

    def end(self, texts: History) -> None:
        if self.drafter.inherited is not None:
            known = {token: row for rows in self._rows for token, row in rows.items()}
            self.drafter.inherited.keep(self._vocab_size, known)

    def _read_prompt(
        self, texts: History, lengths: NDArray[np.int64], active: NDArray[np.bool_]
    ) -> None:
        """Make rows of the first ``lengths[b]`` tokens of each active sequence, once in a call."""
        if self._has_prompt:
            return
        self._has_prompt = True
        for b in np.flatnonzero(active).tolist():
            text = texts.tokens[b, : lengths[b]].tolist()
            followers: dict[int, dict[int, None]] = {}
            for token, after in zip(text[-2::-1], text[:0:-1], strict=True):
                followers.setdefault(token, {})[after] = None
            for token, row in followers.items():
                self._rows[b].setdefault(token, list(row)[: self.drafter.top_k])
