"""Drawing the children of tree nodes from the draft's logits, as each acceptance rule needs them.

- multi_draft, k_seq, traversal: independent draws from the law Q.
- multi_draft_wor: without replacement, each from Q off those before it. match: the same with the
  noise that the target will use, so that the first child is the draft's answer to it.
- top_k_plus_one: the likeliest tokens, and last one drawn from Q off them.
- greedy, target_only: the likeliest tokens.

Every child has noise of its own, and every round: a rejected child shapes what is emitted after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.base import RULES_READING_DRAFT
from specdec_hf.drafters.draft_model import DraftModel
from specdec_hf.trees.layouts import TreeSpec
from specdec_kernels import Sampled, expand_tree

MAX_WIDTH = 64  # of expand_tree
WITHOUT_REPLACEMENT = ("multi_draft_wor", "match")


@dataclass
class Children:
    """The children of m nodes, and the laws Q of these nodes.

    Attributes:
        tokens: [B, C] int64, all children of the first node, then those of the second, ...; -1
            where nothing was left to draw.
        logits: [B, m, V] of the nodes.
        logsumexp, threshold: [B, m], as `sample` left them; empty where nothing was sampled.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    logsumexp: torch.Tensor
    threshold: torch.Tensor


def draw_children(
    draft: DraftModel,
    logits: torch.Tensor,
    start: torch.Tensor,
    depth: int,
    widths: NDArray[np.int64],
    numbers: NDArray[np.int64],
    spec: TreeSpec,
    nodes: NDArray[np.int64],
) -> Children:
    """Draw one level of a tree.

    Args:
        draft: samples; its context names the rule.
        logits: [B, m, V] behind the nodes that get children.
        start: [B] int64, absolute index of the tokens at depth 1.
        depth: of the children.
        widths: [m] number of children of each node, at least 1.
        numbers: [C] of the children in the round, for their noise.
        spec, nodes: the tree, and [C] which of its nodes the children are.
    """
    rule = draft.context.rule
    firsts = np.cumsum(widths) - widths
    if rule not in RULES_READING_DRAFT and rule != "match":
        ranks = np.array(spec.ranks)[nodes]
        tokens = _likeliest(logits, int(ranks.max()) + 1)
        owners = np.repeat(np.arange(len(widths)), widths)
        nothing = logits.new_empty((len(logits), 0))
        return Children(_pick(tokens, owners, ranks), logits, nothing, nothing)
    level = _Level(draft, logits, start, depth, numbers)
    law = draft.draw(logits, level.noise(firsts))
    columns: dict[int, torch.Tensor] = {}

    def put(points: NDArray[np.int64], k: int, tokens: torch.Tensor) -> None:
        columns.update(zip((firsts[points] + k).tolist(), tokens.unbind(dim=1), strict=True))

    put(np.arange(len(widths)), 0, law.tokens)
    several = np.flatnonzero(widths > 1)
    if len(several) and (rule in WITHOUT_REPLACEMENT or rule == "top_k_plus_one"):
        level.restrict(law, several)
    if rule == "top_k_plus_one":
        for width in np.unique(widths[several]).tolist():
            points = np.flatnonzero(widths == width)
            top = _likeliest(_rows(logits, points), width - 1)
            for k in range(width - 1):
                put(points, k, top[:, :, k])
            level.remove(points, top)
            put(points, width - 1, level.rest(points, firsts[points] + width - 1))
    else:
        if len(several) and rule in WITHOUT_REPLACEMENT:
            level.remove(several, _rows(law.tokens, several)[..., None])
        for k in range(1, int(widths.max())):
            points = np.flatnonzero(widths > k)
            children = firsts[points] + k
            if rule in WITHOUT_REPLACEMENT:
                put(points, k, level.rest(points, children))
            else:
                put(points, k, draft.draw(_rows(logits, points), level.noise(children)).tokens)
    tokens = torch.stack([columns[c] for c in range(len(numbers))], dim=1)
    return Children(tokens, logits, law.logsumexp, law.threshold)


class _Level:
    """The nodes of one level that get children, and what is left of their laws."""

    def __init__(
        self,
        draft: DraftModel,
        logits: torch.Tensor,
        start: torch.Tensor,
        depth: int,
        numbers: NDArray[np.int64],
    ) -> None:
        self.draft = draft
        self.logits = logits
        self.start = start
        self.depth = depth
        self.numbers = numbers

    def noise(self, children: NDArray[np.int64]) -> torch.Tensor:
        """[B, c], where the noise of these children comes from."""
        if self.draft.context.rule == "match":
            return (self.start[:, None] + (self.depth - 1)).expand(-1, len(children))
        own = torch.from_numpy((self.numbers[children] + 1) << 32)
        return self.start[:, None] + own.to(self.start.device, non_blocking=True)

    def restrict(self, law: Sampled, points: NDArray[np.int64]) -> None:
        """Leave of these nodes' laws what the filters left."""
        threshold = law.threshold
        temperature = self.draft.settings["temperature"]
        if isinstance(temperature, torch.Tensor):
            # At temperature 0 the threshold is the maximum; children are then simply the likeliest.
            threshold = threshold.masked_fill((temperature == 0)[:, None], -torch.inf)
        elif temperature == 0:
            threshold = torch.full_like(threshold, -torch.inf)
        rows = _rows(self.logits, points)
        self.points = points
        self.left = rows.masked_fill(rows < _rows(threshold, points)[..., None], -torch.inf)

    def remove(self, points: NDArray[np.int64], tokens: torch.Tensor) -> None:
        """Take tokens [B, c, t] out of what is left of the nodes' laws."""
        at = torch.from_numpy(np.searchsorted(self.points, points))
        at = at.to(tokens.device, non_blocking=True)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None, None]
        # Absent (-1) is what was drawn where nothing is left: removing token 0 changes nothing.
        self.left[rows, at[None, :, None], tokens.clamp(min=0)] = -torch.inf

    def rest(self, points: NDArray[np.int64], children: NDArray[np.int64]) -> torch.Tensor:
        """Draw from what is left of these nodes' laws, and take it out; [B, c]."""
        rows = _rows(self.left, np.searchsorted(self.points, points))
        drawn = self.draft.draw(rows, self.noise(children), filtered=False).tokens
        self.remove(points, drawn[..., None])
        return drawn


def _rows(x: torch.Tensor, points: NDArray[np.int64]) -> torch.Tensor:
    """x [B, m, ...] at some of the m nodes; a view where it is all of them."""
    if len(points) == x.shape[1]:
        return x
    return x[:, torch.from_numpy(points).to(x.device, non_blocking=True)]


def _likeliest(logits: torch.Tensor, width: int) -> torch.Tensor:
    """[B, m, width], the likeliest tokens of each row, ties in ascending order."""
    scores = torch.zeros(logits.shape[:2], device=logits.device)
    return expand_tree(logits, scores, width=width).tokens


def _pick(
    tokens: torch.Tensor, points: NDArray[np.int64], ranks: NDArray[np.int64]
) -> torch.Tensor:
    """[B, C], the token of each child from those [B, m, K] of its node."""
    points_, ranks_ = (
        torch.from_numpy(x).to(tokens.device, non_blocking=True) for x in (points, ranks)
    )
    return tokens[:, points_, ranks_]
