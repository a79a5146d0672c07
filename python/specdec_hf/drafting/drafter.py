"""The contract between the loop and whatever drafts tokens.

Terms:

- draft: tokens that may follow the text of each sequence. In a chain each follows the one before.
  A tree has several continuations of one prefix; its nodes are the drafted tokens, and its root is
  the last committed token, which is no node.
- draft distribution: the distribution Q that a token was drawn from. A draft without one, such as a
  copied n-gram, is deterministic: its Q is one-hot.
- proposals: several chains of one sequence, for a tree that merges them.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafting.context import Candidates, DraftContext, History
from specdec_hf.drafting.registry import DRAFTERS
from specdec_hf.rules import LOSSY_RULES
from specdec_kernels import LOSSLESS_RULES, SampledDraft

if TYPE_CHECKING:
    from typing_extensions import Self


# Rule "auto" of drafts with a distribution is block, which accepts at least as much as token.
RULES_OF_DRAWN_DRAFTS: tuple[str, ...] = tuple(dict.fromkeys(("block", *LOSSLESS_RULES)))
RULES_OF_DETERMINISTIC_TREES: tuple[str, ...] = ("target_only", "match", "greedy")


@dataclass
class Draft:
    """Drafted tokens for every sequence: a chain, or with ``parents`` a tree.

    Attributes:
        tokens: [B, N] integers on the host or the target's device; those of one chain also as an
            array, or as a list of one list per sequence. In a chain -1 ends a sequence's draft; in
            a tree it is an absent node.
        parents: [B, N] int32 or int64 there: the number of each node's parent, which is smaller
            than its own, and -1 for children of the root. None for a chain.
        distribution: the logits that `sample` drew the tokens from and the statistics it returned,
            rows [B, M, V]; None for deterministic drafts.
        draft_rows: of a tree, [B, N] int32, which of these rows each token was drawn from; None
            where there is a row for each token.
        counts: [B] integers on the host, the tokens of each chain; None means those before the
            first -1.
        confidence: [B, N] float32 on the host, estimates of the probability that each token of a
            chain is accepted if those before it are; for schedules that read it. It must follow
            from the committed text, since a schedule may drop the token because of it. Where there
            is a distribution, schedules read that instead.
        num_proposals: K, where ``tokens`` holds K chains of N / K tokens for each sequence, the
            best first; at most `DraftContext.num_proposals`.
        depth: of a tree, how many levels count; None means `Drafter.depth`.
        scores: of a tree, [B, N] float32, the logarithm of the probability that the draft gives to
            the path down to each node, or None. A tree of several drafters chooses nodes by it.
        carried: [B, E] int64 on the host or the target's device. The loop reads it along with the
            verdict and gives it back in `DraftOutcome`.
    """

    tokens: Any
    parents: torch.Tensor | None = None
    distribution: SampledDraft | None = None
    draft_rows: torch.Tensor | None = None
    counts: NDArray[np.int64] | None = None
    confidence: NDArray[np.float32] | None = None
    num_proposals: int = 1
    depth: int | None = None
    scores: torch.Tensor | None = None
    carried: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class DraftOutcome:
    """The part of a draft that was committed, on the host.

    Attributes:
        lengths: [B], tokens that each sequence had when it drafted.
        accepted: [B], how many drafted tokens of each were committed.
        path: [B, D] int64, the numbers of these tokens in the draft, in order, then -1. Of a chain
            they are 0, 1, and so on.
        tokens: [B, D] int64, the tokens themselves, then -1.
        carried: [B, E] int64, as in the draft; E is 0 in a round without one.
    """

    lengths: NDArray[np.int64]
    accepted: NDArray[np.int64]
    path: NDArray[np.int64]
    tokens: NDArray[np.int64]
    carried: NDArray[np.int64]

    @classmethod
    def of_chain(
        cls, lengths: NDArray[np.int64], accepted: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> DraftOutcome:
        """The outcome of a chain, whose first ``accepted[b]`` tokens [B, D] were committed."""
        columns = np.arange(tokens.shape[1])
        kept = columns < accepted[:, None]
        path = np.where(kept, columns, -1)
        return cls(lengths, accepted, path, np.where(kept, tokens, -1), path[:, :0])


@dataclass(frozen=True, eq=False)
class Rejections:
    """The places of a round where the target rejected a draft, each of another sequence.

    Attributes:
        sequences: [R] int64 on the host, which sequences of the batch.
        lengths: [R] int64 on the host, tokens of each up to the rejected draft: those committed
            when the round drafted, and the drafts that were accepted.
        logits: [R, V] of the target for the next token there, after logits processors, on its
            device; an inference tensor, which the loop does not write to any more.
    """

    sequences: NDArray[np.int64]
    lengths: NDArray[np.int64]
    logits: torch.Tensor


class Drafter(ABC):
    """Base class of drafters. Override `propose`; the other methods do nothing.

    A drafter serves one `generate` call at a time, and `start` begins the next one. A class with
    ``entry="name"`` in its head takes its name and capabilities from the registry.

    Attributes:
        name: in the statistics.
        rules: lossless acceptance rules that can verify its drafts, the best first, which is rule
            "auto" of sampled calls. A drafter of trees has rules of `verify_tree`, by default
            target_only, match and greedy. The lossy rules follow from them; see `lossy_rules_of`.
        size, depth: for a drafter of trees, no tree has more nodes, or deeper ones; 0 for chains.
        draws: whether every draft comes with the distribution that it was drawn from.
        reports_confidence: whether every draft comes with `Draft.confidence`.
        several: whether it gives as many proposals as `DraftContext.num_proposals` asks for.
        rolls_back: whether the history may end with drafts, as in a cascade. `commit` is then
            called with the lengths before those drafts and how many of them were kept, and later
            histories hold other tokens in the place of the rest.
        makes_forward: whether it makes forwards of the target itself, over the target's cache, as
            one that overrides `forward` does.
        candidates: how many of the target's most likely next tokens `observe` is given; with 0 it
            is not called.
        reads_rejections: whether `learn_rejections` is called.
        relative_cost: about how many forwards of the target a draft step takes, for the benefit
            guard before it has measured one; set in `start`.
        drafts_at_once: whether ``relative_cost`` is the cost of a whole draft.
        reads_prompt: whether a drafter with a ``relative_cost`` reads the prompt before its first
            draft, as a draft model does.
        expected_benefit: tokens a second over those of plain decoding that the benefit guard goes
            by in the first call, or None: drafts then wait until a text has earned what they may
            lose.
        joins: whether `fresh` and `adopt` serve it once it was started, so that sequences may join
            a batch that is under way, with texts longer than `DraftContext.max_length` said when it
            was started. Subclasses do not inherit it, because they may keep more.
    """

    name = "custom"
    rules: tuple[str, ...] = LOSSLESS_RULES
    size = 0
    depth = 0
    draws = False
    reports_confidence = False
    several = False
    rolls_back = False
    makes_forward = False
    candidates = 0
    reads_rejections = False
    relative_cost = 0.0
    drafts_at_once = False
    reads_prompt = True
    expected_benefit: float | None = None
    joins = False

    def __init_subclass__(cls, *, entry: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.joins = vars(cls).get("joins", False)
        if entry is not None:
            cls.name = entry
            for attribute, value in DRAFTERS[entry].capabilities().items():
                if vars(cls).get(attribute, value) != value:
                    raise TypeError(f"{cls.__name__}.{attribute} must be {value}, as in its entry")
                setattr(cls, attribute, value)
        if "forward" in vars(cls):
            cls.makes_forward = True

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The drafter that ``NAME:text`` asks for; ``text`` is empty without a colon."""
        return cls()

    def check_config(self, config: Any) -> None:  # noqa: B027  # need not be overridden
        """Raise ValueError if this drafter cannot draft for a model of this configuration."""

    def check_tokenizer(self, tokenizer: Any) -> None:  # noqa: B027  # need not be overridden
        """Raise ValueError if this drafter was made with another tokenizer than the target's.

        The command line calls both before it reads weights. `generate` calls this one before
        `start` where it was given a ``tokenizer``.
        """

    def start(self, context: DraftContext) -> None:  # noqa: B027  # need not be overridden
        """Begin a new call."""

    def add_up_costs(self, drafters: Sequence[Drafter]) -> None:
        """Take as its own the costs of drafters that a round asks together."""
        costly = [drafter for drafter in drafters if drafter.relative_cost > 0]
        self.relative_cost = sum(drafter.relative_cost for drafter in costly)
        self.drafts_at_once = all(drafter.drafts_at_once for drafter in costly or drafters)
        self.reads_prompt = any(drafter.reads_prompt for drafter in costly)

    @abstractmethod
    def propose(self, history: History, limits: NDArray[np.int64]) -> Any:
        """Draft for every sequence: up to ``limits[b]`` tokens, or a tree no deeper than that.

        It should not read from the device, because the host then waits; the loop itself reads once
        a round.

        Args:
            history: the committed tokens.
            limits: [B], 0 for sequences that have ended; at least one is above 0.

        Returns:
            A `Draft`; or the tokens [B, up to max(limits)] of a chain alone, as a tensor, an array
            or a list of one list per sequence; None drafts nothing. What a chain has beyond a
            limit is cut off.
        """

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

    def observe(self, history: History, candidates: Candidates) -> None:  # noqa: B027  # need not be overridden
        """Learn the target's most likely next tokens of a round; called before `commit`.

        Args:
            history: the committed tokens when the round drafted.
            candidates: the next tokens after each token that was fed.
        """

    def learn_rejections(self, rejections: Rejections) -> None:  # noqa: B027  # need not be overridden
        """Learn the target's logits where drafts of a round were rejected; called before `commit`.

        A drafter may not draft otherwise in the rest of the call because of them, unless what it
        drafts comes with the distribution that it was drawn from.

        Args:
            rejections: at least one.
        """

    def commit(self, outcome: DraftOutcome) -> None:  # noqa: B027  # need not be overridden
        """Learn the outcome of a round, also of one without drafts."""

    def fresh(self) -> Self:
        """A drafter of the same settings for another call; the copy by default.

        The two must share nothing that `start` leaves as it is and a round changes.
        """
        return copy.copy(self)

    def read(self, history: History, size: int) -> int:
        """Read the next tokens of a sequence that is about to join a batch, as `propose` would.

        The batch need not read them then, together with padding of its other sequences. It has
        rounds between two calls.

        Args:
            history: the committed tokens of one sequence after its first round.
            size: how many tokens to read at most; 0 where the time of this round is spent.

        Returns:
            How many tokens are left to read, by default none.
        """
        return 0

    def adopt(self, b: int, other: Self, index: int) -> None:  # noqa: B027  # need not be overridden
        """Go on with sequence ``index`` of another drafter's call as sequence ``b`` of this one.

        What this drafter kept of its sequence ``b`` before, which has ended, is forgotten. By
        default nothing is kept of a sequence.

        Args:
            b: which sequence it becomes.
            other: a drafter of the same settings, between two rounds.
            index: which sequence of it.
        """

    def finish(self, history: History) -> None:  # noqa: B027  # need not be overridden
        """Learn the texts of a call in which all sequences have ended.

        Args:
            history: all committed tokens.
        """


