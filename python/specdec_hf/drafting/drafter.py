"""The contract between the loop and whatever drafts tokens.

Terms:

- drafter: the configuration of what drafts. It never changes, so that any number of calls may use
  it at once. What it knows of one call is its state.
- draft: tokens that may follow the text of each sequence. In a chain each follows the one before.
  A tree has several continuations of one prefix; its nodes are the drafted tokens, and its root is
  the last committed token, which is no node.
- draft distribution: the distribution Q that a token was drawn from. A draft without one, such as a
  copied n-gram, is deterministic: its Q is one-hot.
- proposals: several chains of one sequence, for a tree that merges them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafting.call import DrafterCall, Drawn
from specdec_hf.drafting.context import Candidates, History
from specdec_hf.drafting.registry import entry_called
from specdec_hf.rules import LOSSY_RULES
from specdec_kernels import LOSSLESS_RULES, RULES_READING_DRAFT, TREE_RULES

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
        drawn: the rows [B, M, V] that the tokens were drawn from with `DrafterCall.draw`, on any
            device; None for deterministic drafts.
        draft_rows: of a tree, [B, N] int32, which of these rows each token was drawn from; None
            where there is a row for each token.
        counts: [B] integers on the host, the tokens of each chain; None means those before the
            first -1.
        confidence: [B, N] float32 on the host, estimates of the probability that each token of a
            chain is accepted if those before it are; for schedules that read it. It must follow
            from the committed text, since a schedule may drop the token because of it. Where there
            is a distribution, schedules read that instead.
        num_proposals: K, where ``tokens`` holds K chains of N / K tokens for each sequence, the
            best first; at most `DrafterCall.num_proposals`.
        depth: of a tree, how many levels count; None means `Drafter.depth`.
        scores: of a tree, [B, N] float32, the logarithm of the probability that the draft gives to
            the path down to each node, or None. A tree of several drafters chooses nodes by it.
        carried: [B, E] int64 on the host or the target's device. The loop reads it along with the
            verdict and gives it back in `Round`.
    """

    tokens: Any
    parents: torch.Tensor | None = None
    drawn: Drawn | None = None
    draft_rows: torch.Tensor | None = None
    counts: NDArray[np.int64] | None = None
    confidence: NDArray[np.float32] | None = None
    num_proposals: int = 1
    depth: int | None = None
    scores: torch.Tensor | None = None
    carried: torch.Tensor | None = None


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


@dataclass(frozen=True, eq=False)
class Round:
    """What became of a draft, on the host, and what `Needs` asked for.

    Attributes:
        lengths: [B], tokens that each sequence had when it drafted.
        active: [B] bool, the sequences that had not ended then.
        accepted: [B], how many drafted tokens of each were committed.
        path: [B, D] int64, the numbers of these tokens in the draft, in order, then -1. Of a chain
            they are 0, 1, and so on.
        tokens: [B, D] int64, the tokens themselves, then -1.
        carried: [B, E] int64, as in the draft; E is 0 in a round without one.
        candidates: with `Needs.candidates`, the next tokens after each token that was fed.
        rejections: with `Needs.rejections`, where there is at least one.
    """

    lengths: NDArray[np.int64]
    active: NDArray[np.bool_]
    accepted: NDArray[np.int64]
    path: NDArray[np.int64]
    tokens: NDArray[np.int64]
    carried: NDArray[np.int64]
    candidates: Candidates | None = None
    rejections: Rejections | None = None

    @classmethod
    def of_chain(
        cls,
        lengths: NDArray[np.int64],
        active: NDArray[np.bool_],
        accepted: NDArray[np.int64],
        tokens: NDArray[np.int64],
    ) -> Round:
        """The round of a chain, whose first ``accepted[b]`` tokens [B, D] were committed."""
        columns = np.arange(tokens.shape[1])
        kept = columns < accepted[:, None]
        path = np.where(kept, columns, -1)
        return cls(lengths, active, accepted, path, np.where(kept, tokens, -1), path[:, :0])


