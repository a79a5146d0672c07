"""The arguments of `specdec_kernels::verify_tree` by name."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .draft import DraftArguments
from .rules import (
    KINDS,
    TREE_RULES,
    TREE_RULES_READING_DRAFT,
    Kind,
    TreeRule,
)
from .sample import SamplingArguments
from .verification import new_outputs


class TreeOutputs(NamedTuple):
    """The outputs in the order of the schema; those not asked for have no entries."""

    path: Tensor
    tokens: Tensor
    num_accepted: Tensor
    status: Tensor
    logprobs: Tensor
    accept_probs: Tensor


class TreeArguments(NamedTuple):
    """In the order of the schema; shapes as in csrc/include/specdec/tree.h."""

    target: Tensor
    tree_tokens: Tensor
    parents: Tensor
    draft: Tensor | None
    draft_ids: Tensor | None
    draft_columns: Tensor | None
    draft_logsumexp: Tensor | None
    draft_threshold: Tensor | None
    draft_temperatures: Tensor | None
    draft_temperature: float
    draft_rows: Tensor | None
    kind: int
    rule: int
    temperatures: Tensor | None
    temperature: float
    top_ks: Tensor | None
    top_k: int
    top_ps: Tensor | None
    top_p: float
    min_ps: Tensor | None
    min_p: float
    seeds: Tensor
    positions: Tensor
    target_indptr: Tensor | None
    uniforms: Tensor | None
    typical_epsilon: float
    typical_delta: float
    eos_token_ids: Tensor | None
    max_new_tokens: Tensor | None
    max_depth: int
    with_logprobs: bool
    with_accept_probs: bool

    @property
    def kind_name(self) -> Kind:
        return KINDS[self.kind]

    @property
    def rule_name(self) -> TreeRule:
        return TREE_RULES[self.rule]

    @property
    def sampling(self) -> SamplingArguments:
        return SamplingArguments.of(self)

    @property
    def draft_arguments(self) -> DraftArguments:
        return DraftArguments.of(self)

    @property
    def flat_draft(self) -> bool:
        """Whether the draft rows are [M, D], shared by all sequences of the batch."""
        return self.draft is not None and self.draft.dim() == 2

    @property
    def reads_draft(self) -> bool:
        """Whether the rule compares P with Q."""
        return self.rule_name in TREE_RULES_READING_DRAFT

    @property
    def id_limit(self) -> int:
        """Drafted ids in [0, id_limit) are valid; others are `Status.DRAFT_OUT_OF_RANGE`."""
        v = self.target.shape[-1]
        return self.draft_arguments.id_limit(v) if self.reads_draft else v

    def new_outputs(self) -> TreeOutputs:
        """Uninitialised outputs."""
        path = self.parents.new_empty((self.parents.shape[0], self.max_depth))
        return TreeOutputs(
            path,
            *new_outputs(
                self.tree_tokens, self.max_depth + 1, self.with_logprobs, self.with_accept_probs
            ),
        )
