"""Cascades: drafters that draft for one another within a round.

A drafter of a lower level drafts after tokens that are no committed text yet. So it must be one
that rolls back (`Drafter.rolls_back`), and reading those tokens costs a read from the device.

Here are what both kinds share and the `HorizontalCascade`; vertical_cascade.py has the other.

Source: Chen et al. 2023, "Cascade Speculative Drafting", arXiv 2312.11462.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.arguments import check_integers, shown
from specdec_hf.drafters.composed import ComposedDrafter, candidates_for, round_for, values_of
from specdec_hf.drafters.model import ModelDrafter
from specdec_hf.drafting.call import (
    MAX_DRAFTS_PER_ROUND,
    Asks,
    DrafterCall,
    Drawn,
)
from specdec_hf.drafting.checks import begin_state, propose_checked
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import (
    RULES_OF_DRAWN_DRAFTS,
    Cost,
    Draft,
    Drafter,
    Round,
    State,
)
from specdec_hf.drafting.registry import make_drafter
from specdec_hf.request.inputs import is_language_model
from specdec_hf.runner.protocol import to_device, vocab_size_of

if TYPE_CHECKING:
    pass

MAX_LEVELS = 8  # drafters of one cascade


@dataclass
class RoundOfLevel:
    """How far a drafter of a cascade is in a round.

    Attributes:
        lengths: [B] committed tokens of each sequence when the round began. Noise of the round
            belongs to them, not to the drafts between, whose number a later round may repeat.
        asked: [B] how often the drafter has been asked before in the round. Each time has noise of
            its own, since a sequence is drafted as many tokens as the batch needs.
    """

    lengths: NDArray[np.int64]
    asked: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LevelCall(DrafterCall):
    """The call of one drafter of a cascade, which drafts after tokens of the same round.

    Attributes:
        parent: the call of the cascade.
        round: what changes from one draft to the next.
    """

    parent: DrafterCall = field(kw_only=True)
    round: RoundOfLevel = field(kw_only=True)

    def begin_round(self, texts: History) -> None:
        """Begin a proposal of the cascade, which another cascade may ask for again in a round."""
        mine = self.round
        if isinstance(self.parent, LevelCall):
            above = self.parent.round
            mine.lengths, mine.asked = above.lengths, np.where(above.asked == 0, 0, mine.asked)
        else:
            mine.lengths, mine.asked = texts.lengths, np.zeros_like(texts.lengths)

    def sampled_seeds(self) -> dict[int, int]:
        """Those of the whole call: a level has a temperature and seeds of its own."""
        return self.parent.sampled_seeds()

    def _noise_positions(
        self,
        texts: History,
        indices: NDArray[np.int64],
        depth: int | None,
        device: torch.device,
    ) -> torch.Tensor:
        if self.rule == "match":
            return super()._noise_positions(texts, indices, depth, device)
        base = self.round.lengths + ((self.round.asked * MAX_DRAFTS_PER_ROUND + 1) << 32)
        return to_device(base[:, None] + (indices << 32), device)


def level_call(call: DrafterCall, level: int, **changes: Any) -> LevelCall:
    """The call of the drafter of one level below a call.

    It has seeds of its own, so that no other level uses its noise. Under rule match all levels
    share the target's, and the text is that noise's whatever is drafted. The schedule of the call
    answers no level: it counts the tokens of whole drafts.
    """
    values = values_of(call) | {"asks": Asks(), **changes}
    if values["rule"] != "match":
        seeds = derived_seeds(call.seeds.cpu(), level, call.first_draft_index)
        values["seeds"] = seeds.to(values["seeds"].device)
    zeros = np.zeros(call.batch_size, dtype=np.int64)
    return LevelCall(**values, parent=call, round=RoundOfLevel(zeros, zeros.copy()))


class Level:
    """One drafter of a cascade in a call.

    Args:
        drafter: its settings.
        call: what it is told.

    Raises:
        ValueError: a call that it cannot draft for.
    """

    def __init__(self, drafter: Drafter, call: LevelCall) -> None:
        self.drafter, self.call = drafter, call
        self.state = begin_state(drafter, call)

    def ask(self, texts: History, most: NDArray[np.int64]) -> Draft | None:
        """Up to ``most[b]`` tokens after texts that may end with drafts, checked."""
        draft = propose_checked(self.drafter, self.state, texts, most, self.call)
        self.call.round.asked += most > 0
        return draft

    def commit(self, texts: History, done: Round) -> None:
        """Tell it the outcome of a round, its own or that of the whole cascade."""
        self.state.commit(texts, round_for(self.drafter, done))


def derived_seeds(seeds: torch.Tensor, *numbers: NDArray[np.int64] | int) -> torch.Tensor:
    """Seeds whose noise is unlike that of ``seeds`` or of other numbers.

    Args:
        seeds: [B] int64 on the host.
        numbers: each is [B], or one for all sequences; none is negative.

    Returns:
        [B] int64 on the host.
    """
    columns = [np.broadcast_to(number, len(seeds)).tolist() for number in numbers]
    words = [
        np.random.SeedSequence(seed % 2**64, spawn_key=key).generate_state(1, np.uint64)[0]
        for seed, *key in zip(seeds.tolist(), *columns, strict=True)
    ]
    return torch.from_numpy(np.array(words, dtype=np.uint64).view(np.int64))


class Cascade(ComposedDrafter):
    """Base class: the drafters of a cascade, and what they learn together.

    Attributes:
        drafters: of all levels.
    """

    rolls_back = True

    def __init__(self, drafters: Sequence[Any]) -> None:
        self.drafters = [as_drafter(one) for one in drafters]
        for drafter in self.drafters:
            if drafter.size:
                named = f"{drafter.name}, which drafts trees"
                raise ValueError(f"a cascade must hold drafters of chains, got {named}")
        self.needs = candidates_for(self.drafters)


class HorizontalCascade(Cascade):
    """The first tokens of a chain by one drafter, later ones by others.

    A chain's first tokens are the likeliest to be accepted, so a better drafter pays there only.

    Args:
        drafters: at least two, the best one first: draft models, drafters, or their names; all but
            the first must roll back.
        counts: most tokens that each of them drafts; the last one drafts the rest. ``[2]`` lets the
            first of two drafters draft two tokens.

    Raises:
        TypeError: a drafter or number of a wrong type.
        ValueError: fewer than two drafters, one that does not roll back, or other numbers.
    """

    name = "horizontal_cascade"

    def __init__(self, drafters: Sequence[Any], counts: Sequence[int]) -> None:
        super().__init__(list(drafters))
        for drafter in self.drafters[1:]:
            check_rolls_back(drafter)
        if not 2 <= len(self.drafters) <= MAX_LEVELS:
            raise ValueError(f"drafters must be 2 to {MAX_LEVELS}, got {len(self.drafters)}")
        counts = list(check_integers("counts", counts))
        if len(counts) != len(self.drafters) - 1 or min(counts) < 1:
            raise ValueError(
                f"counts must be {len(self.drafters) - 1} numbers of at least 1, one for each "
                f"drafter but the last, got {counts}"
            )
        self.counts = counts
        self.draws = all(drafter.draws for drafter in self.drafters)
        self.rolls_back = all(drafter.rolls_back for drafter in self.drafters)
        if self.draws:
            self.rules = RULES_OF_DRAWN_DRAFTS

    def begin(self, call: DrafterCall) -> State:
        """Begin a call with every drafter."""
        return HorizontalState(self, call)


class HorizontalState(State):
    """What the drafters of a `HorizontalCascade` know of a call."""

    def __init__(self, drafter: HorizontalCascade, call: DrafterCall) -> None:
        self.drafter, self.call = drafter, call
        self.levels = [Level(part, level_call(call, k)) for k, part in enumerate(drafter.drafters)]
        costs = [level.state.cost for level in self.levels]
        self.cost = Cost.sum(costs)
        if not self.cost.at_once:  # each step is one drafter's
            most = max(cost.relative for cost in costs)
            self.cost = dataclasses.replace(self.cost, relative=most)

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        batch_size, gamma = len(texts.lengths), int(limits.max())
        drafted = np.full((batch_size, gamma), -1, dtype=np.int64)
        counts = np.zeros(batch_size, dtype=np.int64)
        for level in self.levels:
            level.call.begin_round(texts)
        parts: list[tuple[NDArray[np.int64], NDArray[np.int64], Drawn | None]] = []
        for level, own in zip(self.levels, [*self.drafter.counts, gamma], strict=True):
            most = np.minimum(limits - counts, own)
            if most.max() < 1:
                break
            draft = level.ask(with_drafts(texts, drafted, counts, most > 0), most)
            if draft is None:
                continue
            tokens, added = read_tokens(draft)
            for b in np.flatnonzero(added):
                drafted[b, counts[b] : counts[b] + added[b]] = tokens[b, : added[b]]
            parts.append((counts.copy(), added, draft.drawn))
            counts += added
        together = torch.from_numpy(drafted[:, : counts.max()].copy())
        if all(drawn is None for _, _, drawn in parts):
            return Draft(together, counts=counts)
        target = self.call.model
        together = together.to(target.device)
        joined = _joined(together, parts, vocab_size_of(target))
        return Draft(together, drawn=joined, counts=counts)

    def commit(self, texts: History, done: Round) -> None:
        for level in self.levels:
            level.commit(texts, done)

    def end(self, texts: History) -> None:
        for level in self.levels:
            level.state.end(texts)


def as_drafter(one: Any) -> Drafter:
    """A drafter of a level: a `Drafter`, one with a name, or a draft model."""
    if isinstance(one, Drafter):
        return one
    if is_language_model(one):
        return ModelDrafter(one)
    if not isinstance(one, str):
        raise TypeError(
            "a cascade must hold Drafters, names of drafters and draft models, got "
            f"{type(one).__name__}"
        )
    made: Drafter | None = make_drafter(one)
    if made is None:
        raise ValueError(f"a cascade must hold drafters with a name, got {shown(one)}")
    return made


def check_rolls_back(drafter: Drafter) -> None:
    """Raises ValueError for a drafter whose texts must not end with drafts."""
    if not drafter.rolls_back:
        raise ValueError(
            "drafter must set rolls_back = True to draft after other drafts in a cascade, "
            f"got {type(drafter).__name__}"
        )


def with_drafts(
    texts: History,
    drafted: NDArray[np.int64],
    counts: NDArray[np.int64],
    active: NDArray[np.bool_],
) -> History:
    """The texts with ``counts[b]`` drafts after each sequence's committed tokens."""
    lengths = texts.lengths + counts
    tokens = np.zeros((len(lengths), int(lengths.max())), dtype=np.int64)
    for b, (length, count) in enumerate(zip(texts.lengths, counts, strict=True)):
        tokens[b, :length] = texts.tokens[b, :length]
        tokens[b, length : length + count] = drafted[b, :count]
    return History(tokens, lengths, active)


def read_tokens(draft: Draft) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A checked draft's tokens on the host, and [B] how many there are before the first -1."""
    assert draft.counts is not None
    tokens = draft.tokens.cpu().numpy()
    present = np.arange(tokens.shape[1]) < draft.counts[:, None]
    return tokens, np.minimum.accumulate(present & (tokens >= 0), axis=1).sum(axis=1)


def _joined(
    tokens: torch.Tensor,
    parts: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], Drawn | None]],
    vocab_size: int,
) -> Drawn:
    """The rows of drafts by several drafters; a deterministic draft has a one-hot row.

    Args:
        tokens: [B, gamma] on the target's device.
        parts: for each drafter [B] where its drafts begin, [B] how many they are, and their rows.
        vocab_size: V.
    """
    joined = Drawn.one_hot(tokens, vocab_size)
    for begins, counts, drawn in parts:
        if drawn is None:
            continue
        for b in np.flatnonzero(counts).tolist():
            to, count = slice(int(begins[b]), int(begins[b] + counts[b])), int(counts[b])
            joined.logits[b, to] = drawn.logits[b, :count].float()
            joined.logsumexp[b, to] = drawn.logsumexp[b, :count].double()
            joined.threshold[b, to] = drawn.threshold[b, :count]
    return joined
