"""A prefix tree of several drafted chains: of several drafters, or several of one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.checks import check_temperature
from specdec_hf.drafters.context import (
    MAX_DRAFTS_PER_ROUND,
    Candidates,
    DraftContext,
    History,
    reads_draft,
)
from specdec_hf.drafters.drafter import (
    RULES_OF_DETERMINISTIC_TREES,
    Draft,
    Drafter,
    DraftOutcome,
)
from specdec_hf.drafters.tensors import concat_distributions
from specdec_hf.drafters.trees.chain_source import ChainSource, agreement
from specdec_hf.drafters.trees.node_budget import NodeBudget
from specdec_hf.trees.layouts import TrieTree
from specdec_kernels import SampledDraft, build_trie


class TrieDrafter(Drafter):
    """Merges the chains of several drafters into one tree.

    Chains share the nodes of their common prefix, which is then verified once. Only rules that read
    the draft distribution keep the chains apart: they try a token that was drawn twice two times
    (SpecInfer). They are offered where no drafter drafts several chains or trees of its own, and
    rule "auto" is one of them where all drafters draw their drafts from a distribution.

    A tree of limited size takes the nodes that are most likely to be committed: by a head's own
    probabilities, and by the acceptance measured so far for drafters that give none; see
    `NodeBudget`. With schedule "optimal" it takes as many of them as are worth their time, where
    the rule does not read the draft distribution. Drafts on a device are not cut so: they would
    have to be read first.

    Args:
        drafters: those with `Drafter.several` draft several chains, each other drafter one. The
            leaves of a tree end one chain each.
        layout: number of chains and tokens.
    """

    def __init__(self, drafters: Sequence[Drafter], layout: TrieTree) -> None:
        self.drafters = list(drafters)
        self.layout = layout
        self.name = ", ".join(drafter.name for drafter in drafters)
        self.depth = layout.depth
        self._sources = [ChainSource(drafter, layout.sequences) for drafter in drafters]
        self._ranks = [rank for source in self._sources for rank in range(source.count)]
        all_nodes = len(self._ranks) * layout.depth
        self.size = all_nodes if layout.size is None else min(layout.size, all_nodes)
        self.candidates = max(drafter.candidates for drafter in drafters)
        self.rules, drawn = RULES_OF_DETERMINISTIC_TREES, ("multi_draft", "traversal")
        if all(drafter.draws and not drafter.size for drafter in drafters):
            self.rules = (*drawn, *self.rules)
        elif not any(drafter.several or drafter.size for drafter in drafters):
            self.rules = (*self.rules, *drawn)

    def start(self, context: DraftContext) -> None:
        """Begin a new call with every drafter."""
        self._context = context
        self._budget = NodeBudget(self._ranks, context.batch_size)
        for k, source in enumerate(self._sources):
            source.start(context, k * MAX_DRAFTS_PER_ROUND)
        self.add_up_costs(self.drafters)

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        limits = np.minimum(limits, self.depth)
        answers = [source.propose(history, limits) for source in self._sources]
        self._context.asked_for_noise = True  # `ask` has checked each drafter's noise
        given = [answer.tokens for answer in answers if answer is not None]
        if not given:
            return None
        depth, target = int(limits.max()), self._context.model.device
        on_host = all(chains.device.type == "cpu" for chains in given)
        device = torch.device("cpu") if on_host else target
        chains = torch.full((len(limits), len(self._ranks), depth), -1, device=device)
        values = np.full(chains.shape, np.nan)  # where a drafter knows them
        for answer, chain_range in zip(answers, self._chain_ranges(), strict=True):
            if answer is not None:
                drafted = answer.tokens[:, :, :depth]
                first, (_, count, size) = chain_range.start, drafted.shape
                chains[:, first : first + count, :size] = drafted.to(device)
                if answer.values is not None:
                    values[:, first : first + count, :size] = answer.values[:, :, :depth]
        bounds = torch.from_numpy(limits.copy()).to(device, non_blocking=True)
        too_deep = torch.arange(depth, device=device) >= bounds[:, None, None]
        chains = chains.masked_fill(too_deep, -1)
        merge = not reads_draft(self._context.rule)
        if on_host and self.layout.size is not None:
            nodes = None
            if self._context.nodes is not None and merge:
                nodes = functools.partial(self._nodes, depth, history.active)
            cut = self._budget.cut(
                chains.numpy(), self.size, merge=merge, values=values, least=self.layout.least,
                nodes=nodes,
            )  # fmt: skip
            chains = torch.from_numpy(cut)
        trie = build_trie(chains, size=self.size, merge=merge)
        # The number of nodes is known where the trie is on the host. On a device it would take one
        # more read, so the tree keeps its largest size there.
        size = int(trie.num_nodes.max()) if on_host else self.size
        if size == 0:
            return None
        proposed = Draft(
            trie.tokens[:, :size].to(target, non_blocking=True),
            trie.parents[:, :size].to(target, non_blocking=True),
            depth=depth,
            carried=chains.flatten(1).to(target, non_blocking=True),
        )
        distributions = [None if answer is None else answer.distribution for answer in answers]
        if reads_draft(self._context.rule) and any(d is not None for d in distributions):
            for drafter, answer in zip(self.drafters, answers, strict=True):
                if answer is not None:
                    self._check_distribution(drafter, answer.distribution)
            parts = [part for part in distributions if part is not None]
            proposed.distribution = concat_distributions(parts, self._context.temperature, target)
            rows = _draft_rows(trie.nodes, self.size, distributions)
            proposed.draft_rows = rows[:, :size].to(target, non_blocking=True)
        return proposed

    def _nodes(self, depth: int, active: NDArray[np.bool_], values: NDArray[np.float64]) -> int:
        """`Schedule.nodes` for the values [B, N] of a round."""
        assert self._context.nodes is not None
        return self._context.nodes(depth, values[active])

    def _chain_ranges(self) -> list[slice]:
        """For each drafter, the range of its chains among those of all."""
        ends = np.cumsum([0, *(source.count for source in self._sources)]).tolist()
        return [slice(first, last) for first, last in pairwise(ends)]

    def _check_distribution(self, drafter: Drafter, distribution: SampledDraft | None) -> None:
        """The rows of all drafters become one draft, which has one temperature and vocabulary."""
        name, context = type(drafter).__name__, self._context
        if distribution is None:
            raise ValueError(
                f"{name}.propose must return a distribution under rule {context.rule!r} if another "
                "drafter of the TrieTree does, got None"
            )
        check_temperature(drafter, distribution, context.temperature, "TrieTree")

    def observe(self, history: History, candidates: Candidates) -> None:
        for source in self._sources:
            if source.drafter.candidates:
                source.observe(history, candidates)

    def commit(self, outcome: DraftOutcome) -> None:
        batch_size = len(outcome.lengths)
        chains = np.full((batch_size, len(self._ranks), 1), -1)
        if outcome.carried.size:
            chains = outcome.carried.reshape(*chains.shape[:2], -1)
            self._budget.observe(chains, agreement(chains, outcome.tokens))
        for source, chain_range in zip(self._sources, self._chain_ranges(), strict=True):
            source.commit(outcome.lengths, chains[:, chain_range], outcome.tokens)


def _draft_rows(
    nodes: torch.Tensor, size: int, distributions: list[SampledDraft | None]
) -> torch.Tensor:
    """[B, size] int32, the row of each node's draft distribution in their concatenation.

    Args:
        nodes: [B, K, L], the node of each token of a trie whose chains share no nodes.
        size: number of its nodes.
        distributions: of each chain, None for one that drafted nothing.
    """
    rows = np.zeros(tuple(nodes.shape[1:]), dtype=np.int32)
    first = 0
    for k, distribution in enumerate(distributions):
        if distribution is not None:
            count = distribution.logits.shape[1]
            rows[k] = first + np.minimum(np.arange(rows.shape[1]), count - 1)
            first += count
    flat = nodes.flatten(1).long()
    values = torch.from_numpy(rows.flatten()).to(nodes.device, non_blocking=True).expand_as(flat)
    out = torch.zeros((len(flat), size + 1), dtype=torch.int32, device=nodes.device)
    return out.scatter(1, torch.where(flat < 0, size, flat), values)[:, :size]
