"""Drafting with some layers of the target itself.

The layers that draft and target share see each token once: their keys and values go into the
target's own cache, and the verification goes on from the hidden states after them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.cache.protocol import Lengths
from specdec_hf.cache.split_model import SplitModel, check_split
from specdec_hf.drafters.context import DraftContext, History
from specdec_hf.drafters.drafter import Draft, DraftOutcome
from specdec_hf.drafters.models.own_cache import OwnCacheDraft, OwnCacheDrafter


class OwnLayers(OwnCacheDraft):
    """A part of the target as a draft model over the target's cache.

    Args:
        context: the call.
        split: the two parts of the target.
    """

    def __init__(self, context: DraftContext, split: SplitModel) -> None:
        super().__init__(context)
        self.split = split
        self.hidden: list[torch.Tensor] = []

    def catch_up(self, history: History) -> torch.Tensor:
        self.hidden = []
        pending = torch.from_numpy(history.last(1)).to(self.device, non_blocking=True)
        return self.forward(pending, history.lengths - 1, 1)[:, -1]

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor:
        logits, hidden = self.split.first(self.target_cache, tokens, starts)
        self.hidden.append(hidden)
        return logits


class OwnLayersDrafter(OwnCacheDrafter):
    """Base class of drafters that are a part of the target; override `parts`."""

    def parts(self, total: int) -> tuple[int, int]:
        """For a model of ``total`` layers, how many the draft shares and where it resumes."""
        raise NotImplementedError

    def exit_of(self, model: Any) -> Any:
        """A module between the draft's last layer and the final norm, or None.

        Raises:
            ValueError: a target that the module was not made for.
        """
        return None

    def check_config(self, config: Any) -> None:
        self.parts(config.get_text_config(decoder=True).num_hidden_layers)

    def start(self, context: DraftContext) -> None:
        """Take the target apart.

        Raises:
            ValueError: a cache or a model that this does not go with.
        """
        self._check_cache(context)
        self._context = context
        model = context.model
        shared, resume = self.parts(model.config.get_text_config(decoder=True).num_hidden_layers)
        split = SplitModel(model, shared, resume, self.exit_of(model))
        if context.self_check:
            check_split(model, split, shared, resume)
        self._draft = OwnLayers(context, split)
        self.relative_cost = split.first_share

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        if self._context.cache.hidden_states is not None:
            self._context.note(
                f"drafter {self.name} drafts nothing where the call returns hidden states"
            )
            return None
        return super().propose(history, limits)

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor | None:
        own: Any = self._draft
        hidden, own.hidden = own.hidden, []
        if not hidden:
            return None
        known = torch.cat(hidden, dim=1)[:, : tokens.shape[1]]
        size = known.shape[1]
        if size < tokens.shape[1]:
            rest = own.split.shared(own.target_cache, tokens[:, size:], starts + size)
            known = torch.cat([known, rest], dim=1)
        logits: torch.Tensor = own.split.second(own.target_cache, known, starts, keep)
        return logits

    def commit(self, outcome: DraftOutcome) -> None:
        own: Any = self._draft
        own.hidden = []
