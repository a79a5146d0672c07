"""Configs of `verify_tree`: the grid, the inputs of a config, and the bytes it has to read."""

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
from specdec_kernels.arguments.rules import TREE_RULES
from specdec_kernels.ops.verify_tree import Tree, TreeVerdict, verify_tree

OTHERS = ("match", "top_k_plus_one", "k_seq", "typical")  # timed at fewer configs
RULES = tuple(rule for rule in TREE_RULES if rule not in OTHERS)
# Rule -> how siblings are drawn from the draft (see `_siblings`). Other rules get the draft's most
# likely tokens.
DRAWN = {
    "multi_draft": "with",
    "k_seq": "with",
    "traversal": "with",
    "multi_draft_wor": "without",
    "top_k_plus_one": "last",
}
SETS = 16  # sets of siblings that are drawn for each distinct row
FIRST, DEPTH = 0.6, 8  # acceptance probability of a node's first child; depth of the deepest tree


@dataclass(frozen=True)
class TreeConfig:
    """One setting of `verify_tree`, with fields as in `Config`.

    nodes: N, the number of nodes of each tree.
    start: "logits", or "probs" for rule target_only only.
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
    """Parents of a tree of the most likely nodes.

    Child k of a node is assumed to be accepted with probability FIRST * (1 - FIRST)^k.
    """
    parents: list[int] = []
    depth = {-1: 0}
    waiting = [(-FIRST, -1)]  # (-probability, parent) of nodes whose parent is in the tree
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
    """The shape of one tree.

    children: [N+1, K] int64; row 0 has the root's children, row n+1 those of node n, then -1.
    """

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
    """Tensors of a config; target is [B, N+1, V], draft is [B, M, V] for M nodes with children."""

    config: TreeConfig
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
    """Tokens of siblings [POOL, SETS, width], drawn from each draft row of the pool.

    how: "with" or "without" replacement; "top", the most likely tokens; or "last", where column k
    is drawn from the tokens that are not among the top k.
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


def build(config: TreeConfig, device: str = "cpu") -> TreeInputs:
    """The config's tensors; the same values on every device."""
    b, n = config.batch, config.nodes
    shape = Shape.of(tree(n))
    target, draft = (
        rows.to(DTYPES[config.dtype]) for rows in pool(config.vocabulary, config.acceptance)
    )
    if config.start == "probs":
        target = eager.filtered(target, *FILTERS[config.filters])
    pick = (torch.arange(b * (n + 1)) % POOL).view(b, n + 1)
    parents = torch.tensor(shape.parents)
    inside = parents.unique()  # nodes with children, the root among them
    rank = (shape.children[parents + 1] == torch.arange(n)[:, None]).long().argmax(-1)
    source = config.vocabulary, config.acceptance, config.dtype, FILTERS[config.filters][0]
    how, width = DRAWN.get(config.rule, "top"), shape.children.shape[1]
    families = _siblings(*source, "top" if how == "last" else how, width)
    if how == "last":
        last = rank + 1 == (shape.children[parents + 1] >= 0).sum(-1)
        rank = torch.where(last, rank + width, rank)
        families = torch.cat([families, _siblings(*source, how, width)], -1)
    turns = []
    for i in range(TURNS):
        of = (i + 5 * torch.arange(b)[:, None] + 3 * parents) % SETS
        tokens = families[pick[:, parents + 1], of, rank]
        turns.append(Turn(tokens.to(device), (torch.arange(b) + b * i).to(device)))
    drawn = config.rule in DRAWN
    pick = pick.to(device)
    rows = torch.searchsorted(inside, parents).int().expand(b, n).contiguous()
    return TreeInputs(
        config=config,
        shape=shape,
        target=target.to(device)[pick],
        draft=draft.to(device)[pick[:, (inside + 1).to(device)]] if drawn else None,
        draft_rows=rows.to(device) if drawn else None,
        parents=parents.expand(b, n).contiguous().to(device),
        turns=turns,
        **parameters(config, device),
        positions=torch.full((b,), 100, device=device),
    )


def call(inputs: TreeInputs, turn: Turn, *, with_accept_probs: bool = False) -> TreeVerdict:
    """Call the public function with one turn."""
    return verify_tree(
        inputs.target,
        Tree(turn.tokens, inputs.parents),
        inputs.draft,
        rule=inputs.config.rule,  # type: ignore[arg-type]
        draft_rows=inputs.draft_rows,
        kind="probs" if inputs.config.start == "probs" else "logits",
        temperature=inputs.temperature,
        top_k=inputs.top_k,
        top_p=inputs.top_p,
        seeds=turn.seeds,
        positions=inputs.positions,
        max_depth=inputs.shape.depth,
        with_accept_probs=with_accept_probs,
    )


