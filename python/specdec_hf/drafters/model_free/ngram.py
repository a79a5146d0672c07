"""N-gram language models as drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specdec_hf.arguments import check_flag, check_integer, shown
from specdec_hf.drafters.checks import check_vocab_size, describe
from specdec_hf.drafters.context import DraftContext, History
from specdec_hf.drafters.drafter import Draft
from specdec_hf.drafters.fingerprint import check_fingerprint
from specdec_hf.drafters.model_free.ngram_counts import NgramCounts
from specdec_hf.drafters.model_free.ngram_table import MAX_ORDER, NgramTable
from specdec_hf.drafters.model_free.row_drafter import RowDrafter

if TYPE_CHECKING:
    from typing_extensions import Self


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
        longest = MAX_ORDER if table is None or learn else table.order
        if order is None:
            order = 3 if table is None else table.order
        self.order = check_integer("order", order, 1, longest)
        least = min(1, self.order - 1) if min_context is None else min_context
        self.min_context = check_integer("min_context", least, 0, self.order - 1)
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
