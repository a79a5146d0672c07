"""The `_speculative_sampling` of Transformers 5.24: assisted generation samples with it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import conversion
from ..arguments.checks import dtype_name, require, shape
from ..arguments.status import Status
from ..ops.verify_chain import verify_chain
from .noise import seeds_and_positions
from .sampling import readable


def _speculative_sampling(
    candidate_input_ids: Tensor,
    candidate_logits: Tensor,
    candidate_length: int,
    new_logits: Tensor,
    assistant_ensemble_weight: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Verifies the candidates of one sequence by rule token of `verify_chain`.

    The noise is drawn from torch's default generator of the device of new_logits.

    Args:
        candidate_input_ids: [1, L] int32 or int64, whose last candidate_length ids are candidates.
        candidate_logits: [1, candidate_length, V], the assistant's logits at the candidates after
            its logits processors.
        candidate_length: how many candidates there are.
        new_logits: [1, candidate_length+1, V], the model's logits after its processors.
        assistant_ensemble_weight: w in [0, 1] verifies with w P + (1 - w) Q in place of P, which is
            lossy (arXiv 2604.07622). The bonus token is still drawn from P. None means 1.

    Returns:
        (valid_tokens [1, n_matches+1] in the dtype of candidate_input_ids: the accepted candidates
        and one token; n_matches, a 0-dim int64 tensor: how many candidates were accepted).

    Raises:
        RuntimeError: a shape, dtype or device is wrong, or a row of logits that was needed holds no
            distribution.
        TypeError, ValueError: candidate_length or the weight has a wrong type or value.

    Source: Leviathan et al. 2023, Algorithm 1; transformers 5.24.

    >>> new = 99 * torch.tensor([[[1, 0, 0], [0, 1, 0], [0, 0, 1]]]).float()
    >>> assistant = 99 * torch.tensor([[[1, 0, 0], [0, 0, 1]]]).float()
    >>> _speculative_sampling(torch.tensor([[1, 0, 2]]), assistant, 2, new)
    (tensor([[0, 1]]), tensor(1))
    """
    conversion.require_tensors(
        candidate_input_ids=candidate_input_ids, candidate_logits=candidate_logits,
        new_logits=new_logits,
    )  # fmt: skip
    conversion.require_integer(candidate_length, "candidate_length")
    ids = candidate_input_ids
    require(ids.dim() == 2, f"candidate_input_ids must be [1, L], got {shape(ids)}")
    length = ids.shape[1]
    if not 0 <= candidate_length <= length:
        raise ValueError(f"candidate_length must be in [0, {length}], got {candidate_length}")
    for name, t, rows in (
        ("candidate_logits", candidate_logits, candidate_length),
        ("new_logits", new_logits, candidate_length + 1),
    ):
        require(
            t.dim() == 3 and t.shape[:2] == (1, rows),
            f"{name} must be [1, {rows}, V], got {shape(t)}",
        )
        require(t.is_floating_point(), f"{name} must be floating-point, got {dtype_name(t.dtype)}")
    v = new_logits.shape[2]
    require(
        candidate_logits.shape[2] == v,
        f"candidate_logits must have the vocabulary of new_logits, {v}, "
        f"got {shape(candidate_logits)}",
    )
    candidate_logits, new_logits = readable(candidate_logits), readable(new_logits)
    candidates = ids[:, length - candidate_length :]
    seeds, positions = seeds_and_positions(1, new_logits.device, None, None, None)
    if assistant_ensemble_weight is None:
        verdict = verify_chain(
            new_logits, candidates, candidate_logits, seeds=seeds, positions=positions
        )
    else:
        target, draft = _ensemble(new_logits, candidate_logits, assistant_ensemble_weight)
        verdict = verify_chain(
            target, candidates, draft, kind="probs", seeds=seeds, positions=positions
        )
    matches, status = torch.stack([verdict.num_accepted, verdict.status]).flatten().tolist()
    if int(verdict.tokens[0, matches]) < 0:
        raise RuntimeError(
            f"new_logits must hold a distribution in row {matches}, got {Status(status)!r}"
        )
    return verdict.tokens[:, : matches + 1], verdict.num_accepted[0].long()


def _ensemble(new_logits: Tensor, candidate_logits: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Probabilities of the target and of the draft.

    The target's rows are mixed with the draft's valid ones; the last row has none.
    """
    conversion.require_number(weight, "assistant_ensemble_weight")
    if not 0 <= weight <= 1:
        raise ValueError(f"assistant_ensemble_weight must be in [0, 1], got {weight}")
    target, draft = (t.softmax(-1, dtype=torch.float32) for t in (new_logits, candidate_logits))
    mixed = weight * target[:, :-1] + (1 - weight) * draft
    valid = draft.isfinite().all(-1, keepdim=True)  # verify_chain has no draft where it is not
    target[:, :-1] = torch.where(valid, mixed, target[:, :-1])
    return target, draft
