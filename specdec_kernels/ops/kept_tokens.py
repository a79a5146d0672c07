"""The tokens that the filters keep, with their probabilities: sampling masks and top log-probs.

A token is *kept* in a row if it passes top-k, top-p and min-p and its probability is not 0.
Trainers that learn from sampled text need the kept tokens of each emitted one: the policy that drew
it is the distribution over them, and not the one over the vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from ..arguments import conversion
from ..arguments.conversion import Param
from ..arguments.kept_tokens import KeptTokensArguments
from ..arguments.rules import KINDS, Kind
from ..arguments.validation import fake_kernel
from ..arguments.values import number_of


class KeptTokens(NamedTuple):
    """The result of `kept_tokens`, where `[..]` is [B, E], [B, N], or [R] for a target [R, V].

    Attributes:
        ids: [.., max_kept] int64, the kept tokens from the likeliest on, the lower id first among
            equal logits; then -1.
        logprobs: [.., max_kept] float32, the log-probability of each under P, the distribution that
            the sampler and the verifiers draw from; then -inf. It is normalised over all tokens
            that are kept, also over those that `max_kept` cuts.
        counts: [..] int32, how many tokens are kept, which may be more than `max_kept`.
        status: [..] int32, `Status.KEPT_CUT` where they are more; `Status.TARGET_INVALID` where the
            row holds no distribution or does not exist, `Status.NOTHING_ALLOWED` where no token of
            it is allowed and `Status.BAD_PARAMETER` where a sampling parameter is out of range.
            These three keep nothing. 0 otherwise.
    """

    ids: Tensor
    logprobs: Tensor
    counts: Tensor
    status: Tensor


class KeptCsr(NamedTuple):
    """Kept tokens without the empty places, in the order of their rows.

    Attributes:
        indptr: [N+1] int64; row n has the entries from indptr[n] to indptr[n+1].
        ids: [indptr[N]] int64.
        logprobs: [indptr[N]] float32.
    """

    indptr: Tensor
    ids: Tensor
    logprobs: Tensor


def kept_tokens(
    target: Tensor,
    *,
    max_kept: int,
    rows: Tensor | None = None,
    kind: Kind = "logits",
    temperature: Param = 1.0,
    top_k: int | Tensor = 0,
    top_p: Param = 1.0,
    min_p: Param = 0.0,
    token_bitmask: Tensor | None = None,
    target_indptr: Tensor | None = None,
) -> KeptTokens:
    """The tokens that the filters keep of target rows, from the likeliest on. Not differentiable.

    With the sampling parameters of a verifier these are the tokens that it could have emitted, and
    their probabilities; lossy rules also emit others. Without parameters they are the `max_kept`
    likeliest tokens of the model, as servers return them in `top_logprobs`. At temperature 0 the
    argmax is kept alone, with log-probability 0.

    Args:
        target: [B, N, V] float32, bfloat16 or float16, what the verifier reads; ragged [R, V] with
            `target_indptr`; or [R, V], rows with a sampling parameter each, as `sample` reads them.
            The last dimension must be contiguous.
        max_kept: how many tokens a row returns at most, in [1, 1024].
        rows: [B, E] int32 or int64, the rows that are read of each sequence; -1 reads none, and
            its outputs are empty. `Verdict.rows()` and `TreeVerdict.rows()` are those of the
            emitted tokens. None reads all rows.
        kind: "logits" or "probs", the content of the target. Probabilities are normalised, also
            where a verifier takes them as they are: `logprobs` then differ by the log of their sum.
        temperature, top_k, top_p, min_p: scalar or [B], as in `sample`; for a target [R, V], [R].
        token_bitmask: int32 with the dimensions of the target and ceil(V/32) words in the last one,
            as in `verify_chain`. Tokens that are not allowed are not kept.
        target_indptr: [B+1] int32 or int64; row target_indptr[b]+i is row i of sequence b.

    Raises:
        RuntimeError: a shape, dtype, device or scalar is out of range; the message names it.
        TypeError: an argument has a wrong type, such as a list in place of a tensor.

    Source: docs/ops.md#kept-tokens.

    >>> kept = kept_tokens(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), max_kept=4, top_k=2)
    >>> kept.ids, kept.counts
    (tensor([[ 1,  3, -1, -1]]), tensor([2], dtype=torch.int32))
    """
    return KeptTokens(
        *ops.kept_tokens.default(
            conversion.require_tensor(target, "target"),
            conversion.require_tensor_or_none(rows, "rows"),
            conversion.require_tensor_or_none(target_indptr, "target_indptr"),
            number_of(kind, "kind", KINDS),
            conversion.require_integer(max_kept, "max_kept"),
            *conversion.sampling(temperature, top_k, top_p, min_p),
            conversion.require_tensor_or_none(token_bitmask, "token_bitmask"),
        )
    )


@fake_kernel("kept_tokens")
def _(*args: Any) -> tuple[Tensor, ...]:
    return KeptTokensArguments(*args).new_outputs()


def kept_to_csr(kept: KeptTokens) -> KeptCsr:
    """The kept tokens in compressed rows, as trainers store them.

    The number of entries is data: on a CUDA device the host waits for it, so that no CUDA graph can
    capture the call.

    Args:
        kept: what `kept_tokens` returned, or rows of it.

    Returns:
        N rows, those of `kept` in order. Rows without a token, such as those that were not read,
        are empty.

    Raises:
        TypeError: kept is no `KeptTokens`.

    >>> kept = kept_tokens(torch.tensor([[0.0, 2.0, 1.0], [9.0, 0.0, 9.0]]), max_kept=3, top_k=1)
    >>> csr = kept_to_csr(kept)
    >>> csr.indptr, csr.ids
    (tensor([0, 1, 3]), tensor([1, 0, 2]))
    """
    if not isinstance(kept, KeptTokens):
        raise TypeError(f"kept must be a KeptTokens, got {type(kept).__name__}")
    there = kept.ids >= 0
    lengths = there.sum(-1).flatten()
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return KeptCsr(indptr, kept.ids[there], kept.logprobs[there])
