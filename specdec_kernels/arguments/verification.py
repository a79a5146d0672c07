"""The arguments and outputs that `verify_chain` and `verify_tree` share."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .rules import KINDS, Kind, TypicalParameters
from .sample import SamplingArguments


class VerifyArguments(SamplingArguments, TypicalParameters):
    """Shapes as in csrc/include/specdec/verification.h and draft.h."""

    rules: ClassVar[tuple[str, ...]]
    rules_reading_draft: ClassVar[tuple[str, ...]]

    target: Tensor
    draft: Tensor | None  # logits or probabilities of Q, or with draft_ids those of a few tokens
    draft_ids: Tensor | None
    draft_columns: Tensor | None
    draft_logsumexp: Tensor | None
    draft_threshold: Tensor | None
    draft_temperatures: Tensor | None
    draft_temperature: float
    draft_bitmask: Tensor | None
    draft_rows: Tensor | None
    kind: int
    rule: int
    token_bitmask: Tensor | None
    seeds: Tensor
    positions: Tensor
    target_indptr: Tensor | None
    uniforms: Tensor | None
    eos_token_ids: Tensor | None
    max_new_tokens: Tensor | None
    with_logprobs: bool
    with_accept_probs: bool

    @property
    def kind_name(self) -> Kind:
        return KINDS[self.kind]

    @property
    def rule_name(self) -> str:
        return self.rules[self.rule]

    @property
    def reads_draft(self) -> bool:
        """Whether the rule compares P with Q."""
        return self.rule_name in self.rules_reading_draft

    @property
    def flat_draft(self) -> bool:
        """Whether all sequences of the batch share one list of draft rows, [M, D]."""
        return self.draft is not None and self.draft.dim() == 2

    @property
    def id_limit(self) -> int:
        """Drafted ids in [0, id_limit) are valid; others are `Status.DRAFT_OUT_OF_RANGE`.

        A draft model with a larger vocabulary than the target's may propose a token that the target
        does not have. P is 0 there, so the token is rejected as usual and is not a fault.
        """
        v, rows = self.target.shape[-1], self.draft
        if not self.reads_draft or rows is None:
            return v
        one_to_one = self.draft_ids is None and self.draft_columns is None
        return max(v, rows.shape[-1]) if one_to_one else v


class Outputs(NamedTuple):
    """Those not asked for have no entries."""

    tokens: Tensor
    num_accepted: Tensor
    status: Tensor
    logprobs: Tensor
    accept_probs: Tensor


def new_outputs(a: VerifyArguments, drafted: Tensor, emitted: int) -> Outputs:
    """Uninitialised outputs for drafted tokens [B, N], of which at most `emitted` are emitted."""
    b, n = drafted.shape
    return Outputs(
        drafted.new_empty((b, emitted)),
        drafted.new_empty((b,), dtype=torch.int32),
        drafted.new_empty((b,), dtype=torch.int32),
        drafted.new_empty((b, emitted) if a.with_logprobs else (0, 0), dtype=torch.float32),
        drafted.new_empty((b, n) if a.with_accept_probs else (0, 0), dtype=torch.float32),
    )
