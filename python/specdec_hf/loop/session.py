"""The state of a call from round to round.

The tokens of a call are stored once, in ``Session.history``, without padding. Only where Hugging
Face's objects or the caller read them is the padding of ``input_ids`` put in front again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList

from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.drafter import Drafter, State, drafts_trees
from specdec_hf.loop.draft_length import DraftLengthPolicy
from specdec_hf.loop.history import CommittedTokens
from specdec_hf.loop.plan import Packing
from specdec_hf.loop.statistics import SpecStats
from specdec_hf.loop.streaming import Trace
from specdec_hf.loop.token_outputs import TokenOutputs
from specdec_hf.options import Options
from specdec_hf.request.call import Call
from specdec_hf.request.sampling import Sampling
from specdec_hf.runner.forwards import Borrower
from specdec_hf.runner.protocol import Lengths, Runner


class Answer(NamedTuple):
    """The row [V] of a prefix [T] before and after logits processors."""

    prefix: torch.Tensor
    row: torch.Tensor
    processed: torch.Tensor


@dataclass
class Session:
    """The state of one call between rounds.

    Attributes:
        options: those of the call with the drafter chosen.
        packing: the packed twin of the model, and what was packed, as `pack_for` gives them.
        rule_parameters: arguments of the ops that belong to the rule.
        ablate: what verification leaves out, or None.
        length_policy: says how many tokens each sequence drafts.
        history: all committed tokens.
        calls: for each sequence the call that asked for it, and its index there.
        numbers: for each sequence its number in the statistics and in steps.
        sampling: parameters of the fused ops.
        prompt_lengths: [B] tokens of each prompt, without padding.
        budgets: [B] most new tokens of each sequence.
        logprobs: [B] lists, of the new tokens.
        drafter_call, state: what the drafter was told of the call, and what it knows of it; None
            without a drafter.
        borrower: has what is lent to the call until it ends.
        outputs: collects what the caller wants of every new token, or None.
        first_logits: [B, 1, V], those of the model's own prefill until the first round reads them.
        trace: called with what each round compared, once its time is taken.
        answers: of logits processors in an earlier round, by the number of the sequence.
        isolates: whether a fault of one sequence ends it alone, and not the call.
    """

    model: Any
    call: Call
    options: Options
    packing: Packing
    rule: str
    rule_parameters: dict[str, Any]
    ablate: str | None
    runner: Runner
    drafter: Drafter | None
    drafter_call: DrafterCall | None
    state: State | None
    length_policy: DraftLengthPolicy
    history: CommittedTokens
    calls: list[tuple[Call, int]]
    numbers: list[int]
    sampling: Sampling
    prompt_lengths: Lengths
    budgets: NDArray[np.int64]
    logprobs: list[list[float]]
    seeds: torch.Tensor
    borrower: Borrower
    stats: SpecStats
    clock: Callable[[], float]
    started: float
    outputs: TokenOutputs | None = None
    first_logits: torch.Tensor | None = None
    trace: Trace | None = None
    answers: dict[int, Answer] = field(default_factory=dict)
    isolates: bool = False

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
        return not self.new_tokens.any()

    @property
    def padding_fed(self) -> NDArray[np.int64]:
        """[B], tokens of padding that plain generation has fed by this round, without drafts."""
        return np.where(self.history.active, 0, self.stats.rounds - self.new_tokens)

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return not self.history.active.any()

    @property
    def processors(self) -> list[LogitsProcessorList]:
        """The logits processors of each sequence."""
        return [call.processors[index] for call, index in self.calls]

    def padded_ids(self, b: int) -> NDArray[np.int64]:
        """The tokens of sequence ``b`` as ``model.generate`` holds them: with left padding."""
        (call, index), begin, end = self.calls[b], self.prompt_lengths[b], self.history.lengths[b]
        return np.concatenate([call.input_ids[index], self.history.tokens[b, begin:end]])

    @torch.inference_mode()
    def adopt(self, b: int, other: Session, index: int) -> None:
        """Go on with sequence ``index`` of another session, between two rounds of both, in place b.

        Both runners have slots, both states are of one kind and have `State.joins`, and
        ``sampling`` has tensors. All that is kept of one sequence is listed here.
        """
        self.history.adopt(b, other.history, index)
        self.answers.pop(self.numbers[b], None)
        number = other.numbers[index]
        if number in other.answers:
            self.answers[number] = other.answers[number]
        for name in ("calls", "numbers", "prompt_lengths", "budgets", "logprobs", "seeds"):
            getattr(self, name)[b] = getattr(other, name)[index]
        for name, value in self.sampling.to_dict().items():
            value[b] = getattr(other.sampling, name)[index]
        self.runner.adopt(b, other.runner, index)
        if self.state is not None:
            assert self.drafter_call is not None
            assert other.drafter_call is not None
            assert other.state is not None
            self.drafter_call.take(b, other.drafter_call, index)
            self.state.take(b, other.state, index)
