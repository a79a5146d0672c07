"""Drafting with the target itself, at look-ahead embeddings that follow the text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.cache.forward import forward_embeddings
from specdec_hf.cache.protocol import Lengths
from specdec_hf.drafters.context import DraftContext, History
from specdec_hf.drafters.drafter import Draft
from specdec_hf.drafters.heads.head_drafter import HeadDrafter
from specdec_hf.drafters.models.own_cache import OwnCacheDraft, OwnCacheDrafter
from specdec_hf.heads.pass_head import PassHead, check_takes_embeddings, load_pass


class LookAheadDraft(OwnCacheDraft):
    """The target over the pending token and look-ahead embeddings, in one forward a round.

    Args:
        context: the call.
        head: in the target's dtype, on its device.

    Attributes:
        most: tokens that it can draft.
        size: most tokens of the round.
    """

    def __init__(self, context: DraftContext, head: PassHead) -> None:
        super().__init__(context)
        self.head = head
        self.most = 1 + head.config.num_embeddings
        self.size = 1
        self._rows: Iterator[torch.Tensor] = iter(())

    @property
    def relative_cost(self) -> float:
        """One forward of the target makes all drafts of a round."""
        return 1.0

    def catch_up(self, history: History) -> torch.Tensor:
        """Run the forward; logits [B, V] of each sequence's next token."""
        pending = torch.from_numpy(history.last(1)).to(self.device, non_blocking=True)
        given = self.model.get_input_embeddings()(pending)
        own = self.head.embeddings[: self.size - 1].to(given).expand(len(given), -1, -1)
        fed = torch.cat([given, own], dim=1)
        logits = forward_embeddings(
            self.model, self.target_cache, fed, history.lengths - 1, keep=self.size
        )
        self._rows = iter(logits.unbind(dim=1))
        return next(self._rows)

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor:
        """Logits [B, 1, V] at the next look-ahead embedding, whichever token was drawn before."""
        return next(self._rows)[:, None]


class PassHeadDrafter(HeadDrafter[PassHead], OwnCacheDrafter, entry="pass_head"):
    """The target's next token, and a guess of the following ones at look-ahead embeddings.

    The first draft is drawn from the target's own distribution, so that it is accepted but for
    rounding. The verification is another forward: where nothing more is accepted, two forwards
    give two tokens.

    Args:
        head: a `PassHead`, or the folder of one. It is not changed.

    Raises:
        TypeError: no head.
        ValueError: a folder whose head cannot be read, by name of what is wrong.

    Source: Monea et al. 2023, "PaSS", arXiv 2311.13581.
    """

    kind, load = PassHead, staticmethod(load_pass)
    drafts_at_once = True

    def draft_with(self, head: PassHead, context: DraftContext) -> LookAheadDraft:
        self._check_cache(context)
        check_takes_embeddings(context.model, head.config.target_hidden_size)
        self._context = context
        return LookAheadDraft(context, head)

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        own: Any = self._draft
        own.size = min(int(limits.max()), own.most)
        return super().propose(history, np.minimum(limits, own.most))
