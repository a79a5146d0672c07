"""N-gram language models as drafters."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import check_flag, check_integer, shown
from specdec_hf.drafters.fingerprint import check_fingerprint
from specdec_hf.drafters.ngram_table import MAX_ORDER, NgramCounts, NgramTable
from specdec_hf.drafting.checks import check_vocab_size, describe
from specdec_hf.drafting.context import DraftContext, History, reads_draft
from specdec_hf.drafting.drafter import RULES_OF_DRAWN_DRAFTS, Draft, Drafter
from specdec_hf.drafting.sampling import RowSampler, token_stats
from specdec_hf.runner.protocol import vocab_size_of
from specdec_kernels import SampledDraft

if TYPE_CHECKING:
    from typing_extensions import Self


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
        continue_drafting = limits > 0
        tokens = np.full((batch_size, gamma), -1, dtype=np.int64)
        rows = np.zeros((batch_size, gamma, self.vocab_size), dtype=np.float32)
        sums = torch.zeros((batch_size, gamma), dtype=torch.float64)
        thresholds = torch.zeros((batch_size, gamma))
        lengths = torch.from_numpy(history.lengths.copy())
        for i in range(gamma):
            for b in np.flatnonzero(continue_drafting):
                row = self.row(int(b), texts[b])
                if row is None:
                    continue_drafting[b] = False
                else:
                    rows[b, i] = row
            if not continue_drafting.any():
                break
            noise = self.context.noise_positions(lengths, i)
            drawn = self.sampler.sample(torch.from_numpy(rows[:, i : i + 1]), noise[:, None])
            sums[:, i], thresholds[:, i] = drawn.logsumexp[:, 0], drawn.threshold[:, 0]
            for b in np.flatnonzero(continue_drafting):
                tokens[b, i] = drawn.tokens[b, 0]
                texts[b] = np.append(texts[b], tokens[b, i])
            counts += continue_drafting
            continue_drafting &= limits > i + 1
            if self.context.continue_drafting is not None:
                stats = token_stats(
                    torch.from_numpy(rows[:, i : i + 1]), torch.from_numpy(tokens[:, i : i + 1]),
                    self.sampler.sampling["temperature"], drawn.threshold,
                )  # fmt: skip
                continue_drafting &= self.context.continue_drafting(i, stats[0])
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


class NgramDrafter(RowDrafter, entry="ngram"):
    """Draws the next token as often as it followed the last tokens before.

    The counts are those of a table and, with ``learn``, of the sequence itself. The longest context
    that either has met decides: with the last n - 1 tokens, Q(v) = count(context, v) /
    count(context); where they were never met, with one token fewer, and so on.

    Args:
        table: counts of a text (`NgramTable.build`, or ``python -m specdec_hf build ngram``); None
            learns from the sequences alone.
        order: n, tokens of the longest n-grams, the drawn one included; 1 is a unigram model, 2 a
            bigram model. None takes the table's, or 3.
        learn: whether each sequence also counts its own tokens, prompt included.
        min_context: a context of fewer tokens drafts nothing. None is 1, and 0 for unigrams.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an order or context out of range, or neither a table nor ``learn``.

    Source: Leviathan et al. 2023, section 3.6.
    """

    def __init__(
        self,
        table: NgramTable | None = None,
        order: int | None = None,
        *,
        learn: bool = True,
        min_context: int | None = None,
    ) -> None:
        if table is not None and not isinstance(table, NgramTable):
            raise TypeError(f"table must be None or an NgramTable, got {shown(table)}")
        check_flag("learn", learn)
        if table is None and not learn:
            raise ValueError("table must be given with learn=False, got None")
        max_order = MAX_ORDER if table is None or learn else table.order
        if order is None:
            order = 3 if table is None else table.order
        self.order = check_integer("order", order, 1, max_order)
        min_context = min(1, self.order - 1) if min_context is None else min_context
        self.min_context = check_integer("min_context", min_context, 0, self.order - 1)
        self.table = table
        self._note: str | None = None  # of the tokenizer, until it is checked
        if table is not None:
            self._note = check_fingerprint("table", table.fingerprint, None)
        self.learn = learn
        self.rolls_back = not learn

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Learns n-grams of N tokens from the sequences, or reads a table."""
        if text.isdecimal():
            return cls(order=int(text))
        return cls(NgramTable.load(text) if text else None)

    def check_config(self, config: Any) -> None:
        if self.table is not None:
            check_vocab_size("table", self.table.vocab_size, config)

    def check_tokenizer(self, tokenizer: Any) -> None:
        if self.table is not None:
            self._note = check_fingerprint("table", self.table.fingerprint, tokenizer)

    def start(self, context: DraftContext) -> None:
        """Begin a new call; nothing is kept of the sequences of an earlier one.

        Raises:
            ValueError: a table for another vocabulary.
        """
        super().start(context)
        self.check_config(context.model.config)
        if self._note is not None:
            context.note(f"{describe(self)}: {self._note}")
        self._learnt = [
            NgramCounts(self.order - 1, self.min_context) for _ in range(context.batch_size)
        ]

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        if self.learn:
            for b in np.flatnonzero(history.active):
                self._learnt[b].extend(history.tokens[b, : history.lengths[b]])
        return super().propose(history, limits)

    def row(self, b: int, text: NDArray[np.int64]) -> NDArray[np.float32] | None:
        sources: list[NgramTable | NgramCounts] = [] if self.table is None else [self.table]
        sources += [self._learnt[b]] if self.learn else []
        for length in range(min(self.order - 1, len(text)), self.min_context - 1, -1):
            context = text[len(text) - length :].tolist()
            counts = np.zeros(self.vocab_size, dtype=np.float32)
            for source in sources:
                tokens, times = source.followers(context)
                counts[tokens] += times
            if counts.any():
                with np.errstate(divide="ignore"):
                    return np.log(counts)
        return None


class RandomDrafter(RowDrafter, entry="random"):
    """Draws every token of the vocabulary with the same probability.

    The target accepts one draft in V on average (V tokens in the vocabulary). It shows what
    speculation costs where nothing is accepted.

    Source: Leviathan et al. 2023, section 3.6.
    """

    rolls_back = True

    def start(self, context: DraftContext) -> None:
        super().start(context)
        # The distribution is uniform at every temperature; greedy calls too need random tokens.
        self.sampler.sampling |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        self._row = np.zeros(self.vocab_size, dtype=np.float32)

    def row(self, b: int, text: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._row
