"""The state of one sequence while its draft tree is verified.

Each *node* is a drafted token below its parent. The *root* is the token before all drafts; it is
no node and has index -1. *Siblings* share a parent, and the n-th sibling that a rule tries is its
*trial* n. A *path* is the accepted nodes from the root down, its length the *depth*. Target row
n + 1 is P after node n, row 0 is P after the root. See docs/rules.md#multi_draft.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ...arguments.status import Status
from ...arguments.tree import TreeArguments
from ..chain.residual import ratio
from ..chain.sequence import VerifiedSequence
from ..row.distribution import TargetRow, target_row
from ..row.draft import DraftDistribution, invalid_draft, one_hot_draft

ROOT = -1


@dataclass
class TreeSequence(VerifiedSequence):
    a: TreeArguments
    path: list[int] = field(default_factory=list)

    def read_tree(self, nodes: int) -> None:
        """Lists the children of each node, without absent ones (token -1)."""
        self.tokens: list[int] = self.a.tree_tokens[self.b].tolist()
        self.parents: list[int] = self.a.parents[self.b].tolist()
        self.children: dict[int, list[int]] = {n: [] for n in range(ROOT, nodes)}
        for n in range(nodes):
            if not (-1 <= self.parents[n] < n and -1 <= self.tokens[n] < self.a.id_limit):
                self.status |= Status.DRAFT_OUT_OF_RANGE
            elif self.tokens[n] != -1:
                self.children[self.parents[n]].append(n)

    def ends(self, path: list[int]) -> bool:
        """Whether a path's last token ends the sequence or is the last that is allowed."""
        if len(path) == self.max_new_tokens:
            return True
        return bool(path) and self.tokens[path[-1]] in self.eos_token_ids

    def target(self, node: int) -> TargetRow:
        """P after a node."""
        return target_row(self.unprocessed(node + 1), self.a.kind_name, self.params, self.direct)

    def draft_row(self, node: int) -> int:
        """The row of the draft that a node was drawn from."""
        return node if self.a.draft_rows is None else int(self.a.draft_rows[self.b, node])

    def drawn_together(self, node: int) -> tuple[int, int]:
        """A key that siblings drawn from one row of the draft have in common."""
        return self.parents[node], self.draft_row(node)

    def draft(self, node: int, token: int | None = None) -> DraftDistribution:
        """Q that a node was drawn from, with its probability of the node's or another token."""
        a, token = self.a, self.tokens[node] if token is None else token
        if a.draft is None or self.draft_temperature == 0:
            return one_hot_draft(self.tokens[node], token, self.v)
        row = self.draft_row(node)
        if not 0 <= row < a.draft.shape[-2]:
            return invalid_draft(self.v)
        index = (row,) if a.flat_draft else (self.b, row)
        return self.draft_at(index, index, token)

    def accept(self, node: int, p: float, q: float, position: int, trial: int) -> bool:
        """Accepts a node with probability min(1, p / q)."""
        self.accept_probs[node] = min(1.0, ratio(p, q))
        return self.acceptance_uniform(node, position, trial) * q < p

    def draw_at(self, depth: int, weights: Tensor) -> int:
        return self.draw(depth, weights, self.drafted.shape[1] + depth)
