"""Drafting with a smaller causal language model of the same vocabulary."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.cache import make_cache
from specdec_hf.drafters.base import RATIO_RULES, Draft, DraftContext, Drafter, History
from specdec_hf.forward import forward_window
from specdec_kernels import SampledDraft, sample


class ModelDrafter(Drafter):
    """Any causal LM; may live on another device or in another dtype than the target.

    It samples with the target's own temperature and filters, so that its law is close to the one
    that judges it, and hands over exactly the law it drew from. Its cache trails the sequence by
    one token after a fully accepted draft, and the next call feeds that token first.

    Args:
        model: the draft model. Neither it nor its configs are changed.
        cache: "auto", "spec" or "dynamic", as in `generate`.
    """

    name = "model"

    def __init__(self, model: Any, cache: str = "auto") -> None:
        self.model = model
        self.cache_kind = cache

    def start(self, context: DraftContext) -> None:
        """Check the vocabulary and make an empty cache.

        Raises:
            ValueError: the two vocabularies differ in size.
        """
        ours = self.model.config.get_text_config(decoder=True).vocab_size
        theirs = context.model.config.get_text_config(decoder=True).vocab_size
        if ours != theirs:
            raise ValueError(
                "drafter and model must share one vocabulary: "
                f"drafter has {ours} tokens, model has {theirs}"
            )
        self._context = context
        self._device = self.model.device
        self._limit: int | None = getattr(
            self.model.config.get_text_config(decoder=True), "max_position_embeddings", None
        )
        self._cache = make_cache(
            self.model,
            context.batch_size,
            min(context.max_length, 1024) + context.max_gamma + 1,
            self.cache_kind,
        )
        self._settings: dict[str, Any] = {
            name: value.to(self._device) if isinstance(value, torch.Tensor) else value
            for name, value in (
                ("temperature", context.temperature),
                ("top_k", context.top_k),
                ("top_p", context.top_p),
                ("min_p", context.min_p),
            )
        }
        self._seeds = context.seeds.to(self._device)
        self._stream: Literal["shared", "draft"] = "shared" if context.rule == "match" else "draft"

    def propose(self, history: History, gamma: int) -> Draft | None:
        lengths = history.lengths
        if self._limit is not None:
            gamma = min(gamma, self._limit - int(lengths[history.active].max(initial=0)))
        if gamma < 1:
            return None
        # Rows that trail by less than the one that trails most are fed a few tokens again: the same
        # entries land in the same slots, and the batch stays rectangular and right aligned.
        missing = int((lengths - self._cache.lengths).max())
        tokens = torch.from_numpy(history.last(missing)).to(self._device, non_blocking=True)
        starts = lengths - missing
        positions = torch.from_numpy(lengths.copy()).to(self._device, non_blocking=True)
        drawn, logits_of, sums, thresholds = [], [], [], []
        for i in range(gamma):
            logits = forward_window(self.model, self._cache, tokens, starts, keep=1)[:, -1]
            picked = sample(
                logits,
                **self._settings,
                seeds=self._seeds,
                positions=positions + i,
                stream=self._stream,
            )
            # A row that is not finite draws -1: fed as 0, and judged as "no draft from here on".
            tokens = picked.tokens.clamp(min=0)[:, None]
            starts = lengths + i
            drawn.append(picked.tokens)
            if self._needs_law:
                logits_of.append(logits)
                sums.append(picked.logsumexp)
                thresholds.append(picked.threshold)
        drafted = torch.stack(drawn, dim=1)
        if not self._needs_law:
            return Draft(drafted)
        target = self._context.model.device
        law = SampledDraft(
            torch.stack(logits_of, dim=1).to(target),
            torch.stack(sums, dim=1).to(target),
            torch.stack(thresholds, dim=1).to(target),
            self._context.temperature,
        )
        return Draft(drafted, law)

    def commit(self, lengths: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        # The last draft was never fed, hence the minimum: one short after full acceptance.
        self._cache.truncate(np.minimum(self._cache.lengths, lengths + accepted))

    @property
    def _needs_law(self) -> bool:
        return self._context.rule in RATIO_RULES
