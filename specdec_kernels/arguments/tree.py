"""The arguments of `specdec_kernels::verify_tree` by name, and their validation.

csrc/arguments/tree.cpp validates the same with the same messages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.arguments import verification as verify
from specdec_kernels.arguments.checks import (
    check_ids,
    check_matrix,
    check_same_device,
    require,
    shape,
)
from specdec_kernels.arguments.draft import DraftArguments, Sizes
from specdec_kernels.arguments.rules import (
    KINDS,
    TREE_RULES,
    TREE_RULES_READING_DRAFT,
    Kind,
    TreeRule,
)
from specdec_kernels.arguments.sample import SamplingArguments


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

    def check(self) -> None:
        """Raises RuntimeError naming the argument, the rule and the value."""
        tokens, parents = self.tree_tokens, self.parents
        verify.check_drafted(self, TREE_RULES, "tree tokens", tokens, "[B, N]")
        b, n = tokens.shape
        require(
            parents.shape == tokens.shape,
            f"tree parents must be [B, N] = [{b}, {n}], got {shape(parents)}",
        )
        check_ids("tree parents", parents)
        verify.check_target(self, "tree tokens", tokens, "N", "[R, V]")
        check_same_device("tree parents", parents, self.target.device, "target")
        self._check_draft()
        verify.check_draws(self, b, "[B, 2N+1]", 2 * n + 1)
        verify.check_typical(self)
        verify.check_limits(self, b)
        require(
            0 <= self.max_depth <= n,
            f"max_depth must be in [0, N] = [0, {n}], got {self.max_depth}",
        )

    def _check_draft(self) -> None:
        b, n = self.tree_tokens.shape
        if self.draft_rows is not None:
            dev = self.target.device
            check_matrix(
                "draft_rows", self.draft_rows, "[B, N]", (b, n), torch.int32, dev, "target"
            )
        require(
            self.draft_rows is not None or not self.flat_draft,
            "draft must be [B, N, D] unless draft_rows is given, got two dimensions",
        )
        require(
            self.rule_name != "k_seq" or self.draft is not None,
            "draft must be given when rule is k_seq, got None",
        )
        sizes: Sizes = (("B", b), ("N", n) if self.draft_rows is None else ("M", None))
        statistics = sizes
        if self.draft is not None and self.draft_rows is not None and self.draft.dim() in (2, 3):
            m = self.draft.shape[-2]
            sizes = (("M", None),) if self.flat_draft else sizes
            statistics = (("M", m),) if self.flat_draft else (("B", b), ("M", m))
        self.draft_arguments.check(self.target, b, sizes, statistics)

    def new_outputs(self) -> TreeOutputs:
        """Uninitialised outputs."""
        path = self.parents.new_empty((self.parents.shape[0], self.max_depth))
        return TreeOutputs(path, *verify.new_outputs(self, self.tree_tokens, self.max_depth + 1))
