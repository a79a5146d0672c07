"""Specification of `specdec_kernels::verify_tree`, one sequence at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec_kernels._checks import float32
from specdec_kernels._tree_arguments import TREE_RATIO_RULES, TreeArguments
from specdec_kernels.reference.law import (
    ACCEPT,
    BAD_PARAMETER,
    DRAFT_NOT_FINITE,
    DRAFT_OUT_OF_RANGE,
    EMPTY_RESIDUAL,
    RESIDUAL,
    SHARED,
    TARGET_NOT_FINITE,
    at,
    exponentials,
    pick,
    race,
    uniform,
    valid,
)
from specdec_kernels.reference.residual import LEAST_REST, Left, k_seq_factor, without
from specdec_kernels.reference.rows import (
    Draft,
    Row,
    draft_row,
    point_mass,
    sparse_row,
    target_row,
)

ROOT = -1


def verify_tree(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments in the order of `TreeArguments`."""
    a = TreeArguments(*args)
    a.check()
    path, tokens, num_accepted, status, logprobs, acceptance = a.new_outputs()
    path.fill_(-1)
    tokens.fill_(-1)
    logprobs.zero_()
    acceptance.fill_(math.nan)
    for b in range(len(tokens)):
        sequence = _Sequence(a, b)
        sequence.verify()
        status[b] = sequence.status
        num_accepted[b] = len(sequence.path)
        for i, node in enumerate(sequence.path):
            path[b, i] = node
        for i, (token, logprob) in enumerate(sequence.emitted):
            tokens[b, i] = token
            if a.with_logprobs:
                logprobs[b, i] = logprob
        for n, probability in sequence.acceptance.items() if a.with_acceptance else ():
            acceptance[b, n] = probability
    return path, tokens, num_accepted, status, logprobs, acceptance


