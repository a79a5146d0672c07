"""One drafter among several whose chains are merged into a tree: how it is asked and informed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.checks import OUTSIDE, ask, ask_several, describe
from specdec_hf.drafters.context import Candidates, DraftContext, History
from specdec_hf.drafters.drafter import Drafter
from specdec_hf.drafters.tree_drafter import TreeDraft, TreeDrafter, TreeOutcome
from specdec_kernels import SampledDraft


@dataclass
class Chains:
    """The chains of one drafter in one round.

    Attributes:
        tokens: [B, K, L] int64, -1 after the end of a chain.
        distribution: that one chain was drawn from, or None.
        values: [B, K, L], the probability that the drafter gives to each beginning of a chain, or
            None where it gives none.
    """

    tokens: torch.Tensor
    distribution: SampledDraft | None = None
    values: NDArray[np.float64] | None = None


class ChainSource:
    """A drafter of chains.

    Args:
        drafter: it drafts ``count`` chains if it has `Drafter.several`, else one.
        count: most chains of a sequence in one round.
    """

    def __init__(self, drafter: Drafter, count: int) -> None:
        self.drafter = drafter
        self.count = count if drafter.several else 1

    def start(self, context: DraftContext) -> None:
        self.context = context
        self.drafter.start(context)

    def propose(self, history: History, limits: NDArray[np.int64]) -> Chains | None:
        """Ask the drafter; chains may be longer than the limits [B] of their sequences."""
        if self.drafter.several:
            chains = ask_several(self.drafter, history, limits, self.context, self.count)
            return None if chains is None else Chains(chains)
        draft = ask(self.drafter, history, limits, self.context)
        if draft is None:
            return None
        assert draft.counts is not None
        tokens = draft.tokens
        bounds = torch.from_numpy(draft.counts).to(tokens.device, non_blocking=True)
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        tokens = tokens.masked_fill(columns >= bounds[:, None], -1)
        return Chains(tokens[:, None], draft.distribution)

    def observe(self, history: History, candidates: Candidates) -> None:
        self.drafter.observe(history, candidates)

    def commit(
        self, lengths: NDArray[np.int64], chains: NDArray[np.int64], committed: NDArray[np.int64]
    ) -> None:
        """Tell the drafter how much of its first chain was committed.

        Args:
            lengths: [B] tokens of each sequence when it drafted.
            chains: [B, K, L], its chains as they were verified.
            committed: [B, D], the committed path, then -1.
        """
        if (chains < -1).any():  # the tree ends there as it does at -1
            self.context.note(f"{describe(self.drafter)} {OUTSIDE}")
        self.drafter.commit(lengths.copy(), agreement(chains, committed)[:, 0])


class TreeSource:
    """A drafter of trees of its own, without distributions: each leaf ends a chain.

    Args:
        drafter: its trees are on the host.
    """

    def __init__(self, drafter: TreeDrafter) -> None:
        self.drafter = drafter
        self.count = drafter.size

    def start(self, context: DraftContext) -> None:
        self.context = context
        self._draft: TreeDraft | None = None  # of the round that was not committed yet
        self.drafter.start(context)

    def propose(self, history: History, limits: NDArray[np.int64]) -> Chains | None:
        """Ask the drafter; raises ValueError for a tree with a distribution or on a device."""
        self._draft = draft = ask(self.drafter, history, limits, self.context)
        if draft is None:
            return None
        name = type(self.drafter).__name__
        if draft.distribution is not None:
            raise ValueError(f"{name}.propose must return no distribution with TrieTree, got one")
        if draft.tokens.device.type != "cpu" or draft.parents.device.type != "cpu":
            raise ValueError(
                f"{name}.propose must return tokens and parents on the host with TrieTree, "
                f"got {draft.tokens.device} and {draft.parents.device}"
            )
        leaves = [
            _leaf_nodes(tokens, parents)
            for tokens, parents in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)
        ]
        most = max(map(len, leaves))
        if most == 0:
            return None
        depth = max(len(path) for paths in leaves for path in paths)
        nodes = np.full((len(leaves), most, depth), -1)
        for b, paths in enumerate(leaves):
            for k, path in enumerate(paths):
                nodes[b, k, : len(path)] = path
        chains = np.where(nodes < 0, -1, _at(draft.tokens, nodes))
        values = None if draft.scores is None else np.exp(_at(draft.scores.double(), nodes))
        return Chains(torch.from_numpy(chains), values=values)

    def observe(self, history: History, candidates: Candidates) -> None:
        """Tell the drafter of a round's candidates, in the rows of its own tree."""
        if self._draft is not None:
            candidates = _renumber(candidates, self._draft)
        self.drafter.observe(history, candidates)

    def commit(
        self, lengths: NDArray[np.int64], chains: NDArray[np.int64], committed: NDArray[np.int64]
    ) -> None:
        """Tell the drafter which path of its own tree was committed; see `ChainSource.commit`."""
        (draft, self._draft), outcome = (self._draft, None), None
        if draft is not None:
            outcome = _outcome(draft, committed)
        self.drafter.commit(lengths.copy(), outcome)


