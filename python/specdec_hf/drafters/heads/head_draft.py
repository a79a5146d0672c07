"""A trained head in the place of a draft model: what drafters of chains and of trees share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from specdec_hf.cache.protocol import Lengths, context_length
from specdec_hf.drafters.context import DraftContext, History
from specdec_hf.drafters.row_sampler import RowSampler
from specdec_hf.heads.cache import HeadCache
from specdec_hf.heads.eagle3 import Eagle3Head
from specdec_kernels import tree_attention


class HeadDraft:
    """An `Eagle3Head` that drafts in one call, with the methods of a `DraftModel`.

    Its cache holds the pairs of committed tokens alone from one round to the next: those of drafts
    are made again from the target's features once the drafts are committed.

    Args:
        head: in the target's dtype, on its device.
        context: the call.
        full_vocabulary: whether logits are those of the target's vocabulary, -inf where the head
            cannot draft a token, or of the draft vocabulary.

    Raises:
        ValueError: a target of other sizes than those that the head was trained for.
    """

    def __init__(
        self, head: Eagle3Head, context: DraftContext, *, full_vocabulary: bool = False
    ) -> None:
        self.head = head
        self.model = context.model
        self.device: torch.device = context.model.device
        self.context = context
        self.relative_cost = head.share_of(context.model)
        self.sampler = RowSampler(context, self.device)
        self.cache: Any = self  # drafts of a chain are fed through `forward`
        self.lengths: Lengths = np.zeros(context.batch_size, dtype=np.int64)
        self._full = full_vocabulary
        self._embed = head.embed(context.model)
        self._states = context.keep_states(head.config.layers)
        self._cache = HeadCache(head.config, context.batch_size, head.fc.weight)
        self._cosines, self._sines = head.turns(torch.arange(256, device=self.device)[None])
        self._context_length = context_length(context.model)
        self._hidden = torch.empty(0)  # [B, n, H] of the root and of the drafts fed in this round

    def room(self, history: History, limits: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """[B], how many of ``limits`` tokens each sequence can draft.

        None in its first round, before the target has read anything, and none beyond its context.
        """
        known = self.lengths + self._states.counts > 0
        most = np.where(history.active & known, limits, 0)
        if self._context_length is None:
            return most
        return np.minimum(most, np.maximum(self._context_length - history.lengths, 0))

    def target_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's ids of draft tokens, where logits are those of the draft vocabulary."""
        return torch.where(tokens < 0, tokens, self.head.tokens[tokens.clamp(min=0)])

    def catch_up(self, history: History) -> torch.Tensor:
        """Feed the pairs of newly committed tokens; logits [B, V] after each pending token."""
        states, counts = self._states.take()
        size = states.shape[1]
        # The features of a token go with the token after it; the last of these is pending.
        columns = (history.lengths - counts)[:, None] + np.arange(size)
        columns = np.minimum(columns, history.lengths[:, None] - 1)
        ids = torch.from_numpy(np.take_along_axis(history.tokens, columns, axis=1))
        starts = self._to_device(self.lengths)
        places = starts[:, None] + torch.arange(size, device=self.device)
        visible = int(self.lengths.max()) + size
        alone = len(counts) == 1
        mask: torch.Tensor | None = None
        if not alone or size not in (1, visible):
            slots = torch.arange(visible, device=self.device)
            mask = (slots <= places[:, :, None])[:, None]
        hidden = self._run(
            ids.to(self.device, non_blocking=True), self.head.fuse(states), places, starts, visible,
            mask, causal=alone and visible == size > 1,
        )  # fmt: skip
        last = self._to_device(np.maximum(counts - 1, 0))[:, None, None]
        self._hidden = hidden.gather(1, last.expand(-1, -1, hidden.shape[2]))
        self.lengths = self.lengths + counts
        return self._logits(self._hidden)[:, 0]

    def feed(self, tokens: torch.Tensor, lengths: Lengths, parents: torch.Tensor) -> torch.Tensor:
        """Feed the next nodes of a tree below each pending token; their logits [B, m, V].

        Args:
            tokens: [B, m] int64 of the target; absent nodes (-1) are fed as token 0.
            lengths: [B] tokens of each sequence.
            parents: [B, k] of all nodes fed so far in this round, the m new ones last.
        """
        count, total = tokens.shape[1], parents.shape[1]
        # The pair of the root is the last one in the cache, and nodes follow it.
        roots = self._to_device(self.lengths - 1)
        visible = int(self.lengths.max()) + total
        skip = total + 1 - count
        tree = tree_attention(parents, roots, slots=visible)
        above = (parents[:, total - count :] + 1)[:, :, None]
        before = self._hidden.gather(1, above.expand(-1, -1, self._hidden.shape[2]))
        hidden = self._run(
            tokens.clamp(min=0), before, tree.positions[:, skip:], roots + skip, visible,
            tree.mask[:, None, skip:],
        )  # fmt: skip
        self._hidden = torch.cat([self._hidden, hidden], dim=1)
        return self._logits(hidden)

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor:
        """Feed the next token [B, 1] of a chain; its logits [B, 1, V]."""
        fed = self._hidden.shape[1]
        chain = torch.arange(-1, fed - 1, device=self.device).expand(len(tokens), -1)
        return self.feed(tokens, starts, chain)

    def keep(self, lengths: Lengths, path: NDArray[np.int64]) -> None:
        """Do nothing: the pairs of committed drafts are fed again, with the target's features."""

    def truncate(self, lengths: Lengths) -> None:
        """Do nothing, as `keep`."""

    def _run(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        places: torch.Tensor,
        starts: torch.Tensor,
        visible: int,
        mask: torch.Tensor | None,
        *,
        causal: bool = False,
    ) -> torch.Tensor:
        """The head's hidden states [B, n, H] of pairs at ``places``, which go into the cache."""
        layer = self.head.midlayer
        q, k, v = layer.project(self._embed(tokens), hidden, self._turns(places, visible))
        keys, values = self._cache.append(k, v, starts, visible)
        out: torch.Tensor = layer.finish(hidden, _attend(q, keys, values, mask, causal=causal))
        return out

    def _turns(self, places: torch.Tensor, visible: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`Eagle3Head.turns` from a table, which takes two calls in the place of twenty."""
        if visible > self._cosines.shape[2]:
            slots = torch.arange(max(visible, 2 * self._cosines.shape[2]), device=self.device)
            self._cosines, self._sines = self.head.turns(slots[None])
        return self._cosines[0, 0][places][:, None], self._sines[0, 0][places][:, None]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head.logits(hidden)
        if not self._full:
            return logits
        size = self.head.config.layer.vocab_size
        full: torch.Tensor = logits.new_full((*logits.shape[:-1], size), -torch.inf)
        full[..., self.head.tokens] = logits
        return full

    def _to_device(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values.copy()).to(self.device, non_blocking=True)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
) -> torch.Tensor:
    """Attention [B, H, n, D] of queries whose heads share keys [B, K, S, D]."""
    attention = functional.scaled_dot_product_attention
    out: torch.Tensor
    if causal:
        out = attention(q, keys, values, is_causal=True, enable_gqa=True)
        return out
    # The queries that share a key are fed as more places of one head, so that it is read once.
    share = q.shape[1] // keys.shape[1]
    together = q.unflatten(1, (-1, share)).flatten(2, 3)
    if mask is not None:
        mask = mask.repeat(1, 1, share, 1)
    out = attention(together, keys, values, attn_mask=mask).unflatten(2, (share, -1))
    return out.flatten(1, 2)
