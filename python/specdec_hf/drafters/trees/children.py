"""Drawing the children of tree nodes from the draft's logits, as each acceptance rule needs them.

Q is the draft distribution of a node, after the sampling parameters.

- multi_draft, k_seq, traversal: the children are independent draws from Q.
- multi_draft_wor: they are drawn without replacement, each from Q without those before it.
- match: as multi_draft_wor, with the noise that the target will use at this position. The first
  child is then the draft model's own guess of the token that the target draws.
- top_k_plus_one: all but the last are the most likely tokens, and the last is drawn from Q without
  those.
- greedy, target_only: they are the most likely tokens; nothing is drawn.

Every child has noise of its own in every round: a rejected child influences what is emitted, so the
noise that drew it must not draw again at the same position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.context import reads_draft
from specdec_hf.drafters.models.draft_model import DraftModel
from specdec_hf.trees.layouts import TreeSpec
from specdec_kernels import Sampled, SampledDraft, expand_tree

MAX_WIDTH = 64  # most children of a node that expand_tree selects
WITHOUT_REPLACEMENT = ("multi_draft_wor", "match")


@dataclass
class Children:
    """The children of the m nodes of one level that have any.

    Attributes:
        tokens: [B, C] int64, all children of the first node, then those of the second, and so on;
            -1 where Q had no token left to draw.
        distribution: rows [B, m, V] of the nodes' Q; None where nothing was drawn from them.
    """

    tokens: torch.Tensor
    distribution: SampledDraft | None


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
        logits: [B, m, V] of the nodes that get children.
        start: [B] int64, absolute index of the tokens at depth 1.
        depth: of the children.
        widths: [m] number of children of each node, at least 1.
        numbers: [C] of the children among all nodes of the round, for their noise.
        spec, nodes: the tree, and [C] which of its nodes the children are.
    """
    rule = draft.context.rule
    firsts = np.cumsum(widths) - widths
    if not reads_draft(rule) and rule != "match":
        ranks = np.array(spec.ranks)[nodes]
        tokens = _most_likely(logits, int(ranks.max()) + 1)
        owners = np.repeat(np.arange(len(widths)), widths)
        return Children(_pick(tokens, owners, ranks), None)
    level = _Level(draft, logits, start, depth, numbers)
    first_draw = draft.sampler.sample(logits, level.noise_positions(firsts))
    columns: dict[int, torch.Tensor] = {}

    def put(parents: NDArray[np.int64], k: int, tokens: torch.Tensor) -> None:
        """Set child ``k`` of these nodes."""
        columns.update(zip((firsts[parents] + k).tolist(), tokens.unbind(dim=1), strict=True))

    put(np.arange(len(widths)), 0, first_draw.tokens)
    several = np.flatnonzero(widths > 1)
    if len(several) and (rule in WITHOUT_REPLACEMENT or rule == "top_k_plus_one"):
        level.begin_removal(first_draw, several)
    if rule == "top_k_plus_one":
        for width in np.unique(widths[several]).tolist():
            parents = np.flatnonzero(widths == width)
            top = _most_likely(_rows(logits, parents), width - 1)
            for k in range(width - 1):
                put(parents, k, top[:, :, k])
            level.remove(parents, top)
            put(parents, width - 1, level.draw_remaining(parents, firsts[parents] + width - 1))
    else:
        if len(several) and rule in WITHOUT_REPLACEMENT:
            level.remove(several, _rows(first_draw.tokens, several)[..., None])
        for k in range(1, int(widths.max())):
            parents = np.flatnonzero(widths > k)
            children = firsts[parents] + k
            if rule in WITHOUT_REPLACEMENT:
                put(parents, k, level.draw_remaining(parents, children))
            else:
                positions = level.noise_positions(children)
                put(parents, k, draft.sampler.sample(_rows(logits, parents), positions).tokens)
    tokens = torch.stack([columns[c] for c in range(len(numbers))], dim=1)
    return Children(
        tokens,
        SampledDraft(logits, first_draw.logsumexp, first_draw.threshold, draft.context.temperature),
    )


class _Level:
    """The nodes of one level that get children, and their Q without the tokens drawn so far."""

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

    def noise_positions(self, children: NDArray[np.int64]) -> torch.Tensor:
        """[B, c], the positions that these children take their noise from."""
        return self.draft.context.noise_positions(
            self.start, self.numbers[children], depth=self.depth
        )

    def begin_removal(self, first_draw: Sampled, parents: NDArray[np.int64]) -> None:
        """Set up the logits from which tokens are removed: those that pass the filters."""
        threshold = first_draw.threshold
        temperature = self.draft.sampler.sampling["temperature"]
        if isinstance(temperature, torch.Tensor):
            # At temperature 0 the threshold is the maximum, which would leave a single child. The
            # children of greedy sequences are the most likely tokens instead.
            threshold = threshold.masked_fill((temperature == 0)[:, None], -torch.inf)
        elif temperature == 0:
            threshold = torch.full_like(threshold, -torch.inf)
        rows = _rows(self.logits, parents)
        self.parents = parents
        self.remaining = rows.masked_fill(rows < _rows(threshold, parents)[..., None], -torch.inf)

    def remove(self, parents: NDArray[np.int64], tokens: torch.Tensor) -> None:
        """Take tokens [B, c, t] out of the distributions of these nodes."""
        at = torch.from_numpy(np.searchsorted(self.parents, parents))
        at = at.to(tokens.device, non_blocking=True)
        sequences = torch.arange(len(tokens), device=tokens.device)[:, None, None]
        # A draw is -1 where no token remains. Removing token 0 there changes nothing.
        self.remaining[sequences, at[None, :, None], tokens.clamp(min=0)] = -torch.inf

    def draw_remaining(
        self, parents: NDArray[np.int64], children: NDArray[np.int64]
    ) -> torch.Tensor:
        """[B, c], draw one child of each of these nodes and remove it from their distributions."""
        rows = _rows(self.remaining, np.searchsorted(self.parents, parents))
        positions = self.noise_positions(children)
        drawn = self.draft.sampler.sample(rows, positions, filtered=False).tokens
        self.remove(parents, drawn[..., None])
        return drawn


def _rows(x: torch.Tensor, nodes: NDArray[np.int64]) -> torch.Tensor:
    """x [B, m, ...] at some of the m nodes; a view where they are all of them."""
    if len(nodes) == x.shape[1]:
        return x
    return x[:, torch.from_numpy(nodes).to(x.device, non_blocking=True)]


def _most_likely(logits: torch.Tensor, width: int) -> torch.Tensor:
    """[B, m, width], the most likely tokens of each row; ties go to the smaller id."""
    scores = torch.zeros(logits.shape[:2], dtype=torch.float32, device=logits.device)
    return expand_tree(logits, scores, width=width).tokens


def _pick(
    tokens: torch.Tensor, owners: NDArray[np.int64], ranks: NDArray[np.int64]
) -> torch.Tensor:
    """[B, C], the token of each child among those [B, m, K] of the node that owns it."""
    owners_, ranks_ = (
        torch.from_numpy(x).to(tokens.device, non_blocking=True) for x in (owners, ranks)
    )
    return tokens[:, owners_, ranks_]
