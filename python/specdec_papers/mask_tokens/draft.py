"""Drafting a chain in one pass of a head over mask tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.drafters.chain import ChainState
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import RULES_OF_DRAWN_DRAFTS, Draft
from specdec_hf.heads.eagle_family.cache import HeadCache
from specdec_hf.heads.eagle_family.draft import StatesStepper
from specdec_hf.heads.eagle_family.step import attend
from specdec_hf.heads.placed import HeadDrafter
from specdec_hf.runner.protocol import Lengths

from specdec_kernels import kv_append_
from specdec_papers.mask_tokens.head import BlockHead

B = TypeVar("B", bound=BlockHead)


class BlockStepper(StatesStepper, Generic[B]):
    """A `BlockHead` that drafts in one call; override `run`.

    Args:
        head, call: as in `StatesStepper`.

    Attributes:
        size: most tokens of the round.
    """

    head: B

    def __init__(self, head: B, call: DrafterCall) -> None:
        super().__init__(head, call)
        self.cost = dataclasses.replace(self.cost, at_once=True)
        self.size = 1
        self.embed = head.embed(call.model)
        self._caches = [HeadCache(head.config, call.batch_size, head.lm_head) for _ in head.layers]
        self._rows: Iterator[torch.Tensor] = iter(())

    def run(self, texts: History, states: torch.Tensor, counts: NDArray[np.int64]) -> torch.Tensor:
        """[B, size, H], the hidden states that the drafts of a round are drawn from.

        Args:
            texts: the committed tokens.
            states: [B, n, layers * H] of the target, of the tokens that it has read since the last
                round.
            counts: [B], how many they are; what follows them has no meaning.
        """
        raise NotImplementedError

    def room(self, texts: History, limits: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """As `StatesStepper.room`, and no more than the head was trained for."""
        most = np.minimum(limits, self.head.config.num_drafts)
        return super().room(texts, most)

    def catch_up(self, texts: History) -> torch.Tensor:
        """Run the pass of a round; logits [B, V] of the first draft."""
        states, counts = self._states.pop()
        logits = self.head.logits(self.run(texts, states, counts))
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


class BlockState(ChainState):
    """Draws the drafts of one pass, which has as many places as the round can use."""

    stepper: BlockStepper[Any]

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        self.stepper.size = max(int(self.stepper.room(texts, limits).max()), 1)
        return super().propose(texts, limits)


class BlockDrafter(HeadDrafter[B]):
    """Base class of drafters with a `BlockHead`.

    Attributes:
        stepper: the class of what draws its chains.
    """

    draws = True
    rules = RULES_OF_DRAWN_DRAFTS
    stepper: type[BlockStepper[B]]

    def state_with(self, head: B, call: DrafterCall) -> BlockState:
        return BlockState(call, self.stepper(head, call))
