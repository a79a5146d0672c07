"""The exact distribution that a tree verifier realizes, measured over all its random inputs.

`proofs.enumeration` explains cells. A tree has too many uniforms to cut each of
them for every outcome of the others, so cells are split in the order in which the rule itself
compares its uniforms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proofs.drawn_trees import lineage
from proofs.enumeration import (
    LARGEST_UNIFORM,
    RealizedDistribution,
    bisect,
    check_constant,
    check_in_vocabulary,
)

TreeVerify = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_NEAR = 2.0**-22


@dataclass(frozen=True)
class Decisions:
    """Where the acceptance uniform of a node decided, and the acceptance probability it showed.

    drafts: [T, N]. uniforms: [T, 2N+1], with which the rule comes to try the node. nodes: [T].
    accept_probs: [T] float64, the node is accepted if its uniform is lower.
    """

    drafts: Tensor
    uniforms: Tensor
    nodes: Tensor
    accept_probs: Tensor


@dataclass(frozen=True)
class RealizedTreeDistribution(RealizedDistribution):
    """`RealizedDistribution` of a tree, whose depth takes the place of gamma.

    nodes: [N] float64, probability that each node is on the accepted path.
    decisions: every decision on a node that its uniform made.
    """

    nodes: Tensor
    decisions: Decisions


def enumerate_tree_distribution(
    verify, parents, drafts, weights, target, *, upward=False, steps=32, like=None
) -> RealizedTreeDistribution:
    """Measures a verifier on every tuple of drafted tokens and every cell of its uniforms.

    Cells are split in the order in which the rule uses its uniforms, which follows from the tree
    and from the tokens emitted so far: first the acceptance uniform of each child of the last
    accepted node (the path shows whether the child was accepted), then the uniform that draws the
    token there (the token shows where it falls). Each edge is found by bisection on the verifier
    itself. Each cell is then evaluated at inner places of all uniforms, which must agree, so that a
    rule that uses a wrong uniform is noticed.

    Args:
        verify: (drafts [C, N], uniforms [C, 2N+1]) -> (path [C, D], tokens [C, D+1]), as
            `verify_tree` takes and returns them; D is at least the depth of the tree.
        drafts, weights: [C, N] and [C], as from `drawn_trees`.
        target, steps: as of `enumerate_distribution`.
        upward: the rule goes from the leaves to the root (traversal): the uniform of a node is used
            after those of its descendants, and nothing is used after the draw.
        like: a faster verifier whose cells are tried first: if `verify` gives the same answers in
            the middle of each cell and near each of its faces (where a mass of 2^-22 is cut off),
            its own cells are not measured.

    >>> def verify(drafts, uniforms):
    ...     token = (uniforms[:, 1:2] >= 0.25).long()
    ...     return torch.full_like(drafts, -1), torch.nn.functional.pad(token, (0, 1), value=-1)
    >>> target = [torch.tensor([0.25, 0.75]).double(), torch.full((2, 2), 0.5).double()]
    >>> one = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    >>> enumerate_tree_distribution(verify, [-1], *one, target).joint
    tensor([[0.1250, 0.1250],
            [0.3750, 0.3750]], dtype=torch.float64)
    """
    v = target[0].shape[-1]
    if like is not None:
        cells, decisions = _Splitter(like, parents, v, upward, steps).run(drafts)
        path, tokens = like(cells.drafts, cells.middle())
    if like is None or not _agrees(verify, cells, path, tokens, steps):
        cells, decisions = _Splitter(verify, parents, v, upward, steps).run(drafts)
        path, tokens = verify(cells.drafts, cells.middle())
        _check_inner_places(verify, cells, path, tokens, steps)
    volume = (cells.high - cells.low).prod(-1) * weights[cells.origin]
    counts = (path >= 0).sum(-1)
    accepted = torch.zeros(len(target), dtype=torch.float64).index_add_(0, counts, volume)
    on_path = torch.stack([(path == n).any(-1) for n in range(len(parents))], -1)
    return RealizedTreeDistribution(
        _joint(tokens, volume, target), accepted, (on_path * volume[:, None]).sum(0), decisions
    )


def _joint(tokens: Tensor, volume: Tensor, target: Sequence[Tensor]) -> Tensor:
    """Joint distribution; the target's own distribution goes on after the emitted tokens."""
    v = target[0].shape[-1]
    check_in_vocabulary(tokens[tokens >= 0], v)
    emitted = (tokens >= 0).sum(-1)
    joint = torch.zeros((), dtype=torch.float64)
    for length in range(len(target) + 1):
        here = emitted == length
        code = torch.zeros_like(tokens[here, 0])
        for i in range(min(length, tokens.shape[1])):
            code = code * v + tokens[here, i]
        mass = torch.zeros(v**length, dtype=torch.float64).index_add_(0, code, volume[here])
        joint = joint + mass.view((v,) * length)
        if length < len(target):
            joint = joint[..., None] * target[length]
    return joint