@dataclass
class _Sequence:
    a: TreeArguments
    b: int
    status: int = 0
    path: list[int] = field(default_factory=list)
    emitted: list[tuple[int, float]] = field(default_factory=list)
    acceptance: dict[int, float] = field(default_factory=dict)

    def verify(self) -> None:
        a, b = self.a, self.b
        k = a.top_k if a.top_ks is None else int(a.top_ks[b])
        self.params = (
            at(a.temperatures, a.temperature, b), k, at(a.top_ps, a.top_p, b),
            at(a.min_ps, a.min_p, b),
        )  # fmt: skip
        self.v = a.target.shape[-1]
        self.q_temperature = self.params[0]
        if a.rule in TREE_RATIO_RULES and a.draft_logsumexp is not None:
            self.q_temperature = at(a.draft_temperatures, a.draft_temperature, b)
        if not valid(*self.params) or not valid(self.q_temperature, 0, 1.0, 0.0):
            self.status = BAD_PARAMETER
            return
        if a.rule == "greedy":
            self.params = (0.0, 0, 1.0, 0.0)
        shaped = self.params[0] != 1 or 0 < k < self.v or self.params[2:] != (1.0, 0.0)
        self.direct = a.kind == "probs" and a.rule in TREE_RATIO_RULES and not shaped

        rows = a.tree_tokens.shape[1] + 1
        self.begin = 0
        if a.cu_rows is not None:
            n = a.target.shape[0]
            self.begin = min(max(int(a.cu_rows[b]), 0), n)
            rows = min(rows, min(max(int(a.cu_rows[b + 1]), self.begin), n) - self.begin)
        if rows == 0:
            self.status = TARGET_NOT_FINITE
            return
        self._read_tree(rows - 1)
        self.most = rows if a.max_emit is None else max(0, int(a.max_emit[b]))
        self.ends = set(a.eos_ids.tolist()) if a.eos_ids is not None else set()
        if self.most == 0:
            return
        if a.rule == "traversal" and self.params[0] != 0:
            self._visit([], 1.0)
        else:
            self._walk()

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
        a, row = self.a, node + 1
        given = a.target[self.b, row] if a.cu_rows is None else a.target[self.begin + row]
        return target_row(given.double(), a.kind, self.params, self.direct)

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
        flat = a.flat_draft
        if not 0 <= row < a.draft.shape[-2]:
            return Draft(torch.zeros(self.v), 0.0, fault=True)
        given = (a.draft[row] if flat else a.draft[self.b, row]).double()
        if a.draft_ids is not None:
            ids = (a.draft_ids[row] if flat else a.draft_ids[self.b, row]).long()
            return sparse_row(given, ids, x, self.v)
        left = None
        if a.draft_logsumexp is not None and a.draft_threshold is not None:
            where = (row,) if flat else (self.b, row)
            left = float(a.draft_logsumexp[where]), float(a.draft_threshold[where])
        return draft_row(given, x, self.v, a.kind, left, a.draft_columns, self.q_temperature)

    def _position(self, depth: int) -> int:
        return int(self.a.positions[self.b]) + depth

    def _coin(self, node: int, position: int, lane: int) -> float:
        if self.a.uniforms is not None:
            return float(self.a.uniforms[self.b, node])
        return uniform(int(self.a.seeds[self.b]), position, ACCEPT, lane)

    def _draw(self, depth: int, weights: Tensor) -> int:
        if self.a.uniforms is not None:
            nodes = self.a.tree_tokens.shape[1]
            return pick(weights, float(self.a.uniforms[self.b, nodes + depth]))
        u = uniform(int(self.a.seeds[self.b]), self._position(depth), RESIDUAL)
        return pick(weights, u)

    def _emit(self, row: Row, token: int) -> None:
        self.emitted.append((token, 0.0 if self.params[0] == 0 else float(row.lp[token])))

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
                self._emit(row, y)
                return
            self._emit(row, self.tokens[node])
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
                self.acceptance[n] = float(row.p[x]) if drawn else float(x == y)
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
        if self.params[0] == 0:
            return int(row.lp.argmax())
        if self.a.rule == "match":
            seed = int(self.a.seeds[self.b])
            return race(row.lp, exponentials(seed, self._position(depth), SHARED, self.v))
        return self._draw(depth, row.p)

    def _typical(self, depth: int, row: Row, children: list[int]) -> tuple[int | None, int]:
        entropy = -float((row.p * row.lp).nan_to_num(0.0).sum())
        bound = min(
            float32(self.a.typical_epsilon), float32(self.a.typical_delta) * math.exp(-entropy)
        )
        for n in children:
            self.acceptance[n] = float(float(row.p[self.tokens[n]]) > bound)
        likely = [n for n in children if self.acceptance[n]]
        if not likely:
            return None, self._draw(depth, row.p)
        return max(likely, key=lambda n: float(row.p[self.tokens[n]])), -1

    def _stands(self, node: int, p_x: float, q_x: float, position: int, lane: int) -> bool:
        self.acceptance[node] = 0.0 if p_x == 0 else min(1.0, p_x / q_x) if q_x else 1.0
        return self._coin(node, position, lane) * q_x < p_x

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
            p_x = float(left.weights[x]) if x < self.v else 0.0
            if self._stands(n, p_x, left.mass * draft.q_x / rest, self._position(depth), lane):
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
                p_x = float(row.p[x]) if x < self.v else 0.0
                if self._stands(n, p_x, draft.q_x / rest, self._position(depth), 0):
                    return n, -1
                left = Left(row.p).subtract(draft, 1 / rest, sorted(top))
                weights = left.weights
                if not float(weights.sum()) > 0:
                    self.status |= EMPTY_RESIDUAL
                    weights = row.p
        total = float(weights.sum())
        for x in top:
            self.acceptance[first[x]] = float(weights[x]) / total if x < self.v else 0.0
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
            p_x = float(row.p[x]) if x < self.v else 0.0
            if self._stands(n, p_x, rho * draft.q_x, self._position(depth), lane):
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
            p_x = (float(left.weights[x]) if x < self.v else 0.0) / left.mass
            ratio = 0.0 if p_x == 0 else p_x / draft.q_x if draft.q_x else math.inf
            if self._visit([*path, n], min(1.0, ratio)):
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
            self.acceptance[node] = a
            if self._coin(node, int(self.a.positions[self.b]), node) >= a:
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
        self._emit(row, self._draw(len(path), weights))
        return True

    def _accept(self, path: list[int]) -> None:
        self.path = path
        for i, n in enumerate(path):
            self._emit(self._target(path[i - 1] if i else ROOT), self.tokens[n])
