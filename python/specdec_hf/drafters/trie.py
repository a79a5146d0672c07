"""Sequences of several drafters, or several of prompt lookup, merged into a prefix tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.base import (
    RULES_READING_DRAFT,
    DraftContext,
    Drafter,
    History,
    TreeDraft,
    TreeDrafter,
    TreeOutcome,
    check_draft,
)
from specdec_hf.drafters.model import ModelDrafter
from specdec_hf.drafters.prompt_lookup import PromptLookupDrafter
from specdec_hf.trees.layouts import TrieTree
from specdec_kernels import SampledDraft, build_trie


class TrieDrafter(TreeDrafter):
    """Merges what chain drafters propose into one tree.

    Where all are draft models and the rule asks for the laws, sequences stay apart: a token that
    was drawn twice is two trials (SpecInfer). Else what they share is verified once.

    Args:
        drafters: chain drafters; prompt lookup gives several sequences, every other one.
        layout: how many sequences and tokens.
    """

    def __init__(self, drafters: Sequence[Drafter], layout: TrieTree) -> None:
        self.drafters = list(drafters)
        self.layout = layout
        self.name = ", ".join(drafter.name for drafter in drafters)
        self.depth = layout.depth
        self._counts = [
            layout.sequences if isinstance(d, PromptLookupDrafter) else 1 for d in drafters
        ]
        most = sum(self._counts) * layout.depth
        self.size = most if layout.size is None else min(layout.size, most)
        if all(isinstance(drafter, ModelDrafter) for drafter in drafters):
            self.rules = ("multi_draft", "traversal", *TreeDrafter.rules)

    def start(self, context: DraftContext) -> None:
        """Begin a new call with every drafter."""
        self._context = context
        self._ratio = context.rule in RULES_READING_DRAFT
        for k, drafter in enumerate(self.drafters):
            mine = dataclasses.replace(context, noise_from=k * self.depth)
            if context.rule == "target_only":
                mine.temperature = 0.0  # its children need not be drawn, and the likeliest do best
            drafter.start(mine)

    def propose(self, history: History, limits: NDArray[np.int64]) -> TreeDraft | None:
        depth = min(self.depth, int(limits.max()))
        asked = [
            _ask(drafter, count, history, depth)
            for drafter, count in zip(self.drafters, self._counts, strict=True)
        ]
        given = [tokens for tokens, _ in asked if tokens is not None]
        if not given:
            return None
        target = self._context.model.device
        on_host = all(tokens.device.type == "cpu" for tokens in given)
        device = torch.device("cpu") if on_host else target
        sequences = torch.full((len(limits), sum(self._counts), depth), -1, device=device)
        first = 0
        for (tokens, _), count in zip(asked, self._counts, strict=True):
            if tokens is not None:
                sequences[:, first : first + count, : tokens.shape[2]] = tokens.to(device)
            first += count
        bounds = torch.from_numpy(limits.copy()).to(device, non_blocking=True)
        beyond = torch.arange(depth, device=device) >= bounds[:, None, None]
        sequences = sequences.masked_fill(beyond, -1)
        trie = build_trie(sequences, size=self.size, merge=not self._ratio)
        # On a device the number of nodes would be one more read: there the tree keeps its size.
        size = int(trie.num_nodes.max()) if on_host else self.size
        if size == 0:
            return None
        made = TreeDraft(
            trie.tokens[:, :size].to(target, non_blocking=True),
            trie.parents[:, :size].to(target, non_blocking=True),
            depth,
            note=sequences.flatten(1).to(target, non_blocking=True),
        )
        laws = [law for _, law in asked if law is not None]
        if laws:
            made.law = SampledDraft(
                torch.cat([law.logits for law in laws], dim=1),
                torch.cat([law.logsumexp for law in laws], dim=1),
                torch.cat([law.threshold for law in laws], dim=1),
                self._context.temperature,
            )
            rows = _law_rows(trie.nodes, self.size, [law for _, law in asked])
            made.draft_rows = rows[:, :size].to(target, non_blocking=True)
        return made

    def commit(self, lengths: NDArray[np.int64], outcome: TreeOutcome | None) -> None:
        first = 0
        for drafter, count in zip(self.drafters, self._counts, strict=True):
            accepted = np.zeros_like(lengths)
            if outcome is not None:
                proposed = outcome.note.reshape(len(lengths), sum(self._counts), -1)[:, first]
                depth = min(proposed.shape[1], outcome.tokens.shape[1])
                proposed, stood = proposed[:, :depth], outcome.tokens[:, :depth]
                agrees = (proposed == stood) & (stood >= 0)
                accepted = np.minimum.accumulate(agrees, axis=1).sum(axis=1)
            drafter.commit(lengths, accepted)
            first += count


def _ask(
    drafter: Drafter, count: int, history: History, depth: int
) -> tuple[torch.Tensor | None, SampledDraft | None]:
    """Sequences [B, count, up to depth] of a drafter, -1 behind their ends, and their law."""
    if isinstance(drafter, PromptLookupDrafter):
        return drafter.propose_several(history, depth, count), None
    draft = drafter.propose(history, depth)
    if draft is None:
        return None, None
    check_draft(drafter, draft, len(history.lengths), depth)
    tokens = draft.tokens
    if draft.counts is not None:
        bounds = torch.from_numpy(draft.counts.copy()).to(tokens.device, non_blocking=True)
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        tokens = tokens.masked_fill(columns >= bounds[:, None], -1)
    return tokens[:, None], draft.law


def _law_rows(nodes: torch.Tensor, size: int, laws: list[SampledDraft | None]) -> torch.Tensor:
    """[B, size] int32, the row of each node's law where the rows of all laws stand in line.

    Args:
        nodes: [B, K, L] of a trie whose sequences share no nodes.
        size: its nodes.
        laws: of each sequence, None for one that proposed nothing.
    """
    rows = np.zeros(tuple(nodes.shape[1:]), dtype=np.int32)
    first = 0
    for k, law in enumerate(laws):
        if law is not None:
            rows[k] = first + np.minimum(np.arange(rows.shape[1]), law.logits.shape[1] - 1)
            first += law.logits.shape[1]
    flat = nodes.flatten(1).long()
    values = torch.from_numpy(rows.flatten()).to(nodes.device, non_blocking=True).expand_as(flat)
    out = torch.zeros((len(flat), size + 1), dtype=torch.int32, device=nodes.device)
    return out.scatter(1, torch.where(flat < 0, size, flat), values)[:, :size]
