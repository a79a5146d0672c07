"""Trees that are timed: a point of their grid, its inputs, and the bytes that its answer needs."""

from __future__ import annotations

import functools
import heapq
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import eager
from bench.configs import (
    COPIES,
    DTYPES,
    FILTERS,
    POOL,
    SHORT,
    TURNS,
    Turn,
    parameters,
    pool,
)
from specdec_kernels.ops.verify_tree import Tree, TreeVerdict, verify_tree

RULES = ("greedy", "target_only", "multi_draft", "multi_draft_wor", "traversal")
OTHERS = ("match", "top_k_plus_one", "k_seq", "typical")  # at fewer points
# Rule -> how its siblings come about; of the others they are the draft's most likely tokens.
DRAWN = {
    "multi_draft": "with",
    "k_seq": "with",
    "traversal": "with",
    "multi_draft_wor": "without",
    "top_k_plus_one": "last",
}
SETS = 16  # of siblings drawn for each distinct row
FIRST, DEPTH = 0.6, 8  # probability that the first child of a node stands; the deepest tree


@dataclass(frozen=True)
class TreePoint:
    """One place of the grid of `verify_tree`. Fields as in `Point`; nodes is N of each tree.

    start: "logits", or "probs" for rule target_only alone.
    """

    batch: int = 8
    nodes: int = 16
    vocabulary: int = 49152
    dtype: str = "float32"
    rule: str = "multi_draft"
    filters: str = "t.8"
    acceptance: float = 0.8
    start: str = "logits"
    per_sequence: bool = False

    @property
    def id(self) -> str:
        words = [f"B{self.batch}", f"N{self.nodes}", f"V{self.vocabulary}", SHORT[self.dtype]]
        words += [self.rule, self.filters, f"a{self.acceptance:g}", self.start]
        return "-".join([*words, *(["tensors"] if self.per_sequence else [])])

    @property
    def rows(self) -> int:
        """Rows of target and draft together."""
        drawn = len(set(tree(self.nodes))) if self.rule in DRAWN else 0
        return self.batch * (self.nodes + 1 + drawn)

    @property
    def needed_bytes(self) -> int:
        return self.rows * self.vocabulary * (self.element + 4 * COPIES)

    @property
    def element(self) -> int:
        return 4 if self.start == "probs" else DTYPES[self.dtype].itemsize

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, **asdict(self)}


@functools.cache
def tree(nodes: int) -> tuple[int, ...]:
    """Parents of the most likely nodes, if child k of a node stands with FIRST * (1 - FIRST)^k."""
    parents: list[int] = []
    depth = {-1: 0}
    waiting = [(-FIRST, -1)]  # value, parent; pushed after the parent is numbered
    while len(parents) < nodes:
        value, parent = heapq.heappop(waiting)
        n = len(parents)
        parents.append(parent)
        depth[n] = depth[parent] + 1
        heapq.heappush(waiting, (value * (1 - FIRST), parent))
        if depth[n] < DEPTH:
            heapq.heappush(waiting, (value * FIRST, n))
    return tuple(parents)


class Shape(NamedTuple):
    """Of one tree. children: [N+1, K] int64, those of the root first, then -1."""

    parents: tuple[int, ...]
    children: Tensor
    depth: int

    @classmethod
    def of(cls, parents: tuple[int, ...]) -> Shape:
        below: dict[int, list[int]] = {p: [] for p in range(-1, len(parents))}
        depth = {-1: 0}
        for n, parent in enumerate(parents):
            below[parent].append(n)
            depth[n] = depth[parent] + 1
        widest = max(map(len, below.values()))
        children = torch.full((len(parents) + 1, widest), -1)
        for p, nodes in below.items():
            children[p + 1, : len(nodes)] = torch.tensor(nodes, dtype=torch.int64)
        return cls(parents, children, max(depth.values()))


@dataclass(frozen=True)
class TreeInputs:
    """Tensors of a point: target [B, N+1, V], and draft [B, M, V] of the nodes with children."""

    point: TreePoint
    shape: Shape
    target: Tensor
    draft: Tensor | None  # None for rules whose siblings were not sampled
    draft_rows: Tensor | None  # [B, N] int32
    parents: Tensor  # [B, N] int64
    turns: list[Turn]  # tokens [B, N]
    temperature: float | Tensor
    top_k: int | Tensor
    top_p: float | Tensor
    positions: Tensor


