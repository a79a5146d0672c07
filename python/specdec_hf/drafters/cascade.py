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
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer, check_integers, shown
from specdec_hf.drafters.model import DraftModel, ModelDrafter
from specdec_hf.drafters.sparse_cache import SparseCacheDraft, SparseCacheDrafter
from specdec_hf.drafting.checks import ask, check_temperature
from specdec_hf.drafting.context import (
    MAX_DRAFTS_PER_ROUND,
    Candidates,
    DraftContext,
    History,
    reads_draft,
)
from specdec_hf.drafting.drafter import RULES_OF_DRAWN_DRAFTS, Draft, Drafter, DraftOutcome
from specdec_hf.drafting.registry import make_drafter
from specdec_hf.drafting.sampling import one_hot_logits
from specdec_hf.request.inputs import check_language_model, is_language_model
from specdec_hf.runner.protocol import to_device, vocab_size_of
from specdec_kernels import Rule, SampledDraft, Verdict, verify_chain

MAX_LEVELS = 8  # drafters of one cascade


@dataclass
class LevelContext(DraftContext):
    """The context of one drafter of a cascade, which drafts after tokens of the same round.

    Attributes:
        parent: the context of the cascade.
        round_lengths: [B] committed tokens of each sequence when the round began. Noise of the
            round belongs to them, not to the drafts between, whose number a later round may repeat.
        asks: [B] how often this drafter has been asked before in the round. Each time has noise of
            its own, since a sequence is drafted as many tokens as the batch needs.
    """

    parent: DraftContext | None = None
    round_lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    asks: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def begin(self, history: History) -> None:
        """Begin a proposal of the cascade, which another cascade may ask for again in a round."""
        if isinstance(self.parent, LevelContext):
            self.round_lengths = self.parent.round_lengths
            self.asks = np.where(self.parent.asks == 0, 0, self.asks)
        else:
            self.round_lengths = history.lengths
            self.asks = np.zeros_like(history.lengths)

    def noise_positions(
        self,
        lengths: NDArray[np.int64] | torch.Tensor,
        index: int | Sequence[int] | NDArray[np.int64],
        *,
        depth: int | None = None,
    ) -> torch.Tensor:
        if self.rule == "match":
            return super().noise_positions(lengths, index, depth=depth)
        self.asked_for_noise = True
        device = lengths.device if isinstance(lengths, torch.Tensor) else self.seeds.device
        base = self.round_lengths + ((self.asks * MAX_DRAFTS_PER_ROUND + 1) << 32)
        offsets = np.asarray(index, dtype=np.int64) << 32
        positions = base + offsets if offsets.ndim == 0 else base[:, None] + offsets
        return to_device(positions, device)


def level_context(context: DraftContext, level: int, **changes: Any) -> LevelContext:
    """The context of the drafter of one level below a context.

    It has seeds of its own, so that no other level uses its noise. Under rule match all levels
    share the target's, and the text is that noise's whatever is drafted.
    """
    values = {f.name: getattr(context, f.name) for f in dataclasses.fields(DraftContext)}
    values |= {"sampled": context.sampled_seeds(), **changes}
    if values["rule"] != "match":
        seeds = derived_seeds(context.seeds.cpu(), level, context.first_draft_index)
        values["seeds"] = seeds.to(values["seeds"].device)
    asks = np.zeros(context.batch_size, dtype=np.int64)
    return LevelContext(**values, parent=context, asks=asks)


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


