"""Hugging Face's logits processors, made for a whole batch, taken apart into one per sequence."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def allowed_tokens_of(function: Any, b: int) -> Any:
    """A ``prefix_allowed_tokens_fn`` for a batch that holds sequence ``b`` alone."""
    if function is None:
        return None
    return lambda _, ids: function(b, ids)


def warper_parameter(processor: Any) -> tuple[str, Any] | None:
    """Name and value of the sampling parameter that a warper applies; None for other processors."""
    kind = type(processor)
    if kind is TemperatureLogitsWarper:
        return "temperature", processor.temperature
    if kind is TopKLogitsWarper:
        return "top_k", processor.top_k
    if kind is TopPLogitsWarper:
        return "top_p", processor.top_p
    if kind is MinPLogitsWarper:
        return "min_p", processor.min_p
    return None


def processor_of(processor: Any, b: int, batch_size: int) -> Any:
    """A processor for sequence ``b`` alone, where the given one knows the sequences of a batch.

    Those that read the prompt know each prompt once, though several sequences may continue it.
    """
    if type(processor) is RepetitionPenaltyLogitsProcessor and isinstance(
        processor.prompt_ignore_length, torch.Tensor
    ):
        ignored = processor.prompt_ignore_length
        b = b * len(ignored) // batch_size  # there may be several rows, one for each beam
        return RepetitionPenaltyLogitsProcessor(
            processor.penalty, prompt_ignore_length=ignored[b : b + 1]
        )
    alone = copy.copy(processor)
    if type(processor) is EncoderRepetitionPenaltyLogitsProcessor:
        b = b * len(processor.encoder_input_ids) // batch_size
        alone.encoder_input_ids = processor.encoder_input_ids[b : b + 1]
    elif type(processor) is EncoderNoRepeatNGramLogitsProcessor:
        b = b * processor.batch_size // batch_size
        alone.batch_size, alone.generated_ngrams = 1, processor.generated_ngrams[b : b + 1]
    elif type(processor) is PrefixConstrainedLogitsProcessor:
        allowed = allowed_tokens_of(processor._prefix_allowed_tokens_fn, b)
        alone._prefix_allowed_tokens_fn, alone._num_beams = allowed, 1
    else:
        return processor
    return alone
