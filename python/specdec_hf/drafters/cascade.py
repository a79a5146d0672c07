"""Cascades: drafters that draft for one another within a round.

A drafter of a lower level drafts after tokens that are no committed text yet. So it must be one
that rolls back (`Drafter.rolls_back`), and reading those tokens costs a read from the device.

In a `VerticalCascade` the draft model verifies the smaller drafter's tokens, and the target those
that were verified. A verified token follows the draft model's distribution exactly: after a
rejection it is drawn from the residual, not from the draft model. So the reported rows are those
of the draft model, as if it had drawn every token by itself.

Source: Chen et al. 2023, "Cascade Speculative Drafting", arXiv 2312.11462.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer, check_integers, shown
from specdec_hf.drafters.composed import ComposedDrafter, candidates_for, round_for, values_of
from specdec_hf.drafters.model import DraftModel, ModelDrafter
from specdec_hf.drafters.sparse_cache import SparseCacheDrafter, SparseCacheStepper
from specdec_hf.drafting.call import (
    MAX_DRAFTS_PER_ROUND,
    Asks,
    DrafterCall,
    Drawn,
    reads_draft,
)
from specdec_hf.drafting.checks import ask, begin_state
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
from specdec_hf.request.inputs import check_language_model, is_language_model
from specdec_hf.runner.protocol import to_device, vocab_size_of
from specdec_kernels import Rule, Verdict, verify_chain

if TYPE_CHECKING:
    from typing_extensions import Self

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
        draft = ask(self.drafter, self.state, texts, most, self.call)
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
        self.drafters = [_as_drafter(one) for one in drafters]
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
            tokens, added = read_tokens(draft, most)
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


def _as_drafter(one: Any) -> Drafter:
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


def read_tokens(
    draft: Draft, most: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A checked draft's tokens on the host, and [B] how many there are before the first -1."""
    assert draft.counts is not None
    tokens = draft.tokens.cpu().numpy()
    present = np.arange(tokens.shape[1]) < np.minimum(draft.counts, most)[:, None]
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


class VerticalCascade(Cascade):
    """A draft model whose tokens a smaller drafter drafts.

    A round of the target holds several rounds of the draft model. Each reads the draft model's
    device once for the outcome of the verification, and once more for drafts that lie on a device.
    With a `TreeSpec` it drafts the trees of its model with fewer forwards; see staged.py.

    The draft model may be the target over a `SparseCacheDrafter`, as in TriForce (Sun et al. 2024,
    arXiv 2404.11912): it then drafts chains for that target.

    Args:
        model: the draft model. Neither it nor its configs are changed. Or a `SparseCacheDrafter`,
            or its name.
        drafter: drafts for it: a smaller model, the name of a drafter, or a `Drafter`, such as
            another `VerticalCascade`; one that rolls back.
        num_assistant_tokens: tokens that ``drafter`` drafts in each round of ``model``.

    Raises:
        TypeError: no model, or no drafter.
        ValueError: a drafter that does not roll back.
    """

    name = "vertical_cascade"
    draws = True
    rules = RULES_OF_DRAWN_DRAFTS

    def __init__(self, model: Any, drafter: Any, num_assistant_tokens: int = 3) -> None:
        self.model: Any = _as_drafter(model) if isinstance(model, str) else model
        if isinstance(self.model, SparseCacheDrafter):
            self.rolls_back = False
        else:
            check_language_model("model", self.model)
        self.num_assistant_tokens = check_integer("num_assistant_tokens", num_assistant_tokens, 1)
        super().__init__([drafter])
        check_rolls_back(self.drafters[0])
        forwards = isinstance(self.model, SparseCacheDrafter)
        self.is_model = not forwards
        self.needs = dataclasses.replace(self.needs, target_forward=forwards)

    def for_target(self, model: Any) -> Self:
        """The same of a drafter that drafts for the draft model."""
        sparse = isinstance(self.model, SparseCacheDrafter)
        return super().for_target(model if sparse else self.model)

    def begin(self, call: DrafterCall) -> State:
        """Check the vocabularies and make empty caches.

        Raises:
            ValueError: vocabularies that differ in size, and what `SparseCacheDrafter` refuses.
        """
        return VerticalState(self, call)


