"""TensorRT-LLM's acceptance of drafts by their ids: `invokeAcceptDraftTokensByIds` of its kernels.

TensorRT-LLM has it in C++ only, and this is its form of 2024, with `batchSlots`. Here it has the
same arguments without the sizes, which the tensors have, and without the stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import conversion
from ..arguments.checks import check_matrix, check_vector, require, shape
from .indices import check_in_range

# The bits of a FinishedState.
FINISHED_EOS, FINISHED_STOP_WORDS, FINISHED_MAX_LENGTH, SKIP_DECODING = 1, 2, 4, 8
FINISHED = FINISHED_EOS | FINISHED_STOP_WORDS | FINISHED_MAX_LENGTH


def accept_draft_tokens_by_ids(
    draft_ids: Tensor,
    target_ids: Tensor,
    context_lengths: Tensor,
    nums_draft_tokens: Tensor,
    sequence_lengths: Tensor,
    finished: Tensor,
    finished_final: Tensor,
    finished_sum: Tensor | None = None,
    batch_slots: Tensor | None = None,
) -> None:
    """Accepts drafts up to the first that differs from the target's token, and keeps this one.

    The target's tokens of slot s are `target_ids[s, context_lengths[s]:sequence_lengths[s]]`. The
    result is that of rule greedy of `verify_chain`, if these are the argmax of the target's rows.

    Args:
        draft_ids: [S, D] int32, the drafts of each of S slots.
        target_ids: [S, L] int32, the text of each slot with the target's tokens in it.
        context_lengths: [S] int32, tokens of the text before the first draft.
        nums_draft_tokens: [S] int32, how many drafts a slot has.
        sequence_lengths: [S] int32, cut in place after the first token that differs.
        finished: [D+1, S] uint8, the FinishedState of each slot at each of its new tokens.
        finished_final: [S] uint8, written in place: `finished` at the first token that differs, or
            else after the compared ones.
        finished_sum: [S] int32, written in place: 1 where `finished_final` has a bit of `FINISHED`.
        batch_slots: [B] int32, the slots of this batch, each once; None means all of them. What
            belongs to other slots is left as it is.

    Raises:
        RuntimeError: a shape, dtype or device is wrong, or on the CPU a slot.
        TypeError: an argument has a wrong type.

    >>> def column(*numbers): return torch.tensor(numbers, dtype=torch.int32)
    >>> lengths, state = column(5), torch.zeros(1, dtype=torch.uint8)
    >>> accept_draft_tokens_by_ids(
    ...     column(7, 8, 9)[None], column(1, 2, 7, 6, 9)[None], column(2), column(3), lengths,
    ...     torch.zeros(4, 1, dtype=torch.uint8), state,
    ... )
    >>> lengths
    tensor([4], dtype=torch.int32)
    """
    conversion.require_tensors(
        draft_ids=draft_ids, target_ids=target_ids, context_lengths=context_lengths,
        nums_draft_tokens=nums_draft_tokens, sequence_lengths=sequence_lengths, finished=finished,
        finished_final=finished_final,
    )  # fmt: skip
    conversion.require_tensors_or_none(finished_sum=finished_sum, batch_slots=batch_slots)
    require(draft_ids.dim() == 2, f"draft_ids must be [S, D], got {shape(draft_ids)}")
    require(target_ids.dim() == 2, f"target_ids must be [S, L], got {shape(target_ids)}")
    device, (slots, drafts), length = draft_ids.device, draft_ids.shape, target_ids.shape[1]
    of = (device, "draft_ids")
    check_matrix("draft_ids", draft_ids, "[S, D]", (slots, drafts), torch.int32, *of)
    check_matrix("target_ids", target_ids, "[S, L]", (slots, length), torch.int32, *of)
    check_matrix("finished", finished, "[D+1, S]", (drafts + 1, slots), torch.uint8, *of)
    check_vector("finished_final", finished_final, slots, torch.uint8, *of)
    for name, t in (
        ("context_lengths", context_lengths),
        ("nums_draft_tokens", nums_draft_tokens),
        ("sequence_lengths", sequence_lengths),
        ("finished_sum", finished_sum),
    ):
        if t is not None:
            check_vector(name, t, slots, torch.int32, *of)
    if batch_slots is None:
        batch_slots = torch.arange(slots, device=device)
    else:
        check_vector("batch_slots", batch_slots, batch_slots.numel(), torch.int32, *of)
        check_in_range("batch_slots", batch_slots, slots)

    slot = batch_slots.long()
    context, end = context_lengths[slot].long(), sequence_lengths[slot].long()
    compared = (end - context).minimum(nums_draft_tokens[slot]).clamp(0, drafts)
    at = torch.arange(drafts, device=device)
    places = (context[:, None] + at).clamp(0, max(length - 1, 0))
    same = draft_ids[slot] == target_ids[slot].gather(1, places)
    accepted = (same & (at < compared[:, None])).int().cumprod(-1).sum(-1)
    cut = (context + accepted + 1).clamp(max=length)
    sequence_lengths[slot] = torch.where(accepted < compared, cut, end).int()
    final = finished[accepted, slot]
    finished_final[slot] = final
    if finished_sum is not None:
        finished_sum[slot] = ((final & FINISHED) != 0).int()
