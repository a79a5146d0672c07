"""Hugging Face's stopping criteria, asked about one sequence at a time."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import StoppingCriteriaList


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
    answer = criteria(torch.from_numpy(ids)[None].to(device), None)
    answers = torch.as_tensor(answer, device="cpu").flatten()
    if len(answers) not in (1, batch_size):
        raise ValueError(
            f"stopping_criteria must answer with 1 or {batch_size} bools, got {len(answers)}"
        )
    return bool(answers[b if len(answers) == batch_size else 0])
