"""The arguments of `specdec_kernels::kept_tokens` by name."""

from __future__ import annotations

import torch
from torch import Tensor

from .rules import KINDS, Kind
from .sample import SamplingArguments
from .schema import named_by_schema


@named_by_schema("kept_tokens")
class KeptTokensArguments(SamplingArguments):
    """Shapes as in csrc/include/specdec/kept_tokens.h."""

    target: Tensor
    rows: Tensor | None
    target_indptr: Tensor | None
    kind: int
    max_kept: int
    token_bitmask: Tensor | None

    @property
    def kind_name(self) -> Kind:
        return KINDS[self.kind]

    def new_outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Uninitialised (ids, logprobs, counts, status)."""
        like = self.target
        n = like.shape[:-1] if self.rows is None else self.rows.shape
        return (
            like.new_empty((*n, self.max_kept), dtype=torch.int64),
            like.new_empty((*n, self.max_kept), dtype=torch.float32),
            like.new_empty(n, dtype=torch.int32),
            like.new_empty(n, dtype=torch.int32),
        )
