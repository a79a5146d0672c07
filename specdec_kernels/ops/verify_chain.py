"""Verification of a chain of drafted tokens.

Terms, here and in the whole package. The *target* model's distribution at a position is P, the
*draft* model's is Q. The *drafted tokens* of a sequence are tried in order until one is *rejected*;
those before it are *accepted*. One token follows them. After a rejection it is the
*recovered token*: rules token, block and lenient sample it from the *residual* max(P - Q, 0)
normalised, rules typical, top_beta and synthetic from P, and for rules greedy and match it is the
token that the target chose itself. After a fully accepted draft it is the *bonus token*, from P.
The accepted tokens and this one are the *emitted* tokens. P is the distribution after the sampling
parameters. The random number that is compared with the *acceptance probability* of a draft is its
*acceptance uniform*.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from ..arguments import conversion
from ..arguments.chain import ChainArguments
from ..arguments.conversion import Param
from ..arguments.draft_forms import (
    DraftMap,
    SampledDraft,
    SparseDraft,
    map_columns,
    split_draft,
)
from ..arguments.out import write_out
from ..arguments.rules import KINDS, RULES, Kind, Rule
from ..arguments.validation import fake_kernel
from ..arguments.values import number_of, require_flag


class Verdict(NamedTuple):
    """The result of `verify_chain`.

    Attributes:
        tokens: [B, gamma+1] in the dtype of draft_token_ids: the emitted tokens, then -1. These are
            the accepted drafts and the recovered or bonus token, so `(tokens >= 0).sum(-1)` counts
            them. No such token follows an end-of-sequence token, `max_new_tokens` tokens or a
            fault.
        num_accepted: [B] int32, the accepted drafts among them.
        status: [B] int32, the `Status` bits of each sequence; 0 where its data has no fault.
        logprobs: [B, gamma+1] float32, the log-probability of each emitted token under P; 0 at
            temperature 0 and where nothing was emitted. Empty if not asked for.
        accept_probs: [B, gamma] float32, the acceptance probability of each draft, given that it
            was reached: `min(1, P/Q)` for rule token, `min(1, P/(lenience Q))` for lenient, the
            rate for synthetic, 0 or 1 where nothing is random. For rule block column i is h_{i+1}
            of docs/rules.md#block: the probability of accepting i + 1 drafts, given that no more
            are accepted. NaN for drafts that the rule did not look at. Empty if not asked for.
    """

    tokens: Tensor
    num_accepted: Tensor
    status: Tensor
    logprobs: Tensor
    accept_probs: Tensor

    def rows(self) -> Tensor:
        """[B, gamma+1] int64: the target row that gave each emitted token, then -1.

        `kept_tokens` takes them.
        """
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return torch.where(self.tokens >= 0, places, -1)


def verify_chain(
    target: Tensor,
    draft_token_ids: Tensor,
    draft: Tensor | SampledDraft | SparseDraft | None = None,
    *,
    kind: Kind = "logits",
    rule: Rule = "token",
    temperature: Param = 1.0,
    top_k: int | Tensor = 0,
    top_p: Param = 1.0,
    min_p: Param = 0.0,
    token_bitmask: Tensor | None = None,
    seeds: Tensor,
    positions: Tensor,
    target_indptr: Tensor | None = None,
    uniforms: Tensor | None = None,
    draft_map: DraftMap | None = None,
    draft_rows: Tensor | None = None,
    lenience: float = 1.0,
    typical_epsilon: float = 0.09,
    typical_delta: float = 0.3,
    top_beta_rank: int = 1,
    top_beta_distance: float = 0.0,
    synthetic_rates: Tensor | None = None,
    eos_token_ids: Tensor | None = None,
    max_new_tokens: Tensor | None = None,
    with_logprobs: bool = True,
    with_accept_probs: bool = False,
    out: Verdict | None = None,
    workspace: Tensor | None = None,
) -> Verdict:
    """Decide which drafted tokens are accepted, and sample the recovered or bonus token.

    The op reads logits as the model returns them and applies the sampling parameters itself. It is
    not differentiable. At temperature 0 every rule decides as "greedy" does, except "synthetic",
    whose rates hold, "lenient" and "top_beta", see below.

    Args:
        target: [B, gamma+1, V] float32, bfloat16 or float16, or ragged [R, V] with `target_indptr`.
            Row i verifies draft i; the last row of a sequence gives its bonus token. The last
            dimension must be contiguous.
        draft_token_ids: [B, gamma] int32 or int64; -1 means no draft from here on.
        draft: Q, the distribution that the drafts were sampled from: None (deterministic: Q is
            one-hot at the drafted token), a tensor [B, gamma, D] of what `kind` says, a
            `SampledDraft` or a `SparseDraft`. Only `RULES_READING_DRAFT` read it.

            Logits in a tensor are divided by the target's temperature and not filtered;
            probabilities are taken as they are. D may differ from V, see `DraftMap`.

            With a ragged target the rows may be [R-B, D]: row target_indptr[b]-b+i belongs to draft
            i. Then every sequence must have at least one target row. With `draft_rows` the rows are
            [B, M, D] or [M, D], and so are the ids of a `SparseDraft`; the statistics of a
            `SampledDraft` are [B, M] or [M].

            A draft with Q = 0 < P is always accepted, as the rules demand. So a drafter that passes
            the wrong rows shows as `accept_probs` of 1.
        kind: "logits" or "probs", the content of the target and of a draft given as a tensor. For
            probabilities at temperature 1 without filters, rules token, block and lenient use them
            as they are, and read and check only the entries that they need.
        rule: one of `RULES`; docs/rules.md gives their formulas. Lossless, so that the output
            follows the target's distribution: "token" (rejection sampling, draft by draft), "block"
            (all drafts together: accepts at least as many in expectation), "match" (Gumbel-max
            sampling with shared noise: the output equals that of `sample` with `noise="shared"`,
            and drafts are often accepted if the drafter sampled so too, with the same seeds and
            positions) and "greedy" (accepts the argmax and ignores the temperature, so that P is
            the distribution at temperature 0). Lossy: "typical" (accepts tokens that are likely
            enough under P), "top_beta" (accepts tokens that are among the likeliest and near the
            first), "lenient" (compares P with lenience * Q) and "synthetic" (accepts at given rates
            whatever the rows hold: for benchmarks of servers).
        temperature, top_k, top_p, min_p: scalar or [B], the sampling parameters of the target, as
            in `sample`.
        token_bitmask: [B, gamma+1, ceil(V/32)] int32, or ragged [R, ceil(V/32)], which tokens a
            grammar allows after each row: bit v % 32 of word v // 32 is that of token v, as
            xgrammar and llguidance write it. Others have P = 0 before any filter, whatever their
            entry holds. None allows all.
        seeds: [B] int32 or int64.
        positions: [B] int32 or int64, the absolute index of the first drafted token. Row i takes
            its randomness from (seed, position + i), except the acceptance uniforms of rule block,
            which all come from (seed, position). So the result does not depend on the batch. Drafts
            are drawn at the positions of `draft_positions`; see docs/rules.md#noise.
        target_indptr: [B+1] int32 or int64; row target_indptr[b]+i verifies draft i of sequence b.
        uniforms: [B, gamma+1] float64 in [0, 1), in place of random numbers, for tests. Column
            i < gamma is the acceptance uniform of draft i, the last column draws the recovered or
            bonus token. If any value of a row is out of range, even one that no decision would
            read, the sequence emits nothing: `Status.BAD_PARAMETER`.
        draft_map: for draft rows over a smaller vocabulary of the draft model. The drafted ids are
            still the target's.
        draft_rows: [B, gamma] int32 or int64, the row of `draft` that draft i was sampled from, for
            rows that lie in a store of more requests than the batch has: nothing is copied. None
            means row i. A drafted token whose row does not exist is `Status.DRAFT_INVALID`.
        lenience: in (0, 1], for rule lenient, which with 1 equals token. At temperature 0 that rule
            accepts drafts whose probability at temperature 1 is at least lenience times the
            largest.
        typical_epsilon, typical_delta: rule typical accepts x if
            `P(x) > min(epsilon, delta * exp(-H))` with H the entropy of P.
        top_beta_rank, top_beta_distance: rule top_beta accepts x if fewer than top_beta_rank tokens
            are likelier and `log P(top) - log P(x) <= top_beta_distance`, where top is the
            likeliest token. At least 1, and at least 0 (infinity is no bound). At temperature 0 P
            is that of temperature 1 without filters.
        synthetic_rates: [gamma] float32, for rule synthetic: the probability that draft i is
            accepted if it is reached.
        eos_token_ids: [E] int32 or int64; nothing is emitted after one of them.
        max_new_tokens: [B] int32 or int64, how many tokens may be emitted; 0 or less emits nothing.
        with_logprobs: whether to compute `logprobs`.
        with_accept_probs: whether to compute `accept_probs`.
        out: contiguous tensors of the shapes and dtypes of `Verdict`, in which the results are
            written and which are returned: no tensor is allocated for them. What is not asked for
            is None or empty. None may overlap another or an argument.
            docs/ops.md#persistent-buffers.
        workspace: uint8 of at least `verify_chain_workspace_bytes`, for `out` on a CUDA device: the
            kernels work in it. It need not be cleared. None: the call allocates one.

    Raises:
        RuntimeError: a shape, dtype, device or scalar is out of range, or a parameter that the rule
            does not read differs from its default; the message names it.
        TypeError: an argument has a wrong type, such as a list in place of a tensor.

    Source: token: Leviathan et al. 2023, Algorithm 1; Chen et al. 2023. block: Sun et al. 2024,
    arXiv 2403.10444. match: Daliri et al. 2024, arXiv 2408.07978. typical: Cai et al. 2024
    (Medusa). top_beta: Stern et al. 2018 (arXiv 1811.03115), section 5; Xia et al. 2023 (arXiv
    2203.16487). lenient: Leviathan et al. 2023, A.5.

    >>> target = torch.tensor([[[0.0, 9.0], [9.0, 0.0]]])
    >>> one = torch.zeros(1, dtype=torch.int64)
    >>> v = verify_chain(target, torch.tensor([[1]]), rule="greedy", seeds=one, positions=one)
    >>> v.tokens, v.num_accepted
    (tensor([[1, 0]]), tensor([1], dtype=torch.int32))
    """
    rows, ids, *statistics = split_draft(draft)
    arguments = (
        conversion.require_tensor(target, "target"),
        conversion.require_tensor(draft_token_ids, "draft_token_ids"),
        rows,
        ids,
        map_columns(draft_map),
        *statistics,
        conversion.require_tensor_or_none(draft_rows, "draft_rows"),
        number_of(kind, "kind", KINDS),
        number_of(rule, "rule", RULES),
        *conversion.sampling(temperature, top_k, top_p, min_p),
        conversion.require_tensor_or_none(token_bitmask, "token_bitmask"),
        conversion.require_tensor(seeds, "seeds"),
        conversion.require_tensor(positions, "positions"),
        conversion.require_tensor_or_none(target_indptr, "target_indptr"),
        conversion.require_tensor_or_none(uniforms, "uniforms"),
        conversion.require_number(lenience, "lenience"),
        conversion.require_number(typical_epsilon, "typical_epsilon"),
        conversion.require_number(typical_delta, "typical_delta"),
        conversion.require_integer(top_beta_rank, "top_beta_rank"),
        conversion.require_number(top_beta_distance, "top_beta_distance"),
        conversion.require_tensor_or_none(synthetic_rates, "synthetic_rates"),
        conversion.require_tensor_or_none(eos_token_ids, "eos_token_ids"),
        conversion.require_tensor_or_none(max_new_tokens, "max_new_tokens"),
        require_flag(with_logprobs, "with_logprobs"),
        require_flag(with_accept_probs, "with_accept_probs"),
    )
    if out is None and workspace is None:
        return Verdict(*ops.verify_chain.default(*arguments))
    return write_out(ops.verify_chain_out.default, arguments, Verdict, out, workspace)


@fake_kernel("verify_chain")
def _(*args: Any) -> tuple[Tensor, ...]:
    return ChainArguments(*args).new_outputs()


@fake_kernel("verify_chain_out")
def _(*args: Any) -> None:
    """Nothing is returned."""
