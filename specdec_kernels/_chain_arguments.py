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
    def id_limit(self) -> int:
        """Drafted ids below it are judged.

        A draft with a larger vocabulary than the target may propose what the target cannot say:
        a rejection like any other.
        """
        v = self.target.shape[-1]
        if self.draft is None or self.draft_ids is not None or self.draft_columns is not None:
            return v
        return max(v, self.draft.shape[-1]) if self.rule in RATIO_RULES else v

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
        draft, dev, v = self.draft, self.target.device, self.target.shape[-1]
        if draft is not None:
            self._check_draft_rows(draft)
        if self.draft_ids is not None:
            ids = self.draft_ids
            require(
                draft is not None and ids.shape == draft.shape,
                f"draft ids must be like the draft probabilities, "
                f"{shape(draft) if draft is not None else 'None'}, got {shape(ids)}",
            )
            require(
                ids.dtype in IDS, f"draft ids must be int32 or int64, got {dtype_name(ids.dtype)}"
            )
            same_device("draft ids", ids, dev, "target")
        if self.draft_columns is not None:
            vector("draft_map columns", self.draft_columns, v, torch.int32, dev, "target")
            require(
                draft is not None and self.draft_ids is None,
                "draft_map must be None unless draft holds rows over a vocabulary of its own",
            )
        pair = (self.draft_logsumexp, self.draft_threshold)
        require(
            (pair[0] is None) == (pair[1] is None)
            and (pair[0] is None or (draft is not None and self.draft_ids is None)),
            "draft_logsumexp and draft_threshold must come together and with draft",
        )
        names = ("draft_logsumexp", "draft_threshold")
        for name, t, dtype in zip(names, pair, (torch.float64, torch.float32), strict=True):
            if t is None:
                continue
            require(
                t.dim() == 2 and t.shape[0] == b and t.shape[1] == gamma,
                f"{name} must be [B, gamma] = [{b}, {gamma}], got {shape(t)}",
            )
            require(
                t.dtype == dtype, f"{name} must be {dtype_name(dtype)}, got {dtype_name(t.dtype)}"
            )
            same_device(name, t, dev, "target")
        if self.draft_temperatures is not None:
            vector("draft temperature", self.draft_temperatures, b, torch.float32, dev, "target")
        else:
            t0 = float32(self.draft_temperature)
            require(
                math.isfinite(t0) and t0 >= 0,
                f"draft temperature must be finite and at least 0, got {t0:g}",
            )

    def _check_draft_rows(self, draft: Tensor) -> None:
        b, gamma = self.draft_tokens.shape
        sparse = self.draft_ids is not None
        name, last = ("draft probabilities", "K") if sparse else ("draft", "D")
        if self.ragged_draft:
            n = self.target.shape[0] - b
            require(
                n >= 0,
                f"target must be [N, V] with N >= B = {b} when draft is [N-B, {last}], "
                f"got {shape(self.target)}",
            )
            require(
                draft.shape[0] == n,
                f"{name} must be [N-B, {last}] = [{n}, {last}], got {shape(draft)}",
            )
        else:
            require(
                draft.dim() == 3 and draft.shape[0] == b and draft.shape[1] == gamma,
                f"{name} must be [B, gamma, {last}] = [{b}, {gamma}, {last}], got {shape(draft)}",
            )
        require(
            not sparse or draft.shape[-1] >= 1,
            f"{name} must have K >= 1 entries, got {shape(draft)}",
        )
        rows(name, draft)
        same_device(name, draft, self.target.device, "target")

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
