"""A draft model with a cache of its own: what drafting chains and trees has in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.cache.rows import Lengths, SpecCache, context_of, make_cache
from specdec_hf.decode.forward import forward_tree, forward_window
from specdec_hf.drafters.base import DraftContext, History
from specdec_kernels import Sampled, sample


class DraftModel:
    """Any causal LM of the target's vocabulary; may live on another device or in another dtype.

    It samples with the target's own temperature and filters, so that its law is close to the one
    that judges it.

    Args:
        model: the draft model. Neither it nor its configs are changed.
        context: the call it serves.
        cache: "auto", "spec" or "dynamic", as in `generate`; trees need "spec".

    Raises:
        ValueError: the two vocabularies differ in size, or the cache cannot serve the model.
    """

    def __init__(self, model: Any, context: DraftContext, cache: str = "auto") -> None:
        ours = model.config.get_text_config(decoder=True).vocab_size
        theirs = context.model.config.get_text_config(decoder=True).vocab_size
        if ours != theirs:
            raise ValueError(
                "drafter and model must share one vocabulary: "
                f"drafter has {ours} tokens, model has {theirs}"
            )
        self.model = model
        self.device: torch.device = model.device
        self.context = context
        self.cache = make_cache(
            model,
            context.batch_size,
            min(context.max_length, 1024) + context.max_gamma + 1,
            cache,
        )
        self.settings: dict[str, Any] = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in (
                ("temperature", context.temperature),
                ("top_k", context.top_k),
                ("top_p", context.top_p),
                ("min_p", context.min_p),
            )
        }
        self.seeds = context.seeds.to(self.device)
        self._limit = context_of(model)
        self._fed = 0

    def room(self, history: History, wanted: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """[B], tokens it can draft for each row before its own context ends, ``wanted`` at most."""
        most = np.where(history.active, wanted, 0)
        if self._limit is None:
            return most
        return np.minimum(most, np.maximum(self._limit - history.lengths, 0))

    def catch_up(self, history: History) -> torch.Tensor:
        """Feed what the cache lacks; logits [B, V] behind each row's last token."""
        lengths = history.lengths
        # Rows that trail by less than the one that trails most are fed a few tokens again: the same
        # entries land in the same slots, and the batch stays rectangular and right aligned.
        missing = int((lengths - self.cache.lengths).max())
        tokens = torch.from_numpy(history.last(missing)).to(self.device, non_blocking=True)
        self._fed = 0
        return forward_window(self.model, self.cache, tokens, lengths - missing, keep=1)[:, -1]

    def feed(self, tokens: torch.Tensor, lengths: Lengths, parents: torch.Tensor) -> torch.Tensor:
        """Feed the next nodes of a tree below each row's last token; their logits [B, m, V].

        Args:
            tokens: [B, m] int64; absent ones (-1) are fed as 0, and nobody asks for them.
            lengths: [B] tokens of each row.
            parents: [B, k] of all nodes fed so far in this round, these last.
        """
        self._fed = parents.shape[1]
        cache = self.cache
        assert isinstance(cache, SpecCache)
        return forward_tree(self.model, cache, tokens.clamp(min=0), lengths - 1, parents)

    def keep(self, lengths: Lengths, path: NDArray[np.int64]) -> None:
        """Keep the accepted path of what `feed` was given, up to the first node it was not.

        Args:
            lengths: [B] tokens of each row when it drafted.
            path: [B, P], numbers of nodes in the order they were fed, -1 for others.
        """
        run = np.minimum.accumulate((path >= 0) & (path < self._fed), axis=1)
        if run.any():
            assert isinstance(self.cache, SpecCache)
            self.cache.compact(
                torch.from_numpy(lengths.copy()).to(self.device, non_blocking=True),
                torch.from_numpy(np.where(run, path, -1)).to(self.device, non_blocking=True),
            )
        self.truncate(lengths + run.sum(axis=1))
        self._fed = 0

    def truncate(self, lengths: Lengths) -> None:
        """Keep ``lengths[b]`` tokens of each row, or fewer where it was not fed so many."""
        self.cache.truncate(np.minimum(self.cache.lengths, lengths))

    def draw(
        self, logits: torch.Tensor, positions: torch.Tensor, *, filtered: bool = True
    ) -> Sampled:
        """`sample` from logits [B, m, V]; every result is [B, m].

        Args:
            logits: the rows.
            positions: [B, m] int64, where their noise comes from.
            filtered: False leaves out top-k, top-p and min-p.
        """
        rows = logits.shape[1]
        settings: dict[str, Any] = {
            name: value.repeat_interleave(rows) if isinstance(value, torch.Tensor) else value
            for name, value in self.settings.items()
            if filtered or name == "temperature"
        }
        drawn = sample(
            logits.flatten(0, 1),
            **settings,
            seeds=self.seeds.repeat_interleave(rows),
            positions=positions.flatten(),
            noise="shared" if self.context.rule == "match" else "draft",
        )
        return Sampled(*(x.view(-1, rows) for x in drawn))
