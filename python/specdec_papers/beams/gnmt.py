"""A beam search whose texts are compared by the length penalty of GNMT.

A text Y of n tokens scores log P(Y) / lp(n). Texts that ended keep their place among the w beams as
long as their score is one of the w best, so the search ends when all of the best have ended.
Transformers' search, in scores.py, compares running beams by log P(Y) and keeps w ended texts
beside them.

Source: Wu et al. 2016 (arXiv 1609.08144), equation 14, without its coverage penalty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from specdec_hf.request.call import Call
from torch import Tensor

from specdec_papers.beams.scores import NO_SCORE, Beams
from specdec_papers.beams.tree import Integers


class GnmtBeams(Beams):
    """The beams of one prompt.

    Args:
        model, call, max_new_tokens: as in `Beams`.
        top_k: how many tokens continue a beam; the first step takes as many as there are beams.
        penalty: lp of a number of tokens.

    Attributes:
        ended: texts that ended and are among the best, with their scores.
    """

    def __init__(
        self, model: Any, call: Call, max_new_tokens: int, top_k: int,
        penalty: Callable[[int], float],
    ) -> None:  # fmt: skip
        super().__init__(model, call, max_new_tokens)
        self.top_k, self.penalty = top_k, penalty
        self.num_candidates = max(self.num_candidates, top_k)
        self.ended: list[tuple[list[int], float]] = []

    def step(
        self, values: Tensor, ids: Tensor, whole_rows: Callable[[], Tensor]
    ) -> tuple[Integers, Integers]:
        """Extend the beams by one token; arguments and result are those of `Beams.step`."""
        new = self.length + 1 - self.prompt_length
        many = max(self.top_k, self.width) if new == 1 else self.top_k
        totals = (values[0, :, :many] + self.running_scores[0, :, None]).flatten()
        # Texts that ended, and candidates by their index in the totals.
        scored: list[tuple[float, list[int] | int]] = [(score, text) for text, score in self.ended]
        scored += [
            (total / self.penalty(new), index)
            for index, total in enumerate(totals.tolist())
            if total > NO_SCORE / 2
        ]
        if not scored:
            raise RuntimeError(f"no token may follow the beams at position {self.length}")
        best = sorted(scored, key=lambda one: one[0], reverse=True)[: self.width]
        self.ended, going = [], []
        for score, text_or_index in best:
            if isinstance(text_or_index, list):
                self.ended.append((text_or_index, score))
                continue
            origin, column = divmod(text_or_index, min(many, values.shape[2]))
            token = int(ids[0, origin, column])
            if token in self.call.stopping.eos:
                self.ended.append(([*self._text(origin), token], score))
            else:
                going.append((origin, token, totals[text_or_index]))
        return self._continue(going)

    def _continue(self, going: list[tuple[int, int, Tensor]]) -> tuple[Integers, Integers]:
        """Take beams with their continuations; the tree has w nodes, so the first may repeat."""
        nothing = [(0, 0, torch.tensor(0.0, device="cpu"))]
        filled = going + (going[:1] or nothing) * (self.width - len(going))
        origins = torch.tensor([origin for origin, _, _ in filled], device="cpu")
        tokens = torch.tensor([token for _, token, _ in filled], device="cpu")
        self.running = self.running[:, origins]
        self.running[0, :, self.length] = tokens
        self.running_scores = torch.full_like(self.running_scores, NO_SCORE)
        for beam, (_, _, total) in enumerate(going):
            self.running_scores[0, beam] = total
        self.length += 1
        self.done = not going or self.length == self.max_length
        return origins.numpy()[None].astype(np.int64), tokens.numpy()[None].astype(np.int64)

    def ranked(self) -> list[tuple[list[int], float]]:
        """The new tokens of ended and running texts and their scores, the best first."""
        penalty = self.penalty(self.length - self.prompt_length)
        running = [
            (self._text(beam), total / penalty)
            for beam, total in enumerate(self.running_scores[0].tolist())
            if total > NO_SCORE / 2
        ]
        return sorted([*self.ended, *running], key=lambda one: one[1], reverse=True)

    def _text(self, beam: int) -> list[int]:
        new: list[int] = self.running[0, beam, self.prompt_length : self.length].tolist()
        return new
