"""A draft model that is itself accelerated by a smaller drafter.

The smaller drafter's tokens are verified by the draft model, and the draft model's verified tokens
by the target. A verified token follows the draft model's distribution exactly: after a rejection it
is drawn from the residual, not from the draft model. So the rows that are reported are those of the
draft model, as if it had drawn every token by itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer
from specdec_hf.cache.forward import forward_window
from specdec_hf.drafters.checks import ask
from specdec_hf.drafters.context import DraftContext, History, reads_draft
from specdec_hf.drafters.drafter import RULES_OF_DRAWN_DRAFTS, Draft, DraftOutcome
from specdec_hf.drafters.models.cascade import (
    Cascade,
    check_rolls_back,
    derived_seeds,
    level_context,
    read_tokens,
    with_drafts,
)
from specdec_hf.drafters.models.draft_model import DraftModel
from specdec_hf.hf_arguments.language_model import check_language_model
from specdec_kernels import Rule, SampledDraft, Verdict, verify_chain


class VerticalCascade(Cascade):
    """A draft model whose tokens a smaller drafter drafts.

    A round of the target holds several rounds of the draft model. Each reads the draft model's
    device once for the outcome of the verification, and once more for drafts that lie on a device.

    Args:
        model: the draft model. Neither it nor its configs are changed.
        drafter: drafts for it: a smaller model, or a `Drafter` that rolls back, such as another
            `VerticalCascade`.
        num_assistant_tokens: tokens that ``drafter`` drafts in each round of ``model``.

    Raises:
        TypeError: no model, or no drafter.
        ValueError: a drafter that does not roll back.
    """

    name = "vertical_cascade"
    draws = True
    rules = RULES_OF_DRAWN_DRAFTS

    def __init__(self, model: Any, drafter: Any, num_assistant_tokens: int = 3) -> None:
        check_language_model("model", model)
        self.model: Any = model
        self.num_assistant_tokens = check_integer("num_assistant_tokens", num_assistant_tokens, 1)
        super().__init__([drafter])
        check_rolls_back(self.drafters[0])

    def start(self, context: DraftContext) -> None:
        """Check the vocabularies and make empty caches.

        Raises:
            ValueError: vocabularies that differ in size.
        """
        self._context = context
        self._draft = DraftModel(self.model, context)
        self.relative_cost = self._draft.relative_cost
        # The draft model's rule. Where Q is read it must be lossless for Q. Under match all levels
        # share the noise of a position, and the greedy rule serves drafts that are not drawn.
        rule = "greedy"
        if context.rule == "match" or reads_draft(context.rule):
            rule = "match" if context.rule == "match" else "token"
        self._inner = level_context(
            context,
            0,
            model=self.model,
            cache=None,
            rule=rule,
            seeds=context.seeds.to(self._draft.device),
        )
        self._seeds = context.seeds.cpu()
        self.drafters[0].start(self._inner)

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        draft, batch_size = self._draft, len(history.lengths)
        limits = draft.room(history, limits)
        gamma = int(limits.max())
        if gamma < 1:
            return None
        drafted = np.full((batch_size, gamma), -1, dtype=np.int64)
        counts = np.zeros(batch_size, dtype=np.int64)
        rows: torch.Tensor | None = None
        self._inner.begin(history)
        seeds = self._round_seeds(history.lengths)
        active = limits > 0
        while active.any():
            shown = with_drafts(history, drafted, counts, active)
            # A sequence's own number: the noise of its drafts must not depend on the batch.
            most = np.where(active, np.minimum(limits - counts - 1, self.num_assistant_tokens), 0)
            emitted, accepted, logits = self._round(shown, most, seeds)
            if rows is None:
                rows = logits.new_zeros((batch_size, gamma, logits.shape[2]))
            added = np.where(active, np.minimum((emitted >= 0).sum(axis=1), limits - counts), 0)
            for b in np.flatnonzero(added).tolist():
                to = slice(int(counts[b]), int(counts[b] + added[b]))
                drafted[b, to] = emitted[b, : added[b]]
                rows[b, to] = logits[b, : added[b]]
            counts += added
            active &= (added > 0) & (counts < limits)
            # The last of the added tokens is pending: no cache holds it.
            kept = np.minimum(accepted, np.maximum(added - 1, 0))
            draft.truncate(shown.lengths + np.maximum(added - 1, 0))
            self.drafters[0].commit(DraftOutcome.of_chain(shown.lengths, kept, emitted))
        self._context.asked_for_noise = True
        if rows is None or not counts.any():
            return None
        tokens = torch.from_numpy(drafted)
        if not reads_draft(self._context.rule):
            return Draft(tokens, counts=counts)
        target = self._context.model.device
        zeros = torch.zeros((batch_size, gamma), dtype=torch.int64, device=draft.device)
        # The statistics of the rows; the tokens that come with them are not used.
        drawn = draft.sampler.sample(rows, zeros)
        distribution = SampledDraft(
            rows.to(target), drawn.logsumexp.to(target), drawn.threshold.to(target),
            self._context.temperature,
        )  # fmt: skip
        return Draft(tokens.to(target), distribution=distribution, counts=counts)

    def commit(self, outcome: DraftOutcome) -> None:
        self._draft.truncate(outcome.lengths + outcome.accepted)
        self.drafters[0].commit(outcome)

    def _round(
        self, history: History, most: NDArray[np.int64], seeds: torch.Tensor
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], torch.Tensor]:
        """One round of the draft model.

        Args:
            history: what it continues.
            most: [B], how many tokens the smaller drafter may draft.
            seeds: [B] int64, of the verification.

        Returns:
            Emitted tokens [B, m+1], -1 after their end; [B] how many of them were drafted; and the
            draft model's logits [B, m+1, V].
        """
        draft, proposed = self._draft, None
        if most.any():
            shown = dataclasses.replace(history, active=most > 0)
            proposed = ask(self.drafters[0], shown, most, self._inner)
        ids = torch.empty((len(history.lengths), 0), dtype=torch.int64, device=draft.device)
        distribution = None
        self._inner.asks += most > 0
        if proposed is not None:
            found, counts = read_tokens(proposed, most)
            found = np.where(np.arange(found.shape[1]) < counts[:, None], found, -1)
            ids, distribution = torch.from_numpy(found).to(draft.device), proposed.distribution
        missing = int((history.lengths - draft.cache.lengths).max())
        window = torch.from_numpy(history.last(missing)).to(draft.device, non_blocking=True)
        window = torch.cat([window, ids.clamp(min=0)], dim=1)
        logits = forward_window(
            draft.model, draft.cache, window, history.lengths - missing, keep=ids.shape[1] + 1
        )
        positions = torch.from_numpy(history.lengths).to(draft.device, non_blocking=True)
        verdict = self._verify(logits, ids, distribution, seeds, positions)
        outcome = torch.cat([verdict.tokens, verdict.num_accepted[:, None].long()], dim=1)
        read = outcome.cpu().numpy()
        return read[:, :-1], read[:, -1], logits

    def _verify(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        distribution: SampledDraft | None,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> Verdict:
        return verify_chain(
            logits, ids, distribution, rule=cast(Rule, self._inner.rule),
            **self._draft.sampler.sampling, seeds=seeds, positions=positions,
        )  # fmt: skip

    def _round_seeds(self, lengths: NDArray[np.int64]) -> torch.Tensor:
        """[B] int64, the seeds with which the draft model verifies in this round of the target.

        The target verifies at the same positions, and needs noise that decided nothing before.
        """
        if self._inner.rule == "match":
            return self._inner.seeds
        begun, first = self._inner.round_lengths, self._context.first_draft_index
        seeds = derived_seeds(self._seeds, begun, lengths, first)
        return seeds.to(self._draft.device, non_blocking=True)
