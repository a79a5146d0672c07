"""The lossless rules in rational arithmetic, written from the papers, one sequence at a time.

A rule is given rational P and Q and the uniforms that a verifier is given, and says which tokens
are emitted. `Exact` makes every comparison of a rule, and remembers how near it was: what floats
decide otherwise, they may only where two numbers are that near.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch

Row = list[Fraction]  # a distribution, or its unnormalised weights
ZERO, ONE = Fraction(0), Fraction(1)


def fractions(row: Sequence[Any]) -> Row:
    """The exact values of floats."""
    return [Fraction(float(x)) for x in row]


def normalized(weights: Row) -> Row:
    """The weights by their sum."""
    total = sum(weights)
    return [w / total for w in weights]


def difference(p: Row, q: Row) -> Row:
    """max(p - q, 0), unnormalised."""
    return [max(a - b, ZERO) for a, b in zip(p, q, strict=True)]


def without(row: Row, tokens: Sequence[int] | set[int]) -> Row:
    """The row with 0 at some tokens, unnormalised."""
    return [ZERO if x in tokens else w for x, w in enumerate(row)]


def filtered(row: Row, power: int, top_k: int, top_p: float, min_p: float) -> Row:
    """P at temperature 1 / power after top-k, top-p of the survivors, and min-p; ties are kept."""
    row = normalized([w**power for w in row])
    kept = range(len(row))
    if top_k:
        kept = [x for x in kept if sum(w > row[x] for w in row) < top_k]
    mass = sum(row[x] for x in kept)
    kept = [
        x
        for x in kept
        if sum(row[y] for y in kept if row[y] > row[x]) < Fraction(top_p) * mass
        and row[x] >= Fraction(min_p) * max(row)
    ]
    return normalized([w if x in kept else ZERO for x, w in enumerate(row)])


@dataclass
class Exact:
    """The decisions of one sequence.

    Attributes:
        margin: the smallest difference of two numbers that were compared.
        accept_probs: acceptance probabilities that a uniform was compared with, and that uniform.
        plain: the wrong step of a control: tokens after a rejection are drawn from P.
    """

    margin: Fraction = ONE
    accept_probs: list[tuple[Fraction, Fraction]] = field(default_factory=list)
    plain: bool = False

    def accepts(self, u: Fraction, p: Fraction, q: Fraction) -> bool:
        """Whether u < min(1, p / q)."""
        h = min(ONE, p / q) if q else Fraction(p > 0)
        self.accept_probs.append((h, u))
        if 0 < h < 1:
            self.margin = min(self.margin, abs(u - h))
        return u < h

    def pick(self, weights: Row, u: Fraction) -> int:
        """The first token whose cumulative weight exceeds u of the total."""
        goal, run, found = u * sum(weights), ZERO, -1
        for v, w in enumerate(weights):
            run += w
            if w > 0:
                self.margin = min(self.margin, abs(run - goal) / sum(weights))
                found = v if found < 0 and run > goal else found
        assert found >= 0, "no weight"
        return found

    def pick_residual(self, residual: Row, p: Row, u: Fraction) -> int:
        """A token after a rejection, from the residual; P itself where that is empty."""
        return self.pick(p if self.plain or not any(residual) else residual, u)

    def largest(self, values: Row) -> int:
        """The first of the largest values."""
        best = max(range(len(values)), key=lambda v: values[v])
        others = [w for v, w in enumerate(values) if v != best and w < values[best]]
        if others and values[best]:
            self.margin = min(self.margin, 1 - max(others) / values[best])
        return best


def token(
    e: Exact, p: list[Row], q: list[Row], drafts: list[int], uniforms: Row, last: Fraction
) -> list[int]:
    """The tokens that rule token emits: Leviathan et al. 2023, algorithm 1."""
    for i, x in enumerate(drafts):
        if not e.accepts(uniforms[i], p[i][x], q[i][x]):
            return [*drafts[:i], e.pick_residual(difference(p[i], q[i]), p[i], last)]
    return [*drafts, e.pick(p[len(drafts)], last)]


def block(
    e: Exact, p: list[Row], q: list[Row], drafts: list[int], uniforms: Row, last: Fraction
) -> list[int]:
    """The tokens that rule block emits: Sun et al. 2024, algorithm 2."""
    c = [ONE]
    for i, x in enumerate(drafts):
        c.append(min(ONE, c[-1] * p[i][x] / q[i][x]) if q[i][x] else ZERO)
    accepted = []
    for i in range(1, len(drafts) + 1):
        h = c[i]
        if i < len(drafts):
            common = sum(min(c[i] * a, b) for a, b in zip(p[i], q[i], strict=True))
            h = (c[i] - common) / (1 - common) if common < 1 else ONE
        accepted.append(e.accepts(uniforms[i - 1], h, ONE))
    tau = max([i for i, one in enumerate(accepted, 1) if one], default=0)
    if tau == len(drafts):
        return [*drafts, e.pick(p[tau], last)]
    residual = difference([c[tau] * w for w in p[tau]], q[tau])
    return [*drafts[:tau], e.pick_residual(residual, p[tau], last)]


def shared_choice(e: Exact, p: Row, exponentials: Sequence[Any]) -> int:
    """Rule match: the token whose noise, shared with the drafter, is least beside its P."""
    return e.largest([a / b for a, b in zip(p, fractions(exponentials), strict=True)])


def until_unlike(wanted: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The tokens that the target decides on, up to the first that is no draft."""
    same = [a == b for a, b in zip(wanted, drafts, strict=False)]
    return list(wanted[: same.index(False) + 1 if False in same else len(drafts) + 1])


