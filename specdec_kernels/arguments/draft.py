"""The seven arguments of a verifier that describe the draft distribution Q."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class DraftArguments(NamedTuple):
    """In the order of the schemas; shapes as in csrc/include/specdec/draft.h.

    `rows` are logits or probabilities of Q, or with `ids` the probabilities of a few tokens.
    """

    rows: Tensor | None
    ids: Tensor | None
    columns: Tensor | None
    logsumexp: Tensor | None
    threshold: Tensor | None
    temperatures: Tensor | None
    temperature: float

    @classmethod
    def of(cls, a: Any) -> DraftArguments:
        """Those among the arguments of a verifier."""
        return cls(
            rows=a.draft,
            ids=a.draft_ids,
            columns=a.draft_columns,
            logsumexp=a.draft_logsumexp,
            threshold=a.draft_threshold,
            temperatures=a.draft_temperatures,
            temperature=a.draft_temperature,
        )

    def id_limit(self, vocab: int) -> int:
        """One more than the largest drafted id that is in range for a rule that reads Q.

        A draft model with a larger vocabulary than the target's may propose a token that the target
        does not have. P is 0 there, so the token is rejected as usual and is not a fault.
        """
        if self.rows is None or self.ids is not None or self.columns is not None:
            return vocab
        return max(vocab, self.rows.shape[-1])
