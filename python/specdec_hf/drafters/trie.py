"""A prefix tree of several drafted chains: from several drafters, or several of prompt lookup."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.base import (
    MAX_NUMBERS,
    Candidates,
    DraftContext,
    Drafter,
    History,
    TreeDraft,
    TreeDrafter,
    TreeOutcome,
    concat_distributions,
    reads_draft,
)
from specdec_hf.drafters.checks import OUTSIDE, ask, describe
from specdec_hf.trees.layouts import TrieTree
from specdec_kernels import SampledDraft, build_trie


class TrieDrafter(TreeDrafter):
    """Merges the chains of several drafters into one tree.

    Chains share the nodes of their common prefix, which is then verified once. Only rules that read
    the draft distribution keep the chains apart: they try a token that was drawn twice two times
    (SpecInfer). They are offered where no drafter drafts several chains, and rule "auto" is one of
    them where all drafters draw their drafts from a distribution.

    Args:
        drafters: those with `Drafter.several` draft several chains, each other drafter one.
        layout: number of chains and tokens.
    """

    def __init__(self, drafters: Sequence[Drafter], layout: TrieTree) -> None:
        self.drafters = list(drafters)
        self.layout = layout
        self.name = ", ".join(drafter.name for drafter in drafters)
        self.depth = layout.depth
        self._counts = [layout.sequences if drafter.several else 1 for drafter in drafters]
        all_nodes = sum(self._counts) * layout.depth
        self.size = all_nodes if layout.size is None else min(layout.size, all_nodes)
        drawn = ("multi_draft", "traversal")
        self.candidates = max(drafter.candidates for drafter in drafters)
        if all(drafter.draws for drafter in drafters):
            self.rules = (*drawn, *TreeDrafter.rules)
        elif not any(drafter.several for drafter in drafters):
            self.rules = (*TreeDrafter.rules, *drawn)

    def start(self, context: DraftContext) -> None:
        """Begin a new call with every drafter."""
        self._context = context
        self._contexts = []
        for k, drafter in enumerate(self.drafters):
            # Chains of one round must not share their noise.
            mine = dataclasses.replace(context, first_number=k * MAX_NUMBERS)
            self._contexts.append(mine)
            if context.rule == "target_only":
                # This rule accepts whichever child equals the target's own draw, so the most likely
                # tokens are the best drafts and nothing need be drawn.
                mine.temperature = 0.0
            drafter.start(mine)

    def propose(self, history: History, limits: NDArray[np.int64]) -> TreeDraft | None:
        depth = min(self.depth, int(limits.max()))
        answers = [
            _ask(drafter, count, history, depth, context)
            for drafter, count, context in zip(
                self.drafters, self._counts, self._contexts, strict=True
            )
        ]
        given = [chains for chains, _ in answers if chains is not None]
        if not given:
            return None
        target = self._context.model.device
        on_host = all(chains.device.type == "cpu" for chains in given)
        device = torch.device("cpu") if on_host else target
        chains = torch.full((len(limits), sum(self._counts), depth), -1, device=device)
        first = 0
        for (drafted, _), count in zip(answers, self._counts, strict=True):
            if drafted is not None:
                chains[:, first : first + count, : drafted.shape[2]] = drafted.to(device)
            first += count
        bounds = torch.from_numpy(limits.copy()).to(device, non_blocking=True)
        too_deep = torch.arange(depth, device=device) >= bounds[:, None, None]
        chains = chains.masked_fill(too_deep, -1)
        trie = build_trie(chains, size=self.size, merge=not reads_draft(self._context.rule))
        # The number of nodes is known where the trie is on the host. On a device it would take one
        # more read, so the tree keeps its largest size there.
        size = int(trie.num_nodes.max()) if on_host else self.size
        if size == 0:
            return None
        proposed = TreeDraft(
            trie.tokens[:, :size].to(target, non_blocking=True),
            trie.parents[:, :size].to(target, non_blocking=True),
            depth,
            note=chains.flatten(1).to(target, non_blocking=True),
        )
        distributions = [distribution for _, distribution in answers]
        if reads_draft(self._context.rule) and any(d is not None for d in distributions):
            for drafter, (chain, distribution) in zip(self.drafters, answers, strict=True):
                if chain is not None:
                    self._check_distribution(drafter, distribution)
            parts = [part for part in distributions if part is not None]
            proposed.distribution = concat_distributions(parts, self._context.temperature, target)
            rows = _draft_rows(trie.nodes, self.size, distributions)
            proposed.draft_rows = rows[:, :size].to(target, non_blocking=True)
        return proposed

    def _check_distribution(self, drafter: Drafter, distribution: SampledDraft | None) -> None:
        """The rows of all drafters become one draft, which has one temperature and vocabulary."""
        name, context = type(drafter).__name__, self._context
        if distribution is None:
            raise ValueError(
                f"{name}.propose must return a distribution under rule {context.rule!r} if another "
                "drafter of the TrieTree does, got None"
            )
        given, wanted = distribution.temperature, context.temperature
        if given is not wanted and (isinstance(given, torch.Tensor) or given != wanted):
            raise ValueError(
                f"{name}.propose must return a distribution of context.temperature with TrieTree, "
                f"got {given!r}"
            )

    def observe(self, history: History, candidates: Candidates) -> None:
        for drafter in self.drafters:
            if drafter.candidates:
                drafter.observe(history, candidates.first(drafter.candidates))

    def commit(self, lengths: NDArray[np.int64], outcome: TreeOutcome | None) -> None:
        first = 0
        for drafter, count in zip(self.drafters, self._counts, strict=True):
            accepted = np.zeros_like(lengths)
            if outcome is not None:
                chain = outcome.note.reshape(len(lengths), sum(self._counts), -1)[:, first]
                if (chain < -1).any():  # the trie ends there as it does at -1
                    self._context.note(f"{describe(drafter)} {OUTSIDE}")
                depth = min(chain.shape[1], outcome.tokens.shape[1])
                chain, committed = chain[:, :depth], outcome.tokens[:, :depth]
                agrees = (chain == committed) & (committed >= 0)
                accepted = np.minimum.accumulate(agrees, axis=1).sum(axis=1)
            drafter.commit(lengths.copy(), accepted)
            first += count


def _ask(
    drafter: Drafter, count: int, history: History, depth: int, context: DraftContext
) -> tuple[torch.Tensor | None, SampledDraft | None]:
    """A drafter's chains [B, count, up to depth], -1 behind their ends, and their distribution."""
    if drafter.several:
        return drafter.propose_several(history, depth, count), None
    draft = ask(drafter, history, depth, context)
    if draft is None:
        return None, None
    assert draft.counts is not None
    tokens = draft.tokens
    bounds = torch.from_numpy(draft.counts).to(tokens.device, non_blocking=True)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    return tokens.masked_fill(columns >= bounds[:, None], -1)[:, None], draft.distribution


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
