"""Sequences of a batch that each have a cache of their own."""

from __future__ import annotations

import numpy as np
import torch

from specdec_hf.cache.plain import PlainCache
from specdec_hf.cache.protocol import Lengths


class SeparateCache:
    """A batch as sequences that each run alone, one forward after the other.

    This serves models for which a sequence of a batch depends on its padding. Each sequence keeps
    the padding it was given, so its text is that of plain ``generate``.

    Args:
        caches: a `PlainCache` of one sequence each.
    """

    def __init__(self, caches: list[PlainCache]) -> None:
        self.caches = caches
        self.kind = caches[0].kind

    @property
    def lengths(self) -> Lengths:
        """[B] int64, committed tokens of each sequence that the cache holds."""
        return np.concatenate([cache.lengths for cache in self.caches])

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor:
        """Feed the next tokens of every sequence, as in `RollbackCache`."""
        return torch.cat(
            [
                cache.forward(tokens[b : b + 1], starts[b : b + 1], keep)
                for b, cache in enumerate(self.caches)
            ]
        )

    def truncate(self, lengths: Lengths) -> None:
        """Keep the first ``lengths[b]`` tokens of each sequence."""
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.truncate(np.array([length]))