@dataclass(frozen=True)
class _Cells:
    """S cells, and how far the rule has come in each.

    origin: [S], the row of `drafts`. low, high: [S, 2N+1], the corners. used: [S, 2N+1], uniforms
    that the rule has used. tried: [S, N], nodes that were tried. members: [S, N+1], the last
    accepted nodes, siblings of one token together; index 0 is the root. depth: [S].
    """

    origin: Tensor
    drafts: Tensor
    low: Tensor
    high: Tensor
    used: Tensor
    tried: Tensor
    members: Tensor
    depth: Tensor

    def take(self, index: Tensor) -> _Cells:
        return _Cells(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def middle(self) -> Tensor:
        return (self.low + self.high) / 2

    def uniforms(self, acceptance: float, draws: float) -> Tensor:
        """[S, 2N+1]: the middle of the cell for used uniforms, the given values for the others."""
        n = self.drafts.shape[1]
        rest = torch.full_like(self.low, draws)
        rest[:, :n] = acceptance
        return torch.where(self.used, self.middle(), rest)

    def cut(self, column: Tensor, low: Tensor, high: Tensor) -> _Cells:
        """The parts of the cells between two values of one uniform each."""
        at = column[:, None]
        return replace(
            self,
            low=self.low.scatter(1, at, low[:, None]),
            high=self.high.scatter(1, at, high[:, None]),
            used=self.used.scatter(1, at, True),
        )


def _join(parts: list[_Cells]) -> _Cells:
    return _Cells(
        *(torch.cat([getattr(p, name) for p in parts]) for name in _Cells.__dataclass_fields__)
    )


class _Splitter:
    """Splits each cell at the next uniform that the rule uses, until it uses no more."""

    def __init__(
        self, verify: TreeVerify, parents: Sequence[int], v: int, upward: bool, steps: int
    ) -> None:
        self.verify, self.v, self.upward, self.steps = verify, v, upward, steps
        # A cell narrower than this is dropped: in float64 its inside may not be found.
        self.narrow = max(2.0 ** (2 - steps), 2.0**-28)
        self.parents = torch.tensor(list(parents), dtype=torch.int64)
        self.depths = torch.tensor([len(lineage(parents, n)) - 1 for n in range(len(parents))])
        # Nodes are tried in the order of their turn.
        order = _leaves_first(parents) if upward else list(range(len(parents)))
        self.turn = torch.tensor([order.index(n) for n in range(len(parents))], dtype=torch.int64)
        self.decisions: list[Decisions] = []

    def run(self, drafts: Tensor) -> tuple[_Cells, Decisions]:
        c, n = drafts.shape
        members = torch.zeros(c, n + 1, dtype=torch.bool)
        members[:, 0] = True
        low = torch.zeros(c, 2 * n + 1, dtype=torch.float64)
        none = torch.zeros_like(low, dtype=torch.bool)
        cells = _Cells(
            torch.arange(c), drafts, low, torch.ones_like(low), none, none[:, :n], members,
            torch.zeros(c, dtype=torch.int64),
        )  # fmt: skip
        done: list[_Cells] = [cells.take(torch.zeros(0, dtype=torch.int64))]
        while len(cells.origin):
            column = self._next(cells)
            of_nodes = column < n
            tried = self._try(cells.take(of_nodes), column[of_nodes])
            drawn, over = self._draw(cells.take(~of_nodes), column[~of_nodes])
            done.append(drawn.take(over))
            cells = _join([tried, drawn.take(~over)])
        return _join(done), self._all_decisions(n)

    def _all_decisions(self, n: int) -> Decisions:
        none = Decisions(
            torch.zeros(0, n, dtype=torch.int64), torch.zeros(0, 2 * n + 1, dtype=torch.float64),
            torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64),
        )  # fmt: skip
        parts = [none, *self.decisions]
        names = Decisions.__dataclass_fields__
        return Decisions(*(torch.cat([getattr(d, name) for d in parts]) for name in names))

    def _children(self, cells: _Cells) -> Tensor:
        """[S, N]: the children of the members that are not absent."""
        return cells.members[:, self.parents + 1] & (cells.drafts >= 0)

    def _next(self, cells: _Cells) -> Tensor:
        """[S]: the column of the uniform that is used next."""
        n = cells.drafts.shape[1]
        candidates = (cells.drafts >= 0 if self.upward else self._children(cells)) & ~cells.tried
        draw = n + cells.depth
        if n == 0:
            return draw
        first = (candidates * (n - self.turn)).argmax(-1)
        return torch.where(candidates.any(-1), first, draw)

    def _try(self, cells: _Cells, node: Tensor) -> _Cells:
        """Splits at the acceptance uniform of a node."""

        def accepted(cells: _Cells, node: Tensor, u: Tensor, later: float, draws: float) -> Tensor:
            at = node[:, None]
            uniforms = cells.uniforms(later, draws).scatter(1, at, u[:, None])
            return (self.verify(cells.drafts, uniforms)[0] == at).any(-1)

        first = torch.zeros(len(node), dtype=torch.float64)
        ends = (0.0, LARGEST_UNIFORM)
        contexts = [(later, draws) for later in ends for draws in ends]
        low = torch.stack([accepted(cells, node, first, *c) for c in contexts])
        last = first + LARGEST_UNIFORM
        high = torch.stack([accepted(cells, node, last, *c) for c in contexts])
        turns = (low & ~high).all(0)
        idle = (low == high).all(0)
        if not bool((turns | idle).all()):
            s = int((~(turns | idle)).nonzero()[0])
            raise ValueError(
                f"not constant in a cell: node {int(node[s])} of draft {cells.drafts[s].tolist()} "
                f"is accepted by its uniform only for some of the uniforms that come later"
            )
        moving, moved = cells.take(turns), node[turns]
        edge = bisect(lambda _, u: accepted(moving, moved, u, 0.5, 0.5), len(moved), self.steps)
        self.decisions.append(Decisions(moving.drafts, moving.uniforms(0.5, 0.5), moved, edge))
        below = moving.cut(moved, torch.zeros_like(edge), edge)
        above = moving.cut(moved, edge, torch.ones_like(edge))
        wide = 1 - edge > self.narrow
        always = idle & low.all(0)
        not_here = idle & ~always
        return _join([
            self._accept(below, moved).take(edge > self.narrow),
            self._reject(above, moved).take(wide),
            self._accept(cells.take(always), node[always]),
            self._reject(cells.take(not_here), node[not_here]),
        ])  # fmt: skip

    def _reject(self, cells: _Cells, node: Tensor) -> _Cells:
        return replace(cells, tried=cells.tried.scatter(1, node[:, None], True))

    def _accept(self, cells: _Cells, node: Tensor) -> _Cells:
        if self.upward:
            return replace(cells, tried=torch.ones_like(cells.tried), depth=self.depths[node] + 1)
        return self._descend(cells, cells.drafts.gather(1, node[:, None]))

    def _descend(self, cells: _Cells, token: Tensor) -> _Cells:
        """Goes on with all children that have the token [S, 1]."""
        below = self._children(cells) & (cells.drafts == token)
        members = torch.nn.functional.pad(below, (1, 0))
        return replace(cells, members=members, depth=cells.depth + 1)

    def _draw(self, cells: _Cells, column: Tensor) -> tuple[_Cells, Tensor]:
        """Splits at the uniform that draws a token; also [S], whether the rule ends with it."""
        s, v = len(column), self.v
        last = torch.full((s, 1), LARGEST_UNIFORM, dtype=torch.float64)
        uniforms = cells.uniforms(0.5, 0.5).scatter(1, column[:, None], last)
        highest = self.verify(cells.drafts, uniforms)[1].gather(1, cells.depth[:, None])
        check_in_vocabulary(highest[highest >= 0], v)  # -1 where the path ended before
        cell = torch.arange(s).repeat_interleave(v - 1)
        ids = torch.arange(v - 1).repeat(s)
        tried, columns = cells.take(cell), column[cell][:, None]

        def at_most(_: Tensor, u: Tensor) -> Tensor:
            uniforms = tried.uniforms(0.5, 0.5).scatter(1, columns, u[:, None])
            tokens = self.verify(tried.drafts, uniforms)[1]
            return tokens.gather(1, tried.depth[:, None])[:, 0] <= ids

        found = bisect(at_most, len(ids), self.steps).view(s, v - 1)
        edges = torch.nn.functional.pad(found, (0, 1), value=1.0)
        begin = torch.nn.functional.pad(edges[:, :-1], (1, 0)).flatten()
        end = edges.flatten()
        wide = end - begin > self.narrow
        whole = torch.arange(s).repeat_interleave(v)[wide]
        out = cells.take(whole).cut(column[whole], begin[wide], end[wide])
        path, tokens = self.verify(out.drafts, out.uniforms(0.5, 0.5))
        over = (path >= 0).sum(-1) <= out.depth
        if self.upward:
            over = torch.ones_like(over)
        token = tokens.gather(1, out.depth[:, None])
        below = self._descend(out, token)
        return _join([out.take(over), below.take(~over)]), torch.arange(len(over)) < over.sum()


