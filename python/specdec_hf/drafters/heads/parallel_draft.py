"""Heads that draft in parallel in one call: what their drafters of chains and of trees share."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from specdec_hf.drafters.context import DraftContext, History
from specdec_hf.drafters.heads.head_drafter import HeadDrafter
from specdec_hf.heads.parallel import ParallelHeads

P = TypeVar("P", bound=ParallelHeads)


class ParallelDraft:
    """`ParallelHeads` over the final hidden state of the last token that the target has read.

    Args:
        head: in the target's dtype, on its device.
        context: the call.
    """

    def __init__(self, head: ParallelHeads, context: DraftContext) -> None:
        self.head = head
        text = context.model.config.get_text_config(decoder=True)
        self._states = context.keep_states((text.num_hidden_layers,))
        # Where the heads share an output matrix, each of them reads it.
        outputs = head.config.num_heads if head.lm_head.dim() == 2 else 1
        self.relative_cost = head.share_of(context.model, outputs)

    def room(self, history: History, limits: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """[B], how many of ``limits`` tokens each sequence can draft.

        None before it has states, which a prefill of the model's own does not give.
        """
        most = np.minimum(limits, self.head.config.num_heads)
        return np.where(history.active & (self._states.counts > 0), most, 0)

    def states(self) -> torch.Tensor:
        """The states [B, K, H] that the output matrix reads; called once a round."""
        states, counts = self._states.take()
        last = torch.from_numpy(np.maximum(counts - 1, 0)).to(states.device, non_blocking=True)
        final = states.gather(1, last[:, None, None].expand(-1, -1, states.shape[2]))[:, 0]
        return self.head.states(final)

    def top(self, states: torch.Tensor, k: int, width: int) -> torch.Tensor:
        """[B, width], the target's ids of the most likely tokens of head k, then -1."""
        logits = self.head.logits(states[:, k], k)
        ids = logits.topk(min(width, logits.shape[-1]), dim=-1).indices
        return functional.pad(self.head.tokens[ids], (0, width - ids.shape[1]), value=-1)


class ParallelDrafter(HeadDrafter[P]):
    """Base class of drafters with such heads beside that of chain or tree drafters."""

    drafts_at_once = True
    reads_prompt = False  # but for the state of its last token

    def draft_with(self, head: P, context: DraftContext) -> ParallelDraft:
        return ParallelDraft(head, context)
