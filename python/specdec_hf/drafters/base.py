"""The contract between the loop and whatever drafts tokens.

Terms:

- chain: drafted tokens that follow one another. Tree: drafted tokens with several continuations of
  one prefix. Its root is the pending token, the last committed one, which is not a node.
- draft distribution: the distribution Q that a token was drawn from. A draft without one, such as a
  copied n-gram, is deterministic: its Q is one-hot.
- gamma: number of tokens that a chain may have.

Chains and trees have a protocol each. A chain drafter is asked for a number of tokens and told how
many were kept; the loop cuts its drafts to what each sequence can use. A tree drafter must do that
itself, names the node each token hangs below, and is told which path was kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.hf_arguments.encoder import EncoderSource
from specdec_hf.schedules.base import TokenFacts
from specdec_kernels import (
    LOSSLESS_RULES,
    RULES_NEEDING_ROUND_NOISE,
    RULES_READING_DRAFT,
    TREE_RULES_READING_DRAFT,
    SampledDraft,
)

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_NUMBERS = 2**16  # drafts of one drafter in one round


def reads_draft(rule: str) -> bool:
    """Whether a rule compares the target's probabilities with those of the draft distribution."""
    return rule in RULES_READING_DRAFT or rule in TREE_RULES_READING_DRAFT


@dataclass(frozen=True, eq=False)
class History:
    """The committed tokens of every sequence, without padding, on the host.

    A drafter cannot write to the arrays that it gets, and the loop reads none of them.

    Attributes:
        tokens: [B, C] int64; sequence ``b`` holds ``lengths[b]`` tokens, and zeros follow them.
        lengths: [B] int64, number of committed tokens, the pending one included.
        active: [B] bool, sequences that have not ended.
    """

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    active: NDArray[np.bool_]

    def last(self, size: int) -> NDArray[np.int64]:
        """[B, size], a copy of each sequence's last ``size`` tokens; zeros precede short ones."""
        columns = self.lengths[:, None] - size + np.arange(size)
        taken = np.take_along_axis(self.tokens, np.maximum(columns, 0), axis=1)
        taken[columns < 0] = 0
        return taken