def _leaves_first(parents: Sequence[int]) -> list[int]:
    def below(node: int) -> list[int]:
        children = [n for n, p in enumerate(parents) if p == node]
        return [m for n in children for m in below(n)] + [node]

    return below(-1)[:-1]


def _differs(answer: tuple[Tensor, Tensor], path: Tensor, tokens: Tensor) -> Tensor:
    return (answer[0] != path).any(-1) | (answer[1] != tokens).any(-1)


def _agrees(verify: TreeVerify, cells: _Cells, path: Tensor, tokens: Tensor, steps: int) -> bool:
    """Whether a verifier gives these answers in all cells: in the middle, near faces, at the ends.

    The ends are uniforms of 0 and the largest one.
    """
    generator = torch.Generator().manual_seed(0)
    columns = cells.low.shape[1]
    rows, uniforms = [], []
    width = cells.high - cells.low
    # A face that is misplaced by less than this moves a mass of less than 2^-22.
    volume = width.prod(-1, keepdim=True)
    off = torch.minimum(_NEAR * width / volume, width / 4)
    large = volume[:, 0] > _NEAR  # smaller cells may be due to the rounding of one verifier
    lowest = torch.where(cells.low == 0, 0.0, _inner(cells, generator, steps))
    highest = torch.where(cells.high == 1, LARGEST_UNIFORM, _inner(cells, generator, steps))
    for places in (cells.middle(), lowest, highest):
        rows.append(large.nonzero()[:, 0])
        uniforms.append(places[large])
    for column in range(columns):
        for face, inward in ((cells.low, off), (cells.high, -off)):
            here = (large & (face[:, column] > 0) & (face[:, column] < 1)).nonzero()[:, 0]
            inner = _inner(cells, generator, steps)[here]
            inner[:, column] = (face + inward)[here, column]
            rows.append(here)
            uniforms.append(inner)
    index = torch.cat(rows)
    answer = verify(cells.drafts[index], torch.cat(uniforms))
    wrong = _differs(answer, path[index], tokens[index])
    return not bool(wrong.any())


def _inner(cells: _Cells, generator: torch.Generator, steps: int) -> Tensor:
    """[S, 2N+1]: uniforms inside the cells, farther from the faces than these are uncertain."""
    inner = torch.rand(cells.low.shape, generator=generator, dtype=torch.float64)
    width = cells.high - cells.low
    margin = (0.001 * width).clamp(min=2.0**-steps)
    return cells.low + margin + inner * (width - 2 * margin)


def _check_inner_places(
    verify: TreeVerify, cells: _Cells, path: Tensor, tokens: Tensor, steps: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        answer = verify(cells.drafts, _inner(cells, generator, steps))
        wrong = _differs(answer, path, tokens)
        check_constant(wrong, cells.drafts, cells.low, cells.high, tokens, answer[1])
