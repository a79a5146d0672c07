"""The arguments of `specdec_kernels::verify_chain` by name."""

from __future__ import annotations

from torch import Tensor

from .rules import RULES, RULES_READING_DRAFT, ChainParameters
from .schema import named_by_schema
from .verification import Outputs, VerifyArguments, new_outputs


@named_by_schema("verify_chain")
class ChainArguments(VerifyArguments, ChainParameters):
    """Shapes as in csrc/include/specdec/chain.h."""

    rules = RULES
    rules_reading_draft = RULES_READING_DRAFT

    draft_token_ids: Tensor
    synthetic_rates: Tensor | None

    @property
    def ragged_draft(self) -> bool:
        """Whether the draft rows are [R-B, D], packed as the target's rows are."""
        return self.flat_draft and self.draft_rows is None

    def new_outputs(self) -> Outputs:
        """Uninitialised outputs, in the order of the schema."""
        return new_outputs(self, self.draft_token_ids, self.draft_token_ids.shape[1] + 1)
