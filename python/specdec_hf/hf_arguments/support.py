"""What the loop refuses by name, and Hugging Face's objects cut to one row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# Name of the GenerationConfig field and its neutral values; anything else is refused by name.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
    "token_healing": (None, False),
    "cache_implementation": (None,),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "use_cache": (None, True),
    "prefill_chunk_size": (None,),
}
UNSUPPORTED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "top_h": (None,),
}
INSTEAD = {
    "assistant_model": "pass drafter=",
    "prompt_lookup_num_tokens": "pass drafter='prompt_lookup' and num_assistant_tokens=",
    "num_return_sequences": "repeat the prompt and give one seed per row",
}


def refuse_unsupported(config: GenerationConfig) -> None:
    table = {**UNSUPPORTED, **(UNSUPPORTED_SAMPLING if config.do_sample else {})}
    for name, neutral in table.items():
        value = getattr(config, name, None)
        if not any(value is n or value == n for n in neutral):
            raise ValueError(f"{name}={value!r} is not supported" + instead(name))


def instead(name: str) -> str:
    return f"; {INSTEAD[name]}" if name in INSTEAD else ""


def is_per_row(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim == 1
    return isinstance(value, list | tuple)


def for_row(function: Any, row: int) -> Any:
    if function is None:
        return None
    return lambda _, ids: function(row, ids)


def warper_value(processor: Any) -> tuple[str, Any] | None:
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


def row_processor(processor: Any, row: int) -> Any:
    """generate() built this one for the whole batch; give it this row's share."""
    if type(processor) is RepetitionPenaltyLogitsProcessor and isinstance(
        processor.prompt_ignore_length, torch.Tensor
    ):
        return RepetitionPenaltyLogitsProcessor(
            processor.penalty, prompt_ignore_length=processor.prompt_ignore_length[row : row + 1]
        )
    return processor
