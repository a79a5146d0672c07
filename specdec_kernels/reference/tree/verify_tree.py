"""Specification of `specdec_kernels::verify_tree`, one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.arguments.tree import TreeArguments
from specdec_kernels.reference.chain.sequence import Verification, ratio, verdicts
from specdec_kernels.reference.row.distribution import (
    DRAFT_NOT_FINITE,
    DRAFT_OUT_OF_RANGE,
    EMPTY_RESIDUAL,
    TARGET_NOT_FINITE,
)
from specdec_kernels.reference.row.draft import Draft, Row, entry, point_mass, target_row
from specdec_kernels.reference.tree.residual import LEAST_REST, Left, k_seq_factor, without

ROOT = -1


def verify_tree(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments in the order of `TreeArguments`."""
    a = TreeArguments(*args)
    a.check()
    drafted = a.tree_tokens
    out = a.new_outputs()
    sequences = [_Tree(a, b, drafted) for b in range(len(drafted))]
    verdicts(out[1:], sequences)
    out[0].fill_(-1)
    for b, sequence in enumerate(sequences):
        for i, node in enumerate(sequence.path):
            out[0][b, i] = node
    return out


@dataclass
class _Tree(Verification):
    a: TreeArguments
    path: list[int] = field(default_factory=list)

    def judge(self, rows: int) -> None:
        self._read_tree(rows - 1)
        if self.most == 0:
            return
        if self.a.rule == "traversal" and self.params[0] != 0:
            self._visit([], 1.0)
        else:
            self._walk()
        self.accepted = len(self.path)

    def _read_tree(self, nodes: int) -> None:
        """The children of each node, absent ones left out."""
        tokens, parents = self.a.tree_tokens[self.b].tolist(), self.a.parents[self.b].tolist()
        self.tokens, self.parents = tokens, parents
        self.children: dict[int, list[int]] = {n: [] for n in range(ROOT, nodes)}
        for n in range(nodes):
            lawful = -1 <= parents[n] < n and -1 <= tokens[n] < self.a.id_limit
            if not lawful:
                self.status |= DRAFT_OUT_OF_RANGE
            elif tokens[n] != -1:
                self.children[parents[n]].append(n)

    def _over(self, path: list[int]) -> bool:
        """Whether nothing follows a path: its last token ends the text or is the last allowed."""
        return len(path) == self.most or (bool(path) and self.tokens[path[-1]] in self.ends)

    def _target(self, node: int) -> Row:
        """P of what follows a node."""
        return target_row(self.given(node + 1), self.a.kind, self.params, self.direct)

    def _law_of(self, node: int) -> int:
        """The row of the law that a node was drawn from."""
        return node if self.a.draft_rows is None else int(self.a.draft_rows[self.b, node])

    def _group(self, node: int) -> tuple[int, int]:
        """Nodes of one parent and one law were drawn together."""
        return self.parents[node], self._law_of(node)

    def _draft(self, node: int, token: int | None = None) -> Draft:
        """Q of a node, at its token or another one."""
        a, x = self.a, self.tokens[node] if token is None else token
        if a.draft is None or self.q_temperature == 0:
            return point_mass(self.tokens[node], x, self.v)
        row = self._law_of(node)
        if not 0 <= row < a.draft.shape[-2]:
            return Draft(torch.zeros(self.v), 0.0, fault=True)
        where = (row,) if a.flat_draft else (self.b, row)
        return self.draft_law(where, where, x)

    def _draw(self, depth: int, weights: Tensor) -> int:
        return self.draw(depth, weights, self.drafted.shape[1] + depth)

    def _walk(self) -> None:
        """Every rule that goes from the root down."""
        here, members = ROOT, [ROOT]
        while not self._over(self.path):
            row = self._target(here)
            if row.fault:
                self.status |= TARGET_NOT_FINITE
                return
            depth = len(self.path)
            children = (
                [n for m in members for n in self.children[m]] if depth < self.a.max_depth else []
            )
            children.sort()
            node, y = self._judge(depth, row, children)
            if node is None:
                self.emit(row, y)
                return
            self.emit(row, self.tokens[node])
            self.path.append(node)
            members = [n for n in children if self.tokens[n] == self.tokens[node]]
            here = node

    def _judge(self, depth: int, row: Row, children: list[int]) -> tuple[int | None, int]:
        """The child that stands, or None and the token that follows."""
        rule = self.a.rule
        first = {self.tokens[n]: n for n in reversed(children)}  # of each token
        distinct = sorted(first.values())
        if self.params[0] == 0 or rule in ("greedy", "match", "target_only"):
            y = self._answer(depth, row)
            for n in distinct:
                x = self.tokens[n]
                drawn = self.params[0] != 0 and rule == "target_only"
                self.accept_probs[n] = float(row.p[x]) if drawn else float(x == y)
            return first.get(y), y
        if rule == "typical":
            return self._typical(depth, row, distinct)
        if rule == "top_k_plus_one":
            return self._top_k_plus_one(depth, row, children, first)
        if rule == "k_seq":
            return self._k_seq(depth, row, children)
        replacement = rule == "multi_draft"
        if not replacement:
            once = {(self._group(n), self.tokens[n]): n for n in reversed(children)}
            children = sorted(once.values())
        return self._one_by_one(depth, row, children, replacement)

    def _answer(self, depth: int, row: Row) -> int:
        """The token that the target itself says."""
        if self.params[0] == 0 or self.a.rule == "match":
            return self.answer(depth, row)
        return self._draw(depth, row.p)

    def _typical(self, depth: int, row: Row, children: list[int]) -> tuple[int | None, int]:
        bound = self.typical_bound(row)
        for n in children:
            self.accept_probs[n] = float(float(row.p[self.tokens[n]]) > bound)
        likely = [n for n in children if self.accept_probs[n]]
        if not likely:
            return None, self._draw(depth, row.p)
        return max(likely, key=lambda n: float(row.p[self.tokens[n]])), -1

    def _stands(self, node: int, p_x: float, q_x: float, position: int, lane: int) -> bool:
        self.accept_probs[node] = min(1.0, ratio(p_x, q_x))
        return self.coin(node, position, lane) * q_x < p_x

    def _one_by_one(
        self, depth: int, row: Row, children: list[int], replacement: bool
    ) -> tuple[int | None, int]:
        """multi_draft and multi_draft_wor, whose later siblings' Q lacks the tokens before them.

        Without replacement, a token that came from another law before is tried in vain, and what
        is left is reduced by its law all the same.

        After j rejections P' = (P - sum of a_i Q_i)+ / a_{j+1} with a_{i+1} the mass of what the
        first i leave of P, and a_1 = 1.
        """
        left = Left(row.p)
        tried: dict[tuple[int, int], dict[int, float]] = {}  # of each group, without replacement
        for lane, n in enumerate(children):
            x, draft = self.tokens[n], self._draft(n)
            before = {} if replacement else tried.setdefault(self._group(n), {})
            rest = without(draft, before)
            if draft.fault:
                self.status |= DRAFT_NOT_FINITE
                break
            if not rest > LEAST_REST:  # nothing was left to draw this one from
                continue
            p_x = entry(left.weights, x)
            if self._stands(n, p_x, left.mass * draft.q_x / rest, self.position + depth, lane):
                return n, -1
            if not draft.whole:
                self.status |= DRAFT_NOT_FINITE
                break
            left = left.subtract(draft, left.mass / rest, before)
            if not replacement:
                before[x] = draft.q_x
                if x < self.v:
                    left.weights[x] = 0.0
            left.mass = float(left.weights.sum())
            if not left.mass > 0:
                self.status |= EMPTY_RESIDUAL
                left = Left(row.p)
                break
        return None, self._draw(depth, left.weights)

    def _top_k_plus_one(
        self, depth: int, row: Row, children: list[int], first: dict[int, int]
    ) -> tuple[int | None, int]:
        """The last child was drawn from Q off the others, which are the top of Q."""
        weights = row.p
        top = {self.tokens[n] for n in children[:-1]}
        if children and self.tokens[children[-1]] not in top:
            n = children[-1]
            x, draft = self.tokens[n], self._draft(n)
            rest = without(draft, {t: self._draft(n, token=t).q_x for t in top})
            if draft.fault or not draft.whole:
                self.status |= DRAFT_NOT_FINITE
            elif rest > LEAST_REST:
                p_x = entry(row.p, x)
                if self._stands(n, p_x, draft.q_x / rest, self.position + depth, 0):
                    return n, -1
                left = Left(row.p).subtract(draft, 1 / rest, sorted(top))
                weights = left.weights
                if not float(weights.sum()) > 0:
                    self.status |= EMPTY_RESIDUAL
                    weights = row.p
        total = float(weights.sum())
        for x in top:
            self.accept_probs[first[x]] = float(weights[x]) / total if x < self.v else 0.0
        y = self._draw(depth, weights)
        return (first[y] if y in top else None), y

    def _k_seq(self, depth: int, row: Row, children: list[int]) -> tuple[int | None, int]:
        """Each child is tried against P and the law of the first (Sun et al. 2023)."""
        if not children:
            return None, self._draw(depth, row.p)
        drafts = [self._draft(children[0], self.tokens[n]) for n in children]
        law = drafts[0]
        if any(d.fault for d in drafts) or not law.whole:
            self.status |= DRAFT_NOT_FINITE
            return None, self._draw(depth, row.p)
        rho, beta = k_seq_factor(row.p, law.q, len(children))
        for lane, (n, draft) in enumerate(zip(children, drafts, strict=True)):
            x = self.tokens[n]
            p_x = entry(row.p, x)
            if self._stands(n, p_x, rho * draft.q_x, self.position + depth, lane):
                return n, -1
        hit = 1 - (1 - beta) ** len(children)
        accepted = torch.minimum(law.q, row.p / rho)
        weights = (row.p - accepted * (hit / beta if beta > 0 else 0.0)).clamp(min=0)
        if not float(weights.sum()) > 0:
            self.status |= EMPTY_RESIDUAL
            weights = row.p
        return None, self._draw(depth, weights)

    def _visit(self, path: list[int], a: float) -> bool:
        """Rule traversal: whether a node, accepted so far with probability a, or one below stands.

        On a chain it is rule block: h from the two one-sided differences, a faulty row ends the
        tree there, and coins belong to where the round began.
        """
        node = path[-1] if path else ROOT
        row = self._target(node)
        left, status, fresh = Left(a * row.p), 0, True
        over = self._over(path)
        children = [] if over or row.fault or len(path) >= self.a.max_depth else self.children[node]
        for n in children:
            x, draft = self.tokens[n], self._draft(n)
            if draft.fault:
                status = DRAFT_NOT_FINITE
                break
            step = ratio(entry(left.weights, x) / left.mass, draft.q_x)
            if self._visit([*path, n], min(1.0, step)):
                return True
            if not draft.whole:
                status = DRAFT_NOT_FINITE
                break
            after = left.subtract(draft, left.mass, [])
            more = float(after.weights.sum())
            less = float((left.mass * draft.q - left.weights).clamp(min=0).sum())
            less += left.mass * draft.beyond
            if not less > 0:
                status = EMPTY_RESIDUAL
                break
            a, fresh = min(1.0, more / less), False
            left = after
            left.mass = less
        if path:
            self.accept_probs[node] = a
            if self.coin(node, self.position, node) >= a:
                return False
        self._accept(path)
        if over:
            return True
        if row.fault:
            self.status |= TARGET_NOT_FINITE
            return True
        self.status |= status
        weights = row.p if fresh else left.weights
        if not float(weights.sum()) > 0:
            self.status |= EMPTY_RESIDUAL
            weights = row.p
        self.emit(row, self._draw(len(path), weights))
        return True

    def _accept(self, path: list[int]) -> None:
        self.path = path
        for i, n in enumerate(path):
            self.emit(self._target(path[i - 1] if i else ROOT), self.tokens[n])