class Cascade(Drafter):
    """Base class: the drafters of a cascade, and what they learn together.

    Attributes:
        drafters: of all levels.
    """

    rolls_back = True

    def __init__(self, drafters: Sequence[Any]) -> None:
        self.drafters = [_as_drafter(one) for one in drafters]
        self.candidates = max((drafter.candidates for drafter in self.drafters), default=0)

    def observe(self, history: History, candidates: Candidates) -> None:
        for drafter in self.drafters:
            if drafter.candidates:
                drafter.observe(history, candidates.first(drafter.candidates))


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

    def start(self, context: DraftContext) -> None:
        """Begin a new call with every drafter."""
        self._context = context
        self._contexts = [level_context(context, k) for k in range(len(self.drafters))]
        for drafter, mine in zip(self.drafters, self._contexts, strict=True):
            drafter.start(mine)
        self.add_up_costs(self.drafters)
        if not self.drafts_at_once:  # each step is one drafter's
            self.relative_cost = max(drafter.relative_cost for drafter in self.drafters)

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        batch_size, gamma = len(history.lengths), int(limits.max())
        drafted = np.full((batch_size, gamma), -1, dtype=np.int64)
        counts = np.zeros(batch_size, dtype=np.int64)
        for context in self._contexts:
            context.begin(history)
        parts: list[tuple[NDArray[np.int64], NDArray[np.int64], SampledDraft | None]] = []
        for k, (drafter, context) in enumerate(zip(self.drafters, self._contexts, strict=True)):
            most = np.minimum(limits - counts, [*self.counts, gamma][k])
            if most.max() < 1:
                break
            shown = with_drafts(history, drafted, counts, most > 0)
            draft = ask(drafter, shown, most, context)
            context.asks += most > 0
            if draft is None:
                continue
            rows = draft.distribution
            if rows is not None:
                check_temperature(drafter, rows, context.temperature, "HorizontalCascade")
            tokens, added = read_tokens(draft, most)
            for b in np.flatnonzero(added):
                drafted[b, counts[b] : counts[b] + added[b]] = tokens[b, : added[b]]
            parts.append((counts.copy(), added, rows))
            counts += added
        self._context.asked_for_noise = True  # `ask` has checked each part's noise
        together = torch.from_numpy(drafted[:, : counts.max()].copy())
        if all(distribution is None for _, _, distribution in parts):
            return Draft(together, counts=counts)
        target = self._context.model
        joined = _joined(together, parts, self._context.temperature, target)
        return Draft(together.to(target.device), distribution=joined, counts=counts)

    def commit(self, outcome: DraftOutcome) -> None:
        for drafter in self.drafters:
            drafter.commit(outcome)


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
    """Raises ValueError for a drafter whose history must not end with drafts."""
    if not drafter.rolls_back:
        raise ValueError(
            "drafter must set rolls_back = True to draft after other drafts in a cascade, "
            f"got {type(drafter).__name__}"
        )


