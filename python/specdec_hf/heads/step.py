"""The part of an EAGLE-3 head that runs at each draft step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specdec_hf.heads.eagle3 import Eagle3Head
from specdec_kernels import kv_append_


class Eagle3Step(nn.Module):
    """A forward of an `Eagle3Head` over the keys and values of earlier pairs.

    All its products are those of linear layers, also that with the output matrix, so that all of
    them can be packed. It shares the head's weights.

    Args:
        head: in the dtype and on the device that it drafts in.
    """

    def __init__(self, head: Eagle3Head) -> None:
        super().__init__()
        self.fc, self.midlayer, self.norm = head.fc, head.midlayer, head.norm
        rows, size = head.lm_head.shape
        self.output = nn.Linear(size, rows, bias=False, device="meta")
        self.output.weight = nn.Parameter(head.lm_head, requires_grad=False)

    @property
    def dtype(self) -> torch.dtype:
        """The head's."""
        dtype: torch.dtype = self.output.weight.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """The head's."""
        device: torch.device = self.output.weight.device
        return device

    def forward(self, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`states` of n pairs, and their logits [B, n, draft_vocab_size]."""
        hidden = self.states(**inputs)
        return hidden, self.logits(hidden)

    def states(
        self,
        *,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        places: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        starts: torch.Tensor,
        mask: torch.Tensor | None,
        visible: int | None = None,
    ) -> torch.Tensor:
        """The hidden states [B, n, H] of n pairs, whose keys and values are written.

        Args:
            embeddings: [B, n, H] of their tokens.
            hidden: [B, n, H].
            places: [B, n] int64, for the rotary embedding.
            cosines, sines: [P, D], those of place p in row p.
            keys, values: buffers [B, K, S, D], changed in place.
            starts: [B] int64, slot of the first pair.
            mask: [B, n, visible] bool, which slots each pair sees; None lets several pairs see
                those up to their own, and a single one all.
            visible: slots that the pairs see; only given without a mask.
        """
        rotary = cosines[places][:, None], sines[places][:, None]
        q, k, v = self.midlayer.project(embeddings, hidden, rotary)
        kv_append_([keys, values], [k, v], starts)
        slots = visible if mask is None else mask.shape[2]
        attended = _attend(q, keys[:, :, :slots], values[:, :, :slots], mask)
        out: torch.Tensor = self.midlayer.finish(hidden, attended)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., draft_vocab_size] from hidden states [..., H]."""
        logits: torch.Tensor = self.output(self.norm(hidden))
        return logits


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention [B, H, n, D] of queries whose heads share keys [B, K, S, D]."""
    attention = functional.scaled_dot_product_attention
    out: torch.Tensor
    if mask is None and q.shape[2] > 1:
        out = attention(q, keys, values, is_causal=True, enable_gqa=True)
        return out
    # The queries that share a key are fed as more places of one head, so that it is read once.
    share = q.shape[1] // keys.shape[1]
    together = q.unflatten(1, (-1, share)).flatten(2, 3)
    if mask is not None:
        mask = mask[:, None].repeat(1, 1, share, 1)
    out = attention(together, keys, values, attn_mask=mask).unflatten(2, (share, -1))
    return out.flatten(1, 2)
