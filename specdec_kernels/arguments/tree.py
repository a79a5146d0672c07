"""The arguments of `specdec_kernels::verify_tree` by name."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .rules import TREE_RULES, TREE_RULES_READING_DRAFT
from .schema import named_by_schema
from .verification import VerifyArguments, new_outputs


class TreeOutputs(NamedTuple):
    """The outputs in the order of the schema; those not asked for have no entries."""

    path: Tensor
    tokens: Tensor
    num_accepted: Tensor
    status: Tensor
    logprobs: Tensor
    accept_probs: Tensor


@named_by_schema("verify_tree")
class TreeArguments(VerifyArguments):
    """Shapes as in csrc/include/specdec/tree.h."""

    rules = TREE_RULES
    rules_reading_draft = TREE_RULES_READING_DRAFT

    tree_tokens: Tensor
    parents: Tensor
    max_depth: int

    def new_outputs(self) -> TreeOutputs:
        """Uninitialised outputs."""
        path = self.parents.new_empty((self.parents.shape[0], self.max_depth))
        return TreeOutputs(path, *new_outputs(self, self.tree_tokens, self.max_depth + 1))
