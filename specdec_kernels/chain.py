"""Verification of a chain of drafted tokens."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from specdec_kernels import _checks, _params
from specdec_kernels._params import Param

Kind = Literal["logits", "probs"]
Rule = Literal["token", "greedy", "match"]


class SampledDraft(NamedTuple):
    """The draft law that `sample` left behind.

    logits: [B, gamma, V] (or ragged [N-B, V]), as they were given to `sample`.
    logsumexp: [B, gamma], `Sampled.logsumexp` of each row.
    threshold: [B, gamma], `Sampled.threshold` of each row.
    temperature: scalar or [B], as given to `sample`; 0 makes the draft a point mass.
    """

    logits: Tensor
    logsumexp: Tensor
    threshold: Tensor
    temperature: Param = 1.0


class Verdict(NamedTuple):
    """What `verify_chain` returns.

    tokens: [B, gamma+1] in the dtype of draft_tokens: accepted drafts, one more token, then -1.
    num_accepted: [B] int32.
    status: [B] int32; bit 0 target row not finite (no token emitted there), bit 1 draft row not
        finite (treated as no draft), bit 2 empty residual (sampled from the target), bit 3 draft
        id out of range (treated as -1), bit 4 sampling parameter out of range (nothing emitted).
    logprobs: [B, gamma+1] float32, of emitted tokens under the filtered target; 0 at temperature
        0 and where nothing was emitted.
    """

    tokens: Tensor
    num_accepted: Tensor
    status: Tensor
    logprobs: Tensor


def verify_chain(
    target: Tensor,
    draft_tokens: Tensor,
    draft: Tensor | SampledDraft | None = None,
    *,
    kind: Kind = "logits",
    rule: Rule = "token",
    temperature: Param = 1.0,
    top_k: int | Tensor = 0,
    top_p: Param = 1.0,
    min_p: Param = 0.0,
    seeds: Tensor,
    positions: Tensor,
    cu_rows: Tensor | None = None,
    uniforms: Tensor | None = None,
) -> Verdict:
    """Decide which drafted tokens stand and sample the one token that follows them.

    Args:
        target: [B, gamma+1, V] float32, bfloat16 or float16, or ragged [N, V] with `cu_rows`; row
            i judges draft i, the last one gives the bonus token. The last dimension is contiguous.
        draft_tokens: [B, gamma] int32 or int64; -1 means no draft from here on.
        draft: None (the draft is a point mass), a tensor [B, gamma, V] (or ragged [N-B, V]) of
            what `kind` says, unfiltered and at the target's temperature, or a `SampledDraft`.
        kind: "logits" or "probs": what the target and a plain-tensor draft hold. Probabilities at
            temperature 1 without filters are used as they are; only visited entries are read.
        rule: "token" (lossless rejection sampling), "match" (lossless, shared noise: the output
            equals `sample(stream="shared")`), "greedy" (argmax, temperature ignored).
        temperature, top_k, top_p, min_p: scalar or [B], as in `sample`; they shape the target.
        seeds: [B] int64.
        positions: [B] int64, the absolute index of the first drafted token; row i draws with
            (seed, position + i).
        cu_rows: [B+1] int32, row cu_rows[b]+i belongs to draft i of sequence b.
        uniforms: [B, gamma+1] float64 in [0, 1), for tests: column i < gamma is the coin of draft
            i, the last one draws the token that follows.

    Raises:
        RuntimeError: a shape, dtype, device or scalar out of range, with its name and value.

    Source: Leviathan et al. 2023, Algorithm 1; Chen et al. 2023; Daliri et al. 2024 (`match`).

    >>> target = torch.tensor([[[0.0, 9.0], [9.0, 0.0]]])
    >>> one = torch.zeros(1, dtype=torch.int64)
    >>> v = verify_chain(target, torch.tensor([[1]]), rule="greedy", seeds=one, positions=one)
    >>> v.tokens, v.num_accepted
    (tensor([[1, 0]]), tensor([1], dtype=torch.int32))
    """
    logsumexp = threshold = draft_temperatures = None
    draft_temperature = 1.0
    if isinstance(draft, SampledDraft):
        logsumexp = draft.logsumexp.to(torch.float64)
        threshold = draft.threshold
        draft_temperatures, draft_temperature = _params.split(
            draft.temperature, "draft temperature", 1.0
        )
        draft = draft.logits
    return Verdict(
        *torch.ops.specdec_kernels.verify_chain.default(
            target,
            draft_tokens,
            draft,
            logsumexp,
            threshold,
            draft_temperatures,
            draft_temperature,
            kind,
            rule,
            *_params.sampling(temperature, top_k, top_p, min_p),
            seeds,
            positions,
            cu_rows,
            uniforms,
        )
    )


@torch.library.register_fake("specdec_kernels::verify_chain")
def _(target: Tensor, draft_tokens: Tensor, *args: Any) -> tuple[Tensor, ...]:
    _checks.verify_chain(target, draft_tokens, *args)
    b, gamma = draft_tokens.shape
    return (
        draft_tokens.new_empty((b, gamma + 1)),
        draft_tokens.new_empty((b,), dtype=torch.int32),
        draft_tokens.new_empty((b,), dtype=torch.int32),
        draft_tokens.new_empty((b, gamma + 1), dtype=torch.float32),
    )