class VerticalState(State):
    """What the draft model of a `VerticalCascade` and the drafter below it know of a call."""

    def __init__(self, drafter: VerticalCascade, call: DrafterCall) -> None:
        self.drafter, self.call = drafter, call
        self.stepper: DraftModel | SparseCacheStepper
        if isinstance(drafter.model, SparseCacheDrafter):
            self.stepper, lead = drafter.model.stepper(call), call.model
        else:
            self.stepper, lead = DraftModel(drafter.model, call), drafter.model
        self.cost = Cost(self.stepper.cost.relative)
        # The draft model's rule. Where Q is read it must be lossless for Q. Under match all levels
        # share the noise of a position, and the greedy rule serves drafts that are not drawn.
        rule = "greedy"
        if call.rule == "match" or reads_draft(call.rule):
            rule = "match" if call.rule == "match" else "token"
        inner = level_call(
            call,
            0,
            model=lead,
            runner=None,
            rule=rule,
            seeds=call.seeds.to(self.stepper.device),
        )
        self._seeds = call.seeds.cpu()
        self.below = Level(drafter.drafters[0], inner)

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        call, stepper, batch_size = self.call, self.stepper, len(texts.lengths)
        limits = stepper.room(texts, limits)
        gamma = int(limits.max())
        if gamma < 1:
            return None
        active = limits > 0
        stepper.begin_round(dataclasses.replace(texts, active=active))
        drafted = np.full((batch_size, gamma), -1, dtype=np.int64)
        counts = np.zeros(batch_size, dtype=np.int64)
        rows: torch.Tensor | None = None
        self.below.call.begin_round(texts)
        seeds = self._round_seeds(texts.lengths)
        before = with_drafts(texts, drafted, counts, active)
        while active.any():
            # A sequence's own number: the noise of its drafts must not depend on the batch.
            longest = self.drafter.num_assistant_tokens
            most = np.where(active, np.minimum(limits - counts - 1, longest), 0)
            emitted, accepted, logits = self._round(before, most, seeds)
            if rows is None:
                rows = logits.new_zeros((batch_size, gamma, logits.shape[2]))
            added = np.where(active, np.minimum((emitted >= 0).sum(axis=1), limits - counts), 0)
            for b in np.flatnonzero(added).tolist():
                to = slice(int(counts[b]), int(counts[b] + added[b]))
                drafted[b, to] = emitted[b, : added[b]]
                rows[b, to] = logits[b, : added[b]]
            counts += added
            active = active & (added > 0) & (counts < limits)
            # The last of the added tokens is pending: no cache holds it.
            kept = np.minimum(accepted, np.maximum(added - 1, 0))
            stepper.truncate(before.lengths + np.maximum(added - 1, 0))
            after = with_drafts(texts, drafted, counts, active)
            done = Round.of_chain(before.lengths, before.active, kept, emitted)
            self.below.commit(after, done)
            before = after
        if rows is None or not counts.any():
            return None
        tokens = torch.from_numpy(drafted)
        if not reads_draft(call.rule) and call.asks.continue_drafting is None:
            return Draft(tokens, counts=counts)
        # The statistics of the rows; the tokens that come with them are not used.
        drawn = call.draw(texts, rows, range(gamma), sampling=stepper.sampling)
        drawn = dataclasses.replace(drawn, tokens=tokens.to(stepper.device))
        return Draft(tokens.to(call.model.device), drawn=drawn, counts=counts)

    def commit(self, texts: History, done: Round) -> None:
        self.stepper.truncate(done.lengths + done.accepted)
        self.below.commit(texts, done)

    def end(self, texts: History) -> None:
        self.below.state.end(texts)

    def _round(
        self, texts: History, most: NDArray[np.int64], seeds: torch.Tensor
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], torch.Tensor]:
        """One round of the draft model.

        Args:
            texts: what it continues.
            most: [B], how many tokens the smaller drafter may draft.
            seeds: [B] int64, of the verification.

        Returns:
            Emitted tokens [B, m+1], -1 after their end; [B] how many of them were drafted; and the
            draft model's logits [B, m+1, V].
        """
        stepper, runner, proposed = self.stepper, self.stepper.runner, None
        if most.any():
            proposed = self.below.ask(dataclasses.replace(texts, active=most > 0), most)
        ids = torch.empty((len(texts.lengths), 0), dtype=torch.int64, device=stepper.device)
        drawn = None
        if proposed is not None:
            found, counts = read_tokens(proposed, most)
            found = np.where(np.arange(found.shape[1]) < counts[:, None], found, -1)
            ids, drawn = to_device(found, stepper.device), proposed.drawn
        missing = int((texts.lengths - runner.lengths).max())
        window = to_device(texts.last(missing), stepper.device)
        window = torch.cat([window, ids.clamp(min=0)], dim=1)
        logits = runner.forward(window, texts.lengths - missing, ids.shape[1] + 1)
        positions = to_device(texts.lengths, stepper.device)
        verdict = self._verify(logits, ids, drawn, seeds, positions)
        outcome = torch.cat([verdict.tokens, verdict.num_accepted[:, None].long()], dim=1)
        read = outcome.cpu().numpy()
        return read[:, :-1], read[:, -1], logits

    def _verify(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        drawn: Drawn | None,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> Verdict:
        given = self.below.call.sampling_on(self.stepper.device)
        draft = None if drawn is None else drawn.at(given["temperature"])
        given |= {**self.stepper.sampling, "seeds": seeds}
        rule = cast(Rule, self.below.call.rule)
        return verify_chain(logits, ids, draft, rule=rule, **given, positions=positions)

    def _round_seeds(self, lengths: NDArray[np.int64]) -> torch.Tensor:
        """[B] int64, the seeds with which the draft model verifies in this round of the target.

        The target verifies at the same positions, and needs noise that decided nothing before.
        """
        inner = self.below.call
        if inner.rule == "match":
            return inner.seeds
        seeds = derived_seeds(
            self._seeds, inner.round.lengths, lengths, self.call.first_draft_index
        )
        return seeds.to(self.stepper.device, non_blocking=True)