def with_drafts(
    history: History,
    drafted: NDArray[np.int64],
    counts: NDArray[np.int64],
    active: NDArray[np.bool_],
) -> History:
    """The history with ``counts[b]`` drafts after each sequence's committed tokens."""
    lengths = history.lengths + counts
    tokens = np.zeros((len(lengths), int(lengths.max())), dtype=np.int64)
    for b, (length, count) in enumerate(zip(history.lengths, counts, strict=True)):
        tokens[b, :length] = history.tokens[b, :length]
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
    parts: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], SampledDraft | None]],
    temperature: float | torch.Tensor,
    target: Any,
) -> SampledDraft:
    """One distribution of drafts by several drafters; a deterministic one has a one-hot row.

    Args:
        tokens: [B, gamma].
        parts: for each drafter [B] where its drafts begin, [B] how many they are, and their rows.
        temperature: of all rows.
        target: the model.
    """
    device = target.device
    logits = one_hot_logits(tokens.to(device), vocab_size_of(target))
    sums = torch.zeros(tokens.shape, dtype=torch.float64, device=device)
    thresholds = torch.full(tokens.shape, -torch.inf, device=device)
    for begins, counts, rows in parts:
        if rows is None:
            continue
        for b in np.flatnonzero(counts).tolist():
            to, count = slice(int(begins[b]), int(begins[b] + counts[b])), int(counts[b])
            logits[b, to] = rows.logits[b, :count].float()
            sums[b, to] = rows.logsumexp[b, :count].double()
            thresholds[b, to] = rows.threshold[b, :count]
    return SampledDraft(logits, sums, thresholds, temperature)


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
            self.makes_forward, self.rolls_back = True, False
        else:
            check_language_model("model", self.model)
        self.num_assistant_tokens = check_integer("num_assistant_tokens", num_assistant_tokens, 1)
        super().__init__([drafter])
        check_rolls_back(self.drafters[0])

    def start(self, context: DraftContext) -> None:
        """Check the vocabularies and make empty caches.

        Raises:
            ValueError: vocabularies that differ in size, and what `SparseCacheDrafter` refuses.
        """
        self._context = context
        self._draft: DraftModel | SparseCacheDraft
        if isinstance(self.model, SparseCacheDrafter):
            self._draft, lead = self.model.draft_in(context), context.model
        else:
            self._draft, lead = DraftModel(self.model, context), self.model
        self.relative_cost = self._draft.relative_cost
        # The draft model's rule. Where Q is read it must be lossless for Q. Under match all levels
        # share the noise of a position, and the greedy rule serves drafts that are not drawn.
        rule = "greedy"
        if context.rule == "match" or reads_draft(context.rule):
            rule = "match" if context.rule == "match" else "token"
        self._inner = level_context(
            context,
            0,
            model=lead,
            runner=None,
            rule=rule,
            seeds=context.seeds.to(self._draft.device),
        )
        self._seeds = context.seeds.cpu()
        self.drafters[0].start(self._inner)

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        draft, batch_size = self._draft, len(history.lengths)
        limits = draft.room(history, limits)
        gamma = int(limits.max())
        if gamma < 1:
            return None
        draft.begin_round(dataclasses.replace(history, active=limits > 0))
        drafted = np.full((batch_size, gamma), -1, dtype=np.int64)
        counts = np.zeros(batch_size, dtype=np.int64)
        rows: torch.Tensor | None = None
        self._inner.begin(history)
        seeds = self._round_seeds(history.lengths)
        active = limits > 0
        while active.any():
            shown = with_drafts(history, drafted, counts, active)
            # A sequence's own number: the noise of its drafts must not depend on the batch.
            most = np.where(active, np.minimum(limits - counts - 1, self.num_assistant_tokens), 0)
            emitted, accepted, logits = self._round(shown, most, seeds)
            if rows is None:
                rows = logits.new_zeros((batch_size, gamma, logits.shape[2]))
            added = np.where(active, np.minimum((emitted >= 0).sum(axis=1), limits - counts), 0)
            for b in np.flatnonzero(added).tolist():
                to = slice(int(counts[b]), int(counts[b] + added[b]))
                drafted[b, to] = emitted[b, : added[b]]
                rows[b, to] = logits[b, : added[b]]
            counts += added
            active &= (added > 0) & (counts < limits)
            # The last of the added tokens is pending: no cache holds it.
            kept = np.minimum(accepted, np.maximum(added - 1, 0))
            draft.truncate(shown.lengths + np.maximum(added - 1, 0))
            self.drafters[0].commit(DraftOutcome.of_chain(shown.lengths, kept, emitted))
        self._context.asked_for_noise = True
        if rows is None or not counts.any():
            return None
        tokens = torch.from_numpy(drafted)
        if not reads_draft(self._context.rule) and self._context.continue_drafting is None:
            return Draft(tokens, counts=counts)
        target = self._context.model.device
        zeros = torch.zeros((batch_size, gamma), dtype=torch.int64, device=draft.device)
        # The statistics of the rows; the tokens that come with them are not used.
        drawn = draft.sampler.sample(rows, zeros)
        distribution = SampledDraft(
            rows.to(target), drawn.logsumexp.to(target), drawn.threshold.to(target),
            self._context.temperature,
        )  # fmt: skip
        return Draft(tokens.to(target), distribution=distribution, counts=counts)

    def commit(self, outcome: DraftOutcome) -> None:
        self._draft.truncate(outcome.lengths + outcome.accepted)
        self.drafters[0].commit(outcome)

    def _round(
        self, history: History, most: NDArray[np.int64], seeds: torch.Tensor
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], torch.Tensor]:
        """One round of the draft model.

        Args:
            history: what it continues.
            most: [B], how many tokens the smaller drafter may draft.
            seeds: [B] int64, of the verification.

        Returns:
            Emitted tokens [B, m+1], -1 after their end; [B] how many of them were drafted; and the
            draft model's logits [B, m+1, V].
        """
        draft, proposed = self._draft, None
        if most.any():
            shown = dataclasses.replace(history, active=most > 0)
            proposed = ask(self.drafters[0], shown, most, self._inner)
        ids = torch.empty((len(history.lengths), 0), dtype=torch.int64, device=draft.device)
        distribution = None
        self._inner.asks += most > 0
        if proposed is not None:
            found, counts = read_tokens(proposed, most)
            found = np.where(np.arange(found.shape[1]) < counts[:, None], found, -1)
            ids, distribution = to_device(found, draft.device), proposed.distribution
        missing = int((history.lengths - draft.runner.lengths).max())
        window = to_device(history.last(missing), draft.device)
        window = torch.cat([window, ids.clamp(min=0)], dim=1)
        logits = draft.runner.forward(window, history.lengths - missing, ids.shape[1] + 1)
        positions = to_device(history.lengths, draft.device)
        verdict = self._verify(logits, ids, distribution, seeds, positions)
        outcome = torch.cat([verdict.tokens, verdict.num_accepted[:, None].long()], dim=1)
        read = outcome.cpu().numpy()
        return read[:, :-1], read[:, -1], logits

    def _verify(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        distribution: SampledDraft | None,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> Verdict:
        return verify_chain(
            logits, ids, distribution, rule=cast(Rule, self._inner.rule),
            **self._draft.sampler.sampling, seeds=seeds, positions=positions,
        )  # fmt: skip

    def _round_seeds(self, lengths: NDArray[np.int64]) -> torch.Tensor:
        """[B] int64, the seeds with which the draft model verifies in this round of the target.

        The target verifies at the same positions, and needs noise that decided nothing before.
        """
        if self._inner.rule == "match":
            return self._inner.seeds
        begun, first = self._inner.round_lengths, self._context.first_draft_index
        seeds = derived_seeds(self._seeds, begun, lengths, first)
        return seeds.to(self._draft.device, non_blocking=True)
