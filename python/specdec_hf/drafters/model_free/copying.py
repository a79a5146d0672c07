"""The part that drafters share that copy by `specdec_host`."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.checks import check_vocab_size, describe
from specdec_hf.drafters.context import DraftContext, History
from specdec_hf.drafters.drafter import Draft, Drafter
from specdec_hf.drafters.fingerprint import check_fingerprint
from specdec_hf.drafters.model_free.copied_text import CopiedText

if TYPE_CHECKING:
    from specdec_host import Corpus, Proposal


class CopyingDrafter(Drafter):
    """Drafts deterministic chains, one sequence after the other, on the host. Override `copy`.

    Args:
        corpus: a text that it copies from; None for none.
    """

    def __init__(self, corpus: Corpus | None) -> None:
        self.corpus = corpus
        self._note: str | None = None  # of the tokenizer, until it is checked
        if corpus is not None:
            self._note = check_fingerprint("corpus", corpus.fingerprint, None)
        self._text = CopiedText()

    @abstractmethod
    def copy(self, b: int, text: NDArray[np.int64], gamma: int, count: int) -> Proposal:
        """Up to ``count`` chains of up to ``gamma`` tokens for sequence ``b``.

        ``text`` is that of the sequence, or of `CopiedText`; it grows at its end.
        """

    def check_config(self, config: Any) -> None:
        made_for = None if self.corpus is None else self.corpus.vocab_size
        if made_for is not None:
            check_vocab_size("corpus", made_for, config)

    def start(self, context: DraftContext) -> None:
        """Begin a new call.

        Raises:
            ValueError: a corpus for another vocabulary.
        """
        self._text, self._num_proposals = CopiedText(context), context.num_proposals
        self.check_config(context.model.config)
        if self._note is not None:
            context.note(f"{describe(self)}: {self._note}")

    def check_tokenizer(self, tokenizer: Any) -> None:
        if self.corpus is not None:
            self._note = check_fingerprint("corpus", self.corpus.fingerprint, tokenizer)

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        """Different chains of every sequence."""
        batch_size, count, gamma = len(history.lengths), self._num_proposals, int(limits.max())
        tokens = np.full((batch_size, count, gamma), -1, dtype=np.int64)
        confidence = np.zeros((batch_size, gamma), dtype=np.float32)
        for b in np.flatnonzero(history.active).tolist():
            proposal = self.copy(b, self._text.of(history, b), gamma, count)
            tokens[b], confidence[b] = proposal.tokens, proposal.confidence[0]
        if (tokens < 0).all():
            return None
        return Draft(
            torch.from_numpy(tokens).flatten(1),
            confidence=confidence if count == 1 else None,
            num_proposals=count,
        )
