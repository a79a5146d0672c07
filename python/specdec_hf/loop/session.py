"""The state of a call from round to round.

The tokens of a call are stored once, in ``Session.history``, without padding. Only where Hugging
Face's objects or the caller read them is the padding of ``input_ids`` put in front again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList

from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Drafter, State
from specdec_hf.loop.draft_length import DraftLengthPolicy
from specdec_hf.loop.plan import Plan
from specdec_hf.loop.statistics import SpecStats
from specdec_hf.options import Options
from specdec_hf.request.call import Call
from specdec_hf.request.sampling import Sampling
from specdec_hf.runner.forwards import Borrower
from specdec_hf.runner.protocol import Lengths, Runner

if TYPE_CHECKING:
    from specdec_hf.extras.token_outputs import TokenOutputs


@dataclass(frozen=True, eq=False)
class CommittedTokens(History):
    """The only store of committed tokens; the loop alone writes to it.

    A drafter gets other arrays with the same values. NumPy refuses writes to them, but a tensor
    that `torch.from_numpy` makes of such an array writes where it likes, and must not reach the
    text.
    """

    _visible: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_visible", self.tokens.copy())

    def append(self, b: int, tokens: Sequence[int]) -> None:
        """Commit tokens of sequence ``b``."""
        begin = self.lengths[b]
        end = begin + len(tokens)
        self._grow(end)
        self.tokens[b, begin:end] = self._visible[b, begin:end] = tokens
        self.lengths[b] = end

    def take(self, b: int, other: CommittedTokens, index: int) -> None:
        """Hold the tokens of sequence ``index`` of another call as those of sequence ``b``."""
        length = other.lengths[index]
        self._grow(length)
        for held in (self.tokens, self._visible):
            held[b] = 0
            held[b, :length] = other.tokens[index, :length]
        self.lengths[b], self.active[b] = length, other.active[index]

    def _grow(self, columns: int) -> None:
        """Make the arrays as wide as so many columns, if they are not."""
        if columns > self.tokens.shape[1]:
            for name in ("tokens", "_visible"):
                held = getattr(self, name)
                grown = np.zeros((len(held), max(2 * held.shape[1], columns)), dtype=np.int64)
                grown[:, : held.shape[1]] = held
                object.__setattr__(self, name, grown)

    def read_only(self) -> History:
        """The arrays for a drafter."""
        return History(
            _read_only(self._visible),
            _read_only(self.lengths.copy()),
            _read_only(self.active.copy()),
        )


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


class Answer(NamedTuple):
    """The row [V] of a prefix [T] before and after logits processors."""

    prefix: torch.Tensor
    row: torch.Tensor
    processed: torch.Tensor


@dataclass
class Sequences:
    """What a session knows of each of its sequences, beside its tokens.

    Attributes:
        calls: the call that asked for it, and its index there.
        numbers: its number in the statistics and in steps.
        prompt_lengths: [B] tokens of its prompt, without padding.
        budgets: [B] most new tokens.
        logprobs: of the new tokens.
        seeds: [B] int64 on the target's device.
    """

    calls: list[tuple[Call, int]]
    numbers: list[int]
    prompt_lengths: Lengths
    budgets: NDArray[np.int64]
    logprobs: list[list[float]]
    seeds: torch.Tensor

    def take(self, b: int, other: Sequences, index: int) -> None:
        """Know of sequence ``b`` what another session knows of its sequence ``index``."""
        for one in fields(self):
            getattr(self, one.name)[b] = getattr(other, one.name)[index]


@dataclass
class Session:
    """The state of one call between rounds.

    Attributes:
        plan: what was decided before anything ran.
        length_policy: says how many tokens each sequence drafts.
        history: all committed tokens.
        sequences: what else is known of each.
        sampling: parameters of the fused ops.
        drafter_call, state: what the drafter was told of the call, and what it knows of it; None
            without a drafter.
        borrower: has what is lent to the call until it ends.
        outputs: collects what the caller wants of every new token, or None.
        first_logits: [B, 1, V], those of the model's own prefill until the first round reads them.
        answers: of logits processors in an earlier round, by the number of the sequence.
        isolates: whether a fault of one sequence ends it alone, and not the call.
    """

    plan: Plan
    runner: Runner
    drafter_call: DrafterCall | None
    state: State | None
    length_policy: DraftLengthPolicy
    history: CommittedTokens
    sequences: Sequences
    sampling: Sampling
    borrower: Borrower
    stats: SpecStats
    outputs: TokenOutputs | None = None
    first_logits: torch.Tensor | None = None
    answers: dict[int, Answer] = field(default_factory=dict)
    isolates: bool = False

    @property
    def model(self) -> Any:
        """The target."""
        return self.plan.model

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self.sequences.seeds.device

    @property
    def call(self) -> Call:
        """That of the sequences that were there first."""
        return self.plan.call

    @property
    def options(self) -> Options:
        """Those of that call."""
        return self.plan.options

    @property
    def drafter(self) -> Drafter | None:
        """What drafts."""
        return self.plan.drafter

    @property
    def rule(self) -> str:
        """The name of the acceptance rule."""
        return self.plan.rule

    @property
    def new_tokens(self) -> NDArray[np.int64]:
        """[B], how many tokens each sequence has beyond its prompt."""
        return self.history.lengths - self.sequences.prompt_lengths

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts are verified as trees."""
        return self.plan.drafts_trees

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
    def ids_without_position(self) -> list[int]:
        """Nothing is drafted behind these, because the decoder counts positions without them."""
        padding = None if self.call.encoded is None else self.call.encoded.padding_id
        return [] if padding is None else [padding]

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return not self.history.active.any()

    @property
    def processors(self) -> list[LogitsProcessorList]:
        """The logits processors of each sequence."""
        return [call.processors[index] for call, index in self.sequences.calls]

    def padded_ids(self, b: int) -> NDArray[np.int64]:
        """The tokens of sequence ``b`` as ``model.generate`` holds them: with left padding."""
        call, index = self.sequences.calls[b]
        begin, end = self.sequences.prompt_lengths[b], self.history.lengths[b]
        return np.concatenate([call.input_ids[index], self.history.tokens[b, begin:end]])

    @torch.inference_mode()
    def take(self, b: int, other: Session, index: int) -> None:
        """Go on with sequence ``index`` of another session, between two rounds of both, in place b.

        Both runners have slots, both states are of one kind and have `State.joins`, and
        ``sampling`` has tensors. All that is kept of one sequence is listed here.
        """
        self.history.take(b, other.history, index)
        self.answers.pop(self.sequences.numbers[b], None)
        number = other.sequences.numbers[index]
        if number in other.answers:
            self.answers[number] = other.answers[number]
        self.sequences.take(b, other.sequences, index)
        for name, value in self.sampling.to_dict().items():
            value[b] = getattr(other.sampling, name)[index]
        self.runner.take(b, other.runner, index)
        if self.state is not None:
            assert self.drafter_call is not None
            assert other.drafter_call is not None
            assert other.state is not None
            self.drafter_call.take(b, other.drafter_call, index)
            self.state.take(b, other.state, index)