@functools.lru_cache(maxsize=16)
def _siblings(v: int, acceptance: float, dtype: str, t: float, how: str, width: int) -> Tensor:
    """[POOL, SETS, width] children of a node whose draft is that row of the pool.

    how: with or without replacement, "top" as they are, or "last": column k is drawn off the top k.
    """
    q = eager.filtered(pool(v, acceptance)[1].to(DTYPES[dtype]), t, 0, 1.0)
    g = torch.Generator().manual_seed(2)
    if how == "with":
        drawn = torch.multinomial(q, SETS * width, replacement=True, generator=g)
        return drawn.view(POOL, SETS, width)
    if how == "without":
        again = q.repeat_interleave(SETS, 0)
        return torch.multinomial(again, width, generator=g).view(POOL, SETS, width)
    top = q.topk(width, -1).indices
    if how == "last":
        off = [
            q.scatter(1, top[:, :k], 0.0).multinomial(SETS, True, generator=g) for k in range(width)
        ]
        return torch.stack(off, -1)
    return top[:, None].expand(-1, SETS, -1)


def build(point: TreePoint, device: str = "cpu") -> TreeInputs:
    """The point's tensors; the same values on every device."""
    b, n = point.batch, point.nodes
    shape = Shape.of(tree(n))
    target, draft = (
        rows.to(DTYPES[point.dtype]) for rows in pool(point.vocabulary, point.acceptance)
    )
    if point.start == "probs":
        target = eager.filtered(target, *FILTERS[point.filters])
    pick = (torch.arange(b * (n + 1)) % POOL).view(b, n + 1)
    parents = torch.tensor(shape.parents)
    inside = parents.unique()  # nodes with children, the root among them
    rank = (shape.children[parents + 1] == torch.arange(n)[:, None]).long().argmax(-1)
    laws = point.vocabulary, point.acceptance, point.dtype, FILTERS[point.filters][0]
    how, width = DRAWN.get(point.rule, "top"), shape.children.shape[1]
    families = _siblings(*laws, "top" if how == "last" else how, width)
    if how == "last":
        last = rank + 1 == (shape.children[parents + 1] >= 0).sum(-1)
        rank = torch.where(last, rank + width, rank)
        families = torch.cat([families, _siblings(*laws, how, width)], -1)
    turns = []
    for i in range(TURNS):
        of = (i + 5 * torch.arange(b)[:, None] + 3 * parents) % SETS
        tokens = families[pick[:, parents + 1], of, rank]
        turns.append(Turn(tokens.to(device), (torch.arange(b) + b * i).to(device)))
    drawn = point.rule in DRAWN
    pick = pick.to(device)
    rows = torch.searchsorted(inside, parents).int().expand(b, n).contiguous()
    return TreeInputs(
        point=point,
        shape=shape,
        target=target.to(device)[pick],
        draft=draft.to(device)[pick[:, (inside + 1).to(device)]] if drawn else None,
        draft_rows=rows.to(device) if drawn else None,
        parents=parents.expand(b, n).contiguous().to(device),
        turns=turns,
        **parameters(point, device),
        positions=torch.full((b,), 100, device=device),
    )


def call(inputs: TreeInputs, turn: Turn, *, with_accept_probs: bool = False) -> TreeVerdict:
    """The public function on one turn."""
    return verify_tree(
        inputs.target,
        Tree(turn.tokens, inputs.parents),
        inputs.draft,
        rule=inputs.point.rule,  # type: ignore[arg-type]
        draft_rows=inputs.draft_rows,
        kind="probs" if inputs.point.start == "probs" else "logits",
        temperature=inputs.temperature,
        top_k=inputs.top_k,
        top_p=inputs.top_p,
        seeds=turn.seeds,
        positions=inputs.positions,
        max_depth=inputs.shape.depth,
        with_accept_probs=with_accept_probs,
    )


class Visits(NamedTuple):
    """What the verdicts of all turns looked at, a sequence: [TURNS, B] each.

    targets, drafts: rows of which the rule needs all. judged: nodes. rejected: of them, by coin.
    """

    accepted: Tensor
    targets: Tensor
    drafts: Tensor
    judged: Tensor
    rejected: Tensor


