"""Drafting a chain in one pass of a head over mask tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.model import DrawingDrafter
from specdec_hf.drafting.context import DraftContext, History
from specdec_hf.drafting.drafter import Draft
from specdec_hf.heads.blocks.head import BlockHead
from specdec_hf.heads.pairs.cache import HeadCache
from specdec_hf.heads.pairs.draft import StateDraft
from specdec_hf.heads.pairs.step import attend
from specdec_hf.heads.placed import HeadDrafter
from specdec_hf.runner.protocol import Lengths
from specdec_kernels import kv_append_

B = TypeVar("B", bound=BlockHead)


class BlockDraft(StateDraft, Generic[B]):
    """A `BlockHead` that drafts in one call; override `run`.

    Args:
        head, context: as in `StateDraft`.

    Attributes:
        size: most tokens of the round.
    """

    head: B

    def __init__(self, head: B, context: DraftContext) -> None:
        super().__init__(head, context)
        self.size = 1
        self.embed = head.embed(context.model)
        self._caches = [
            HeadCache(head.config, context.batch_size, head.lm_head) for _ in head.layers
        ]
        self._rows: Iterator[torch.Tensor] = iter(())

    def run(
        self, history: History, states: torch.Tensor, counts: NDArray[np.int64]
    ) -> torch.Tensor:
        """[B, size, H], the hidden states that the drafts of a round are drawn from.

        Args:
            history: the committed tokens.
            states: [B, n, layers * H] of the target, of the tokens that it has read since the last
                round.
            counts: [B], how many they are; what follows them has no meaning.
        """
        raise NotImplementedError

    def room(self, history: History, limits: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """As `StateDraft.room`, and no more than the head was trained for."""
        most = np.minimum(limits, self.head.config.num_drafts)
        return super().room(history, most)

    def catch_up(self, history: History) -> torch.Tensor:
        """Run the pass of a round; logits [B, V] of the first draft."""
        states, counts = self._states.take()
        logits = self.head.logits(self.run(history, states, counts))
        self.lengths = self.lengths + counts
        self._rows = iter(self.head.over_vocabulary(logits).unbind(dim=1))
        return next(self._rows)

    def extend(self, tokens: torch.Tensor, starts: Lengths) -> torch.Tensor:
        """Logits [B, V] of the next draft, whichever token was drawn before."""
        return next(self._rows)

    def buffers(self, slots: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer, with room for more than so many slots."""
        return [cache.buffers(slots) for cache in self._caches]

    def through(
        self,
        n: int,
        projected: tuple[torch.Tensor, ...],
        starts: torch.Tensor,
        mask: torch.Tensor | None,
        slots: int,
    ) -> torch.Tensor:
        """The hidden states [B, n, H] after layer ``n``, whose keys and values are kept.

        Args:
            n: the layer, from 0.
            projected: queries, keys, values and the residual, as of `HeadLayer.project`.
            starts: [B] int64, slot of the first of them.
            mask: [B, n, slots] bool, which slots each of them sees; None is those up to its own.
            slots: that are seen.
        """
        queries, keys, values, residual = projected
        kept = self._caches[n].buffers(slots)
        kv_append_(list(kept), [keys, values], starts)
        attended = attend(queries, kept[0][:, :, :slots], kept[1][:, :, :slots], mask)
        out: torch.Tensor = self.head.layers[n].finish(residual, attended)
        return out

    def masks(self, make: Callable[[int], torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The mask of each layer, given what makes that of a window."""
        made = {window: make(window) for window in set(self.head.config.windows)}
        return [made[window] for window in self.head.config.windows]


class BlockDrafter(HeadDrafter[B], DrawingDrafter):
    """Base class of drafters with a `BlockHead`; name its `BlockDraft` in ``draft``."""

    drafts_at_once = True
    draft: type[BlockDraft[B]]

    def draft_with(self, head: B, context: DraftContext) -> BlockDraft[B]:
        self._context = context
        return self.draft(head, context)

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        own: Any = self._draft
        own.size = max(int(own.room(history, limits).max()), 1)
        return super().propose(history, limits)
