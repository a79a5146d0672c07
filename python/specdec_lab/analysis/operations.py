"""Arithmetic operations of a draft step relative to one of the target, Definition 3.10."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from specdec_hf.drafting.drafter import Drafter, drafts_trees
from specdec_hf.runner.choose import choose_cache
from specdec_hf.runner.protocol import CacheRequest, to_device
from torch.utils.flop_counter import FlopCounterMode

from specdec_lab.analysis.replay import Text, replay

COUNTED = 4  # positions; the first draft reads the prompt, and is left out


def measure_operations(
    drafter: Drafter, model: Any, text: Text, sampling: dict[str, Any]
) -> float | None:
    """c-hat: operations of one draft step over those of one token of the target.

    PyTorch counts the matrix products of the models' own forwards, with what they have in their
    caches. What a drafter does without matrix products counts as nothing.

    Args:
        drafter: begins a call here.
        model: target.
        text: by `write_text`.
        sampling: the parameters that the text was written with.

    Returns:
        None for trees, whose nodes are not drafted one by one, and where nothing was drafted.
    """
    if drafts_trees(drafter):
        return None
    positions = replay(drafter, model, text, sampling, compile=False)
    counts: list[int] = []
    for number in range(COUNTED):
        with FlopCounterMode(display=False) as counter:
            position = next(positions, None)
        if position is not None and position.draft is not None and number:
            counts.append(counter.get_total_flops())
    of_target = _operations_of_target(model, text)
    if not counts or not of_target:
        return None
    return sum(counts) / len(counts) / of_target


@torch.inference_mode()
def _operations_of_target(model: Any, text: Text) -> int:
    """Operations of its own forward of the second new token, as in a plain step."""
    length = text.begin + 1
    if len(text.tokens) < length:
        return 0
    runner = choose_cache(model, CacheRequest(1, encoded=text.encoded)).make(length)
    tokens = to_device(text.tokens[None, :length], model.device)
    zero = np.zeros(1, dtype=np.int64)
    runner.forward(tokens[:, :-1], zero, 1)
    with FlopCounterMode(display=False) as counter:
        runner.forward(tokens[:, -1:], zero + length - 1, 1)
    return int(counter.get_total_flops())
