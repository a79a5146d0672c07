"""The drawing of chains from rows of logits that a drafter computes on the host."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.cache.protocol import vocab_size_of
from specdec_hf.drafters.context import DraftContext, History, reads_draft
from specdec_hf.drafters.drafter import RULES_OF_DRAWN_DRAFTS, Draft, Drafter
from specdec_hf.drafters.row_sampler import RowSampler
from specdec_hf.drafters.token_stats import token_stats
from specdec_kernels import SampledDraft


class RowDrafter(Drafter):
    """Base class of drafters that have a distribution without a model; override `row`.

    Tokens are drawn on the host, because the row of the next one depends on them. Only the drafts
    and their rows are copied to the target's device.
    """

    draws = True
    rules = RULES_OF_DRAWN_DRAFTS

    def start(self, context: DraftContext) -> None:
        self.context = context
        self.vocab_size: int = vocab_size_of(context.model)
        self.sampler = RowSampler(context, torch.device("cpu"))

    @abstractmethod
    def row(self, b: int, text: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """The logits [V] of the token after ``text``, which drafts of sequence ``b`` may end.

        They may be -inf, but not all of them. None ends the draft, whatever was drawn before: that
        choice sees the text only, so it does not bias what is drawn.
        """

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        batch_size, gamma = len(history.lengths), int(limits.max())
        texts = [history.tokens[b, :n] for b, n in enumerate(history.lengths)]
        counts = np.zeros(batch_size, dtype=np.int64)
        goes_on = history.active.copy()
        tokens = np.full((batch_size, gamma), -1, dtype=np.int64)
        rows = np.zeros((batch_size, gamma, self.vocab_size), dtype=np.float32)
        sums = torch.zeros((batch_size, gamma), dtype=torch.float64)
        thresholds = torch.zeros((batch_size, gamma))
        lengths = torch.from_numpy(history.lengths.copy())
        for i in range(gamma):
            for b in np.flatnonzero(goes_on):
                row = self.row(int(b), texts[b])
                if row is None:
                    goes_on[b] = False
                else:
                    rows[b, i] = row
            if not goes_on.any():
                break
            noise = self.context.noise_positions(lengths, i)
            drawn = self.sampler.sample(torch.from_numpy(rows[:, i : i + 1]), noise[:, None])
            sums[:, i], thresholds[:, i] = drawn.logsumexp[:, 0], drawn.threshold[:, 0]
            for b in np.flatnonzero(goes_on):
                tokens[b, i] = drawn.tokens[b, 0]
                texts[b] = np.append(texts[b], tokens[b, i])
            counts += goes_on
            if self.context.goes_on is not None:
                stats = token_stats(
                    torch.from_numpy(rows[:, i : i + 1]), torch.from_numpy(tokens[:, i : i + 1]),
                    self.sampler.sampling["temperature"], drawn.threshold,
                )  # fmt: skip
                goes_on &= self.context.goes_on(i, stats[0])
        size = int(counts.max())
        if size == 0:
            return None
        drafted = torch.from_numpy(tokens[:, :size])
        if not reads_draft(self.context.rule):
            return Draft(drafted, counts=counts)
        target = self.context.model.device
        distribution = SampledDraft(
            torch.from_numpy(rows[:, :size]).to(target),
            sums[:, :size].to(target),
            thresholds[:, :size].to(target),
            self.context.temperature,
        )
        return Draft(drafted.to(target), distribution=distribution, counts=counts)
