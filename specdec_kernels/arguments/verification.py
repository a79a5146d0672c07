"""What `verify_chain` and `verify_tree` check alike, and the outputs of both.

The C++ binding makes the same checks with the same words.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

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

KINDS = ("logits", "probs")


def check_tokens(
    a: ChainArguments | TreeArguments, rules: tuple[str, ...], name: str, t: Tensor, dims: str
) -> None:
    """The tokens, and before them the words that say how they are judged."""
    one_of("kind", a.kind, KINDS)
    one_of("rule", a.rule, rules)
    require(t.dim() == 2, f"{name} must be {dims}, got {shape(t)}")
    ids(name, t)


def check_target(
    a: ChainArguments | TreeArguments, name: str, t: Tensor, width: str, ragged: str
) -> None:
    """One row more than tokens [B, width], or ragged ones."""
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


def check_draws(a: ChainArguments | TreeArguments, b: int, dims: str, numbers: int) -> None:
    """What the target's law is shaped by, and the noise of draws from it."""
    dev = a.target.device
    a.sampling.check(b, dev, "target")
    vector("seeds", a.seeds, b, torch.int64, dev, "target")
    vector("positions", a.positions, b, torch.int64, dev, "target")
    if a.uniforms is not None:
        matrix("uniforms", a.uniforms, dims, (b, numbers), torch.float64, dev, "target")
        require(a.rule != "match", "uniforms must be None when rule is match")


def check_typical(a: ChainArguments | TreeArguments) -> None:
    epsilon, delta = float32(a.typical_epsilon), float32(a.typical_delta)
    require(0 <= epsilon <= 1, f"typical_epsilon must be in [0, 1], got {epsilon:g}")
    require(
        math.isfinite(delta) and delta >= 0,
        f"typical_delta must be finite and at least 0, got {delta:g}",
    )


def check_limits(a: ChainArguments | TreeArguments, b: int) -> None:
    dev = a.target.device
    if a.eos_token_ids is not None:
        require(
            a.eos_token_ids.dim() == 1, f"eos_token_ids must be [E], got {shape(a.eos_token_ids)}"
        )
        typed("eos_token_ids", a.eos_token_ids, torch.int64, dev, "target")
    if a.max_new_tokens is not None:
        vector("max_new_tokens", a.max_new_tokens, b, torch.int64, dev, "target")


def new_outputs(
    a: ChainArguments | TreeArguments, tokens: Tensor, emitted: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised (tokens, num_accepted, status, logprobs, accept_probs)."""
    b, judged = tokens.shape
    return (
        tokens.new_empty((b, emitted)),
        tokens.new_empty((b,), dtype=torch.int32),
        tokens.new_empty((b,), dtype=torch.int32),
        tokens.new_empty((b, emitted) if a.with_logprobs else (0, 0), dtype=torch.float32),
        tokens.new_empty((b, judged) if a.with_accept_probs else (0, 0), dtype=torch.float32),
    )
