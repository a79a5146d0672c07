"""The arguments of `specdec_kernels::verify_chain` by name, and their checks.

csrc/torch/chain_arguments.cpp makes the same checks with the same words; tests/test_errors.py holds
the two together by the table in tests/error_table.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels._checks import (
    IDS,
    dtype_name,
    float32,
    one_of,
    require,
    rows,
    same_device,
    sampling,
    shape,
    vector,
)
from specdec_kernels._draft_arguments import DraftArguments, Sizes

RULES = ("token", "block", "greedy", "match", "typical", "lenient", "synthetic")
KINDS = ("logits", "probs")
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
    def sampling(self) -> tuple[Tensor | float | None, ...]:
        """The eight sampling arguments."""
        return self[11:19]

    @property
    def ragged_draft(self) -> bool:
        return self.draft is not None and self.cu_rows is not None and self.draft.dim() == 2

    @property
    def law(self) -> DraftArguments:
        return DraftArguments(*self[2:9])

    @property
    def id_limit(self) -> int:
        """Drafted ids below it are judged."""
        v = self.target.shape[-1]
        return self.law.id_limit(v) if self.rule in RATIO_RULES else v

    def check(self) -> None:
        """Raises RuntimeError naming the argument, the rule and the value."""
        one_of("kind", self.kind, KINDS)
        one_of("rule", self.rule, RULES)
        tokens = self.draft_tokens
        require(tokens.dim() == 2, f"draft_tokens must be [B, gamma], got {shape(tokens)}")
        require(
            tokens.dtype in IDS,
            f"draft_tokens must be int32 or int64, got {dtype_name(tokens.dtype)}",
        )
        self._check_target()
        self._check_draft()
        b, dev = tokens.shape[0], self.target.device
        sampling(b, dev, "target", *self.sampling)  # type: ignore[arg-type]
        vector("seeds", self.seeds, b, torch.int64, dev, "target")
        vector("positions", self.positions, b, torch.int64, dev, "target")
        self._check_uniforms()
        self._check_rule()
        self._check_limits()

    def _check_target(self) -> None:
        target, (b, gamma) = self.target, self.draft_tokens.shape
        if self.cu_rows is None:
            require(
                target.dim() == 3 and target.shape[0] == b and target.shape[1] == gamma + 1,
                f"target must be [B, gamma+1, V] = [{b}, {gamma + 1}, V], got {shape(target)}",
            )
        else:
            require(
                target.dim() == 2,
                f"target must be [N, V] when cu_rows is given, got {shape(target)}",
            )
            vector("cu_rows", self.cu_rows, b + 1, torch.int32, target.device, "target")
        rows("target", target)
        same_device("draft_tokens", self.draft_tokens, target.device, "target")

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

    def _check_uniforms(self) -> None:
        u, (b, gamma) = self.uniforms, self.draft_tokens.shape
        if u is None:
            return
        require(
            u.dim() == 2 and u.shape[0] == b and u.shape[1] == gamma + 1,
            f"uniforms must be [B, gamma+1] = [{b}, {gamma + 1}], got {shape(u)}",
        )
        require(u.dtype == torch.float64, f"uniforms must be float64, got {dtype_name(u.dtype)}")
        same_device("uniforms", u, self.target.device, "target")
        require(self.rule != "match", "uniforms must be None when rule is match")

    def _check_rule(self) -> None:
        lenience, epsilon, delta = (
            float32(x) for x in (self.lenience, self.typical_epsilon, self.typical_delta)
        )
        require(0 < lenience <= 1, f"lenience must be in (0, 1], got {lenience:g}")
        require(0 <= epsilon <= 1, f"typical_epsilon must be in [0, 1], got {epsilon:g}")
        require(
            math.isfinite(delta) and delta >= 0,
            f"typical_delta must be finite and at least 0, got {delta:g}",
        )
        require(
            (self.synthetic_rates is not None) == (self.rule == "synthetic"),
            "synthetic_rates must be given with rule synthetic and with no other",
        )
        if self.synthetic_rates is not None:
            gamma, dev = self.draft_tokens.shape[1], self.target.device
            vector("synthetic_rates", self.synthetic_rates, gamma, torch.float32, dev, "target")

    def _check_limits(self) -> None:
        b, dev = self.draft_tokens.shape[0], self.target.device
        if self.eos_ids is not None:
            ids = self.eos_ids
            require(ids.dim() == 1, f"eos_ids must be [E], got {shape(ids)}")
            vector("eos_ids", ids, ids.shape[0], torch.int64, dev, "target")
        if self.max_emit is not None:
            vector("max_emit", self.max_emit, b, torch.int64, dev, "target")

    def new_outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Uninitialised (tokens, num_accepted, status, logprobs, acceptance)."""
        like, (b, gamma) = self.draft_tokens, self.draft_tokens.shape
        return (
            like.new_empty((b, gamma + 1)),
            like.new_empty((b,), dtype=torch.int32),
            like.new_empty((b,), dtype=torch.int32),
            like.new_empty((b, gamma + 1) if self.with_logprobs else (0, 0), dtype=torch.float32),
            like.new_empty((b, gamma) if self.with_acceptance else (0, 0), dtype=torch.float32),
        )
