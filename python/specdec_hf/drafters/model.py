"""Drafting a chain with a smaller causal language model of the same vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.decode.forward import forward_window
from specdec_hf.drafters.base import RULES_READING_DRAFT, Draft, DraftContext, Drafter, History
from specdec_hf.drafters.draft_model import DraftModel
from specdec_kernels import SampledDraft


class ModelDrafter(Drafter):
    """Any causal LM; may live on another device or in another dtype than the target.

    It hands over exactly the law it drew from. Its cache trails the sequence by one token after a
    fully accepted draft, and the next call feeds that token first.

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
        self._context = context
        self._draft = DraftModel(self.model, context, self.cache_kind)

    def propose(self, history: History, gamma: int) -> Draft | None:
        draft, lengths = self._draft, history.lengths
        counts = draft.room(history, gamma)
        gamma = int(counts.max())
        if gamma < 1:
            return None
        logits = draft.catch_up(history)
        positions = torch.from_numpy(lengths.copy()).to(draft.device, non_blocking=True)
        drawn: list[torch.Tensor] = []
        logits_of, sums, thresholds = [], [], []
        for i in range(gamma):
            if i:
                # A row that is not finite draws -1: fed as 0, and judged as "no draft from here on"
                logits = forward_window(
                    draft.model,
                    draft.cache,
                    drawn[-1].clamp(min=0)[:, None],
                    lengths + i - 1,
                    keep=1,
                )[:, -1]
            picked = draft.draw(logits[:, None], self._noise(positions, i)[:, None])
            drawn.append(picked.tokens[:, 0])
            if self._needs_law:
                logits_of.append(logits)
                sums.append(picked.logsumexp[:, 0])
                thresholds.append(picked.threshold[:, 0])
        drafted = torch.stack(drawn, dim=1)
        if not self._needs_law:
            return Draft(drafted, counts=counts)
        target = self._context.model.device
        law = SampledDraft(
            torch.stack(logits_of, dim=1).to(target),
            torch.stack(sums, dim=1).to(target),
            torch.stack(thresholds, dim=1).to(target),
            self._context.temperature,
        )
        return Draft(drafted, law, counts)

    def commit(self, lengths: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        # The last draft was never fed, hence one short after full acceptance.
        self._draft.truncate(lengths + accepted)

    def _noise(self, positions: torch.Tensor, i: int) -> torch.Tensor:
        """Where the noise of draft i comes from, [B].

        Rules match and token use that of the token's position. Rule block and trees judge a token
        by what comes after it: a rejected draft has then shaped what was emitted, and noise that
        drew it must not draw again at the same position in the next round.
        """
        begin = self._context.noise_from
        if begin is None or self._context.rule == "match":
            return positions + i
        return positions + ((begin + i + 1) << 32)

    @property
    def _needs_law(self) -> bool:
        return self._context.rule in RULES_READING_DRAFT
