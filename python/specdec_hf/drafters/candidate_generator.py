"""Drafts from a candidate generator of Transformers, whatever it is.

A draft that verification treats as deterministic may come from anywhere, also from a random draw.
Its Q is one-hot at the drafted token x: the rules accept x with probability P(x), and otherwise
draw the recovered token from P without x, so the emitted token follows P for every single x, and
hence for every distribution of x that does not depend on the noise of the verification. Candidate
logits are therefore used only where they are known to be those that the drafts were drawn from: a
greedy generator hands out logits too, and ratios with them would be biased.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationMixin
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    EarlyExitCandidateGenerator,
)

from specdec_hf.arguments import shown
from specdec_hf.drafting.context import DraftContext, History, reads_draft
from specdec_hf.drafting.drafter import Draft, Drafter, DraftOutcome
from specdec_hf.drafting.sampling import one_hot_logits
from specdec_hf.runner.protocol import to_device, vocab_size_of
from specdec_kernels import SampledDraft

_METHODS = ("get_candidates", "update_candidate_strategy")


def from_candidate_generator(generator: Any) -> CandidateGeneratorDrafter:
    """A drafter that asks a candidate generator of Transformers for its drafts.

    Args:
        generator: a `CandidateGenerator`, which serves one call with one sequence, because it keeps
            the cache of its text; or a function that makes one for each sequence of every call. The
            function is given the sequence's ``input_ids`` [1, T] on the target's device.

    Returns:
        A `Drafter`. It takes candidate logits for the distribution of the drafts where they are
        that: those of an `AssistedCandidateGenerator` or `EarlyExitCandidateGenerator` that
        samples. All other drafts are deterministic ones, which every rule may verify. Drafts
        beyond the number that the loop asks for are dropped. `update_candidate_strategy` gets
        ``scores`` of the right shape that hold NaN, because a drafter is not shown logits.

    Raises:
        TypeError: neither of the two.

    Example:
        >>> import torch
        >>> from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
        >>> drafter = from_candidate_generator(
        ...     lambda input_ids: PromptLookupCandidateGenerator(max_length=4096)
        ... )
        >>> drafter.name
        'candidate_generator'
    """
    return CandidateGeneratorDrafter(generator)


class CandidateGeneratorDrafter(Drafter):
    """See `from_candidate_generator`.

    Random numbers that a generator draws from torch's default generators are seeded for each
    sequence and round, and those generators are as before afterwards.
    """

    name = "candidate_generator"
    noise = "independent"

    def __init__(self, generator: Any) -> None:
        self._given = generator
        self._is_one = _is_generator(generator)
        self._served = False
        if not self._is_one and not callable(generator):
            raise TypeError(
                "generator must be a CandidateGenerator of Transformers or a function that makes "
                f"one, got {shown(generator)}"
            )

    def start(self, context: DraftContext) -> None:
        """Begin a new call.

        Raises:
            ValueError: one generator for several sequences or calls.
        """
        if self._is_one and context.batch_size != 1:
            raise ValueError(
                "from_candidate_generator needs a function that makes a generator for each "
                f"sequence with batch size {context.batch_size}, got one "
                f"{type(self._given).__name__}"
            )
        if self._is_one and self._served:
            raise ValueError(
                "from_candidate_generator needs a function that makes a generator to serve several "
                f"calls, got one {type(self._given).__name__}, which holds the text of the first"
            )
        self._served = True
        self._context = context
        self._generators: list[Any] = [None] * context.batch_size
        self._seeds = context.seeds.tolist()
        # Drafts and accepted drafts of the last round of each that drafted, for the next update.
        self._drafted = np.zeros(context.batch_size, dtype=np.int64)
        self._accepted = self._drafted.copy()
        # Which sequences have drafted in this round.
        self._in_round = np.zeros(context.batch_size, dtype=np.bool_)

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        batch_size, device = len(history.lengths), self._context.model.device
        gamma = int(limits.max())
        tokens = torch.full((batch_size, gamma), -1, dtype=torch.int64, device=device)
        counts = np.zeros(batch_size, dtype=np.int64)
        scores: list[torch.Tensor | None] = [None] * batch_size
        for b in np.flatnonzero(limits > 0).tolist():
            length = int(history.lengths[b])
            input_ids = to_device(history.tokens[b, :length], device)[None]
            generator = self._generator(b, input_ids)
            if self._drafted[b]:
                self._report(generator, b, input_ids)
            with _own_random_numbers(
                generator, (self._seeds[b] % 2**64, length, self._context.first_draft_index)
            ):
                found, logits = generator.get_candidates(input_ids)
            self._check(generator, found, input_ids.shape[1])
            # Not more than are verified: the generator is told whether all of them were accepted.
            drafted = found[0, input_ids.shape[1] :][: limits[b]].to(device)
            counts[b] = self._drafted[b] = len(drafted)
            tokens[b, : len(drafted)] = drafted
            if logits is not None and reads_draft(self._context.rule):
                scores[b] = self._scores(generator, logits, len(drafted))
        self._in_round = counts > 0
        size = int(counts.max())
        if size == 0:
            return None
        tokens = tokens[:, :size]
        return Draft(tokens, distribution=self._distribution(tokens, scores), counts=counts)

    def commit(self, outcome: DraftOutcome) -> None:
        self._accepted = np.where(self._in_round, outcome.accepted, self._accepted)
        self._in_round[:] = False

    def _generator(self, b: int, input_ids: torch.Tensor) -> Any:
        """The generator of a sequence."""
        if self._generators[b] is None:
            made = self._given if self._is_one else self._given(input_ids)
            if not _is_generator(made):
                raise TypeError(
                    "the function given to from_candidate_generator must make a CandidateGenerator,"
                    f" got {shown(made)}"
                )
            if getattr(made, "requires_model_outputs", False):
                raise ValueError(
                    f"{type(made).__name__} is not supported by from_candidate_generator: it needs "
                    "the target's hidden states and cache"
                )
            self._generators[b] = made
        return self._generators[b]

    def _report(self, generator: Any, b: int, input_ids: torch.Tensor) -> None:
        vocab_size = vocab_size_of(self._context.model)
        scores = torch.full((1, 1, 1), torch.nan, device=input_ids.device)
        scores = scores.expand(1, int(self._drafted[b]) + 1, vocab_size)
        generator.update_candidate_strategy(input_ids, scores, int(self._accepted[b]))
        self._drafted[b] = 0

    def _check(self, generator: Any, found: Any, length: int) -> None:
        shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        if not isinstance(shape, list) or len(shape) != 2 or shape[0] != 1 or shape[1] < length:
            raise ValueError(
                f"{type(generator).__name__}.get_candidates must return ids [1, {length} or more], "
                f"got {shape}"
            )

    def _scores(self, generator: Any, logits: torch.Tensor, count: int) -> torch.Tensor | None:
        """The rows [count, V] that the drafts were drawn from, or None if that is not known."""
        if not _draws_from_candidate_logits(generator):
            return None
        if logits.shape[-1] != vocab_size_of(self._context.model) or logits.shape[1] < count:
            self._context.note(
                f"{type(generator).__name__}: its drafts count as deterministic, because its "
                f"candidate logits are {list(logits.shape)}"
            )
            return None
        return logits[0, :count].float().to(self._context.model.device)

    def _distribution(
        self, tokens: torch.Tensor, scores: list[torch.Tensor | None]
    ) -> SampledDraft | None:
        """The draft distribution of all sequences; deterministic drafts get one-hot rows."""
        if all(rows is None for rows in scores):
            return None
        logits = one_hot_logits(tokens, vocab_size_of(self._context.model))
        for b, rows in enumerate(scores):
            if rows is not None:
                logits[b, : len(rows)] = rows
        sums = logits.logsumexp(dim=-1)
        return SampledDraft(logits, sums, torch.full_like(sums, -torch.inf), 1.0)


def _is_generator(value: Any) -> bool:
    """Whether this is a generator, and no class or function that makes one."""
    methods = [getattr(value, name, None) for name in _METHODS]
    return not isinstance(value, type) and all(map(callable, methods))


def _draws_from_candidate_logits(generator: Any) -> bool:
    """Whether the candidate logits are the scores that ``torch.multinomial`` drew the drafts from.

    They are what the model's `_sample` calls scores: logits after all processors and warpers.
    """
    if type(generator) not in (AssistedCandidateGenerator, EarlyExitCandidateGenerator):
        return False
    config, model = generator.generation_config, generator.assistant_model
    samples = getattr(model._sample, "__func__", None) is GenerationMixin._sample
    return bool(config.do_sample) and samples and config.num_beams in (None, 1)


@contextmanager
def _own_random_numbers(generator: Any, seed: tuple[int, ...]) -> Iterator[None]:
    """Seed torch's default generators for one call, and restore them."""
    state = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1)
    device = getattr(getattr(generator, "assistant_model", None), "device", torch.device("cpu"))
    if device.type != "cpu":
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            torch.manual_seed(state)
            yield
        return
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)
