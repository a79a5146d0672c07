"""Heads that draft several tokens at once, each from the same final hidden state of the target.

Head k drafts the k-th token after the pending one, from the state before the pending token. It does
not know what the heads before it drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Cost, State
from specdec_hf.heads.base import FinalStateConfig, Head
from specdec_hf.heads.files import check_tensors, checked_size, draft_tokens, write_head
from specdec_hf.runner.protocol import to_device, vocab_size_of
from torch.nn import functional


@dataclass(frozen=True)
class ParallelConfig(FinalStateConfig):
    """Sizes of such heads.

    Attributes:
        target_hidden_size: H, of the target's hidden states.
        num_heads: K, how many tokens are drafted.
        inner: number of residual blocks (Medusa), or width of the hidden layer for each head
            (blockwise parallel decoding).
        vocab_size: of the target; 0 where the file does not say.
        draft_vocab_size: how many of the target's tokens are drafted; 0 is all.
    """

    target_hidden_size: int
    num_heads: int
    inner: int
    vocab_size: int
    draft_vocab_size: int

    @classmethod
    def for_target(
        cls, model: Any, draft_vocab_size: int, num_heads: int, inner: int
    ) -> ParallelConfig:
        """Heads for a target."""
        size = model.config.get_text_config(decoder=True).hidden_size
        return cls(size, num_heads, inner, vocab_size_of(model), draft_vocab_size)


class ParallelHeads(Head):
    """Base class; override `states`.

    ``lm_head`` is the target's for all heads, or [K, V, H] with one for each.
    """

    config: ParallelConfig

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config.draft_vocab_size, config.target_hidden_size)
        self.config = config

    def states(self, final: torch.Tensor) -> torch.Tensor:
        """What the output matrix reads, [..., K, H], from final hidden states [..., H]."""
        raise NotImplementedError

    def logits(self, states: torch.Tensor, k: int) -> torch.Tensor:
        """Logits [..., draft_vocab_size] of head k, from 0, given its states [..., H]."""
        return functional.linear(
            states, self.lm_head if self.lm_head.dim() == 2 else self.lm_head[k]
        )


def read_parallel_config(
    given: dict[str, Any],
    size: int,
    heads: int,
    inner: int,
    tensors: dict[str, torch.Tensor],
    rows: int = 0,
) -> ParallelConfig:
    """The sizes of heads whose own output matrices have so many rows."""
    if "d2t" in tensors:
        return ParallelConfig(
            size, heads, inner, checked_size(given, "vocab_size"), tensors["d2t"].numel()
        )
    vocab_size = checked_size(given, "vocab_size", rows, minimum=0)
    if rows and rows != vocab_size:
        raise ValueError(
            f"output matrices of heads without d2t must have vocab_size = {vocab_size} rows, got "
            f"{rows}"
        )
    return ParallelConfig(size, heads, inner, vocab_size, rows or vocab_size)


def begin_vocabulary(
    head: ParallelHeads,
    tensors: dict[str, torch.Tensor],
    expected: dict[str, list[int]],
    path: Path,
) -> None:
    """Give heads their draft vocabulary, once the tensors are found to be as expected."""
    if "d2t" in tensors:
        expected = expected | {"d2t": [head.config.draft_vocab_size]}
    check_tensors(tensors, expected, frozenset(), path, type(head).__name__)
    if "d2t" in tensors:
        head.tokens = draft_tokens(tensors["d2t"], head.config.vocab_size)


def write_parallel(
    head: ParallelHeads,
    folder: Path,
    fields: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    name: str,
) -> None:
    config = head.config
    if 0 < config.draft_vocab_size != config.vocab_size:
        tokens = head.tokens.cpu()
        tensors["d2t"] = tokens - torch.arange(len(tokens), device="cpu")
    sizes = {"hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size}
    given = {"architectures": [type(head).__name__], **fields, **sizes}
    write_head(folder, given, tensors, dtype, name)


class ParallelState(State):
    """`ParallelHeads` over the final hidden state of the last token that the target has read.

    Override `propose`. Of the prompt only the state of its last token is read.

    Args:
        head: in the target's dtype, on its device.
        call: the call.
    """

    def __init__(self, head: ParallelHeads, call: DrafterCall) -> None:
        self.head = head
        text = call.model.config.get_text_config(decoder=True)
        self._states = call.keep_states((text.num_hidden_layers,))
        # Where the heads share an output matrix, each of them reads it.
        outputs = head.config.num_heads if head.lm_head.dim() == 2 else 1
        share = head.share_of(call.model, outputs)
        self.cost = Cost(share, at_once=True, reads_prompt=False)

    def room(self, texts: History, limits: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """[B], how many of ``limits`` tokens each sequence can draft.

        None before it has states, which a prefill of the model's own does not give.
        """
        most = np.minimum(limits, self.head.config.num_heads)
        return np.where(texts.active & (self._states.counts > 0), most, 0)

    def states(self) -> torch.Tensor:
        """The states [B, K, H] that the output matrix reads; called once a round."""
        states, counts = self._states.pop()
        last = to_device(np.maximum(counts - 1, 0), states.device)
        final = states.gather(1, last[:, None, None].expand(-1, -1, states.shape[2]))[:, 0]
        return self.head.states(final)

    def top(self, states: torch.Tensor, k: int, width: int) -> torch.Tensor:
        """[B, width], the target's ids of the most likely tokens of head k, then -1."""
        logits = self.head.logits(states[:, k], k)
        ids = logits.topk(min(width, logits.shape[-1]), dim=-1).indices
        return functional.pad(self.head.tokens[ids], (0, width - ids.shape[1]), value=-1)
