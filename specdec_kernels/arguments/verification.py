"""The validation that `verify_chain` and `verify_tree` share, and the outputs of both.

csrc/torch/arguments/verification.cpp validates the same with the same messages.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from specdec_kernels.arguments.checks import (
    float32,
    ids,
    matrix,
    one_of,
    require,
    rows,
    same_device,
    shape,
    typed,
    vector,
)

if TYPE_CHECKING:
    from specdec_kernels.arguments.chain import ChainArguments
    from specdec_kernels.arguments.tree import TreeArguments

    VerifyArguments: TypeAlias = ChainArguments | TreeArguments

KINDS = ("logits", "probs")


def check_tokens(
    a: VerifyArguments, rules: tuple[str, ...], name: str, t: Tensor, dims: str
) -> None:
    """The names that select what is computed, then the drafted tokens."""
    one_of("kind", a.kind, KINDS)
    one_of("rule", a.rule, rules)
    require(t.dim() == 2, f"{name} must be {dims}, got {shape(t)}")
    ids(name, t)


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
        vector("target_indptr", a.target_indptr, b + 1, torch.int32, target.device, "target")
    rows("target", target)
    same_device(name, t, target.device, "target")


def check_draws(a: VerifyArguments, b: int, dims: str, columns: int) -> None:
    """The sampling parameters of the target, and the randomness; `dims` are those of uniforms."""
    dev = a.target.device
    a.sampling.check(b, dev, "target")
    vector("seeds", a.seeds, b, torch.int64, dev, "target")
    vector("positions", a.positions, b, torch.int64, dev, "target")
    if a.uniforms is not None:
        matrix("uniforms", a.uniforms, dims, (b, columns), torch.float64, dev, "target")
        require(a.rule != "match", "uniforms must be None when rule is match")


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
        typed("eos_token_ids", a.eos_token_ids, torch.int64, dev, "target")
    if a.max_new_tokens is not None:
        vector("max_new_tokens", a.max_new_tokens, b, torch.int64, dev, "target")


def new_outputs(
    a: VerifyArguments, tokens: Tensor, emitted: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised (tokens, num_accepted, status, logprobs, accept_probs)."""
    b, drafted = tokens.shape
    return (
        tokens.new_empty((b, emitted)),
        tokens.new_empty((b,), dtype=torch.int32),
        tokens.new_empty((b,), dtype=torch.int32),
        tokens.new_empty((b, emitted) if a.with_logprobs else (0, 0), dtype=torch.float32),
        tokens.new_empty((b, drafted) if a.with_accept_probs else (0, 0), dtype=torch.float32),
    )