def visits(inputs: TreeInputs) -> Visits:
    """Calls every turn once more, with `acceptance`, which is NaN where the rule did not look."""
    found = []
    drawn = inputs.draft_rows is not None
    for turn in inputs.turns:
        verdict = call(inputs, turn, with_accept_probs=True)
        judged = ~verdict.acceptance.isnan()
        nodes = torch.arange(inputs.point.nodes, device=judged.device)
        accepted = (verdict.path[..., None] == nodes).any(1)
        tried = judged | accepted  # an ancestor of what stands was never judged by traversal
        n = verdict.num_accepted
        drafts = n * 0
        if inputs.draft is not None:
            rows = torch.arange(inputs.draft.shape[1], device=judged.device)
            drafts = ((inputs.draft_rows[..., None] == rows) & tried[..., None]).any(1).sum(-1)
        every = tried if inputs.point.rule == "traversal" else accepted
        rejected = (judged & ~accepted).sum(-1) if drawn else n * 0
        found.append((n, 1 + every.sum(-1), drafts, tried.sum(-1), rejected))
    return Visits(*(torch.stack(counts).cpu() for counts in zip(*found, strict=True)))


def floor_bytes(point: TreePoint, seen: Visits) -> float:
    """Bytes an exact rule cannot do without, mean over calls: every row it visits, once.

    Raw logits need every visited row for its normaliser. Probabilities, for rule target_only, an
    entry for each child and the row that the last token is drawn from.
    """
    row = point.vocabulary * point.element
    if point.start == "probs":
        needed = row + point.element * seen.judged
    else:
        needed = row * (seen.targets + seen.drafts)
    return float(needed.double().sum(-1).mean())


def touched_bytes(point: TreePoint, seen: Visits) -> float:
    """Bytes our kernels read without filters: target and draft once more for each rejection.

    Without replacement the draft a third time, for its mass off the tokens that were tried. Of
    top_k_plus_one an upper bound, for its top is judged without a pass; of k_seq a lower one, for
    what is accepted with some factors is summed several times.
    """
    row = point.vocabulary * point.element
    again = 3 if point.rule == "multi_draft_wor" else 2
    rows = seen.targets + seen.drafts + again * seen.rejected
    return float((row * rows).double().sum(-1).mean())


# Every rule over N comes first: a budget that runs out costs other points.
_CUDA = TreePoint(8, 16, 128256, "bfloat16", per_sequence=True)
_EVERY_B, _EVERY_N = (1, 8, 64), (8, 16, 64)


def _cpu() -> list[TreePoint]:
    base = TreePoint()
    points = [replace(base, rule=rule) for rule in RULES]
    points += [replace(base, batch=1, nodes=n) for n in _EVERY_N]
    points += [replace(base, filters=f, rule=r) for f in FILTERS for r in RULES[1:3]]
    points += [replace(base, batch=1, nodes=64, vocabulary=128256, rule=rule) for rule in RULES]
    points += [replace(base, rule=rule) for rule in OTHERS]
    return points


def _cuda(quick: bool) -> list[TreePoint]:
    base = _CUDA
    points = [replace(base, rule=rule, nodes=n) for rule in RULES for n in _EVERY_N]
    points += [
        replace(base, rule=r, batch=b, nodes=n) for b in _EVERY_B for n in _EVERY_N for r in RULES
    ]
    probs = replace(base, rule="target_only", dtype="float32", start="probs", per_sequence=False)
    points += [replace(probs, batch=b, nodes=n) for b in _EVERY_B for n in _EVERY_N]
    points += [replace(base, filters=f, rule=r) for f in FILTERS for r in RULES[1:]]
    points += [replace(base, dtype="float32", rule=r) for r in RULES]
    points += [replace(base, batch=b, rule=r) for r in OTHERS for b in _EVERY_B]
    if not quick:
        points += [replace(base, nodes=n, rule=r) for r in OTHERS for n in _EVERY_N]
        points += [replace(point, dtype="float32") for point in points]
    return points


def grid(device: str, *, quick: bool = False) -> list[TreePoint]:
    """Rules over B and N, then probabilities as they are, filters and dtypes."""
    return list(dict.fromkeys(_cpu() if device == "cpu" else _cuda(quick)))
