"""The validation that `verify_chain` and `verify_tree` share, and the outputs of both.

csrc/arguments/verification.cpp validates the same with the same messages.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdec_kernels.arguments.checks import (
    check_entries,
    check_ids,
    check_matrix,
    check_number,
    check_rows,
    check_same_device,
    check_typed,
    check_vector,
    float32,
    require,
    shape,
)
from specdec_kernels.arguments.rules import KINDS, Kind, Rule, TreeRule
from specdec_kernels.arguments.sample import SamplingArguments


class VerifyArguments(Protocol):
    """The arguments that both verifiers have."""

    @property
    def target(self) -> Tensor: ...
    @property
    def kind(self) -> int: ...
    @property
    def kind_name(self) -> Kind: ...
    @property
    def rule(self) -> int: ...
    @property
    def rule_name(self) -> Rule | TreeRule: ...
    @property
    def sampling(self) -> SamplingArguments: ...
    @property
    def seeds(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def target_indptr(self) -> Tensor | None: ...
    @property
    def uniforms(self) -> Tensor | None: ...
    @property
    def typical_epsilon(self) -> float: ...
    @property
    def typical_delta(self) -> float: ...
    @property
    def eos_token_ids(self) -> Tensor | None: ...
    @property
    def max_new_tokens(self) -> Tensor | None: ...
    @property
    def draft(self) -> Tensor | None: ...
    @property
    def draft_ids(self) -> Tensor | None: ...
    @property
    def draft_columns(self) -> Tensor | None: ...
    @property
    def draft_logsumexp(self) -> Tensor | None: ...
    @property
    def draft_threshold(self) -> Tensor | None: ...
    @property
    def draft_temperatures(self) -> Tensor | None: ...
    @property
    def draft_temperature(self) -> float: ...
    @property
    def with_logprobs(self) -> bool: ...
    @property
    def with_accept_probs(self) -> bool: ...


def check_drafted(
    a: VerifyArguments, rules: tuple[str, ...], name: str, t: Tensor, dims: str
) -> None:
    """Validates kind and rule, then the drafted tokens `t`, which messages call `name`."""
    check_number("kind", a.kind, KINDS)
    check_number("rule", a.rule, rules)
    require(t.dim() == 2, f"{name} must be {dims}, got {shape(t)}")
    check_ids(name, t)
    check_entries(name, "the outputs", dims, *t.shape)


def check_target(a: VerifyArguments, name: str, t: Tensor, width: str, ragged: str) -> None:
    """The target must have one row more than the drafted tokens [B, width], or be ragged."""
    target, (b, n) = a.target, t.shape
    if a.target_indptr is None:
        require(
            target.dim() == 3 and target.shape[:2] == (b, n + 1),
            f"target must be [B, {width}+1, V] = [{b}, {n + 1}, V], got {shape(target)}",
        )
    else:
        require(
            target.dim() == 2,
            f"target must be {ragged} when target_indptr is given, got {shape(target)}",
        )
        check_vector("target_indptr", a.target_indptr, b + 1, torch.int32, target.device, "target")
    check_rows("target", target)
    check_same_device(name, t, target.device, "target")


def check_draws(a: VerifyArguments, b: int, dims: str, columns: int) -> None:
    """Validates the sampling parameters, seeds, positions and uniforms, whose shape is `dims`."""
    dev = a.target.device
    a.sampling.check(b, dev, "target")
    check_vector("seeds", a.seeds, b, torch.int64, dev, "target")
    check_vector("positions", a.positions, b, torch.int64, dev, "target")
    if a.uniforms is not None:
        check_matrix("uniforms", a.uniforms, dims, (b, columns), torch.float64, dev, "target")
        require(a.rule_name != "match", "uniforms must be None when rule is match")


def check_typical(a: VerifyArguments) -> None:
    epsilon, delta = float32(a.typical_epsilon), float32(a.typical_delta)
    require(0 <= epsilon <= 1, f"typical_epsilon must be in [0, 1], got {epsilon:g}")
    require(
        math.isfinite(delta) and delta >= 0,
        f"typical_delta must be finite and at least 0, got {delta:g}",
    )


def check_limits(a: VerifyArguments, b: int) -> None:
    dev = a.target.device
    if a.eos_token_ids is not None:
        require(
            a.eos_token_ids.dim() == 1, f"eos_token_ids must be [E], got {shape(a.eos_token_ids)}"
        )
        check_typed("eos_token_ids", a.eos_token_ids, torch.int64, dev, "target")
    if a.max_new_tokens is not None:
        check_vector("max_new_tokens", a.max_new_tokens, b, torch.int64, dev, "target")


class Outputs(NamedTuple):
    """The outputs that both verifiers have; those not asked for have no entries."""

    tokens: Tensor
    num_accepted: Tensor
    status: Tensor
    logprobs: Tensor
    accept_probs: Tensor


def new_outputs(a: VerifyArguments, tokens: Tensor, emitted: int) -> Outputs:
    """Uninitialised outputs; `tokens` are the drafted ones."""
    b, drafted = tokens.shape
    return Outputs(
        tokens.new_empty((b, emitted)),
        tokens.new_empty((b,), dtype=torch.int32),
        tokens.new_empty((b,), dtype=torch.int32),
        tokens.new_empty((b, emitted) if a.with_logprobs else (0, 0), dtype=torch.float32),
        tokens.new_empty((b, drafted) if a.with_accept_probs else (0, 0), dtype=torch.float32),
    )