@dataclass
class Tree:
    """A tree of drafts; -1 is the root, and an absent node has token -1.

    Attributes:
        tokens, parents: [N].
        p: [N + 1], P after the root and after each node.
        q: [N + 1], Q after them, which their children are drawn from.
        accept: [N], the acceptance uniform of each node.
        draws: the uniform of the draw after a path, by its length.
    """

    tokens: list[int]
    parents: list[int]
    p: list[Row]
    q: list[Row]
    accept: Row
    draws: Row

    def children(self, nodes: Sequence[int]) -> list[int]:
        """The present children of some nodes, in order."""
        return [n for n, x in enumerate(self.tokens) if x >= 0 and self.parents[n] in nodes]


def one_by_one(e: Exact, tree: Tree, node: int, children: list[int], u: Fraction, *, wor: bool
               ) -> tuple[int | None, int]:  # fmt: skip
    """Recursive rejection sampling: SpecInfer, algorithm 2; ``wor``: Sequoia, algorithm 2."""
    p, q = tree.p[node + 1], tree.q[node + 1]
    tried: set[int] = set()
    for n in children:
        x = tree.tokens[n]
        if (wor and x in tried) or not any(q):
            continue
        tried.add(x)
        q = normalized(q)
        if e.accepts(tree.accept[n], p[x], q[x]):
            return n, -1
        residual = difference(p, q)
        if not any(residual):
            break
        p = normalized(residual)
        q = without(q, {x}) if wor else q
    return None, e.pick_residual(p, tree.p[node + 1], u)


def top_k_plus_one(
    e: Exact, tree: Tree, node: int, children: list[int], u: Fraction
) -> tuple[int | None, int]:
    """All children but the last are tokens that Q draws no more; the last is drawn from the rest.

    The last is verified like one draft, and whatever is then drawn from the residual is accepted if
    it is one of the others.
    """
    p, weights = tree.p[node + 1], tree.p[node + 1]
    top = {tree.tokens[n]: n for n in reversed(children[:-1])}
    rest = without(tree.q[node + 1], set(top))
    if children and tree.tokens[children[-1]] not in top and any(rest):
        n, rest = children[-1], normalized(rest)
        if e.accepts(tree.accept[n], p[tree.tokens[n]], rest[tree.tokens[n]]):
            return n, -1
        weights = difference(p, rest)
    found = e.pick_residual(weights, p, u)
    return top.get(found), found


def k_seq(
    e: Exact, tree: Tree, node: int, children: list[int], u: Fraction
) -> tuple[int | None, int]:
    """Sun et al. 2023 (SpecTr), algorithm 2, with the smallest rho that leaves a residual."""
    p, q, k = tree.p[node + 1], tree.q[node + 1], len(children)
    if not children:
        return None, e.pick(p, u)

    def beta_of(rho: Fraction) -> Fraction:
        return sum((min(b, a / rho) for a, b in zip(p, q, strict=True)), ZERO)

    low, rho = ONE, Fraction(k)
    for _ in range(40):
        middle = (low + rho) / 2
        beta = beta_of(middle)
        if 1 - (1 - beta) ** k <= middle * beta:
            rho = middle
        else:
            low = middle
    for n in children:
        if e.accepts(tree.accept[n], p[tree.tokens[n]], rho * q[tree.tokens[n]]):
            return n, -1
    beta = beta_of(rho)
    share = (1 - (1 - beta) ** k) / beta if beta else ZERO
    residual = difference(p, [min(b, a / rho) * share for a, b in zip(p, q, strict=True)])
    return None, e.pick_residual(residual, p, u)


def target_only(
    e: Exact, tree: Tree, node: int, children: list[int], u: Fraction
) -> tuple[int | None, int]:
    """The target draws, and a child with that token is accepted."""
    found = e.pick(tree.p[node + 1], u)
    return next((n for n in children if tree.tokens[n] == found), None), found


