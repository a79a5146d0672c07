"""Logits processors that the op `apply_penalties_` computes for all rows of a round at once.

They are those of Transformers that add to the logits of single tokens, forbid them, or count the
tokens before a row; each is a function of its arguments.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specdec_hf.loop.session import Session
from specdec_kernels import Tree, apply_penalties_, providers


class PresenceFrequencyPenalty(LogitsProcessor):
    """The penalties of OpenAI's API: they count the tokens after the prompt.

    Args:
        presence: taken from the logit of each token that was generated.
        frequency: taken once for each time that it was.
        prompt: the number of tokens, padding included, that count as prompt.
    """

    def __init__(self, presence: float, frequency: float, prompt: int) -> None:
        self.presence, self.frequency, self.prompt = presence, frequency, prompt

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores [B, V] less the penalties of the tokens in input_ids [B, T]."""
        counts = torch.zeros_like(scores)
        generated = input_ids[:, self.prompt :]
        counts.scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        less = scores - self.frequency * counts - self.presence * (counts > 0)
        return less  # type: ignore[return-value]  # a Tensor


class Penalties(NamedTuple):
    """What the processors of one sequence do, in the order in which the op does it."""

    biases: tuple[tuple[int, float], ...] = ()
    ends: tuple[int, ...] = ()
    least: int = 0  # tokens, padding included, before which no end may come
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: int = 0
    largest_id: int = -1  # of those that must be in the vocabulary


def penalties_of(processors: tuple[Any, ...]) -> Penalties | None:
    """None where some processor does anything else, or in another order."""
    made = Penalties()
    for one in processors:
        after = _with(made, one)
        if after is None:
            return None
        made = after
    return made


def _with(made: Penalties, one: Any) -> Penalties | None:
    """What was made so far and then a processor; None where the op has no place for that."""
    kind = type(one)
    if kind in (SequenceBiasLogitsProcessor, NoBadWordsLogitsProcessor):
        ids = dict(one.sequence_bias)
        added = [(int(sequence[0]), float(bias)) for sequence, bias in ids.items()]
        single = all(len(sequence) == 1 for sequence in ids)
        counted = made.repetition != 1 or made.presence or made.frequency
        late = counted and any(bias != -math.inf for _, bias in added)
        if late or not single:
            return None
        largest = max([made.largest_id, *(token for token, _ in added)])
        return made._replace(biases=(*made.biases, *added), largest_id=largest)
    if kind is SuppressTokensLogitsProcessor:
        added = [(token, -math.inf) for token in one.suppress_tokens.tolist()]
        return made._replace(biases=(*made.biases, *added))
    if kind in (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor):
        ends = tuple(one.eos_token_id.tolist())
        least = (
            one.min_length
            if kind is MinLengthLogitsProcessor
            else one.prompt_length_to_skip + one.min_new_tokens
        )
        fits = made.ends in ((), ends)
        return made._replace(ends=ends, least=max(made.least, least)) if fits else None
    if kind is RepetitionPenaltyLogitsProcessor:
        alone = made.repetition == 1 and not made.presence and not made.frequency
        fits = alone and one.prompt_ignore_length is None
        return made._replace(repetition=float(one.penalty)) if fits else None
    if kind is PresenceFrequencyPenalty and not made.presence and not made.frequency:
        return made._replace(presence=one.presence, frequency=one.frequency, prompt=one.prompt)
    return None


def penalise(
    session: Session, rows: torch.Tensor, drafts: Tree, processors: dict[int, tuple[Any, ...]]
) -> set[int]:
    """Change the rows [B, N+1, V] of the sequences whose processors the op computes.

    Args:
        session: has the texts.
        rows: changed in place.
        drafts: tokens and parents [B, N].
        processors: by the index of the sequence.

    Returns:
        These sequences, and those without processors; the rows of others keep their bits.
    """
    served = providers()["apply_penalties_"].get(rows.device.type, "none") != "none"
    found: dict[int, Penalties] = {}
    ends: tuple[int, ...] = ()
    for b, listed in processors.items():
        one = penalties_of(listed) if served and listed else None
        if one is None or (one.ends and ends and one.ends != ends):
            continue
        if one.largest_id >= rows.shape[-1]:
            continue  # its processors raise
        found[b], ends = one, ends or one.ends
    if found:
        _apply(rows, drafts, found, {b: session.padded_ids(b) for b in found}, ends)
    return {b for b, listed in processors.items() if b in found or not listed}


def _apply(
    rows: torch.Tensor,
    drafts: Tree,
    found: dict[int, Penalties],
    texts: dict[int, NDArray[np.int64]],
    ends: tuple[int, ...],
) -> None:
    batch, vocab, device = len(rows), rows.shape[-1], rows.device

    def vector(values: dict[int, float], rest: float) -> torch.Tensor:
        made = [values.get(b, rest) for b in range(batch)]
        return torch.tensor(made, dtype=torch.float32, device=device)

    named = max(len(one.biases) for one in found.values())
    ids = np.full((batch, named), -1)
    biases = np.zeros((batch, named), np.float32)
    seen = np.zeros((batch, -(-vocab // 32) * 32), bool)
    counts: NDArray[np.int32] | None = None
    if any(one.presence or one.frequency for one in found.values()):
        counts = np.zeros((batch, vocab), np.int32)
    least = np.zeros(batch, np.int64)
    for b, one in found.items():
        for k, (token, bias) in enumerate(one.biases):
            ids[b, k], biases[b, k] = token, bias
        if one.repetition != 1:
            seen[b, texts[b][(texts[b] >= 0) & (texts[b] < vocab)]] = True
        if counts is not None and (one.presence or one.frequency):
            generated = texts[b][one.prompt :]
            generated = generated[(generated >= 0) & (generated < vocab)]
            counts[b] = np.bincount(generated, minlength=vocab)
        least[b] = one.least - len(texts[b])
    words = np.packbits(seen, axis=-1, bitorder="little").view(np.int32)
    apply_penalties_(
        rows,
        drafts,
        token_counts=None if counts is None else torch.from_numpy(counts).to(device),
        prompt_mask=torch.from_numpy(words).to(device) if seen.any() else None,
        repetition_penalty=vector({b: one.repetition for b, one in found.items()}, 1.0),
        presence_penalty=vector({b: one.presence for b, one in found.items()}, 0.0),
        frequency_penalty=vector({b: one.frequency for b, one in found.items()}, 0.0),
        bias_ids=torch.from_numpy(ids).to(device) if named else None,
        biases=torch.from_numpy(biases).to(device) if named else None,
        min_new_tokens=torch.from_numpy(least).to(device) if ends else None,
        eos_token_ids=torch.tensor(ends, device=device) if ends else None,
    )