class Visits(NamedTuple):
    """Counts of what each turn visits in each sequence, each [TURNS, B].

    accepted: accepted nodes.
    targets, drafts: rows that the rule has to read.
    tested: nodes that the rule decides about.
    rejected: tested nodes that an acceptance uniform rejects.
    """

    accepted: Tensor
    targets: Tensor
    drafts: Tensor
    tested: Tensor
    rejected: Tensor


def visits(inputs: TreeInputs) -> Visits:
    """Call every turn once more with `accept_probs`, which are NaN for nodes not decided about."""
    found = []
    drawn = inputs.draft_rows is not None
    for turn in inputs.turns:
        verdict = call(inputs, turn, with_accept_probs=True)
        decided = ~verdict.accept_probs.isnan()
        nodes = torch.arange(inputs.config.nodes, device=decided.device)
        accepted = (verdict.path[..., None] == nodes).any(1)
        tested = decided | accepted  # traversal has no probability for ancestors of the last node
        n = verdict.num_accepted
        drafts = n * 0
        if inputs.draft is not None:
            rows = torch.arange(inputs.draft.shape[1], device=decided.device)
            drafts = ((inputs.draft_rows[..., None] == rows) & tested[..., None]).any(1).sum(-1)
        read = tested if inputs.config.rule == "traversal" else accepted
        rejected = (decided & ~accepted).sum(-1) if drawn else n * 0
        found.append((n, 1 + read.sum(-1), drafts, tested.sum(-1), rejected))
    return Visits(*(torch.stack(counts).cpu() for counts in zip(*found, strict=True)))


def floor_bytes(config: TreeConfig, seen: Visits) -> float:
    """Bytes that a rule of this algorithm has to read: each visited row once. The mean over calls.

    From raw logits, every visited row is needed for its normaliser. From probabilities, rule
    target_only needs one entry for each child and the row that the last token is drawn from.
    """
    row = config.vocabulary * config.element
    if config.start == "probs":
        needed = row + config.element * seen.tested
    else:
        needed = row * (seen.targets + seen.drafts)
    return float(needed.double().sum(-1).mean())


def visited_bytes(config: TreeConfig, seen: Visits) -> float:
    """Bytes that this project's kernels read without filters.

    Every rejection reads target and draft again, and multi_draft_wor reads the draft a third time
    for its mass outside the tried tokens. This is an upper bound for top_k_plus_one, which decides
    about the top tokens without a pass, and a lower bound for k_seq, which sums the accepted mass
    for several factors.
    """
    row = config.vocabulary * config.element
    again = 3 if config.rule == "multi_draft_wor" else 2
    rows = seen.targets + seen.drafts + again * seen.rejected
    return float((row * rows).double().sum(-1).mean())


# Every rule over N comes first in the grid: a budget that runs out costs other configs.
_CUDA = TreeConfig(8, 16, 128256, "bfloat16", per_sequence=True)
_EVERY_B, _EVERY_N = (1, 8, 64), (8, 16, 64)


def _cpu() -> list[TreeConfig]:
    base = TreeConfig()
    configs = [replace(base, rule=rule) for rule in RULES]
    configs += [replace(base, batch=1, nodes=n) for n in _EVERY_N]
    configs += [replace(base, filters=f, rule=r) for f in FILTERS for r in RULES[1:3]]
    configs += [replace(base, batch=1, nodes=64, vocabulary=128256, rule=rule) for rule in RULES]
    configs += [replace(base, rule=rule) for rule in OTHERS]
    return configs


def _cuda(quick: bool) -> list[TreeConfig]:
    base = _CUDA
    configs = [replace(base, rule=rule, nodes=n) for rule in RULES for n in _EVERY_N]
    configs += [
        replace(base, rule=r, batch=b, nodes=n) for b in _EVERY_B for n in _EVERY_N for r in RULES
    ]
    probs = replace(base, rule="target_only", dtype="float32", start="probs", per_sequence=False)
    configs += [replace(probs, batch=b, nodes=n) for b in _EVERY_B for n in _EVERY_N]
    configs += [replace(base, filters=f, rule=r) for f in FILTERS for r in RULES[1:]]
    configs += [replace(base, dtype="float32", rule=r) for r in RULES]
    configs += [replace(base, batch=b, rule=r) for r in OTHERS for b in _EVERY_B]
    if not quick:
        configs += [replace(base, nodes=n, rule=r) for r in OTHERS for n in _EVERY_N]
        configs += [replace(config, dtype="float32") for config in configs]
    return configs


def grid(device: str, *, quick: bool = False) -> list[TreeConfig]:
    """Rules over B and N first, then probabilities, filters and dtypes."""
    return list(dict.fromkeys(_cpu() if device == "cpu" else _cuda(quick)))
