"""Blockwise parallel decoding: one feed-forward layer gives the states of all heads.

Source: Stern et al. 2018, arXiv 1811.03115, section 6.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Draft
from specdec_hf.heads.files import WEIGHTS, checked_size, read_config, read_weights
from specdec_hf.heads.placed import HeadDrafter
from specdec_hf.schedules.base import MAX_DRAFT_LENGTH
from torch import nn

from specdec_papers.parallel import (
    ParallelConfig,
    ParallelHeads,
    ParallelState,
    begin_vocabulary,
    read_parallel_config,
    write_parallel,
)


class BlockwiseHeads(ParallelHeads):
    """A layer with K hidden layers' width and K outputs, each added to the target's state.

    Args:
        config: its sizes.
    """

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        size, heads = config.target_hidden_size, config.num_heads
        self.hidden = nn.Linear(size, heads * config.inner)
        self.output = nn.Linear(heads * config.inner, heads * size)

    def states(self, final: torch.Tensor) -> torch.Tensor:
        made = self.output(self.hidden(final).relu())
        out: torch.Tensor = final[..., None, :] + made.unflatten(-1, (self.config.num_heads, -1))
        return out

    def begin_as(self, model: Any) -> None:
        """Zero outputs, so that every head first drafts what the target would say next."""
        with torch.no_grad():
            self.hidden.reset_parameters()
            self.output.weight.zero_()
            self.output.bias.zero_()


def save_blockwise(head: BlockwiseHeads, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write blockwise heads as `write_head` does."""
    fields = {"num_heads": head.config.num_heads, "inner_size": head.config.inner}
    write_parallel(head, folder, fields, dict(head.state_dict()), dtype, WEIGHTS)


def load_blockwise(folder: str | Path) -> BlockwiseHeads:
    """Blockwise heads from a folder; see `load_medusa`."""
    folder = Path(folder)
    given, tensors = read_config(folder), read_weights(folder, WEIGHTS)
    size, inner = (checked_size(given, name) for name in ("hidden_size", "inner_size"))
    heads = checked_size(given, "num_heads", maximum=MAX_DRAFT_LENGTH)
    head = BlockwiseHeads(read_parallel_config(given, size, heads, inner, tensors))
    expected = {name: list(weight.shape) for name, weight in head.state_dict().items()}
    begin_vocabulary(head, tensors, expected, folder / WEIGHTS)
    head.load_state_dict({name: tensors[name].float() for name in expected})
    return head.eval()


class BlockwiseDrafter(HeadDrafter[BlockwiseHeads], entry="blockwise"):
    """Trained heads, each of which drafts its most likely token.

    Its arguments and errors are those of `HeadDrafter`.

    Source: Stern et al. 2018, arXiv 1811.03115.
    """

    kind, load = BlockwiseHeads, staticmethod(load_blockwise)

    def state_with(self, head: BlockwiseHeads, call: DrafterCall) -> ParallelState:
        return _BlockwiseState(head, call)


class _BlockwiseState(ParallelState):
    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        counts = self.room(texts, limits)
        gamma = int(counts.max())
        if gamma < 1:
            return None
        states = self.states()
        tokens = torch.cat([self.top(states, k, 1) for k in range(gamma)], dim=1)
        return Draft(tokens, counts=counts)
