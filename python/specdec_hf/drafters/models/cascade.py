"""Cascades: drafters that draft for one another within a round.

A drafter of a lower level drafts after tokens that are no committed text yet. So it must be one
that rolls back (`Drafter.rolls_back`), and reading those tokens costs a read from the device.

Source: Chen et al. 2023, "Cascade Speculative Drafting", arXiv 2312.11462.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import check_integers
from specdec_hf.cache.protocol import vocab_size_of
from specdec_hf.drafters.checks import ask, check_temperature
from specdec_hf.drafters.context import (
    MAX_DRAFTS_PER_ROUND,
    Candidates,
    DraftContext,
    History,
)
from specdec_hf.drafters.drafter import RULES_OF_DRAWN_DRAFTS, Draft, Drafter, DraftOutcome
from specdec_hf.drafters.tensors import one_hot_logits
from specdec_hf.hf_arguments.language_model import is_language_model
from specdec_kernels import SampledDraft

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
        return torch.from_numpy(positions).to(device, non_blocking=True)


def level_context(context: DraftContext, level: int, **changes: Any) -> LevelContext:
    """The context of the drafter of one level below a context.

    It has seeds of its own, so that no other level uses its noise. Under rule match all levels
    share the target's, and the text is that noise's whatever is drafted.
    """
    values = {f.name: getattr(context, f.name) for f in dataclasses.fields(DraftContext)}
    values |= changes
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
        self.candidates = max(drafter.candidates for drafter in self.drafters)

    def observe(self, history: History, candidates: Candidates) -> None:
        for drafter in self.drafters:
            if drafter.candidates:
                drafter.observe(history, candidates.first(drafter.candidates))


class HorizontalCascade(Cascade):
    """The first tokens of a chain by one drafter, later ones by others.

    A chain's first tokens are the likeliest to be accepted, so a better drafter pays there only.

    Args:
        drafters: at least two, the best one first: draft models, or drafters that roll back.
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
        size = int(counts.max())
        if size == 0:
            return None
        together = torch.from_numpy(drafted[:, :size].copy())
        if all(distribution is None for _, _, distribution in parts):
            return Draft(together, counts=counts)
        target = self._context.model
        joined = _joined(together, parts, self._context.temperature, target)
        return Draft(together.to(target.device), distribution=joined, counts=counts)

    def commit(self, outcome: DraftOutcome) -> None:
        for drafter in self.drafters:
            drafter.commit(outcome)


def _as_drafter(one: Any) -> Drafter:
    """A drafter of a level: one that is given, or a draft model."""
    from specdec_hf.drafters.models.model import ModelDrafter  # noqa: PLC0415  # it may use cascades

    if isinstance(one, Drafter):
        return one
    if is_language_model(one):
        return ModelDrafter(one)
    raise TypeError(f"a cascade must hold Drafters and draft models, got {type(one).__name__}")


def check_rolls_back(drafter: Drafter) -> None:
    """Raises ValueError for a drafter that must not be shown drafts; see `Drafter.rolls_back`."""
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
