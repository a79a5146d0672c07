"""The arguments of `specdec_kernels::verify_chain` by name, and their checks.

csrc/torch/chain_arguments.cpp makes the same checks with the same words; tests/test_errors.py holds
the two together by the table in tests/error_table.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import _verify_arguments as verify
from specdec_kernels._checks import float32, require, shape, vector
from specdec_kernels._draft_arguments import DraftArguments, Sizes
from specdec_kernels._sample_arguments import SamplingArguments

RULES = ("token", "block", "greedy", "match", "typical", "lenient", "synthetic")
RATIO_RULES = ("token", "block", "lenient")  # they compare P with Q


class ChainArguments(NamedTuple):
    """In the order of the schema; shapes as in csrc/include/specdec/chain.h."""

    target: Tensor
    draft_tokens: Tensor
    draft: Tensor | None
    draft_ids: Tensor | None
    draft_columns: Tensor | None
    draft_logsumexp: Tensor | None
    draft_threshold: Tensor | None
    draft_temperatures: Tensor | None
    draft_temperature: float
    kind: str
    rule: str
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
    cu_rows: Tensor | None
    uniforms: Tensor | None
    lenience: float
    typical_epsilon: float
    typical_delta: float
    synthetic_rates: Tensor | None
    eos_ids: Tensor | None
    max_emit: Tensor | None
    with_logprobs: bool
    with_acceptance: bool

    @property
    def sampling(self) -> SamplingArguments:
        return SamplingArguments(*self[11:19])

    @property
    def ragged_draft(self) -> bool:
        return self.draft is not None and self.cu_rows is not None and self.draft.dim() == 2

    @property
    def law(self) -> DraftArguments:
        return DraftArguments(*self[2:9])

    @property
    def reads_draft(self) -> bool:
        """Whether the rule reads Q."""
        return self.rule in RATIO_RULES

    @property
    def id_limit(self) -> int:
        """Drafted ids below it are judged."""
        v = self.target.shape[-1]
        return self.law.id_limit(v) if self.reads_draft else v

    def check(self) -> None:
        """Raises RuntimeError naming the argument, the rule and the value."""
        tokens = self.draft_tokens
        verify.check_tokens(self, RULES, "draft_tokens", tokens, "[B, gamma]")
        verify.check_target(self, "draft_tokens", tokens, "gamma", "[N, V]")
        self._check_draft()
        b, gamma = tokens.shape
        verify.check_draws(self, b, "[B, gamma+1]", gamma + 1)
        lenience = float32(self.lenience)
        require(0 < lenience <= 1, f"lenience must be in (0, 1], got {lenience:g}")
        verify.check_typical(self)
        require(
            (self.synthetic_rates is not None) == (self.rule == "synthetic"),
            "synthetic_rates must be given with rule synthetic and with no other",
        )
        if self.synthetic_rates is not None:
            dev = self.target.device
            vector("synthetic_rates", self.synthetic_rates, gamma, torch.float32, dev, "target")
        verify.check_limits(self, b)

    def _check_draft(self) -> None:
        b, gamma = self.draft_tokens.shape
        each = (("B", b), ("gamma", gamma))
        sizes: Sizes = each
        if self.ragged_draft:
            n = self.target.shape[0] - b
            last = "D" if self.draft_ids is None else "K"
            require(
                n >= 0,
                f"target must be [N, V] with N >= B = {b} when draft is [N-B, {last}], "
                f"got {shape(self.target)}",
            )
            sizes = (("N-B", n),)
        self.law.check(self.target, b, sizes, each)

    def new_outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Uninitialised (tokens, num_accepted, status, logprobs, acceptance)."""
        return verify.new_outputs(self, self.draft_tokens, self.draft_tokens.shape[1] + 1)
