"""Hugging Face's logits processors and stopping criteria, asked about one sequence at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList, StoppingCriteriaList

from specdec_hf.loop.session import Session
from specdec_hf.runner.protocol import to_device
from specdec_kernels import Tree


def process_logits(session: Session, logits: torch.Tensor, drafts: Tree) -> torch.Tensor:
    """Logits [B, N+1, V] float32 after the processors, each row with the path to it as prefix.

    Rows after a draft that cannot be accepted, because it is absent or a processor forbids it, are
    left as they are: verification never reaches them, and a processor must not be shown a prefix
    that plain decoding could not have made.

    Args:
        session: names the processors of each sequence.
        logits: [B, N+1, V], the row of the pending token, then those of the drafts.
        drafts: tokens and parents [B, N].
    """
    processors: list[Any] = session.processors
    processed = logits.to(torch.float32, copy=True)
    tokens, parents = drafts.tokens.tolist(), drafts.parents.tolist()
    for b in np.flatnonzero(session.history.active).tolist():
        prefixes = {-1: to_device(session.padded_ids(b), session.model.device)[None]}
        processed[b, 0] = processors[b](prefixes[-1], processed[b, 0][None])[0]
        for n, (token, parent) in enumerate(zip(tokens[b], parents[b], strict=True)):
            if parent not in prefixes or not 0 <= token < logits.shape[2]:
                continue
            if processed[b, parent + 1, token] == -torch.inf:
                continue
            prefixes[n] = torch.cat([prefixes[parent], drafts.tokens[b, n].view(1, 1)], dim=1)
            processed[b, n + 1] = processors[b](prefixes[n], processed[b, n + 1][None])[0]
    return processed


def process_ended(
    session: Session,
    logits: torch.Tensor,
    counts: NDArray[np.int64],
    padding: NDArray[np.int64] | None = None,
) -> torch.Tensor:
    """Logits [B, n, V] float32 after the processors, for sequences that go on with padding.

    Args:
        session: names the processors of each sequence.
        logits: [B, n, V], the rows of the last token and of the padding after it.
        counts: [B], how many rows of each sequence are wanted; 0 for one that is not behind.
        padding: [B], how much padding there is before the first row; None is none.
    """
    processors: list[Any] = session.processors
    processed = logits.to(torch.float32, copy=True)
    for b in np.flatnonzero(counts).tolist():
        ids, first = session.padded_ids(b), 0 if padding is None else int(padding[b])
        for n in range(int(counts[b])):
            padded = np.pad(ids, (0, first + n), constant_values=session.call.pad)
            prefix = to_device(padded, session.model.device)[None]
            processed[b, n] = processors[b](prefix, processed[b, n][None])[0]
    return processed


def ends_text(
    criteria: StoppingCriteriaList,
    ids: NDArray[np.int64],
    device: torch.device,
    b: int = 0,
    batch_size: int = 1,
) -> bool:
    """Whether the criteria end a sequence with its last token.

    Args:
        criteria: they are called with ``input_ids`` [1, T] and ``scores`` None. The answer is one
            bool, or one for each sequence of the batch, [B], as from criteria that know the limits
            of each: then that of ``b`` counts.
        ids: [T], the sequence with its padding.
        device: of the model.
        b: index of the sequence.
        batch_size: number of sequences.

    Raises:
        ValueError: an answer of another size.
    """
    answer = criteria(to_device(ids, device)[None], None)
    answers = torch.as_tensor(answer, device="cpu").flatten()
    if len(answers) not in (1, batch_size):
        raise ValueError(
            f"stopping_criteria must answer with 1 or {batch_size} bools, got {len(answers)}"
        )
    return bool(answers[b if len(answers) == batch_size else 0])


class GuardedProcessors(LogitsProcessorList):
    """The processors of one sequence, whose errors end it alone.

    The row of a prefix for which they raise is not finite, so that verification ends the sequence
    there if its text comes that far, and not where a draft that is rejected leads.

    Attributes:
        errors: what they raised, by the prefix.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        super().__init__(processors)
        self.errors: dict[tuple[int, ...], Exception] = {}

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(input_ids, scores, **kwargs)
        except Exception as error:  # whatever a processor raises
            self.errors[tuple(input_ids[0].tolist())] = error
            return torch.full_like(scores, torch.nan)


class GuardedCriteria(StoppingCriteriaList):
    """The criteria of one call, whose errors end a sequence alone, where they raise.

    Attributes:
        errors: what they raised, by the text that ended.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self.errors: dict[tuple[int, ...], Exception] = {}

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(input_ids, scores, **kwargs)
        except Exception as error:  # whatever a criterion raises
            self.errors[tuple(input_ids[0].tolist())] = error
            return torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
