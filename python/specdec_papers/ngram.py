"""N-gram language models as drafters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.arguments import check_flag, check_integer, shown
from specdec_hf.drafters.fingerprint import check_fingerprint
from specdec_hf.drafting.call import NOTHING, DrafterCall, Drawn, reads_draft
from specdec_hf.drafting.checks import check_vocab_size, describe
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import RULES_OF_DRAWN_DRAFTS, Draft, Drafter, State
from specdec_hf.drafting.sampling import token_stats
from specdec_hf.runner.protocol import vocab_size_of

from specdec_papers.ngram_table import MAX_ORDER, NgramCounts, NgramTable

if TYPE_CHECKING:
    from typing_extensions import Self


class RowState(State):
    """Draws a chain from rows of its own, without a model; override `row`.

    Tokens are drawn on the host, because the row of the next one depends on them. Only the drafts
    and their rows are copied to the target's device.

    Attributes:
        vocab_size: V, of the target.
        sampling: parameters of its draws in the place of the call's.
    """

    sampling: Mapping[str, Any] = NOTHING

    def __init__(self, call: DrafterCall) -> None:
        self.call = call
        self.vocab_size: int = vocab_size_of(call.model)

    @abstractmethod
    def row(self, b: int, text: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """The logits [V] of the token after ``text``, which drafts of sequence ``b`` may end.

        They may be -inf, but not all of them. None ends the draft, whatever was drawn before: that
        choice sees the text only, so it does not bias what is drawn.
        """

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        call, batch_size, gamma = self.call, len(texts.lengths), int(limits.max())
        known = [texts.tokens[b, :n] for b, n in enumerate(texts.lengths)]
        counts = np.zeros(batch_size, dtype=np.int64)
        continue_drafting = limits > 0
        tokens = np.full((batch_size, gamma), -1, dtype=np.int64)
        drawn: list[Drawn] = []
        for i in range(gamma):
            rows = np.zeros((batch_size, 1, self.vocab_size), dtype=np.float32)
            for b in np.flatnonzero(continue_drafting):
                row = self.row(int(b), known[b])
                if row is None:
                    continue_drafting[b] = False
                else:
                    rows[b, 0] = row
            if not continue_drafting.any():
                break
            one = call.draw(texts, torch.from_numpy(rows), i, sampling=self.sampling)
            drawn.append(one)
            for b in np.flatnonzero(continue_drafting):
                tokens[b, i] = one.tokens[b, 0]
                known[b] = np.append(known[b], tokens[b, i])
            counts += continue_drafting
            continue_drafting &= limits > i + 1
            if call.asks.continue_drafting is not None:
                sampling = {**call.sampling_on(one.logits.device), **self.sampling}
                stats = token_stats(
                    one.logits, torch.from_numpy(tokens[:, i : i + 1]), sampling["temperature"],
                    one.threshold,
                )  # fmt: skip
                continue_drafting &= call.asks.continue_drafting(i, stats[0])
        if not drawn:
            return None
        drafted = torch.from_numpy(tokens[:, : len(drawn)])
        if not reads_draft(call.rule):
            return Draft(drafted, counts=counts)
        device = call.model.device
        return Draft(drafted.to(device), drawn=Drawn.join(drawn, device), counts=counts)


class NgramDrafter(Drafter, entry="ngram"):
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

    rules = RULES_OF_DRAWN_DRAFTS

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

    def check_tokenizer(self, tokenizer: Any) -> list[str]:
        if self.table is None:
            return []
        note = check_fingerprint("table", self.table.fingerprint, tokenizer)
        return [] if note is None else [f"{describe(self)}: {note}"]

    def rolling_back(self) -> Drafter:
        """The table alone: counts of the text would hold drafts."""
        return self if self.table is None else NgramDrafter(self.table, self.order, learn=False)

    def begin(self, call: DrafterCall) -> State:
        """Begin a new call; nothing is kept of the sequences of an earlier one.

        Raises:
            ValueError: a table for another vocabulary.
        """
        return _NgramState(self, call)


class _NgramState(RowState):
    def __init__(self, drafter: NgramDrafter, call: DrafterCall) -> None:
        super().__init__(call)
        drafter.check_config(call.model.config)
        self.drafter = drafter
        sizes = drafter.order - 1, drafter.min_context
        self._learnt = [NgramCounts(*sizes) for _ in range(call.batch_size)]

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        if self.drafter.learn:
            for b in np.flatnonzero(texts.active):
                self._learnt[b].extend(texts.tokens[b, : texts.lengths[b]])
        return super().propose(texts, limits)

    def row(self, b: int, text: NDArray[np.int64]) -> NDArray[np.float32] | None:
        drafter = self.drafter
        sources: list[NgramTable | NgramCounts] = [] if drafter.table is None else [drafter.table]
        sources += [self._learnt[b]] if drafter.learn else []
        for length in range(min(drafter.order - 1, len(text)), drafter.min_context - 1, -1):
            context = text[len(text) - length :].tolist()
            counts = np.zeros(self.vocab_size, dtype=np.float32)
            for source in sources:
                tokens, times = source.followers(context)
                counts[tokens] += times
            if counts.any():
                with np.errstate(divide="ignore"):
                    return np.log(counts)
        return None


class RandomDrafter(Drafter, entry="random"):
    """Draws every token of the vocabulary with the same probability.

    The target accepts one draft in V on average (V tokens in the vocabulary). It shows what
    speculation costs where nothing is accepted.

    Source: Leviathan et al. 2023, section 3.6.
    """

    rules = RULES_OF_DRAWN_DRAFTS
    rolls_back = True

    def begin(self, call: DrafterCall) -> State:
        return _UniformState(call)


class _UniformState(RowState):
    # The distribution is uniform at every temperature; greedy calls too need random tokens.
    sampling = MappingProxyType({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0})

    def __init__(self, call: DrafterCall) -> None:
        super().__init__(call)
        self._row = np.zeros(self.vocab_size, dtype=np.float32)

    def row(self, b: int, text: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._row