def drafts_trees(drafter: Drafter | None) -> bool:
    """Whether a call with this drafter, or without one, verifies trees."""
    return drafter is not None and drafter.size > 0


def rules_of(drafter: Drafter | None) -> tuple[str, ...]:
    """The lossless acceptance rules of a drafter, or of calls without drafts.

    Raises:
        ValueError: the drafter names a lossy rule, which rule "auto" could then be.
    """
    if drafter is None:
        return LOSSLESS_RULES
    lossy = [rule for rule in drafter.rules if rule in LOSSY_RULES]
    if lossy:
        raise ValueError(
            f"{type(drafter).__name__}.rules must be lossless rules, got {', '.join(lossy)}, which "
            "calls may ask for whatever the drafter"
        )
    if drafts_trees(drafter) and drafter.rules == LOSSLESS_RULES:
        return RULES_OF_DETERMINISTIC_TREES
    return drafter.rules


def lossy_rules_of(drafter: Drafter | None) -> tuple[str, ...]:
    """The lossy rules that can verify a drafter's drafts.

    Rules typical and top_beta read P alone. Rule lenient compares P with Q as token does. Trees
    have rule typical only.
    """
    if drafts_trees(drafter):
        return ("typical",)
    if drafter is None or "token" in drafter.rules:
        return tuple(LOSSY_RULES)
    return tuple(rule for rule in LOSSY_RULES if rule != "lenient")
