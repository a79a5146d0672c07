"""Drafting a chain with a smaller causal language model of the same vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import shown
from specdec_hf.cache.forward import forward_window
from specdec_hf.drafters.context import DraftContext, History, reads_draft
from specdec_hf.drafters.drafter import RULES_OF_DRAWN_DRAFTS, Draft, Drafter, DraftOutcome
from specdec_hf.drafters.models.draft_model import DraftModel
from specdec_hf.drafters.token_stats import token_stats
from specdec_hf.hf_arguments.language_model import check_language_model
from specdec_kernels import SampledDraft


class ModelDrafter(Drafter):
    """Any causal LM; it may be on another device or in another dtype than the target.

    A draft comes with exactly the distribution it was drawn from. After a fully accepted draft the
    model's cache lacks the last drafted token, which the next round feeds first. A schedule that
    reads token statistics is asked after each token, and drafting ends where no sequence goes on.

    Args:
        model: the draft model. Neither it nor its configs are changed.
        cache: "auto", "spec", "aligned" or "dynamic", as in `generate`.
    """

    name = "model"
    draws = True
    rolls_back = True
    rules = RULES_OF_DRAWN_DRAFTS

    def __init__(self, model: Any, cache: str = "auto") -> None:
        check_language_model("model", model)
        if not isinstance(cache, str):
            raise TypeError(f"cache must be a string, got {shown(cache)}")
        self.model = model
        self.cache_kind = cache

    def start(self, context: DraftContext) -> None:
        """Check the vocabulary and make an empty cache.

        Raises:
            ValueError: the two vocabularies differ in size.
        """
        self._context = context
        self._draft = DraftModel(self.model, context, self.cache_kind)
        self.relative_cost = self._draft.relative_cost

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        draft, lengths = self._draft, history.lengths
        counts = draft.room(history, limits)
        gamma = int(counts.max())
        if gamma < 1:
            return None
        logits = draft.catch_up(history)
        positions = torch.from_numpy(lengths.copy()).to(draft.device, non_blocking=True)
        with_distribution = reads_draft(self._context.rule)
        drawn: list[torch.Tensor] = []
        logits_of, sums, thresholds = [], [], []
        for i in range(gamma):
            if i:
                # A row of logits that is not finite draws -1. It is fed as token 0, and the
                # verification takes it as "no draft from here on".
                logits = forward_window(
                    draft.model,
                    draft.cache,
                    drawn[-1].clamp(min=0)[:, None],
                    lengths + i - 1,
                    keep=1,
                )[:, -1]
            noise = self._context.noise_positions(positions, i)
            sampled = draft.sampler.sample(logits[:, None], noise[:, None])
            drawn.append(sampled.tokens[:, 0])
            if with_distribution:
                logits_of.append(logits)
                sums.append(sampled.logsumexp[:, 0])
                thresholds.append(sampled.threshold[:, 0])
            if self._context.goes_on is not None:
                ended = torch.from_numpy(counts <= i).to(draft.device, non_blocking=True)
                stats = token_stats(
                    logits[:, None], sampled.tokens.masked_fill(ended[:, None], -1),
                    draft.sampler.sampling["temperature"], sampled.threshold,
                )  # fmt: skip
                goes_on = self._context.goes_on(i, stats[0])
                counts = np.where(goes_on, counts, np.minimum(counts, i + 1))
                if counts.max() == i + 1:
                    break
        tokens = torch.stack(drawn, dim=1)
        if not with_distribution:
            return Draft(tokens, counts=counts)
        target = self._context.model.device
        distribution = SampledDraft(
            torch.stack(logits_of, dim=1).to(target),
            torch.stack(sums, dim=1).to(target),
            torch.stack(thresholds, dim=1).to(target),
            self._context.temperature,
        )
        return Draft(tokens, distribution=distribution, counts=counts)

    def commit(self, outcome: DraftOutcome) -> None:
        self._draft.truncate(outcome.lengths + outcome.accepted)
