"""The contract between the loop and a schedule, which says how many tokens a round drafts.

Terms:

- draft length: number of drafted tokens of a sequence; in a tree, the depth.
- token statistics: what a drafter knows of a token that it has drafted, before any verification;
  `TokenStats`.
- to continue drafting: to draft one more token after the last one.

A schedule decides before a round how many tokens each sequence may draft, and, if it reads token
statistics, after each drafted token whether drafting continues. A token that was drawn from a
distribution stays in the draft even where its own statistics end it. To drop it would leave the
tokens that are verified with another distribution than the one they are compared with, and the text
biased. A token that is copied, and not drawn, may be dropped: whether it is drafted then depends on
the committed text alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer
from specdec_hf.schedules.costs import Costs

DEFAULT_THRESHOLD = 0.4  # of schedule confidence, as in Transformers
MAX_DRAFT_LENGTH = 1024

Lengths = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TokenStats:
    """The statistics of one drafted token of each sequence, [B] float32 each.

    Sampled sequences have those of the draft distribution Q, greedy ones those of the softmax of
    the drafter's logits. A drafter that reports only a confidence has no entropy (NaN). A sequence
    whose draft has ended before this token has NaN everywhere.

    Attributes:
        probability: of the drafted token.
        entropy: in nats.
    """

    probability: NDArray[np.float32]
    entropy: NDArray[np.float32]

    @classmethod
    def of_confidence(cls, confidence: NDArray[np.float32]) -> TokenStats:
        """The statistics of tokens whose drafter reports a confidence [B] only."""
        return cls(confidence, np.full_like(confidence, np.nan))


@dataclass(frozen=True, eq=False)
class Outcome:
    """The verification of one round's drafts.

    Attributes:
        drafted: [B] draft length.
        accepted: [B] how many of them were committed.
        rejected: [B] bool, whether the verification rejected the draft after those; False where
            all were accepted, and where the text ended first.
    """

    drafted: Lengths
    accepted: Lengths
    rejected: Flags


@dataclass
class ScheduleContext:
    """The arguments and sizes of the call that a schedule serves.

    Attributes:
        batch_size: number of sequences B.
        num_assistant_tokens: tokens to draft per round as the caller asked for them, or the depth
            of the tree.
        vocab_size: of the target.
        tree: whether trees are drafted, which have no more levels than ``num_assistant_tokens``.
        costs: what rounds of the call cost.
    """

    batch_size: int
    num_assistant_tokens: int
    vocab_size: int
    tree: bool = False
    costs: Costs = field(default_factory=Costs)


class Schedule(ABC):
    """Base class of schedules. The loop starts a copy for each call and never changes the original.

    All arrays have an entry for each sequence of the batch. Unless ``mixes_sequences`` is set, the
    decisions about a sequence depend on that sequence alone.

    Attributes:
        name: in notes.
        reads_token_stats: whether `continue_drafting` is called. A draft model then computes the
            statistics of each token and hands them to the host: on a GPU one read from the device a
            token.
        reads_clock: whether decisions depend on measured times.
        mixes_sequences: whether decisions about a sequence depend on the others of its batch.
        trees: whether it can choose the depth of trees.
        sizes_trees: whether `nodes` is called. Trees are then sized by all sequences of the batch.
        joins: whether it keeps nothing of one sequence from round to round, so that another one
            may take its place.
        max_draft: no sequence drafts more tokens; `start` sets it.
    """

    name = "custom"
    reads_token_stats = False
    reads_clock = False
    mixes_sequences = False
    trees = False
    sizes_trees = False
    joins = False
    max_draft = 0

    def start(self, context: ScheduleContext) -> None:
        """Begin a call."""
        self.context = context
        self.max_draft = context.num_assistant_tokens

    @abstractmethod
    def lengths(self, most: Lengths) -> Lengths:
        """How many tokens each sequence drafts in the next round.

        Args:
            most: [B] more than these are never drafted, because the text ends there. The loop cuts
                what is more, and what is more than ``max_draft``.
        """

    def continue_drafting(self, number: int, stats: TokenStats) -> Flags:
        """Whether to draft token ``number + 1`` of the round, given the statistics of ``number``.

        Args:
            number: from 0.
            stats: of token ``number``; NaN where the drafter itself ended a draft before it.
        """
        return np.ones(len(stats.probability), dtype=bool)

    def cut(self, stats: list[TokenStats], counts: Lengths, *, drawn: bool) -> Lengths:
        """How much of a draft to keep, for drafters that do not ask `continue_drafting` themselves.

        Args:
            stats: of token 0, 1, ... of the draft.
            counts: [B] its length in each sequence.
            drawn: whether the tokens were drawn. Then the token that ends the draft stays in it,
                else it is dropped.
        """
        kept, on = np.zeros_like(counts), counts > 0
        for i, one in enumerate(stats):
            asked, goes = on, self.continue_drafting(i, one)
            on = on & goes
            kept = np.where(asked if drawn else on, i + 1, kept)
            on &= counts > i + 1
        return kept

    def nodes(self, depth: int, values: NDArray[np.float64]) -> int:
        """How many nodes of a drafted tree to verify, the same number for each sequence.

        Args:
            depth: of the draft.
            values: [A, N] of the sequences that have not ended, the probability that each node is
                committed, in the order in which they are taken; 0 where one has fewer nodes.
        """
        most: int = values.shape[1]
        return most

    def observe(self, outcome: Outcome) -> None:  # noqa: B027  # need not be overridden
        """Learn what became of the last round's drafts."""

    def record(self) -> dict[str, Any]:
        """What to write to `RoundRecord.schedule` of the round under way."""
        return {}


def check_length(name: str, value: int | None, minimum: int = 1) -> int | None:
    """A number of tokens that a draft may have, or None; raises as `check_integer` does."""
    return None if value is None else check_integer(name, value, minimum, MAX_DRAFT_LENGTH)


class ConstantSchedule(Schedule):
    """``num_assistant_tokens`` in every round."""

    name = "constant"
    trees = True
    joins = True

    def lengths(self, most: Lengths) -> Lengths:
        return np.full_like(most, self.context.num_assistant_tokens)