def descend(e: Exact, tree: Tree, decide: Any) -> list[int]:
    """The tokens along the accepted path and the one after it, of a rule that goes down a tree.

    Siblings of one token continue one text, so that the children of all of them come next.
    """
    nodes, out = [-1], list[int]()
    while True:
        children = tree.children(nodes)
        node, drawn = decide(e, tree, nodes[0], children, tree.draws[len(out)])
        if node is None:
            return [*out, drawn]
        out.append(tree.tokens[node])
        nodes = [n for n in children if tree.tokens[n] == tree.tokens[node]]
        nodes.sort(key=lambda n: n != node)


def traversal(e: Exact, tree: Tree) -> list[int]:
    """Weng et al. 2025, algorithm 1: from the leaves to the root."""

    def visit(path: list[int], a: Fraction) -> list[int] | None:
        """The tokens that follow, if the path or a longer one is accepted."""
        node = path[-1] if path else -1
        p, q = tree.p[node + 1], tree.q[node + 1]
        for n in tree.children([node]):
            x = tree.tokens[n]
            below = visit([*path, n], min(ONE, a * p[x] / q[x]) if q[x] else Fraction(a * p[x] > 0))
            if below is not None:
                return below
            residual = difference([a * w for w in p], q)
            if not any(residual):
                p, a = (p, ONE) if a == 1 else (p, ZERO)
                break
            total = sum(residual, ZERO)
            a, p = total / (total + 1 - a), normalized(residual)
        if path and not e.accepts(tree.accept[node], a, ONE):
            return None
        drawn = e.pick_residual(p, tree.p[node + 1], tree.draws[len(path)])
        return [*(tree.tokens[n] for n in path), drawn]

    found = visit([], ONE)
    assert found is not None, "the root is accepted"
    return found


def compare(verdict: Any, wanted: Sequence[tuple[list[int], Fraction]], near: float
            ) -> tuple[list[int], list[int]]:  # fmt: skip
    """The sequences whose tokens are unlike those wanted, and those whose margin is too small.

    wanted: the tokens of each sequence, and how near its comparisons were.
    """
    assert not verdict.status.any()
    found = verdict.tokens.tolist()
    close = [b for b, (_, margin) in enumerate(wanted) if margin < near]
    unlike = [
        b
        for b, (tokens, _) in enumerate(wanted)
        if b not in close and found[b] != tokens + [-1] * (len(found[b]) - len(tokens))
    ]
    return unlike, close


# Random sequences.

# Uneven, so that no sum of sixteenths, nor of their squares, is a threshold.
FILTERS = {"top_k": (0, 2, 3), "top_p": (1.0, 0.773), "min_p": (0.0, 0.157)}


@dataclass
class Batch:
    """Rows of random sequences as floats, which hold their numerators, and their parameters.

    Attributes:
        p: [B, n, V] sixteenths. q: [B, m, V].
        power: [B], of temperature 1 / power.
        filters: [B] each; none of them is on where the whole batch is unfiltered.
    """

    p: Any
    q: Any
    power: Any
    filters: dict[str, Any]
    kind: str

    @classmethod
    def draw(cls, rng: Any, size: int, n: int, m: int, v: int, kind: str, filtered: bool) -> Batch:
        filters = {
            name: rng.choice(values if filtered else values[:1], size)
            for name, values in FILTERS.items()
        }
        power = rng.integers(1, 3, size) if filtered else np.ones(size, dtype=np.int64)
        return cls(sixteenths(rng, (size, n, v)), sixteenths(rng, (size, m, v)), power, filters,
                   kind)  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """Of an op, beside the rows."""
        filters = {name: torch.from_numpy(value) for name, value in self.filters.items()}
        return {"kind": self.kind, "temperature": torch.from_numpy(1.0 / self.power), **filters}

    def given(self, rows: Any) -> torch.Tensor:
        """Rows as an op takes them: float32, probabilities or their logarithms."""
        rows = torch.from_numpy(rows).float()
        return rows if self.kind == "probs" else rows.log()

    def rational(self, b: int) -> tuple[list[Row], list[Row]]:
        """P and Q of sequence ``b``. Logits of drafts have its temperature, and no filters."""
        parameters = int(self.power[b]), *(self.filters[name][b] for name in FILTERS)
        p = [filtered(fractions(row), *parameters) for row in self.p[b]]
        power = 1 if self.kind == "probs" else parameters[0]
        return p, [normalized([w**power for w in fractions(row)]) for row in self.q[b]]


def sixteenths(rng: Any, shape: tuple[int, ...]) -> Any:
    """Probabilities that are multiples of 1/16, zeros among them: floats hold them exactly."""
    counts = rng.multinomial(16, rng.dirichlet(np.full(shape[-1], 0.7), shape[:-1]))
    return counts.astype(np.float64) / 16
