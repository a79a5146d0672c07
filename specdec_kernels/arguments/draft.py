"""The seven arguments of an op that say what law drafted tokens were drawn from, and their checks.

csrc/torch/draft_arguments.cpp makes the same checks with the same words.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.arguments.checks import (
    float32,
    ids,
    require,
    rows,
    same_device,
    shape,
    typed,
    vector,
)

Sizes = tuple[tuple[str, int | None], ...]  # name and size of each dimension, None: any


class DraftArguments(NamedTuple):
    """In the order of the schemas; shapes as in csrc/include/specdec/draft.h."""

    rows: Tensor | None
    ids: Tensor | None
    columns: Tensor | None
    logsumexp: Tensor | None
    threshold: Tensor | None
    temperatures: Tensor | None
    temperature: float

    def id_limit(self, vocab: int) -> int:
        """Drafted ids below it are judged where Q is asked.

        A draft with a larger vocabulary than the target may propose what the target cannot say:
        a rejection like any other.
        """
        if self.rows is None or self.ids is not None or self.columns is not None:
            return vocab
        return max(vocab, self.rows.shape[-1])

    def check(self, target: Tensor, batch: int, sizes: Sizes, statistics: Sizes) -> None:
        """Raises RuntimeError naming the argument, the rule and the value.

        Args:
            sizes: of the rows, the last dimension left out.
            statistics: of what `sample` left behind.
        """
        dev = target.device
        if self.rows is not None:
            self._check_rows(self.rows, target, sizes)
        if self.ids is not None:
            require(
                self.rows is not None and self.ids.shape == self.rows.shape,
                f"draft ids must be like the draft probabilities, "
                f"{shape(self.rows) if self.rows is not None else 'None'}, got {shape(self.ids)}",
            )
            ids("draft ids", self.ids)
            same_device("draft ids", self.ids, dev, "target")
        if self.columns is not None:
            v = target.shape[-1]
            vector("draft_map columns", self.columns, v, torch.int32, dev, "target")
            require(
                self.rows is not None and self.ids is None,
                "draft_map must be None unless draft holds rows over a vocabulary of its own",
            )
        require(
            (self.logsumexp is None) == (self.threshold is None)
            and (self.logsumexp is None or (self.rows is not None and self.ids is None)),
            "draft_logsumexp and draft_threshold must come together and with draft",
        )
        for name, t, dtype in (
            ("draft_logsumexp", self.logsumexp, torch.float64),
            ("draft_threshold", self.threshold, torch.float32),
        ):
            if t is None:
                continue
            require(
                _fits(t.shape, statistics), f"{name} must be {_words(statistics)}, got {shape(t)}"
            )
            typed(name, t, dtype, dev, "target")
        if self.temperatures is not None:
            vector("draft temperature", self.temperatures, batch, torch.float32, dev, "target")
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
            f"{name} must be {_words((*sizes, (last, None)))}, got {shape(draft)}",
        )
        require(
            not sparse or draft.shape[-1] >= 1,
            f"{name} must have K >= 1 entries, got {shape(draft)}",
        )
        rows(name, draft)
        same_device(name, draft, target.device, "target")


def _fits(got: torch.Size, sizes: Sizes) -> bool:
    return len(got) == len(sizes) and all(
        n is None or n == m for m, (_, n) in zip(got, sizes, strict=True)
    )


def _words(sizes: Sizes) -> str:
    """[B, gamma, D] = [4, 5, D]."""
    names = ", ".join(name for name, _ in sizes)
    numbers = ", ".join(name if n is None else str(n) for name, n in sizes)
    return f"[{names}] = [{numbers}]"
