"""The `chain_speculative_sampling` of FlashInfer 0.7.4, its softmax and its sampling functions.

All of them have the arguments and defaults of that version.

Sizes: B outputs, R rows, V vocabulary, n drafts. Rows may have any floating dtype. `indices` [B]
int32 or int64 gives the row of each output, and the outputs have its dtype; without it output i
belongs to row i and is int32. Indices outside [0, R) raise on the CPU and are undefined on a GPU.
The noise of a call is determined by `seed` and `offset` (integers, or tensors [1] or [B] of int64
or uint64) or, where one of them is None, drawn from `generator` (by default that of the device).
`check_nan` raises ValueError for NaN. A row that holds no distribution gives id 0 and, with
`return_valid`, valid = False. `deterministic` has no effect, because the ops always are.
docs/compat.md#flashinfer lists the differences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import conversion
from ..arguments.checks import (
    check_ids,
    check_same_device,
    dtype_name,
    require,
    shape,
)
from ..arguments.conversion import Param
from ..ops.sample import sample
from ..ops.verify_chain import verify_chain
from .noise import seeds_and_positions
from .sampling import (
    Samples,
    Seed,
    is_joint,
    of_rows,
    readable,
    require_rows,
    sample_logits,
    sample_probs,
)

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_LARGEST = torch.finfo(torch.float32).max


def softmax(
    logits: Tensor, temperature: Param | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """[R, V] float32, the softmax of logits / temperature.

    Args:
        logits: [R, V].
        temperature: scalar or [R]; None is 1, and 0 gives equal probabilities to the tokens whose
            logits are not -inf.
        enable_pdl: without effect.

    Raises:
        RuntimeError: logits are not [R, V] with V of at least 1.
        ValueError: a tensor of temperatures is not [R].

    >>> softmax(torch.tensor([[0.0, 2.0]]), temperature=2.0)
    tensor([[0.2689, 0.7311]])
    """
    require_rows(logits, "logits")
    t = of_rows(1.0 if temperature is None else temperature, "temperature", len(logits), None)
    if not isinstance(t, Tensor):
        t = logits.new_full((1,), t, dtype=torch.float64)
    scale = torch.where(t == 0, 0.0, 1 / t.double()).clamp(max=_LARGEST).float()[:, None]
    logits = logits.float()
    below = (logits - logits.amax(-1, keepdim=True)) * scale
    return below.masked_fill(logits == -torch.inf, -torch.inf).softmax(-1)  # -inf * 0 is NaN


def sampling_from_logits(
    logits: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
) -> Tensor:
    """[B], a token for each output, from the softmax of its row.

    Args:
        logits: [R, V].
        indices, deterministic, generator, check_nan, seed, offset: see the module.

    Raises:
        ValueError: check_nan found NaN, or seed or offset has a wrong form.
        RuntimeError: a shape or dtype is wrong.

    >>> sampling_from_logits(torch.tensor([[0.0, 90.0, 0.0]]), seed=1, offset=0)
    tensor([1], dtype=torch.int32)
    """
    return sample_logits(logits, indices, generator, check_nan, seed, offset)


def sampling_from_probs(
    probs: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Samples:
    """[B], a token for each output, from the probabilities of its row.

    Args:
        probs: [R, V]; a row is divided by its sum.
        indices, deterministic, generator, check_nan, seed, offset: see the module.
        return_valid: return also [B] bool, whether the row of the output holds a distribution.

    Raises:
        ValueError: check_nan found NaN, or seed or offset has a wrong form.
        RuntimeError: a shape or dtype is wrong.

    >>> nan = float("nan")
    >>> sampling_from_probs(torch.tensor([[0.0, 1.0], [nan, nan]]), return_valid=True)
    (tensor([1, 0], dtype=torch.int32), tensor([ True, False]))
    """
    return sample_probs(probs, indices, generator, check_nan, seed, offset, return_valid)


def top_p_sampling_from_probs(
    probs: Tensor,
    top_p: Param,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Samples:
    """As `sampling_from_probs`, among the fewest likeliest tokens whose sum reaches top_p.

    Args:
        probs: [R, V].
        top_p: scalar or [R]; what lies outside [0, 1] counts as the nearer end, and 0 keeps the
            likeliest token.
        indices, deterministic, generator, check_nan, seed, offset, return_valid: as there.

    Raises:
        ValueError, RuntimeError: as there; also ValueError if a tensor is not [R].

    >>> top_p_sampling_from_probs(torch.tensor([[0.3, 0.6, 0.1]]), 0.5)
    tensor([1], dtype=torch.int32)
    """
    return sample_probs(
        probs, indices, generator, check_nan, seed, offset, return_valid, top_p=top_p
    )


def top_k_sampling_from_probs(
    probs: Tensor,
    top_k: int | Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Samples:
    """As `sampling_from_probs`, among the top_k likeliest tokens and their ties.

    Args:
        probs: [R, V].
        top_k: scalar or [R]. A negative one keeps all tokens, and 0 the likeliest one, as 1 does.
        indices, deterministic, generator, check_nan, seed, offset, return_valid: as there.

    Raises:
        ValueError, RuntimeError: as there; also ValueError if a tensor is not [R].

    >>> top_k_sampling_from_probs(torch.tensor([[0.3, 0.6, 0.1]]), 1)
    tensor([1], dtype=torch.int32)
    """
    return sample_probs(
        probs, indices, generator, check_nan, seed, offset, return_valid, top_k=top_k
    )


def min_p_sampling_from_probs(
    probs: Tensor,
    min_p: Param,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Samples:
    """As `sampling_from_probs`, among the tokens with at least min_p of the largest probability.

    Args:
        probs: [R, V].
        min_p: scalar or [R], in [0, 1]. A tensor's entry outside makes its row invalid.
        indices, deterministic, generator, check_nan, seed, offset, return_valid: as there.

    Raises:
        ValueError, RuntimeError: as there; also ValueError if a tensor is not [R], and RuntimeError
            if a scalar is outside [0, 1].

    >>> min_p_sampling_from_probs(torch.tensor([[0.3, 0.6, 0.1]]), 0.9)
    tensor([1], dtype=torch.int32)
    """
    return sample_probs(
        probs, indices, generator, check_nan, seed, offset, return_valid, min_p=min_p
    )


def top_k_top_p_sampling_from_logits(
    logits: Tensor,
    top_k: int | Tensor,
    top_p: Param,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    top_k_max: int | None = None,
) -> Tensor:
    """As `top_k_top_p_sampling_from_probs`, from the softmax of logits [R, V].

    Raises:
        ValueError, RuntimeError: as there.

    >>> top_k_top_p_sampling_from_logits(torch.tensor([[0.0, 2.0, 1.0]]), 2, 0.5)
    tensor([1], dtype=torch.int32)
    """
    joint = is_joint(filter_apply_order)
    return sample_logits(
        logits, indices, generator, check_nan, seed, offset, top_k=top_k, top_p=top_p, joint=joint
    )


def top_k_top_p_sampling_from_probs(
    probs: Tensor,
    top_k: int | Tensor,
    top_p: Param,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
    top_k_max: int | None = None,
) -> Samples:
    """As `sampling_from_probs`, among the tokens that top-k and top-p keep.

    Args:
        probs: [R, V].
        top_k, top_p: as in `top_k_sampling_from_probs` and `top_p_sampling_from_probs`.
        filter_apply_order: "top_k_first" applies top-p to the renormalised top k, "joint" to the
            row itself.
        indices, deterministic, generator, check_nan, seed, offset, return_valid: as there.
        top_k_max: without effect; no kernel here needs a bound of a tensor of top_k. A row above
            it keeps its own top_k, which FlashInfer may cut.

    Raises:
        ValueError, RuntimeError: as there; also ValueError for another filter_apply_order.

    >>> top_k_top_p_sampling_from_probs(torch.tensor([[0.3, 0.6, 0.1]]), 2, 0.5)
    tensor([1], dtype=torch.int32)
    """
    joint = is_joint(filter_apply_order)
    return sample_probs(
        probs, indices, generator, check_nan, seed, offset, return_valid,
        top_k=top_k, top_p=top_p, joint=joint,
    )  # fmt: skip


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: Seed = None,
    offset: Seed = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verifies a chain of drafts by rule token of `verify_chain`.

    Args:
        draft_probs: [B, n, V], the distributions that the drafts were sampled from.
        draft_token_ids: [B, n] integers; -1 means no draft from here on.
        target_probs: [B, n+1, V].
        maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num: [B] integers, to
            which the counts are added in place; None starts from 0.
        deterministic, generator, seed, offset: see the module.

    Returns:
        (output_token_ids [B, n+1] int32: the accepted drafts, the recovered or bonus token, then
        -1; output_accepted_token_num [B]: the accepted drafts, and those behind the rejected one
        that pass a test of their own; output_emitted_draft_token_num [B]: the accepted drafts). The
        counts are int32 or the tensors given.

    Raises:
        RuntimeError: a shape, dtype or device is wrong. Then no count is written.
        TypeError: an argument is no tensor.
        ValueError: seed or offset has a wrong form.

    Source: Chen et al. 2023, arXiv 2302.01318.

    >>> draft = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1]]])
    >>> target = torch.tensor([[[0.0, 0.1, 0.6, 0.3], [1.0, 0, 0, 0], [0.7, 0.1, 0.1, 0.1]]])
    >>> ids = torch.tensor([[2, 1]])
    >>> tokens, accepted, emitted = chain_speculative_sampling(draft, ids, target)
    >>> tokens, emitted
    (tensor([[ 2,  0, -1]], dtype=torch.int32), tensor([1], dtype=torch.int32))
    """
    conversion.require_tensors(
        draft_probs=draft_probs, draft_token_ids=draft_token_ids, target_probs=target_probs
    )
    require(draft_probs.dim() == 3, f"draft_probs must be [B, n, V], got {shape(draft_probs)}")
    b, n, v = draft_probs.shape
    for name, t, sizes in (
        ("draft_token_ids", draft_token_ids, (b, n)),
        ("target_probs", target_probs, (b, n + 1, v)),
    ):
        require(t.shape == sizes, f"{name} must be {list(sizes)}, got {shape(t)}")
    require(v > 0, f"target_probs must have a vocabulary of 1 or more, got {shape(target_probs)}")
    check_ids("draft_token_ids", draft_token_ids)
    for name, count in (
        ("maybe_output_accepted_token_num", maybe_output_accepted_token_num),
        ("maybe_output_emitted_draft_token_num", maybe_output_emitted_draft_token_num),
    ):
        _check_count(count, name, b, target_probs.device)
    ids, target, draft = draft_token_ids, readable(target_probs), readable(draft_probs)
    seeds, positions = seeds_and_positions(b, target.device, generator, seed, offset)
    positions = positions + 1  # the sampling functions use the first one, perhaps for these drafts
    verdict = verify_chain(
        target, ids, draft, kind="probs", rule="token", seeds=seeds, positions=positions,
        with_logprobs=False,
    )  # fmt: skip
    emitted = verdict.num_accepted
    passed = _pass_by_themselves(target[:, :n], ids, draft, seeds, positions)
    passed &= torch.arange(n, device=ids.device) > emitted[:, None]
    accepted = emitted + passed.sum(-1, dtype=torch.int32)
    return (
        verdict.tokens.int(),
        _add(maybe_output_accepted_token_num, accepted),
        _add(maybe_output_emitted_draft_token_num, emitted),
    )


