"""The exact law that a verifier of trees realises, from every cell of its random inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec_kernels.testing.drawn_trees import lineage
from specdec_kernels.testing.enumeration import TOP, RealizedDistribution, bisect

TreeVerify = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_NEAR = 2.0**-22


@dataclass(frozen=True)
class Trials:
    """Where the coin of a node decided: acceptance, measured.

    drafts: [T, N]; uniforms: [T, 2N+1], a point at which the rule comes to the node; nodes: [T];
    edges: [T] float64, the node stands for coins below.
    """

    drafts: Tensor
    uniforms: Tensor
    nodes: Tensor
    edges: Tensor


@dataclass(frozen=True)
class RealizedTreeDistribution(RealizedDistribution):
    """`RealizedDistribution` of a tree, whose depth takes the place of gamma.

    nodes: [N] float64, probability that each node is on the accepted path.
    trials: the coins that decided.
    """

    nodes: Tensor
    trials: Trials


def enumerate_tree_distribution(
    verify: TreeVerify,
    parents: Sequence[int],
    drafts: Tensor,
    weights: Tensor,
    target: Sequence[Tensor],
    *,
    upward: bool = False,
    steps: int = 32,
    like: TreeVerify | None = None,
) -> RealizedTreeDistribution:
    """The exact law that a verifier of trees realises, from every cell of its random inputs.

    Every tuple of drafted tokens, weighted, times every cell of the coins and draws. The cells are
    found in the order in which a rule comes to its uniforms, which the tree and what was emitted
    so far tell: the coin of each child where the path has come to, shown by the node on the path,
    then the draw there, shown by the token. Each edge is bisected on the verifier itself. Cells
    are then evaluated at inner points of all uniforms, which must agree, so that a rule that asks
    another uniform than its own is seen.

    Args:
        verify: (drafts [C, N], uniforms [C, 2N+1]) -> (path [C, D], tokens [C, D+1]), as
            `verify_tree` has them; D is the depth of the tree or more.
        parents: [N], -1 the root; parents[n] < n.
        drafts, weights: [C, N] and [C], as from `drawn_trees`.
        target: conditionals of the target, target[i] [V] * (i + 1) float64, one more than the tree
            is deep.
        upward: the rule goes from the leaves to the root (traversal): the coin of a node comes
            after those below it, and nothing follows the draw.
        steps: bisection steps; an edge is known to 2^-steps.
        like: a faster verifier to learn the cells from. `verify` is then tried in the middle of
            each cell and near each of its faces, where a mass of 2^-22 is cut off, and its own
            cells are measured if it differs anywhere.

    Raises:
        ValueError: a coin decides only for some values of uniforms that come later, or an inner
            point of a cell gives another answer.

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
        cells, trials = _Walk(like, parents, v, upward, steps).run(drafts)
        path, tokens = like(cells.drafts, cells.middle())
    if like is None or not _agrees(verify, cells, path, tokens, steps):
        cells, trials = _Walk(verify, parents, v, upward, steps).run(drafts)
        path, tokens = verify(cells.drafts, cells.middle())
        _check_inner_points(verify, cells, path, tokens, steps)
    volume = (cells.high - cells.low).prod(-1) * weights[cells.origin]
    counts = (path >= 0).sum(-1)
    accepted = torch.zeros(len(target), dtype=torch.float64).index_add_(0, counts, volume)
    on_path = torch.stack([(path == n).any(-1) for n in range(len(parents))], -1)
    return RealizedTreeDistribution(
        _joint(tokens, volume, target),
        accepted,
        len(volume),
        (on_path * volume[:, None]).sum(0),
        trials,
    )


