"""The contract between the loop and whatever drafts tokens.

Terms:

- chain: drafted tokens that follow one another. Tree: drafted tokens with several continuations of
  one prefix. Its root is the pending token, the last committed one, which is not a node.
- draft distribution: the distribution Q that a token was drawn from. A draft without one, such as a
  copied n-gram, is deterministic: its Q is one-hot.
- gamma: number of tokens that a chain may have.

Chains and trees have a protocol each. A chain drafter is asked for a number of tokens and told how
many were kept; the loop cuts its drafts to what each sequence can use. A tree drafter, see
tree_drafter.py, must do that itself, names the node each token hangs below, and is told which path
was kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.context import Candidates, DraftContext, History
from specdec_kernels import LOSSLESS_RULES, SampledDraft

if TYPE_CHECKING:
    from typing_extensions import Self


# Rule "auto" of drafts with a distribution is block, which accepts at least as much as token.
RULES_OF_DRAWN_DRAFTS: tuple[str, ...] = tuple(dict.fromkeys(("block", *LOSSLESS_RULES)))


@dataclass
class Draft:
    """A chain of drafted tokens for every sequence.

    Attributes:
        tokens: [B, gamma] int64 on any device; -1 ends a sequence's draft early.
        distribution: the logits that `sample` drew the tokens from and the statistics it returned;
            None for deterministic drafts.
        counts: [B] drafts per sequence where the host knows them. They hold no -1. None means
            gamma drafts everywhere.
        confidence: [B, gamma] float32 on the host, estimates of the probability that each token is
            accepted if those before it are; for schedules that read it. It must follow from the
            committed text, since a schedule may drop the token because of it. Where there is a
            distribution, schedules read that instead.
    """

    tokens: torch.Tensor
    distribution: SampledDraft | None = None
    counts: NDArray[np.int64] | None = None
    confidence: NDArray[np.float32] | None = None


class DrafterBase:
    """The part of the contract that chain drafters and tree drafters share.

    Attributes:
        name: in the statistics.
        candidates: how many of the target's most likely next tokens `observe` is given; with 0 it
            is not called.
        relative_cost: about how many forwards of the target a draft step takes, for the benefit
            guard before it has measured one; set in `start`.
        drafts_at_once: whether that is what all drafts of a round take together.
        reads_prompt: whether a drafter with a ``relative_cost`` reads the prompt before its first
            draft, as a draft model does.
        noise: where the random numbers come from that draw the drafts. "context": `sample` takes
            them at the positions of `DraftContext.noise_positions`. "independent": they are the
            drafter's own, and none is used twice. Rules that read the draft distribution refuse a
            distribution whose drafter has neither asked in this round nor declared "independent",
            because other noise may bias the text. Drafts without a distribution need no noise.
        expected_benefit: tokens a second over those of plain decoding that the benefit guard goes
            by in the first call, or None: drafts then wait until a text has earned what they may
            lose.
    """

    name = "custom"
    candidates = 0
    noise: Literal["context", "independent"] = "context"
    relative_cost = 0.0
    drafts_at_once = False
    reads_prompt = True
    expected_benefit: float | None = None

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The drafter that ``NAME:text`` asks for; ``text`` is empty without a colon."""
        return cls()

    def check_config(self, config: Any) -> None:
        """Raise ValueError if this drafter cannot draft for a model of this configuration."""

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise ValueError if this drafter was made with another tokenizer than the target's.

        The command line calls both before it reads weights. `generate` calls this one before
        `start` where it was given a ``tokenizer``.
        """

    def start(self, context: DraftContext) -> None:
        """Begin a new call."""

    def add_up_costs(self, drafters: Sequence[DrafterBase]) -> None:
        """Take as its own the costs of drafters that a round asks together."""
        costly = [drafter for drafter in drafters if drafter.relative_cost > 0]
        self.relative_cost = sum(drafter.relative_cost for drafter in costly)
        self.drafts_at_once = all(drafter.drafts_at_once for drafter in costly or drafters)
        self.reads_prompt = any(drafter.reads_prompt for drafter in costly)

    def observe(self, history: History, candidates: Candidates) -> None:
        """Learn the target's most likely next tokens of a round; called before `commit`.

        Args:
            history: the committed tokens when the round drafted.
            candidates: the next tokens after each token that was fed.
        """


class Drafter(DrafterBase, ABC):
    """Base class of chain drafters. Override `propose`; the other methods do nothing.

    A drafter serves one `generate` call at a time, and `start` begins the next one.

    Attributes:
        rules: acceptance rules that its drafts can be verified with; the first is rule "auto" of
            sampled calls.
        draws: whether every draft comes with the distribution that it was drawn from.
        reports_confidence: whether every draft comes with `Draft.confidence`.
        several: whether `propose_several` is overridden, which `TrieTree` then calls.
        rolls_back: whether the history may end with drafts, as in a cascade. `commit` is then
            called with the lengths before those drafts and how many of them were kept, and later
            histories hold other tokens in the place of the rest.
        makes_forward: whether it makes forwards of the target itself, over the target's cache, as
            one that overrides `forward` does.
    """

    rules: tuple[str, ...] = LOSSLESS_RULES
    draws = False
    reports_confidence = False
    several = False
    rolls_back = False
    makes_forward = False

    @abstractmethod
    def propose(self, history: History, gamma: int) -> Draft | None:
        """Draft up to ``gamma`` next tokens for every sequence; None drafts nothing.

        It should not read from the device, because the host then waits; the loop itself reads once
        a round.
        """

    def propose_several(self, history: History, gamma: int, count: int) -> torch.Tensor | None:
        """Up to ``count`` different chains for every sequence, without a distribution.

        Returns:
            [B, count, up to gamma] int64 on any device, best chain first, -1 after the end of a
            chain; None drafts nothing.
        """
        raise NotImplementedError

    def forward(
        self, tokens: torch.Tensor, starts: NDArray[np.int64], keep: int
    ) -> torch.Tensor | None:
        """The target's forward of a round of chains, for a drafter that has computed a part of it.

        Args:
            tokens: [B, n] int64 on the target's device, the tokens that the cache lacks and the
                drafts.
            starts: [B] position of each sequence's first token.
            keep: how many rows of logits are needed, counted from the end.

        Returns:
            Logits [B, keep, V]; None leaves the forward to the loop.
        """
        return None

    def commit(self, lengths: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Learn the outcome of a round.

        Args:
            lengths: [B] tokens that each sequence had when it drafted.
            accepted: [B] how many of its drafts were committed.
        """
