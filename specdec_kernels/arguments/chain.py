"""The arguments of `specdec_kernels::verify_chain` by name."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .draft import DraftArguments
from .rules import KINDS, RULES, RULES_READING_DRAFT, Kind, Rule
from .sample import SamplingArguments
from .verification import Outputs, new_outputs


class ChainArguments(NamedTuple):
    """In the order of the schema; shapes as in csrc/include/specdec/chain.h."""

    target: Tensor
    draft_token_ids: Tensor
    draft: Tensor | None
    draft_ids: Tensor | None
    draft_columns: Tensor | None
    draft_logsumexp: Tensor | None
    draft_threshold: Tensor | None
    draft_temperatures: Tensor | None
    draft_temperature: float
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
    lenience: float
    typical_epsilon: float
    typical_delta: float
    top_beta_rank: int
    top_beta_distance: float
    synthetic_rates: Tensor | None
    eos_token_ids: Tensor | None
    max_new_tokens: Tensor | None
    with_logprobs: bool
    with_accept_probs: bool

    @property
    def kind_name(self) -> Kind:
        return KINDS[self.kind]

    @property
    def rule_name(self) -> Rule:
        return RULES[self.rule]

    @property
    def sampling(self) -> SamplingArguments:
        return SamplingArguments.of(self)

    @property
    def ragged_draft(self) -> bool:
        """Whether the draft rows are [R-B, D], packed as the target's rows are."""
        return self.draft is not None and self.target_indptr is not None and self.draft.dim() == 2

    @property
    def draft_arguments(self) -> DraftArguments:
        return DraftArguments.of(self)

    @property
    def reads_draft(self) -> bool:
        """Whether the rule compares P with Q."""
        return self.rule_name in RULES_READING_DRAFT

    @property
    def id_limit(self) -> int:
        """Drafted ids in [0, id_limit) are valid; others are `Status.DRAFT_OUT_OF_RANGE`."""
        v = self.target.shape[-1]
        return self.draft_arguments.id_limit(v) if self.reads_draft else v

    def new_outputs(self) -> Outputs:
        """Uninitialised outputs, in the order of the schema."""
        drafted = self.draft_token_ids
        return new_outputs(
            drafted, drafted.shape[1] + 1, self.with_logprobs, self.with_accept_probs
        )
