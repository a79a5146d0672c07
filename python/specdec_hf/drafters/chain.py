"""Drawing a chain token by token, whatever gives the rows of logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafting.call import NOTHING, DrafterCall, Drawn, reads_draft
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Cost, Draft, Round, State
from specdec_hf.drafting.sampling import token_stats
from specdec_hf.rules import text_depends_on_drafts
from specdec_hf.runner.protocol import ROPES_BY_LENGTH, Lengths, rounded, to_device

if TYPE_CHECKING:
    from typing_extensions import Self


class Stepper(Protocol):
    """What draws a chain token by token: a draft model, layers of the target, or a head.

    In a round `room` comes first, then `begin_round`, `catch_up` and `extend`.

    Attributes:
        device: where its logits are.
        cost: of a step.
        sampling: parameters of its draws in the place of the call's.
        joins: whether `take` serves it.
    """

    device: torch.device
    cost: Cost
    sampling: Mapping[str, Any] = NOTHING
    joins: bool = False

    def room(self, texts: History, limits: NDArray[np.int64]) -> NDArray[np.int64]:
        """[B], how many of ``limits`` tokens each sequence can draft."""
        ...

    def begin_round(self, texts: History) -> None:
        """Learn what is committed when a round begins; by default nothing is done.

        Active are the sequences that draft in it: the state of another one must not depend on them.
        """
        return

    def catch_up(self, texts: History) -> torch.Tensor:
        """Feed what it lacks of the text; logits [B, V] after each sequence's last token."""
        ...

    def extend(self, tokens: torch.Tensor, starts: Lengths) -> torch.Tensor:
        """Feed one token [B, 1] of each sequence at ``starts[b]``; logits [B, V] after it."""
        ...

    def draw_all(self, texts: History, logits: torch.Tensor, gamma: int) -> Drawn | None:
        """Draw a whole chain from the logits of `catch_up`, or None where each step is to be."""
        return None

    def truncate(self, lengths: Lengths) -> None:
        """Learn how many tokens of each sequence stay."""
        ...

    def read_ahead(self, texts: History, size: int) -> int:
        """Feed the next tokens that `catch_up` would feed, but not the last; see `State.read`."""
        return 0

    def take(self, b: int, other: Any, index: int) -> None:
        """As `State.take`."""
        name = type(self).__name__
        raise NotImplementedError(f"{name} has a state that no other call can go on with")


class ChainState(State):
    """Draws a chain from one row of logits after the other.

    A schedule that reads token statistics is asked after each token, and drafting ends where no
    sequence goes on.

    Args:
        call: the call.
        stepper: gives the rows.
    """

    def __init__(self, call: DrafterCall, stepper: Stepper) -> None:
        self.call, self.stepper = call, stepper
        self.cost = stepper.cost

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        call, stepper, lengths = self.call, self.stepper, texts.lengths
        counts = stepper.room(texts, limits)
        gamma = int(counts.max())
        if gamma < 1:
            return None
        stepper.begin_round(dataclasses.replace(texts, active=counts > 0))
        logits = rounded(stepper.catch_up(texts))  # a head's are in the target's dtype
        whole = stepper.draw_all(texts, logits, gamma)
        drawn = [] if whole is None else [whole]
        for i in range(gamma if whole is None else 0):
            if i:
                # A row of logits that is not finite draws -1. It is fed as token 0, and the
                # verification takes it as "no draft from here on".
                fed = drawn[-1].tokens.clamp(min=0)
                logits = rounded(stepper.extend(fed, lengths + i - 1))
            one = call.draw(texts, logits[:, None], i, sampling=stepper.sampling)
            drawn.append(one)
            if call.asks.continue_drafting is not None:
                ended = to_device(counts <= i, stepper.device)
                stats = token_stats(
                    one.logits, one.tokens.masked_fill(ended[:, None], -1),
                    call.sampling_on(stepper.device)["temperature"], one.threshold,
                )  # fmt: skip
                continue_drafting = call.asks.continue_drafting(i, stats[0])
                counts = np.where(continue_drafting, counts, np.minimum(counts, i + 1))
                if counts.max() == i + 1:
                    break
        if not reads_draft(call.rule):
            return Draft(torch.cat([one.tokens for one in drawn], dim=1), counts=counts)
        joined = Drawn.join(drawn, call.device)
        return Draft(joined.tokens, drawn=joined, counts=counts)

    def commit(self, texts: History, done: Round) -> None:
        self.stepper.truncate(done.lengths + done.accepted)

    def read(self, texts: History, size: int) -> int:
        has_room = self.stepper.room(texts, np.ones_like(texts.lengths)).any()
        return self.stepper.read_ahead(texts, size) if has_room else 0

    @property
    def joins(self) -> bool:
        return type(self) is ChainState and self.stepper.joins

    def take(self, b: int, other: Self, index: int) -> None:
        self.stepper.take(b, other.stepper, index)


def room_in(
    context_length: int | None, texts: History, limits: NDArray[np.int64] | int
) -> NDArray[np.int64]:
    """[B], how many of ``limits`` tokens each sequence can draft within a model's call."""
    most = np.where(texts.active, limits, 0)
    if context_length is None:
        return most
    return np.minimum(most, np.maximum(context_length - texts.lengths, 0))


def note_ropes(call: DrafterCall, name: str, kinds: Iterable[str]) -> None:
    """Say that the drafts of a sequence depend on others of its batch, where a text does so.

    Args:
        call: of what drafts.
        name: of it.
        kinds: of its rotary embeddings, by the names of Transformers.
    """
    by_length = sorted(set(kinds).intersection(ROPES_BY_LENGTH))
    if by_length and call.batch_size > 1 and text_depends_on_drafts(call.rule):
        call.note(
            f"rotary embedding {by_length[0]!r} of {name} turns by the longest sequence of a "
            f"forward: under rule {call.rule!r} the text depends on the rest of the batch"
        )
