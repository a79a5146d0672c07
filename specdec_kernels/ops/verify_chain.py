"""Verification of a chain of drafted tokens."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.arguments import conversion as _params
from specdec_kernels.arguments.chain import ChainArguments
from specdec_kernels.arguments.conversion import Param
from specdec_kernels.arguments.rules import Rule

Kind = Literal["logits", "probs"]


class SampledDraft(NamedTuple):
    """The draft law that `sample` left behind.

    logits: [B, gamma, V] (or ragged [N-B, V]), as they were given to `sample`.
    logsumexp: [B, gamma], `Sampled.logsumexp` of each row.
    threshold: [B, gamma], `Sampled.threshold` of each row.
    temperature: scalar or [B], as given to `sample`; 0 makes the draft a point mass. Another one
        than was sampled with is another law, and the output no longer the target's.
    """

    logits: Tensor
    logsumexp: Tensor
    threshold: Tensor
    temperature: Param


class SparseDraft(NamedTuple):
    """A draft law on a few tokens: what a drafter with top-k really drew from.

    ids: [B, gamma, K] (or ragged [N-B, K]) int32 or int64, K >= 1: tokens of the target, in any
        order, negative where unused; probabilities of an id that comes twice add up.
    probs: of the same shape, float32, bfloat16 or float16; each law sums to 1.
    """

    ids: Tensor
    probs: Tensor


class DraftMap(NamedTuple):
    """Where a draft model with a smaller vocabulary keeps each token of the target.

    columns: [V] int32, the draft's column of each target id, -1 where it has none.
    """

    columns: Tensor

    @classmethod
    def of(cls, ids: Tensor, vocab: int) -> DraftMap:
        """From the target id of each draft column.

        Made once and kept: it reads `ids` on the host.

        Args:
            ids: [D] int32 or int64, distinct, in [0, vocab).
            vocab: V, the last dimension of the target rows.

        Raises:
            ValueError: no such tensor, vocab below 1, an id out of range or twice.

        >>> DraftMap.from_ids(torch.tensor([3, 0]), 4).columns
        tensor([ 1, -1, -1,  0], dtype=torch.int32)
        """
        _check_ids("ids", ids)
        return cls(_inverse("ids", ids, vocab))

    @classmethod
    def from_offsets(cls, d2t: Tensor, vocab: int) -> DraftMap:
        """From the `d2t` of an EAGLE-3 file: column i is target id `i + d2t[i]`.

        Made once and kept, as `of` is.

        Args:
            d2t: [D] int32 or int64.
            vocab: V, the last dimension of the target rows.

        Raises:
            ValueError: as `of`.

        >>> DraftMap.from_offsets(torch.tensor([0, 2]), 4).columns
        tensor([ 0, -1, -1,  1], dtype=torch.int32)
        """
        _check_ids("d2t", d2t)
        ids = d2t + torch.arange(len(d2t), device=d2t.device)
        return cls(_inverse("i + d2t[i]", ids, vocab))


def _check_ids(name: str, ids: Tensor) -> None:
    _params.tensor(ids, name)
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be [D] int32 or int64, got {list(ids.shape)} {ids.dtype}")


def _inverse(name: str, ids: Tensor, vocab: int) -> Tensor:
    """[vocab] int32: where each id stands in `ids`, else -1."""
    if vocab < 1:
        raise ValueError(f"vocab must be at least 1, got {vocab}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(
            f"{name} must be in [0, {vocab}), got {int(ids.min())} to {int(ids.max())}"
        )
    if len(ids.unique()) != len(ids):
        raise ValueError(f"{name} must be distinct, got one twice")
    columns = torch.full((vocab,), -1, dtype=torch.int32, device=ids.device)
    columns[ids.long()] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    return columns


class Verdict(NamedTuple):
    """What `verify_chain` returns.

    tokens: [B, gamma+1] in the dtype of draft_token_ids: accepted drafts, one more token (none after
        an end-of-sequence token or at `max_new_tokens`), then -1. `(tokens >= 0).sum(-1)` are emitted.
    num_accepted: [B] int32, drafts that stand. Not the tokens emitted less one: nothing follows an
        end-of-sequence token, `max_new_tokens` or a fault.
    status: [B] int32; bit 0 target row not finite (no token emitted there), bit 1 draft row not
        finite (treated as no draft), bit 2 empty residual (sampled from the target), bit 3 draft
        id out of range (treated as -1), bit 4 sampling parameter out of range (nothing emitted).
    logprobs: [B, gamma+1] float32, of emitted tokens under the filtered target; 0 at temperature
        0 and where nothing was emitted. Empty if not asked for.
    accept_probs: [B, gamma] float32, the probability with which each draft was to be accepted, given
        that it was reached: `min(1, P/Q)` of rule token, `min(1, P/(lenience Q))` of lenient, the
        rate of synthetic, 0 or 1 where nothing is random. `h_i` of rule block is conditional on
        every later draft having failed. NaN where the rule did not look. Empty if not asked for.
    """

    tokens: Tensor
    num_accepted: Tensor
    status: Tensor
    logprobs: Tensor
    accept_probs: Tensor


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
    seeds: Tensor,
    positions: Tensor,
    target_indptr: Tensor | None = None,
    uniforms: Tensor | None = None,
    draft_map: DraftMap | None = None,
    lenience: float = 1.0,
    typical_epsilon: float = 0.09,
    typical_delta: float = 0.3,
    synthetic_rates: Tensor | None = None,
    eos_token_ids: Tensor | None = None,
    max_new_tokens: Tensor | None = None,
    with_logprobs: bool = True,
    with_accept_probs: bool = False,
) -> Verdict:
    """Decide which drafted tokens stand and sample the one token that follows them.

    Not differentiable: no gradient flows from the outputs. At temperature 0 every rule is greedy
    but synthetic, whose rates hold, and lenient, which takes what is near the top.

    Args:
        target: [B, gamma+1, V] float32, bfloat16 or float16, or ragged [N, V] with `target_indptr`; row
            i judges draft i, the last one gives the bonus token. The last dimension is contiguous.
        draft_token_ids: [B, gamma] int32 or int64; -1 means no draft from here on.
        draft: None (the draft is a point mass), a tensor [B, gamma, D] of what `kind` says, a
            `SampledDraft` or a `SparseDraft`. Logits are raw: the op divides them by the target's
            temperature and filters nothing. Probabilities are the final law that the drafts were
            drawn from. Ragged, [N-B, D], row target_indptr[b]-b+i is of draft i, and every sequence has
            at least one target row. D need not be V: without a `draft_map`, column v is token v,
            tokens from D on have no probability, and columns from V on are never accepted. A
            drafted id outside its own law (Q = 0 < P) is always accepted, as the rule says: a
            drafter wired to the wrong rows shows as an accept_probs of 1.
        kind: "logits" or "probs": what the target and a plain-tensor draft hold. Rules token,
            block and lenient take target probabilities at temperature 1 without filters as they
            are, and read and check the entries they visit only.
        rule: lossless are "token" (rejection sampling, draft by draft), "block" (the drafts
            together: accepts as many or more), "match" (shared noise: the output equals
            `sample(stream="shared")`; drafts stand often only if the drafter called that with the
            same seeds and positions) and "greedy" (argmax, temperature ignored). Lossy are
            "typical" (the draft is likely enough) and "lenient" (P against lenience * Q).
            "synthetic" accepts at given rates, whatever the rows say: for benchmarks of servers.
        temperature, top_k, top_p, min_p: scalar or [B], as in `sample`; they shape the target.
        seeds: [B] int64.
        positions: [B] int64, the absolute index of the first drafted token; row i draws with
            (seed, position + i).
        target_indptr: [B+1] int32, row target_indptr[b]+i belongs to draft i of sequence b.
        uniforms: [B, gamma+1] float64 in [0, 1), for tests: column i < gamma is the coin of draft
            i, the last one draws the token that follows.
        draft_map: for rows over the draft's own, reduced vocabulary; drafted ids are the target's.
        lenience: in (0, 1], for rule lenient. At temperature 0 it accepts drafts whose probability
            (at temperature 1) is at least lenience times the largest.
        typical_epsilon, typical_delta: rule typical accepts `P(x) > min(epsilon, delta * exp(-H))`
            with H the entropy of P.
        synthetic_rates: [gamma] float32, for rule synthetic: with which probability draft i stands
            if it is reached.
        eos_token_ids: [E] int64; nothing is emitted after one of them.
        max_new_tokens: [B] int64, at most so many tokens; 0 or less emits nothing.
        with_logprobs, with_accept_probs: which optional outputs to compute.

    Raises:
        RuntimeError: a shape, dtype, device or scalar out of range, with its name and value.
        ValueError: an argument of a wrong type.

    Source: token: Leviathan et al. 2023, Algorithm 1; Chen et al. 2023. block: Sun et al. 2024,
    arXiv 2403.10444. match: Daliri et al. 2024, arXiv 2408.07978. typical: Cai et al. 2024
    (Medusa). lenient: Leviathan et al. 2023, A.5.

    >>> target = torch.tensor([[[0.0, 9.0], [9.0, 0.0]]])
    >>> one = torch.zeros(1, dtype=torch.int64)
    >>> v = verify_chain(target, torch.tensor([[1]]), rule="greedy", seeds=one, positions=one)
    >>> v.tokens, v.num_accepted
    (tensor([[1, 0]]), tensor([1], dtype=torch.int32))
    """
    rows, ids, *law = split_draft(draft)
    _params.tensors(
        target=target, draft_token_ids=draft_token_ids, seeds=seeds, positions=positions
    )
    _params.optional(
        target_indptr=target_indptr, uniforms=uniforms, synthetic_rates=synthetic_rates, eos_token_ids=eos_token_ids,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip
    return Verdict(
        *torch.ops.specdec_kernels.verify_chain.default(
            target,
            draft_token_ids,
            rows,
            ids,
            map_columns(draft_map),
            *law,
            kind,
            rule,
            *_params.sampling(temperature, top_k, top_p, min_p),
            seeds,
            positions,
            target_indptr,
            uniforms,
            lenience,
            typical_epsilon,
            typical_delta,
            synthetic_rates,
            eos_token_ids,
            max_new_tokens,
            with_logprobs,
            with_accept_probs,
        )
    )


def split_draft(
    draft: Tensor | SampledDraft | SparseDraft | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, float]:
    """Rows, ids, logsumexp, threshold and the two forms of the temperature."""
    if draft is None or isinstance(draft, Tensor):
        return draft, None, None, None, None, 1.0
    if isinstance(draft, SampledDraft):
        logits, logsumexp, threshold, temperature = draft
        _params.tensor(logits, "draft logits")
        _params.tensor(logsumexp, "draft logsumexp")
        _params.tensor(threshold, "draft threshold")
        split = _params.split(temperature, "draft temperature", 1.0)
        return logits, None, logsumexp.to(torch.float64), threshold, *split
    if isinstance(draft, SparseDraft):
        _params.tensor(draft.ids, "draft ids")
        _params.tensor(draft.probs, "draft probabilities")
        return draft.probs, draft.ids, None, None, None, 1.0
    raise ValueError(
        f"draft must be None, a tensor, a SampledDraft or a SparseDraft, got {type(draft).__name__}"
    )


def map_columns(draft_map: DraftMap | None) -> Tensor | None:
    if draft_map is None:
        return None
    if not isinstance(draft_map, DraftMap):
        raise ValueError(f"draft_map must be a DraftMap or None, got {type(draft_map).__name__}")
    _params.tensor(draft_map.columns, "draft_map columns")
    return draft_map.columns


@torch.library.register_fake("specdec_kernels::verify_chain")
def _(*args: Any) -> tuple[Tensor, ...]:
    arguments = ChainArguments(*args)
    arguments.check()
    return arguments.new_outputs()