def _pass_by_themselves(
    target: Tensor, ids: Tensor, draft: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """[B, n] bool, whether a test of its own, min(1, P / Q), accepts each draft."""
    b, n, v = target.shape
    at = ids.clamp(0, v - 1).long()[..., None]
    p, q = (t.gather(-1, at)[..., 0].double() for t in (target, draft))
    valid = (p >= 0) & p.isfinite() & (q >= 0) & q.isfinite()  # as verify_chain tests these entries
    probability = torch.where(valid, (p / q).clamp(max=1).nan_to_num(0.0), 0.0)  # NaN is 0 / 0
    logits = torch.stack([(-probability).log1p(), probability.log()], -1).float()
    steps = positions[:, None] + torch.arange(n, device=ids.device)
    drawn = sample(
        logits.view(b * n, 2), seeds=seeds.repeat_interleave(n), positions=steps.flatten()
    )
    drafted = ((ids >= 0) & (ids < v)).cumprod(-1).bool()  # there is no draft after a -1
    return (drawn.tokens.view(b, n) == 1) & drafted


def _check_count(count: Tensor | None, name: str, batch: int, device: torch.device) -> None:
    """What is written in place is validated before anything is written."""
    if count is None:
        return
    conversion.require_tensor(count, name)
    require(count.shape == (batch,), f"{name} must be [{batch}], got {shape(count)}")
    require(count.dtype in _INTEGERS, f"{name} must hold integers, got {dtype_name(count.dtype)}")
    check_same_device(name, count, device, "target_probs")
    for d, (n, stride) in enumerate(zip(count.shape, count.stride(), strict=True)):
        require(
            stride != 0 or n <= 1 or count.numel() == 0,
            f"{name} must not be expanded, because it is written in place, "
            f"got stride 0 in dimension {d}",
        )


def _add(total: Tensor | None, count: Tensor) -> Tensor:
    return count if total is None else total.add_(count)
