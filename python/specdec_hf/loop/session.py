"""The state of a call from round to round.

The tokens of a call are stored once, in ``Session.history``, without padding. Only where Hugging
Face's objects or the caller read them is the padding of ``input_ids`` put in front again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafting.context import DraftContext
from specdec_hf.drafting.drafter import Drafter, drafts_trees
from specdec_hf.drafting.lease import Lease
from specdec_hf.loop.draft_length import DraftLengthPolicy
from specdec_hf.loop.history import CommittedTokens
from specdec_hf.loop.statistics import SpecStats
from specdec_hf.loop.streaming import Trace
from specdec_hf.loop.token_outputs import TokenOutputs
from specdec_hf.request.call import Call
from specdec_hf.runner.protocol import Lengths, Runner


@dataclass
class Session:
    """The state of one call between rounds.

    Attributes:
        rule_parameters: arguments of the ops that belong to the rule.
        ablate: what verification leaves out, or None.
        length_policy: says how many tokens each sequence drafts.
        history: all committed tokens.
        prompt_lengths: [B] tokens of each prompt, without padding.
        budgets: [B] most new tokens of each sequence.
        logprobs: [B] lists, of the new tokens.
        lease: keeps the drafter from other calls.
        outputs: collects what the caller wants of every new token, or None.
        first_logits: [B, 1, V], those of the model's own prefill until the first round reads them.
        trace: called with what each round compared, once its time is taken.
    """

    model: Any
    call: Call
    rule: str
    rule_parameters: dict[str, Any]
    ablate: str | None
    runner: Runner
    drafter: Drafter | None
    context: DraftContext | None
    length_policy: DraftLengthPolicy
    history: CommittedTokens
    prompt_lengths: Lengths
    budgets: NDArray[np.int64]
    logprobs: list[list[float]]
    seeds: torch.Tensor
    lease: Lease
    stats: SpecStats
    clock: Callable[[], float]
    started: float
    outputs: TokenOutputs | None = None
    first_logits: torch.Tensor | None = None
    trace: Trace | None = None

    @property
    def new_tokens(self) -> NDArray[np.int64]:
        """[B], how many tokens each sequence has beyond its prompt."""
        return self.history.lengths - self.prompt_lengths

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts are verified as trees."""
        return drafts_trees(self.drafter)

    @property
    def first_round(self) -> bool:
        """Whether the next round is the first, which reads the prompts and drafts nothing.

        This holds for prompts of one token and for given caches too. Otherwise the drafts of a
        sequence, and its text, would depend on the prompts beside it.
        """
        return self.stats.rounds == 0

    @property
    def padding_fed(self) -> NDArray[np.int64]:
        """[B], tokens of padding that plain generation has fed by this round, without drafts."""
        return np.where(self.history.active, 0, self.stats.rounds - self.new_tokens)

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return not self.history.active.any()

    def padded_ids(self, b: int) -> NDArray[np.int64]:
        """The tokens of sequence ``b`` as ``model.generate`` holds them: with left padding."""
        begin, end = self.prompt_lengths[b], self.history.lengths[b]
        return np.concatenate([self.call.input_ids[b], self.history.tokens[b, begin:end]])