@dataclass(frozen=True)
class Needs:
    """What the loop must do for a drafter; it does nothing of it for others.

    A head says in `Drafter.begin` which hidden states it reads; see `DrafterCall.keep_states`.

    Attributes:
        candidates: how many of the target's most likely next tokens `Round.candidates` holds after
            each token that was fed; 0 for none.
        rejections: whether `Round.rejections` tells the target's logits where a draft was rejected.
            A state may not draft otherwise in the rest of the call because of them, unless what it
            drafts comes with the distribution that it was drawn from.
        target_forward: whether its states make forwards of the target over the target's cache, and
            `State.forward` is asked before the loop makes one.
    """

    candidates: int = 0
    rejections: bool = False
    target_forward: bool = False


@dataclass(frozen=True)
class Cost:
    """About what drafting costs, for the benefit guard before it has measured anything.

    Attributes:
        relative: how many forwards of the target a draft step takes.
        at_once: whether that is the cost of a whole draft.
        reads_prompt: whether a costly drafter reads the prompt before its first draft, as a draft
            model does.
    """

    relative: float = 0.0
    at_once: bool = False
    reads_prompt: bool = True

    @classmethod
    def sum(cls, costs: Sequence[Cost]) -> Cost:
        """That of drafters which a round asks together."""
        costly = [cost for cost in costs if cost.relative > 0]
        return cls(
            sum(cost.relative for cost in costly),
            all(cost.at_once for cost in costly or costs),
            any(cost.reads_prompt for cost in costly),
        )


class State(ABC):
    """What a drafter knows of one call. Override `propose`; the other methods do nothing.

    Attributes:
        cost: of drafting.
        expected_benefit: tokens a second over those of plain decoding that the benefit guard goes
            by in the first call, or None: drafts then wait until a text has earned what they may
            lose.
    """

    cost = Cost()
    expected_benefit: float | None = None

    @abstractmethod
    def propose(self, texts: History, limits: NDArray[np.int64]) -> Any:
        """Draft for every sequence: up to ``limits[b]`` tokens, or a tree no deeper than that.

        It should not read from the device, because the host then waits; the loop itself reads once
        a round.

        Args:
            texts: the committed tokens.
            limits: [B], 0 for sequences that have ended; at least one is above 0.

        Returns:
            A `Draft`; or the tokens [B, up to max(limits)] of a chain alone, as a tensor, an array
            or a list of one list per sequence; None drafts nothing. What lies beyond a limit is cut
            off.
        """

    def forward(
        self, tokens: torch.Tensor, starts: NDArray[np.int64], keep: int
    ) -> torch.Tensor | None:
        """The target's forward of a round of chains, where the drafter has computed a part of it.

        It is called with `Needs.target_forward` alone.

        Args:
            tokens: [B, n] int64 on the target's device, the tokens that the cache lacks and the
                drafts.
            starts: [B] position of each sequence's first token.
            keep: how many rows of logits are needed, counted from the end.

        Returns:
            Logits [B, keep, V]; None leaves the forward to the loop.
        """
        return None

    def commit(self, texts: History, done: Round) -> None:  # noqa: B027  # need not be overridden
        """Learn the outcome of a round, also of one without drafts.

        Args:
            texts: the committed tokens after it; in a cascade, those of the level above.
            done: the round.
        """

    def end(self, texts: History) -> None:  # noqa: B027  # need not be overridden
        """Learn the texts of a call in which all sequences have ended.

        Args:
            texts: all committed tokens.
        """

    def read(self, texts: History, size: int) -> int:
        """Read the next tokens of a sequence that is about to join a batch, as `propose` would.

        The batch need not read them then, together with padding of its other sequences. It has
        rounds between two calls.

        Args:
            texts: the committed tokens of one sequence after its first round.
            size: how many tokens to read at most; 0 where the time of this round is spent.

        Returns:
            How many tokens are left to read, by default none.
        """
        return 0

    @property
    def joins(self) -> bool:
        """Whether sequences may join a batch that is under way.

        So it is where the class itself defines `take`. Subclasses do not inherit it, because they
        may keep more. Texts are then longer than `DrafterCall.max_length` says.
        """
        return "take" in vars(type(self))

    def take(self, b: int, other: Self, index: int) -> None:
        """Go on with sequence ``index`` of another call as sequence ``b`` of this one.

        What was kept of sequence ``b`` before, which has ended, is forgotten. The calls themselves
        are told by the loop; see `DrafterCall.take`.

        Args:
            b: which sequence it becomes.
            other: a state of a drafter of the same settings, between two rounds.
            index: which sequence of it.
        """
        name = type(self).__name__
        raise NotImplementedError(f"{name} has a state that no other call can go on with")


