"""The seven arguments of a verifier that describe the draft distribution Q, and their validation.

csrc/arguments/draft.cpp validates the same with the same messages.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.arguments.checks import (
    check_ids,
    check_rows,
    check_same_device,
    check_typed,
    check_vector,
    float32,
    require,
    shape,
)
from specdec_kernels.arguments.verification import VerifyArguments

# The name of each dimension and its size; None allows any size.
Sizes = tuple[tuple[str, int | None], ...]


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
    def of(cls, a: VerifyArguments) -> DraftArguments:
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

    def check(self, target: Tensor, batch: int, sizes: Sizes, statistics: Sizes) -> None:
        """Raises RuntimeError naming the argument, the rule and the value.

        Args:
            sizes: the dimensions of `rows`, without the last one.
            statistics: the dimensions of `logsumexp` and `threshold`.
        """
        dev = target.device
        if self.rows is not None:
            self._check_rows(self.rows, target, sizes)
        if self.ids is not None:
            require(
                self.rows is not None and self.ids.shape == self.rows.shape,
                f"draft ids must have the shape of the draft probabilities, "
                f"{shape(self.rows) if self.rows is not None else 'None'}, got {shape(self.ids)}",
            )
            check_ids("draft ids", self.ids)
            check_same_device("draft ids", self.ids, dev, "target")
        if self.columns is not None:
            v = target.shape[-1]
            check_vector("draft_map columns", self.columns, v, torch.int32, dev, "target")
            require(
                self.rows is not None and self.ids is None,
                "draft_map must be None unless draft holds rows over a vocabulary of its own",
            )
        require(
            (self.logsumexp is None) == (self.threshold is None)
            and (self.logsumexp is None or (self.rows is not None and self.ids is None)),
            "draft logsumexp and draft threshold must come together and with draft",
        )
        for name, t, dtype in (
            ("draft logsumexp", self.logsumexp, torch.float64),
            ("draft threshold", self.threshold, torch.float32),
        ):
            if t is None:
                continue
            require(
                _fits(t.shape, statistics),
                f"{name} must be {_described(statistics)}, got {shape(t)}",
            )
            check_typed(name, t, dtype, dev, "target")
        if self.temperatures is not None:
            check_vector(
                "draft temperature", self.temperatures, batch, torch.float32, dev, "target"
            )
        else:
            t0 = float32(self.temperature)
            require(
                math.isfinite(t0) and t0 >= 0,
                f"draft temperature must be finite and at least 0, got {t0:g}",
            )

    def _check_rows(self, draft: Tensor, target: Tensor, sizes: Sizes) -> None:
        sparse = self.ids is not None
        name, last = ("draft probabilities", "K") if sparse else ("draft", "D")
        require(
            draft.dim() == len(sizes) + 1 and _fits(draft.shape[:-1], sizes),
            f"{name} must be {_described((*sizes, (last, None)))}, got {shape(draft)}",
        )
        require(
            not sparse or draft.shape[-1] >= 1,
            f"{name} must have K >= 1 entries, got {shape(draft)}",
        )
        check_rows(name, draft)
        check_same_device(name, draft, target.device, "target")


def _fits(got: torch.Size, sizes: Sizes) -> bool:
    return len(got) == len(sizes) and all(
        n is None or n == m for m, (_, n) in zip(got, sizes, strict=True)
    )


def _described(sizes: Sizes) -> str:
    """Dimensions as messages write them: [B, gamma, D] = [4, 5, D]."""
    names = ", ".join(name for name, _ in sizes)
    numbers = ", ".join(name if n is None else str(n) for name, n in sizes)
    return f"[{names}] = [{numbers}]"
