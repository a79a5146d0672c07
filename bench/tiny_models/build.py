"""A tiny random model of a class of Transformers, without any download."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from bench.tiny_models.config import tiny_config
from bench.tiny_models.weights import randomize


def build(name: str, seed: int = 0, **fields: Any) -> Any:
    """A random model of a class, in float32 and eval mode, without an end-of-sequence token.

    Args:
        name: the class.
        seed: of its weights.
        fields: values of its config, in place of those that the rules give.
    """
    model_class = getattr(transformers, name)
    config_class = model_class.config_class
    config = tiny_config(name, config_class, fields)
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)  # fills memory that a class leaves unset with NaN
        try:
            model = model_class(config).float().eval()
        finally:
            torch.use_deterministic_algorithms(False)
    randomize(model, seed)
    if model.generation_config is not None:
        generation = model.generation_config
        generation.eos_token_id = generation.bos_token_id = None
        generation.pad_token_id = 0
        if config.is_encoder_decoder:
            generation.decoder_start_token_id = 1
            generation.num_beams = 1  # the config of FSMT asks for more
    return model
