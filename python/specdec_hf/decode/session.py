"""What a call carries from round to round, and what it gives back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils.generic import ModelOutput

from specdec_hf.cache.rows import RowCache
from specdec_hf.decode.statistics import SpecStats
from specdec_hf.drafters import Drafter, History, TreeDrafter
from specdec_hf.hf_arguments.call import Call
from specdec_hf.schedules.schedules import BenefitGuard, GammaPolicy
from specdec_hf.trees.layouts import Layout

DEFAULT_GAMMA = 5
MAX_GAMMA = 1024


@dataclass
class Options:
    """The loop's own arguments; see `generate`."""

    drafter: Any = None
    num_assistant_tokens: int = DEFAULT_GAMMA
    gamma_policy: str = "constant"
    acceptance: str = "auto"
    tree: Layout | None = None
    cache: str = "auto"
    seed: Any = None
    guard: bool | BenefitGuard | None = None
    clock: Callable[[], float] = time.perf_counter


@dataclass
class SpecOutput(ModelOutput):
    """What `generate` returns with ``return_dict_in_generate=True``.

    Attributes:
        sequences: [B, W] int64: the input with its padding, new tokens, then ``pad_token_id``.
        attention_mask: [B, W] int64, 1 where ``sequences`` holds a token; pass it on to continue.
        logprobs: [B, W - T] float32, of new tokens under the filtered target; 0 when greedy and
            in the padding.
        past_key_values: ``DynamicCache`` of W - 1 columns, as plain ``generate`` leaves it.
        stats: counts and times.
    """

    sequences: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    past_key_values: Any = None
    stats: Any = None


@dataclass
class RoundRead:
    """One round's verdict on the host."""

    tokens: NDArray[np.int64]  # [B, gamma+1]
    num_accepted: NDArray[np.int64]  # [B]
    status: NDArray[np.int64]  # [B]
    logprobs: NDArray[np.float32]  # [B, gamma+1]
    extra: list[NDArray[np.int64]]  # [B, E] each


@dataclass
class Session:
    """The state of one call between rounds."""

    model: Any
    call: Call
    rule: str
    cache: RowCache
    drafter: Drafter | TreeDrafter | None
    policies: list[GammaPolicy]  # one per row, so that a row drafts alike in every batch
    guard: BenefitGuard | None
    history: History
    budgets: NDArray[np.int64]  # [B] new tokens each row may have
    sequences: NDArray[np.int64]  # [B, T + max_new_tokens]
    logprobs: list[list[float]]
    seeds: torch.Tensor
    stats: SpecStats
    clock: Callable[[], float]
    started: float
    new: NDArray[np.int64] = field(init=False)  # [B] new tokens so far

    def __post_init__(self) -> None:
        self.new = np.zeros(len(self.history.lengths), dtype=np.int64)

    @property
    def done(self) -> bool:
        """Whether every row has ended."""
        return not self.history.active.any()
