"""Verification of a chain of drafted tokens. specdec_kernels/ops/verify_chain.py has the terms."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec_host import _library
from specdec_host.arguments import conversion
from specdec_host.arguments.arrays import Array, Param, require_array, require_array_or_none
from specdec_host.arguments.draft_forms import Draft, DraftMap, map_columns, split_draft
from specdec_host.arguments.rules import KINDS, RULES, Kind, Rule


class Verdict(NamedTuple):
    """The result of `verify_chain`.

    tokens: [B, gamma+1] in the dtype of draft_token_ids: the accepted drafts, the recovered or
        bonus token, then -1. No such token follows an end-of-sequence token, `max_new_tokens`
        tokens or a fault, so `(tokens >= 0).sum(-1)` counts the emitted tokens.
    num_accepted: [B] int32, the accepted drafts among them.
    status: [B] int32, the `Status` bits of each sequence; 0 where its data has no fault.
    logprobs: [B, gamma+1] float32, the log-probability of each emitted token under P; 0 at
        temperature 0 and where nothing was emitted. Empty if not asked for.
    accept_probs: [B, gamma] float32, the acceptance probability of each draft, given that it was
        reached; NaN for drafts that the rule did not look at. Empty if not asked for.
    """

    tokens: NDArray[Any]
    num_accepted: NDArray[np.int32]
    status: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    accept_probs: NDArray[np.float32]


def verify_chain(
    target: Array,
    draft_token_ids: Array,
    draft: Draft = None,
    *,
    kind: Kind = "logits",
    rule: Rule = "token",
    temperature: Param = 1.0,
    top_k: int | Array = 0,
    top_p: Param = 1.0,
    min_p: Param = 0.0,
    seeds: Array,
    positions: Array,
    target_indptr: Array | None = None,
    uniforms: Array | None = None,
    draft_map: DraftMap | None = None,
    lenience: float = 1.0,
    typical_epsilon: float = 0.09,
    typical_delta: float = 0.3,
    top_beta_rank: int = 1,
    top_beta_distance: float = 0.0,
    synthetic_rates: Array | None = None,
    eos_token_ids: Array | None = None,
    max_new_tokens: Array | None = None,
    with_logprobs: bool = True,
    with_accept_probs: bool = False,
) -> Verdict:
    """Decide which drafted tokens are accepted, and sample the recovered or bonus token.

    The arguments are those of `specdec_kernels.verify_chain`, with arrays in place of tensors, and
    so are the results. The sampling parameters are applied to the logits as the model returns them.

    Args:
        target: [B, gamma+1, V] float32, bfloat16 or float16, or ragged [R, V] with `target_indptr`.
            Row i verifies draft i; the last row of a sequence gives its bonus token. The last
            dimension must be contiguous.
        draft_token_ids: [B, gamma] int32 or int64; -1 means no draft from here on.
        draft: Q, the distribution that the drafts were sampled from: None (deterministic: Q is
            one-hot at the drafted token), an array [B, gamma, D] of what `kind` says, a
            `SampledDraft` or a `SparseDraft`. Logits in an array are divided by the target's
            temperature and not filtered. With a ragged target the rows may be [R-B, D].
        kind: "logits" or "probs", the content of the target and of a draft given as an array.
        rule: one of `RULES`; docs/rules.md gives their formulas. Lossless, so that the output
            follows the target's distribution: "token", "block", "match" (with drafts that were
            sampled with `noise="shared"`) and "greedy". Lossy: "typical", "top_beta", "lenient",
            "synthetic".
        temperature, top_k, top_p, min_p: scalar or [B], the sampling parameters of the target, as
            in `sample`.
        seeds: [B] int32 or int64.
        positions: [B] int32 or int64, the absolute index of the first drafted token. Drafts are
            drawn at the positions of `draft_positions`; see docs/rules.md#noise.
        target_indptr: [B+1] int32 or int64; row target_indptr[b]+i verifies draft i of sequence b.
        uniforms: [B, gamma+1] float64 in [0, 1), in place of random numbers, for tests.
        draft_map: for draft rows over a smaller vocabulary of the draft model.
        lenience: in (0, 1], for rule lenient, which with 1 equals token.
        typical_epsilon, typical_delta: rule typical accepts x if
            `P(x) > min(epsilon, delta * exp(-H))` with H the entropy of P.
        top_beta_rank, top_beta_distance: rule top_beta accepts x if fewer than top_beta_rank tokens
            are likelier and `log P(top) - log P(x) <= top_beta_distance`, where top is the
            likeliest token.
        synthetic_rates: [gamma] float32, for rule synthetic: the probability that draft i is
            accepted if it is reached.
        eos_token_ids: [E] int32 or int64; nothing is emitted after one of them.
        max_new_tokens: [B] int32 or int64, how many tokens may be emitted; 0 or less emits nothing.
        with_logprobs, with_accept_probs: whether to compute these outputs.

    Raises:
        RuntimeError: a shape, dtype or scalar is out of range, or a parameter that the rule
            does not read differs from its default; the message names it.
        TypeError: an argument has a wrong type, such as a list in place of an array.

    Source: token: Leviathan et al. 2023, Algorithm 1; Chen et al. 2023. block: Sun et al. 2024,
    arXiv 2403.10444. match: Daliri et al. 2024, arXiv 2408.07978. typical: Cai et al. 2024
    (Medusa). top_beta: Stern et al. 2018; Xia et al. 2023. lenient: Leviathan et al. 2023, A.5.

    >>> target = np.array([[[0.0, 9.0], [9.0, 0.0]]], dtype=np.float32)
    >>> one = np.zeros(1, dtype=np.int64)
    >>> v = verify_chain(target, np.array([[1]]), rule="greedy", seeds=one, positions=one)
    >>> v.tokens.tolist(), v.num_accepted.tolist()
    ([[1, 0]], [1])
    """
    rows, ids, *statistics = split_draft(draft)
    return Verdict(
        *_library.verify_chain(
            require_array(target, "target"),
            require_array(draft_token_ids, "draft_token_ids"),
            rows,
            ids,
            map_columns(draft_map),
            *statistics,
            conversion.number_of(kind, "kind", KINDS),
            conversion.number_of(rule, "rule", RULES),
            *conversion.sampling(temperature, top_k, top_p, min_p),
            require_array(seeds, "seeds"),
            require_array(positions, "positions"),
            require_array_or_none(target_indptr, "target_indptr"),
            require_array_or_none(uniforms, "uniforms"),
            conversion.require_number(lenience, "lenience"),
            conversion.require_number(typical_epsilon, "typical_epsilon"),
            conversion.require_number(typical_delta, "typical_delta"),
            conversion.require_integer(top_beta_rank, "top_beta_rank"),
            conversion.require_number(top_beta_distance, "top_beta_distance"),
            require_array_or_none(synthetic_rates, "synthetic_rates"),
            require_array_or_none(eos_token_ids, "eos_token_ids"),
            require_array_or_none(max_new_tokens, "max_new_tokens"),
            conversion.require_flag(with_logprobs, "with_logprobs"),
            conversion.require_flag(with_accept_probs, "with_accept_probs"),
        )
    )