class Drafter(ABC):
    """Base class of drafters. Override `begin`, which makes what a drafter knows of one call.

    A drafter never changes after it was made, and serves any number of calls at once. One that
    keeps nothing of a call derives from `StatelessDrafter`. A class with ``entry="name"`` in its
    head takes its name and capabilities from the registry.

    Attributes:
        name: in the statistics.
        rules: lossless acceptance rules that can verify its drafts, the best first, which is rule
            "auto" of sampled calls. A drafter of trees has rules of `verify_tree`, by default
            target_only, match and greedy. The lossy rules follow from them; see `lossy_rules_of`.
        size, depth: for a drafter of trees, no tree has more nodes, or deeper ones; 0 for chains.
        draws: whether every draft comes with the distribution that it was drawn from.
        reports_confidence: whether every draft comes with `Draft.confidence`.
        several: whether it gives as many proposals as `DrafterCall.num_proposals` asks for.
        rolls_back: whether the texts may end with drafts, as in a cascade. `State.commit` is then
            called with the lengths before those drafts and how many of them were kept, and later
            texts hold other tokens in the place of the rest.
        needs: what the loop must do for it.
        is_model: whether a draft model draws its tokens, with which trees of a fixed shape can be
            drafted; it then has the method ``tree_model`` of a `ModelDrafter`.
        leads_cascade: whether another drafter can draft for it in a `VerticalCascade`, as for a
            draft model.
    """

    name = "custom"
    rules: tuple[str, ...] = LOSSLESS_RULES
    size = 0
    depth = 0
    draws = False
    reports_confidence = False
    several = False
    rolls_back = False
    needs = Needs()
    is_model = False
    leads_cascade = False

    def __init_subclass__(cls, *, entry: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if entry is None:
            return
        cls.name, row = entry, entry_called(entry)
        if row is None:
            raise TypeError(
                f"entry of {cls.__name__} must be a name in a table of drafters, got {entry!r}"
            )
        for attribute, value in row.capabilities().items():
            if vars(cls).get(attribute, value) != value:
                raise TypeError(f"{cls.__name__}.{attribute} must be {value}, as in its entry")
            setattr(cls, attribute, value)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The drafter that ``NAME:text`` asks for; ``text`` is empty without a colon."""
        return cls()

    def check_config(self, config: Any) -> None:  # noqa: B027  # need not be overridden
        """Raise ValueError if this drafter cannot draft for a model of this configuration."""

    def check_tokenizer(self, tokenizer: Any) -> list[str]:
        """Compare the tokenizer that this drafter was made with, if any, with the target's.

        The command line calls both before it reads weights, and `generate` this one before `begin`.

        Args:
            tokenizer: the target's; None where the caller gave none.

        Returns:
            Notes on what could not be compared.

        Raises:
            ValueError: another tokenizer.
        """
        return []

    def for_target(self, model: Any) -> Drafter:
        """The drafter that drafts for a target: this one, unless it is made of the target itself.

        Raises:
            ValueError: it cannot be made.
        """
        return self

    def rolling_back(self) -> Drafter:
        """This drafter in a form that rolls back, for a cascade; itself where it has no other."""
        return self

    @abstractmethod
    def begin(self, call: DrafterCall) -> State:
        """What it knows of a call that begins.

        What outlives a call, such as kept texts, is an object that the drafter was made with. A
        state reads it here, and writes to it in `State.end`.

        Raises:
            ValueError: a call that it cannot draft for, by name.
        """


class StatelessDrafter(Drafter, State):
    """Base class of drafters that keep nothing of a call, and so are their own states."""

    def begin(self, call: DrafterCall) -> State:
        return self


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

    Rules that compare P with Q verify what rule token verifies, and the others all drafts.
    """
    if drafts_trees(drafter):
        return tuple(rule for rule in LOSSY_RULES if rule in TREE_RULES)
    if drafter is None or "token" in drafter.rules:
        return tuple(LOSSY_RULES)
    return tuple(rule for rule in LOSSY_RULES if rule not in RULES_READING_DRAFT)