def agreement(chains: NDArray[np.int64], committed: NDArray[np.int64]) -> NDArray[np.int64]:
    """[B, K], how many tokens of each chain [B, K, L] begin the committed path [B, D]."""
    depth = min(chains.shape[2], committed.shape[1])
    path = committed[:, None, :depth]
    equal = (chains[:, :, :depth] == path) & (path >= 0)
    lengths: NDArray[np.int64] = np.minimum.accumulate(equal, axis=2).sum(axis=2)
    return lengths


def _paths(
    tokens: list[int], parents: list[int], labels: Sequence[int] | None = None
) -> dict[int, tuple[int, ...]]:
    """The tokens, or other labels, from the root, which is -1, to each present node of one tree."""
    labels = tokens if labels is None else labels
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for n, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token >= 0 and parent in paths:
            paths[n] = (*paths[parent], labels[n])
    return paths


def _leaf_nodes(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """The nodes from the root to each leaf of one tree, leaves in the order of their numbers."""
    paths = _paths(tokens, parents, range(len(tokens)))
    inner = {parents[n] for n in paths if n >= 0}
    return [path for n, path in paths.items() if n >= 0 and n not in inner]


def _at(values: torch.Tensor, nodes: NDArray[np.int64]) -> NDArray[Any]:
    """The values [B, N] of the nodes of each path [B, K, L]; anything where there is none."""
    batch_size = len(nodes)
    taken = np.maximum(nodes, 0).reshape(batch_size, -1)
    return np.take_along_axis(values.numpy(), taken, axis=1).reshape(nodes.shape)


def _outcome(draft: TreeDraft, committed: NDArray[np.int64]) -> TreeOutcome:
    """The committed path in the numbers of a drafter's own tree."""
    path = np.full_like(committed, -1)
    tokens, parents = draft.tokens.numpy(), draft.parents.numpy()
    for b in range(len(committed)):
        node = -1
        for depth, token in enumerate(committed[b].tolist()):
            children = np.flatnonzero((parents[b] == node) & (tokens[b] == token))
            if token < 0 or not len(children):
                break
            path[b, depth] = node = int(children[0])
    carried = path[:, :0] if draft.carried is None else draft.carried.numpy()
    return TreeOutcome(path, np.where(path >= 0, committed, -1), carried)


def _renumber(candidates: Candidates, draft: TreeDraft) -> Candidates:
    """Candidates of a merged tree, with node n of one drafter's own tree in row n + 1.

    The row of a node that the merged tree lacks is absent. Rows of other tokens follow.
    """
    batch_size, rows = candidates.tokens.shape
    nodes = draft.tokens.shape[1]
    order = np.full((batch_size, nodes + rows), -1)  # the merged tree's row that each row shows
    places = np.tile(np.arange(rows) + nodes, (batch_size, 1))  # the reverse
    for b in range(batch_size):
        merged = _paths(candidates.tokens[b, 1:].tolist(), (candidates.parents[b, 1:] - 1).tolist())
        row_of = {path: n + 1 for n, path in merged.items()}
        for n, path in _paths(draft.tokens[b].tolist(), draft.parents[b].tolist()).items():
            if (row := row_of.get(path)) is not None:
                order[b, n + 1], places[b, row] = row, n + 1
    order[:, nodes + 1 :] = np.where(places[:, 1:] > nodes, np.arange(1, rows), -1)
    taken = np.maximum(order, 0)
    tokens = np.take_along_axis(candidates.tokens, taken, axis=1)
    above = np.take_along_axis(candidates.parents, taken, axis=1)
    parents = np.take_along_axis(places, np.maximum(above, 0), axis=1)
    return Candidates(
        np.where(order < 0, -1, tokens),
        np.where((order < 0) | (above < 0), -1, parents),
        np.take_along_axis(candidates.ids, taken[:, :, None], axis=1),
    )