@dataclass
class DraftContext:
    """The facts that a drafter may know of the call it serves.

    Attributes:
        model: the target.
        rule: acceptance rule of the call.
        temperature, top_k, top_p, min_p: float or int, or a tensor [B] on the target's device.
        seeds: [B] int64 on the target's device.
        batch_size: number of sequences B.
        max_length: no sequence will hold more tokens than this.
        max_draft: no round will ask for more tokens than this.
        note: leaves a remark in the statistics, with the number of the round. A remark that was
            left before is left out.
        self_check: whether a draft model's cache is checked before its first use.
        encoder: what the encoder of an encoder-decoder read, or None. `EncoderSource.texts` gives
            its ids, to copy from, and `EncoderSource.encode` what another encoder makes of it.
        cache: the target's cache. Only a drafter that computes a part of the target's forward, see
            `Drafter.forward`, may use it.
        round_noise: whether drafts are drawn with noise of the round under every rule but match,
            because the schedule looks at drafts after rejected ones.
        goes_on: for drafters that draw token by token; set after `start`. Given the number of the
            token drawn last and its `TokenFacts`, it says for each sequence [B] whether to draw
            another one. A token is never taken back. None where the schedule does not ask for
            facts, which cost a read from the device each.
        first_number: number of this drafter's first draft in the round. Only the loop sets it.
        asked_for_noise: whether `noise_positions` was called in this round.
        limits: [B], how many of the round's gamma tokens each sequence can use; None means all.
    """

    model: Any
    rule: str
    temperature: float | torch.Tensor
    top_k: int | torch.Tensor
    top_p: float | torch.Tensor
    min_p: float | torch.Tensor
    seeds: torch.Tensor
    batch_size: int
    max_length: int
    max_draft: int
    note: Callable[[str], None] = field(default=lambda text: None)
    self_check: bool = True
    encoder: EncoderSource | None = None
    cache: Any = None
    round_noise: bool = False
    goes_on: Callable[[int, TokenFacts], NDArray[np.bool_]] | None = None
    first_number: int = 0
    asked_for_noise: bool = False
    limits: NDArray[np.int64] | None = None

    @property
    def needs_round_noise(self) -> bool:
        """Whether no two rounds may draw a draft with the same noise."""
        return self.round_noise or self.rule in RULES_NEEDING_ROUND_NOISE

    def noise_positions(
        self,
        lengths: NDArray[np.int64] | torch.Tensor,
        index: int | Sequence[int] | NDArray[np.int64],
        *,
        depth: int | None = None,
    ) -> torch.Tensor:
        """The ``positions`` that `specdec_kernels.sample` draws a draft at.

        They are those that the rule of the call needs; see docs/rules.md#noise. A drafter that
        returns a distribution calls this in every round, or declares `Drafter.noise`.

        Args:
            lengths: [B] int64, `History.lengths` of the round.
            index: which draft of the round is drawn, from 0; or n of them. Drafts that are drawn in
                one round have different numbers.
            depth: for a tree, how deep below the pending token these drafts are, from 1; index
                + 1, as in a chain, where it is not given.

        Returns:
            int64, [B] for one index and [B, n] for n; on the device of ``lengths`` if that is a
            tensor, else on the target's.

        Raises:
            ValueError: an index outside [0, 65536).
        """
        self.asked_for_noise = True
        numbers = np.asarray(index, dtype=np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < MAX_NUMBERS:
            raise ValueError(f"index must be in [0, {MAX_NUMBERS}), got {index!r}")
        if not isinstance(lengths, torch.Tensor):
            lengths = torch.from_numpy(lengths.copy()).to(self.seeds.device, non_blocking=True)
        if self.needs_round_noise:
            offsets = (self.first_number + numbers + 1) << 32
        else:
            offsets = numbers if depth is None else np.full_like(numbers, depth - 1)
        if numbers.ndim == 0:
            return lengths + int(offsets)
        return lengths[:, None] + torch.from_numpy(offsets).to(lengths.device, non_blocking=True)


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


@dataclass
class Candidates:
    """The target's most likely next tokens after every token that a round fed to it, on the host.

    Row 0 belongs to the pending token, and row n + 1 to draft n. In a `TrieTree` that holds for
    tree drafters, and other drafters' tokens follow; a chain drafter finds its rows by `path`.

    Attributes:
        tokens: [B, N+1] int64, the pending token and the drafts; -1 is an absent draft.
        parents: [B, N+1] int64, the row of the token before it; -1 for the pending token.
        ids: [B, N+1, k] int64, next tokens by falling logit, after penalties and other logits
            processors. A row of an absent draft has no meaning.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    ids: NDArray[np.int64]

    def first(self, count: int) -> Candidates:
        """Only the ``count`` most likely next tokens of each row."""
        return Candidates(self.tokens, self.parents, self.ids[:, :, :count])

    def path(self, b: int, following: Sequence[int]) -> list[int]:
        """Rows of sequence ``b`` from the pending token down, as far as the drafts go.

        Args:
            b: the sequence.
            following: the tokens that were committed after the pending token.
        """
        rows = [0]
        for token in following:
            children = (self.parents[b] == rows[-1]) & (self.tokens[b] == token)
            if not children.any():
                break
            rows.append(int(children.argmax()))
        return rows


class AnyDrafter:
    """The part of the contract that chain drafters and tree drafters share.

    Attributes:
        name: in the statistics.
        candidates: how many of the target's most likely next tokens `observe` is given; with 0 it
            is not called.
        relative_cost: about how many forwards of the target a draft step takes, for the benefit
            guard before it has measured one; set in `start`.
    """

    name = "custom"
    candidates = 0
    relative_cost = 0.0

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The drafter that ``NAME:text`` asks for; ``text`` is empty without a colon."""
        return cls()

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise ValueError if this drafter was made with another tokenizer than the target's.

        The command line calls it; `generate` knows no tokenizer.
        """

    def start(self, context: DraftContext) -> None:
        """Begin a new call."""

    def observe(self, history: History, candidates: Candidates) -> None:
        """Learn the target's most likely next tokens of a round; called before `commit`.

        Args:
            history: the committed tokens when the round drafted.
            candidates: the next tokens after each token that was fed.
        """


class Drafter(AnyDrafter, ABC):
    """Base class of chain drafters. Override `propose`; the other methods do nothing.

    A drafter serves one `generate` call at a time, and `start` begins the next one.

    Attributes:
        rules: acceptance rules that its drafts can be verified with; the first is rule "auto" of
            sampled calls.
        noise: where the random numbers come from that draw the drafts. "context": `sample` takes
            them at the positions of `DraftContext.noise_positions`. "independent": they are the
            drafter's own, and none is used twice. Rule block and the rules of trees that read the
            draft distribution refuse a distribution of a drafter that has neither asked in this
            round nor declared "independent", because with other noise the text would be biased.
            Drafts without a distribution need no noise.
        draws: whether every draft comes with the distribution that it was drawn from.
        reports_confidence: whether every draft comes with `Draft.confidence`.
        several: whether `propose_several` is overridden, which `TrieTree` then calls.
        rolls_back: whether the history may end with drafts, as in a cascade. `commit` is then
            called with the lengths before those drafts and how many of them were kept, and later
            histories hold other tokens in the place of the rest.
    """

    rules: tuple[str, ...] = LOSSLESS_RULES
    noise: Literal["context", "independent"] = "context"
    draws = False
    reports_confidence = False
    several = False
    rolls_back = False

    @abstractmethod
    def propose(self, history: History, gamma: int) -> Draft | None:
        """Draft up to ``gamma`` next tokens for every sequence; None drafts nothing.

        It must not read from the device: a round has one read, and that is the verdict's.
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


@dataclass
class TreeDraft:
    """A tree of drafted tokens for every sequence. A node's number is larger than its parent's.

    Attributes:
        tokens: [B, N] int64 on the host or the target's device; -1 is an absent node.
        parents: [B, N] int32 or int64 there, -1 for children of the root.
        depth: no node is deeper.
        distribution: rows [B, M, V] of the draft distributions, or None for deterministic drafts.
        draft_rows: [B, N] int32, which of these rows each node was drawn from.
        note: [B, E] int64 on one of them. The loop reads it along with the verdict and gives it
            back in `TreeOutcome`.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depth: int
    distribution: SampledDraft | None = None
    draft_rows: torch.Tensor | None = None
    note: torch.Tensor | None = None


@dataclass
class TreeOutcome:
    """The part of a tree that was committed, on the host.

    Attributes:
        path: [B, D] int64, numbers of the committed nodes from the root down, then -1.
        tokens: [B, D] int64, their tokens, then -1.
        note: [B, E] int64, as in the draft.
    """

    path: NDArray[np.int64]
    tokens: NDArray[np.int64]
    note: NDArray[np.int64]


class TreeDrafter(AnyDrafter, ABC):
    """Base class of tree drafters. A drafter serves one `generate` call at a time.

    Attributes:
        rules: acceptance rules that its trees can be verified with; the first is rule "auto" of
            sampled calls.
        size, depth: no tree has more nodes, or deeper ones.
    """

    name = "tree"
    rules: tuple[str, ...] = ("target_only", "match", "greedy")
    size = 0
    depth = 0

    @abstractmethod
    def propose(self, history: History, limits: NDArray[np.int64]) -> TreeDraft | None:
        """Draft a tree for every sequence, no deeper than ``limits[b]``; None drafts nothing.

        It must not wait for the device: a round has one read, and that is the verdict's.
        """

    def commit(self, lengths: NDArray[np.int64], outcome: TreeOutcome | None) -> None:
        """Learn the outcome of a round.

        Args:
            lengths: [B] tokens that each sequence had when it drafted.
            outcome: what was committed of the tree; None in a round without one.
        """