def _joint(tokens: Tensor, volume: Tensor, target: Sequence[Tensor]) -> Tensor:
    """What follows the emitted tokens is the target's own continuation."""
    v = target[0].shape[-1]
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
    """Boxes of uniforms, S of them, and how far the rule has come in each.

    origin: [S], the row of `drafts`. low, high: [S, 2N+1]. asked: [S, 2N+1], uniforms that were
    consulted. settled: [S, N], nodes whose coin is past. members: [S, N+1], the nodes (0 the root)
    that the path has come to. depth: [S].
    """

    origin: Tensor
    drafts: Tensor
    low: Tensor
    high: Tensor
    asked: Tensor
    settled: Tensor
    members: Tensor
    depth: Tensor

    def take(self, index: Tensor) -> _Cells:
        return _Cells(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def middle(self) -> Tensor:
        return (self.low + self.high) / 2

    def point(self, coins: float, draws: float) -> Tensor:
        """[S, 2N+1]: in the middle of what was consulted, elsewhere as given."""
        n = self.drafts.shape[1]
        rest = torch.full_like(self.low, draws)
        rest[:, :n] = coins
        return torch.where(self.asked, self.middle(), rest)

    def cut(self, column: Tensor, low: Tensor, high: Tensor) -> _Cells:
        at = column[:, None]
        return replace(
            self,
            low=self.low.scatter(1, at, low[:, None]),
            high=self.high.scatter(1, at, high[:, None]),
            asked=self.asked.scatter(1, at, True),
        )


def _join(parts: list[_Cells]) -> _Cells:
    return _Cells(
        *(torch.cat([getattr(p, name) for p in parts]) for name in _Cells.__dataclass_fields__)
    )


class _Walk:
    """Splits the cells at the next uniform that is consulted in each, until none is left."""

    def __init__(
        self, verify: TreeVerify, parents: Sequence[int], v: int, upward: bool, steps: int
    ) -> None:
        self.verify, self.v, self.upward, self.steps = verify, v, upward, steps
        # Of a cell narrower than this an evaluation in float64 may not find the inside.
        self.narrow = max(2.0 ** (2 - steps), 2.0**-28)
        self.parents = torch.tensor(list(parents), dtype=torch.int64)
        self.depths = torch.tensor([len(lineage(parents, n)) - 1 for n in range(len(parents))])
        # Of several nodes that can be next, the one of lowest turn is.
        order = _leaves_first(parents) if upward else list(range(len(parents)))
        self.turn = torch.tensor([order.index(n) for n in range(len(parents))], dtype=torch.int64)
        self.trials: list[Trials] = []

    def run(self, drafts: Tensor) -> tuple[_Cells, Trials]:
        c, n = drafts.shape
        members = torch.zeros(c, n + 1, dtype=torch.bool)
        members[:, 0] = True
        low = torch.zeros(c, 2 * n + 1, dtype=torch.float64)
        nothing = torch.zeros_like(low, dtype=torch.bool)
        cells = _Cells(
            torch.arange(c), drafts, low, torch.ones_like(low), nothing, nothing[:, :n], members,
            torch.zeros(c, dtype=torch.int64),
        )  # fmt: skip
        done: list[_Cells] = [cells.take(torch.zeros(0, dtype=torch.int64))]
        while len(cells.origin):
            column = self._next(cells)
            coins = column < n
            tried = self._try(cells.take(coins), column[coins])
            drawn, over = self._draw(cells.take(~coins), column[~coins])
            done.append(drawn.take(over))
            cells = _join([tried, drawn.take(~over)])
        return _join(done), self._trials(n)

    def _trials(self, n: int) -> Trials:
        nothing = Trials(
            torch.zeros(0, n, dtype=torch.int64), torch.zeros(0, 2 * n + 1, dtype=torch.float64),
            torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64),
        )  # fmt: skip
        parts = [nothing, *self.trials]
        names = Trials.__dataclass_fields__
        return Trials(*(torch.cat([getattr(t, name) for t in parts]) for name in names))

    def _children(self, cells: _Cells) -> Tensor:
        """[S, N]: present nodes below the members."""
        return cells.members[:, self.parents + 1] & (cells.drafts >= 0)

    def _next(self, cells: _Cells) -> Tensor:
        """[S]: the column of the uniform that is consulted next."""
        n = cells.drafts.shape[1]
        candidates = (cells.drafts >= 0 if self.upward else self._children(cells)) & ~cells.settled
        draw = n + cells.depth
        if n == 0:
            return draw
        first = (candidates * (n - self.turn)).argmax(-1)
        return torch.where(candidates.any(-1), first, draw)

    def _try(self, cells: _Cells, node: Tensor) -> _Cells:
        """Splits at the coin of a node."""

        def stands(cells: _Cells, node: Tensor, u: Tensor, coins: float, draws: float) -> Tensor:
            at = node[:, None]
            uniforms = cells.point(coins, draws).scatter(1, at, u[:, None])
            return (self.verify(cells.drafts, uniforms)[0] == at).any(-1)

        first = torch.zeros(len(node), dtype=torch.float64)
        contexts = [(coins, draws) for coins in (0.0, TOP) for draws in (0.0, TOP)]
        low = torch.stack([stands(cells, node, first, *c) for c in contexts])
        high = torch.stack([stands(cells, node, first + TOP, *c) for c in contexts])
        turns = (low & ~high).all(0)
        idle = (low == high).all(0)
        if not bool((turns | idle).all()):
            s = int((~(turns | idle)).nonzero()[0])
            raise ValueError(
                f"not constant in a cell: node {int(node[s])} of draft {cells.drafts[s].tolist()} "
                f"stands by its coin only for some of the uniforms that come later"
            )
        moving, moved = cells.take(turns), node[turns]
        edge = bisect(lambda u: stands(moving, moved, u, 0.5, 0.5), len(moved), self.steps)
        self.trials.append(Trials(moving.drafts, moving.point(0.5, 0.5), moved, edge))
        up = moving.cut(moved, torch.zeros_like(edge), edge)
        down = moving.cut(moved, edge, torch.ones_like(edge))
        wide = 1 - edge > self.narrow
        sure = idle & low.all(0)
        unclear = idle & ~sure
        return _join([
            self._accept(up, moved).take(edge > self.narrow),
            self._settle(down, moved).take(wide),
            self._accept(cells.take(sure), node[sure]),
            self._settle(cells.take(unclear), node[unclear]),
        ])  # fmt: skip

    def _settle(self, cells: _Cells, node: Tensor) -> _Cells:
        return replace(cells, settled=cells.settled.scatter(1, node[:, None], True))

    def _accept(self, cells: _Cells, node: Tensor) -> _Cells:
        if self.upward:
            return replace(
                cells, settled=torch.ones_like(cells.settled), depth=self.depths[node] + 1
            )
        return self._descend(cells, cells.drafts.gather(1, node[:, None]))

    def _descend(self, cells: _Cells, token: Tensor) -> _Cells:
        """To all children with the token [S, 1]."""
        below = self._children(cells) & (cells.drafts == token)
        members = torch.nn.functional.pad(below, (1, 0))
        return replace(cells, members=members, depth=cells.depth + 1)

    def _draw(self, cells: _Cells, column: Tensor) -> tuple[_Cells, Tensor]:
        """Splits at the draw of a token; [S] whether the rule ends with it."""
        s, v = len(column), self.v
        repeated = cells.take(torch.arange(s).repeat_interleave(v))
        columns = column.repeat_interleave(v)[:, None]
        depths = repeated.depth[:, None]
        ids = torch.arange(v).repeat(s)

        def at_most(u: Tensor) -> Tensor:
            uniforms = repeated.point(0.5, 0.5).scatter(1, columns, u[:, None])
            return self.verify(repeated.drafts, uniforms)[1].gather(1, depths)[:, 0] <= ids

        edges = bisect(at_most, s * v, self.steps).view(s, v)
        left = torch.nn.functional.pad(edges[:, :-1], (1, 0)).flatten()
        right = edges.flatten()
        wide = right - left > self.narrow
        out = repeated.cut(columns[:, 0], left, right).take(wide)
        path, tokens = self.verify(out.drafts, out.point(0.5, 0.5))
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
    """Whether a verifier gives these answers in the middle of cells and near all their faces."""
    generator = torch.Generator().manual_seed(0)
    columns = cells.low.shape[1]
    rows, points = [], []
    width = cells.high - cells.low
    # A face that is misplaced so far moves so little mass.
    volume = width.prod(-1, keepdim=True)
    off = torch.minimum(_NEAR * width / volume, width / 4)
    large = volume[:, 0] > _NEAR  # one verifier's rounding makes smaller ones, another's does not
    rows.append(large.nonzero()[:, 0])
    points.append(cells.middle()[large])
    for column in range(columns):
        for face, inward in ((cells.low, off), (cells.high, -off)):
            here = (large & (face[:, column] > 0) & (face[:, column] < 1)).nonzero()[:, 0]
            point = _inner(cells, generator, steps)[here]
            point[:, column] = (face + inward)[here, column]
            rows.append(here)
            points.append(point)
    index = torch.cat(rows)
    wrong = _differs(verify(cells.drafts[index], torch.cat(points)), path[index], tokens[index])
    return not bool(wrong.any())


def _inner(cells: _Cells, generator: torch.Generator, steps: int) -> Tensor:
    """[S, 2N+1]: points inside, farther from the faces than the faces are uncertain."""
    inner = torch.rand(cells.low.shape, generator=generator, dtype=torch.float64)
    width = cells.high - cells.low
    margin = (0.001 * width).clamp(min=2.0**-steps)
    return cells.low + margin + inner * (width - 2 * margin)


def _check_inner_points(
    verify: TreeVerify, cells: _Cells, path: Tensor, tokens: Tensor, steps: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        answer = verify(cells.drafts, _inner(cells, generator, steps))
        wrong = _differs(answer, path, tokens).nonzero()
        if len(wrong):
            c = int(wrong[0])
            raise ValueError(
                f"not constant in a cell: draft {cells.drafts[c].tolist()}, uniforms from "
                f"{cells.low[c].tolist()} to {cells.high[c].tolist()}: {tokens[c].tolist()} and "
                f"{answer[1][c].tolist()}"
            )
