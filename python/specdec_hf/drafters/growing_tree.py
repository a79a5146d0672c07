"""Drafting a tree that grows along the most likely paths: EAGLE-2's expansion and re-ranking."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.chain import Stepper
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Draft, Drafter, Round, State
from specdec_hf.drafting.sampling import mask_below_limits
from specdec_hf.runner.protocol import Lengths, rounded, to_device
from specdec_hf.trees import EagleTree
from specdec_kernels import expand_tree, rerank_tree

if TYPE_CHECKING:
    from typing_extensions import Self


class Expandable(Stepper, Protocol):
    """What drafts the nodes of a tree: a draft model or a head."""

    @property
    def joins(self) -> bool:  # type: ignore[override]
        """Whether `take` serves it."""
        ...

    def feed(self, tokens: torch.Tensor, lengths: Lengths, parents: torch.Tensor) -> torch.Tensor:
        """Logits [B, m, V] of the next nodes."""
        ...

    def target_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's ids of tokens of these logits, -1 as it is."""
        ...

    def keep(self, lengths: Lengths, path: NDArray[np.int64]) -> None:
        """Learn which of the nodes that were fed are committed."""
        ...


class GrowingTreeDrafter(Drafter):
    """Base class of drafters whose states are a `GrowingTreeState`; override `begin`.

    Args:
        layout: size of the tree.
    """

    def __init__(self, layout: EagleTree) -> None:
        self.layout = layout
        self.size, self.depth = most_nodes(layout), layout.depth


def most_nodes(layout: EagleTree) -> int:
    """How many nodes a tree of a layout has at most."""
    return min(layout.size, layout.width + (layout.depth - 1) * layout.width**2)


def call_for_tree(call: DrafterCall, layout: EagleTree) -> DrafterCall:
    """The call for what drafts the nodes, whose cache needs room for those that are fed."""
    most = max(call.max_draft, (layout.depth - 1) * layout.width)
    return dataclasses.replace(call, max_draft=most)


class GrowingTreeState(State):
    """Each level expands the most likely paths so far; the most likely candidates are proposed.

    The device decides which nodes those are, and the host learns it together with the verdict. On
    a CPU no level is drafted from which no candidate can be proposed.

    Args:
        call: the call.
        layout: size of the tree.
        stepper: made with `call_for_tree`.

    Source: arXiv 2406.16858, section 4.
    """

    def __init__(self, call: DrafterCall, layout: EagleTree, stepper: Expandable) -> None:
        self.call, self.layout, self.stepper = call, layout, stepper
        self.size, self.cost = most_nodes(layout), stepper.cost

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        stepper, lengths, width = self.stepper, texts.lengths, self.layout.width
        limits = stepper.room(texts, limits)
        levels = int(limits.max())
        if levels < 1:
            return None
        grown = expand_tree(
            rounded(stepper.catch_up(texts))[:, None],
            torch.zeros((len(lengths), 1), dtype=torch.float32, device=stepper.device),
            width=width,
        )
        root = torch.full_like(grown.frontier, -1)  # [B, K]
        tokens = [stepper.target_tokens(grown.tokens).flatten(1)]
        scores, parents = [grown.scores.flatten(1)], [root]
        # A node is fed to the draft model when it is expanded. Nodes are numbered in that order.
        fed = [root]  # number of each candidate among the nodes fed, -1 for those that were not
        above: list[torch.Tensor] = []  # [B, K] for each level: numbers of the parents fed
        frontier, first, came_from = grown.frontier, 0, root
        for level in range(1, levels):
            if (continue_drafting := self._continues(scores, frontier)) is not None:
                limits = np.where(continue_drafting, limits, np.minimum(limits, level))
            if not (limits > level).any():
                levels = level
                break
            begin = (level - 1) * width
            numbers = torch.arange(begin, begin + width, device=stepper.device)
            fed[-1] = fed[-1].scatter(1, frontier, numbers.expand_as(root))
            above.append(came_from)
            paths = scores[-1].gather(1, frontier)
            logits = stepper.feed(tokens[-1].gather(1, frontier), lengths, torch.cat(above, dim=1))
            grown = expand_tree(rounded(logits), paths, width=width)
            parents.append((first + frontier).repeat_interleave(width, dim=1))
            first += tokens[-1].shape[1]
            tokens.append(stepper.target_tokens(grown.tokens).flatten(1))
            scores.append(grown.scores.flatten(1))
            fed.append(torch.full_like(tokens[-1], -1))
            frontier, came_from = grown.frontier, begin + grown.frontier // width
        candidates = torch.cat(tokens, dim=1)
        depths = np.repeat(np.arange(1, levels + 1), [x.shape[1] for x in tokens])
        depths_ = to_device(depths[None], stepper.device)
        candidates = mask_below_limits(candidates, depths_, limits)
        all_scores = torch.cat(scores, dim=1)
        best = rerank_tree(
            candidates,
            torch.cat(parents, dim=1),
            all_scores,
            size=min(self.size, candidates.shape[1]),
        )
        carried = torch.cat(fed, dim=1).gather(1, best.nodes.clamp(min=0))
        carried = carried.masked_fill(best.nodes < 0, -1)
        device = self.call.device
        return Draft(
            best.tokens.to(device),
            best.parents.to(device),
            depth=levels,
            carried=carried.to(device),
            scores=all_scores.gather(1, best.nodes.clamp(min=0)).to(device),
        )

    def _continues(
        self, scores: list[torch.Tensor], frontier: torch.Tensor
    ) -> NDArray[np.bool_] | None:
        """[B], where a deeper level can give nodes and is worth a forward of the draft model.

        Each sequence has its own answer, so that its tree is the same alone and in a batch. A node
        is at most as likely as its parent, and of equally likely ones the less deep is proposed. On
        a GPU the host would have to wait for the answer, so all levels are drafted (None).

        Args:
            scores: [B, n] of the candidates of each level so far.
            frontier: [B, K], the candidates of the last level that the next one would expand.
        """
        so_far = torch.cat(scores, dim=1)
        if so_far.device.type != "cpu":
            return None
        paths = scores[-1].gather(1, frontier)
        continue_drafting = paths.exp().sum(dim=1) >= self.layout.min_probability
        if so_far.shape[1] >= self.size:
            continue_drafting &= paths.amax(dim=1) > so_far.topk(self.size, dim=1).values[:, -1]
        return continue_drafting.numpy()

    def commit(self, texts: History, done: Round) -> None:
        fed = np.take_along_axis(done.carried, np.maximum(done.path, 0), axis=1)
        self.stepper.keep(done.lengths, np.where(done.path >= 0, fed, -1))

    def read(self, texts: History, size: int) -> int:
        has_room = self.stepper.room(texts, np.ones_like(texts.lengths)).any()
        return self.stepper.read_ahead(texts, size) if has_room else 0

    @property
    def joins(self) -> bool:
        return type(self) is GrowingTreeState and self.stepper.joins

    def take(self, b: int, other: Self, index: int) -> None:
        self.stepper.take(b, other.stepper, index)
