"""Layers of multi-token prediction in the place of a draft model, in one call."""

from __future__ import annotations

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.heads.eagle_family.draft import Pairs, PairStepper, following_tokens, pick
from specdec_hf.runner.forwards import CompileStats
from specdec_hf.runner.protocol import CACHE_NAME, Lengths, to_device
from specdec_hf.runner.spec_cache import SpecCache

from specdec_papers.mtp.head import MtpHead


class MtpStepper(PairStepper):
    """An `MtpHead` that drafts in one call.

    Layer k of several reads, in the place of the token after each place, the one that is k further
    on. At the last k places these are drafts, so that draft step k feeds k pairs. What its cache
    holds of these places is written again in the next round, which feeds the last pairs of the
    round before once more. Steps after the last layer go on with its own output, as the only layer
    does.

    Args:
        head: in the target's dtype, on its device.
        call: the call.
    """

    head: MtpHead

    def __init__(self, head: MtpHead, call: DrafterCall) -> None:
        super().__init__(head, call)
        self._depth = len(head.blocks)
        capacity = min(call.max_length, 1024) + call.max_draft + self._depth
        self._cache = SpecCache(head.config.layer, call.batch_size, capacity, self.device)
        # The target's angles; a copy, because some rotary embeddings change with the text.
        self._rotary = copy.deepcopy(call.model.get_decoder().rotary_emb)
        # Of several layers:
        self._features = torch.empty(0)  # [B, K-1, H] of the target at the last committed pairs
        self._drafts = torch.empty(call.batch_size, 0)  # [B, k], tokens drafted in this round
        self._rows: list[torch.Tensor] = []  # [B, K, H] of each layer, at its last K places
        if call.forwards.compile:
            reason = "layers of multi-token prediction run as in Transformers"
            call.report_compiled("head", CompileStats(eager=reason))

    def catch_up(self, texts: History) -> torch.Tensor:
        if self._depth == 1:
            return super().catch_up(texts)
        states, counts = self._states.pop()
        features, again = self._fed_again(states)
        starts, totals = self.lengths - again, again + counts
        self._features = _last(features, totals, self._depth - 1)
        size = int(totals.max())
        begin = to_device(starts, self.device)
        places = begin[:, None] + torch.arange(size, device=self.device)
        visible = int(starts.max()) + size
        hidden, mask = features[:, :size], self._mask(places, visible)
        self._rows = []
        for layer in range(self._depth):
            # Those of layer k are k further on. Where none is known yet, the pending one stands in
            # and draft steps write the slot again.
            tokens = following_tokens(texts, totals - layer, size, self.device)
            hidden = self._forward(layer, Pairs(tokens, hidden, places, begin, mask, visible))
            self._rows.append(_last(hidden, totals, self._depth))
        self.lengths = self.lengths + counts
        self._drafts = torch.empty((len(counts), 0), dtype=torch.int64, device=self.device)
        return self.head.logits(0, self._rows[0][:, -1])

    def extend(self, tokens: torch.Tensor, starts: Lengths) -> torch.Tensor:
        layer = self._drafts.shape[1] + 1
        if layer >= self._depth:
            return super().extend(tokens, starts)
        self._drafts = torch.cat([self._drafts, tokens], dim=1)
        begin = to_device(self.lengths - layer, self.device)
        places = begin[:, None] + torch.arange(layer, device=self.device)
        visible = int(self.lengths.max())
        before, mask = self._rows[layer - 1][:, -layer:], self._mask(places.clamp(min=0), visible)
        pairs = Pairs(self._drafts, before, places, begin, mask, visible)
        hidden = self._forward(layer, pairs)
        self._rows[layer] = torch.cat([self._rows[layer][:, :-layer], hidden], dim=1)
        self._hidden = hidden[:, -1:]
        return self.head.logits(layer, self._hidden[:, 0])

    def _fed_again(self, states: torch.Tensor) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Features [B, n, H] of the pairs to feed: the last ones before the new ones, and [B] how
        many of those there are.
        """
        before = self._depth - 1
        again = np.minimum(self.lengths, before)
        if not again.any():
            return states, again
        order = np.arange(before + states.shape[1])
        columns = np.minimum(before - again[:, None] + order, len(order) - 1)
        both = torch.cat([self._features, states], dim=1)
        index = to_device(columns, self.device)[:, :, None]
        return both.gather(1, index.expand(-1, -1, both.shape[2])), again

    def _run(
        self, pairs: Pairs, last: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self._depth - 1
        made = self._forward(layer, pairs)
        if last is not None:
            made = pick(made, last)
        return made, self.head.logits(layer, made)

    def _forward(self, layer: int, pairs: Pairs) -> torch.Tensor:
        """Hidden states [B, n, H] that a layer gives for pairs."""
        tokens, hidden, places, starts, mask, visible = pairs
        embeddings = self.head.embed(self.model, layer, tokens)
        positions = places.clamp(min=0)
        self._cache.move_cursor(starts, visible - tokens.shape[1], visible)
        made: torch.Tensor = self.head.block(layer)(
            embeddings,
            hidden,
            position_embeddings=self._rotary(embeddings, positions),
            position_ids=positions,
            attention_mask=None if mask is None else mask[:, None],
            use_cache=True,
            **{CACHE_NAME: self._cache},
        )
        return made


def _last(rows: torch.Tensor, totals: NDArray[np.int64], count: int) -> torch.Tensor:
    """The last ``count`` of each sequence's ``totals[b]`` rows [B, n, H]; the first for those
    before it.
    """
    columns = np.maximum(totals[:, None] - count + np.arange(count), 0)
    index = to_device(columns, rows.device)[:, :, None]
    return rows.gather(1, index.expand(-1, -1, rows.shape[2]))
