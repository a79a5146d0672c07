"""Drafting with forwards of the target itself, over the target's own cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec_hf.cache.protocol import Lengths, context_length
from specdec_hf.cache.spec_cache import SpecCache
from specdec_hf.drafters.context import DraftContext, History
from specdec_hf.drafters.drafter import Draft
from specdec_hf.drafters.models.draft_model import DraftModel
from specdec_hf.drafters.models.model import ModelDrafter
from specdec_hf.drafters.row_sampler import RowSampler


class OwnCacheDraft(DraftModel):
    """The target as its own draft model; override `catch_up` and `forward`.

    Args:
        context: the call.
    """

    def __init__(self, context: DraftContext) -> None:
        self.model = context.model
        self.device = context.model.device
        self.context = context
        self.target_cache: SpecCache = context.cache
        self.cache: Any = self  # drafts are fed through `forward`
        self.sampler = RowSampler(context, self.device)
        self._context_length = context_length(self.model)

    def truncate(self, lengths: Lengths) -> None:
        """Do nothing, because the loop truncates the target's cache."""


class OwnCacheDrafter(ModelDrafter):
    """Base class of drafters that run the target; `start` makes what they draft with.

    What a draft writes into the cache lies beyond the committed tokens, where the verification
    overwrites it.
    """

    rolls_back = False
    makes_forward = True
    reads_prompt = False  # the cache holds it
    model = None  # that of the call

    def _check_cache(self, context: DraftContext) -> None:
        """Raise ValueError for a call whose cache drafts cannot be written to."""
        if not isinstance(context.cache, SpecCache):
            kind = getattr(context.cache, "kind", None)
            raise ValueError(f"drafter {self.name} needs cache='spec', got {kind!r}")

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        own: Any = self._draft
        cache = own.target_cache
        if cache.later_inputs is not None:
            self._context.note(
                f"drafter {self.name} drafts nothing where the call has inputs other than text"
            )
            return None
        before = cache.lengths.copy()
        draft = super().propose(history, limits)
        cache.truncate(before)
        return draft
