"""Drafting with some layers of the target itself.

The layers that draft and target share see each token once: their keys and values go into the
target's own cache, and the verification goes on from the hidden states after them.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from specdec_hf.cache.protocol import Lengths, context_length
from specdec_hf.cache.spec_cache import SpecCache
from specdec_hf.cache.split_model import SplitModel, check_split
from specdec_hf.drafters.context import DraftContext, History
from specdec_hf.drafters.drafter import Draft
from specdec_hf.drafters.models.draft_model import DraftModel
from specdec_hf.drafters.models.model import ModelDrafter
from specdec_hf.drafters.row_sampler import RowSampler


class OwnLayers(DraftModel):
    """A part of the target as a draft model over the target's cache.

    Args:
        context: the call.
        split: the two parts of the target.
    """

    def __init__(self, context: DraftContext, split: SplitModel) -> None:
        self.model = context.model
        self.device = context.model.device
        self.context = context
        self.split = split
        self.target_cache: SpecCache = context.cache
        self.cache: Any = self  # drafts are fed through `forward`
        self.sampler = RowSampler(context, self.device)
        self._context_length = context_length(self.model)
        self.hidden: list[torch.Tensor] = []

    def catch_up(self, history: History) -> torch.Tensor:
        self.hidden = []
        pending = torch.from_numpy(history.last(1)).to(self.device, non_blocking=True)
        return self.forward(pending, history.lengths - 1, 1)[:, -1]

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor:
        logits, hidden = self.split.first(self.target_cache, tokens, starts)
        self.hidden.append(hidden)
        return logits

    def truncate(self, lengths: Lengths) -> None:
        """Do nothing, because the loop truncates the target's cache."""


class OwnLayersDrafter(ModelDrafter):
    """Base class of drafters that are a part of the target; override `parts`."""

    rolls_back = False
    model = None  # that of the call

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
        if not isinstance(context.cache, SpecCache):
            kind = getattr(context.cache, "kind", None)
            raise ValueError(f"drafter {self.name} needs cache='spec', got {kind!r}")
        self._context = context
        model = context.model
        shared, resume = self.parts(model.config.get_text_config(decoder=True).num_hidden_layers)
        split = SplitModel(model, shared, resume, self.exit_of(model))
        if context.self_check:
            check_split(model, split, shared, resume)
        self._draft = OwnLayers(context, split)
        self.relative_cost = 1 - (resume - shared) / split.total

    def propose(self, history: History, gamma: int) -> Draft | None:
        own: Any = self._draft
        cache = own.target_cache
        if cache.later_inputs is not None or cache.hidden_states is not None:
            self._context.note(
                f"drafter {self.name} drafts nothing where the call has inputs other than text or "
                "returns hidden states"
            )
            return None
        if (history.lengths - cache.lengths != 1).any():
            return None  # the first round reads the prompt
        before = cache.lengths.copy()
        draft = super().propose(history, gamma)
        cache.truncate(before)
        return draft

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor | None:
        own: Any = self._draft
        hidden, own.hidden = own.hidden, []
        if not hidden or keep != tokens.shape[1]:
            return None
        known = torch.cat(hidden, dim=1)[:, : tokens.shape[1]]
        size = known.shape[1]
        if size < tokens.shape[1]:
            rest = own.split.shared(own.target_cache, tokens[:, size:], starts + size)
            known = torch.cat([known, rest], dim=1)
        logits: torch.Tensor = own.split.second(own.target_cache, known, starts, keep)
        return logits

    def commit(self, lengths: NDArray[Any], accepted: NDArray[Any]) -> None:
        own: Any = self._draft
        own.hidden = []
