"""The arguments of `specdec_kernels::verify_chain` by name, and their validation.

csrc/arguments/chain.cpp validates the same with the same messages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.arguments import verification as verify
from specdec_kernels.arguments.checks import check_vector, float32, require, shape
from specdec_kernels.arguments.draft import DraftArguments, Sizes
from specdec_kernels.arguments.rules import KINDS, RULES, RULES_READING_DRAFT, Kind, Rule
from specdec_kernels.arguments.sample import SamplingArguments


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

    def check(self) -> None:
        """Raises RuntimeError naming the argument, the rule and the value."""
        tokens = self.draft_token_ids
        verify.check_drafted(self, RULES, "draft_token_ids", tokens, "[B, gamma]")
        verify.check_target(self, "draft_token_ids", tokens, "gamma", "[R, V]")
        self._check_draft()
        b, gamma = tokens.shape
        verify.check_draws(self, b, "[B, gamma+1]", gamma + 1)
        lenience = float32(self.lenience)
        require(0 < lenience <= 1, f"lenience must be in (0, 1], got {lenience:g}")
        verify.check_typical(self)
        require(
            (self.synthetic_rates is not None) == (self.rule_name == "synthetic"),
            "synthetic_rates must be given with rule synthetic and with no other",
        )
        if self.synthetic_rates is not None:
            dev = self.target.device
            check_vector(
                "synthetic_rates", self.synthetic_rates, gamma, torch.float32, dev, "target"
            )
        verify.check_limits(self, b)

    def _check_draft(self) -> None:
        b, gamma = self.draft_token_ids.shape
        each = (("B", b), ("gamma", gamma))
        sizes: Sizes = each
        if self.ragged_draft:
            n = self.target.shape[0] - b
            last = "D" if self.draft_ids is None else "K"
            require(
                n >= 0,
                f"target must be [R, V] with R >= B = {b} when draft is [R-B, {last}], "
                f"got {shape(self.target)}",
            )
            sizes = (("R-B", n),)
        self.draft_arguments.check(self.target, b, sizes, each)

    def new_outputs(self) -> verify.Outputs:
        """Uninitialised outputs, in the order of the schema."""
        return verify.new_outputs(self, self.draft_token_ids, self.draft_token_ids.shape[1] + 1)
