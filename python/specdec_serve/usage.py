"""Counts of the answers of a request, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec_hf.loop.statistics import SequenceStats
from specdec_hf.loop.streaming import Step

from specdec_serve.batch_queue import QueuedSequence


class Usage:
    """Counts the rounds of the texts of a request.

    Args:
        sequences: the texts.
        copies: how many texts, which follow one another, share a prompt.
    """

    def __init__(self, sequences: Sequence[QueuedSequence], copies: int) -> None:
        self._first = sequences[::copies]
        self._prompts = sum(len(one.input_ids) for one in self._first)
        self._counts = SequenceStats()

    def add(self, step: Step) -> None:
        """Count a round of one text."""
        if not step.tokens:  # it ended between two rounds
            return
        accepted = sum(step.from_draft)
        self._counts.record(step.drafted, accepted, len(step.tokens), depth=0)
        self._counts.record_prediction(step.drafted, step.predicted, accepted)

    def fields(self) -> dict[str, Any]:
        """OpenAI's ``usage``, and what became of the drafts."""
        counts = self._counts
        return {
            "usage": {
                "prompt_tokens": self._prompts,
                "completion_tokens": counts.new_tokens,
                "total_tokens": self._prompts + counts.new_tokens,
                "prompt_tokens_details": {
                    "cached_tokens": sum(one.prefix.num_cached for one in self._first),
                },
                "completion_tokens_details": {
                    "accepted_prediction_tokens": counts.accepted_predicted,
                    "rejected_prediction_tokens": counts.predicted - counts.accepted_predicted,
                },
            },
            "speculation": {
                "rounds": counts.rounds,
                "drafted_tokens": counts.drafted,
                "accepted_tokens": counts.accepted,
                "draft_acceptance_rate": round(counts.draft_acceptance_rate, 4),
                "mean_acceptance_length": round(counts.mean_acceptance_length, 4),
            },
        }
