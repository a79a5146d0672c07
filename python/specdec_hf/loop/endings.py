"""Whether a text ends with its last token."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import StoppingCriteriaList

from specdec_hf.request.call import Call
from specdec_hf.runner.protocol import to_device


def reason_to_end(call: Call, index: int, ids: NDArray[np.int64], device: torch.device) -> str:
    """Why a sequence ends with the last of its tokens ``ids`` [T]; "" where it does not.

    Without stopping criteria only the last token is looked at.
    """
    if int(ids[-1]) in call.stopping.eos:
        return "eos"
    if call.stopping.criteria and ends_text(
        call.stopping.criteria, ids, device, index, len(call.mask)
    ):
        return "criteria"
    return ""


def ends_text(
    criteria: StoppingCriteriaList,
    ids: NDArray[np.int64],
    device: torch.device,
    b: int = 0,
    batch_size: int = 1,
) -> bool:
    """Whether the criteria end a sequence with its last token.

    Args:
        criteria: they are called with ``input_ids`` [1, T] and ``scores`` None. The answer is one
            bool, or one for each sequence of the batch, [B], as from criteria that know the limits
            of each: then that of ``b`` counts.
        ids: [T], the sequence with its padding.
        device: of the model.
        b: index of the sequence.
        batch_size: number of sequences.

    Raises:
        ValueError: an answer of another size.
    """
    answer = criteria(to_device(ids, device)[None], None)
    answers = torch.as_tensor(answer, device="cpu").flatten()
    if len(answers) not in (1, batch_size):
        raise ValueError(
            f"stopping_criteria must answer with 1 or {batch_size} bools, got {len(answers)}"
        )
    return bool(answers[b if len(answers) == batch_size else 0])
