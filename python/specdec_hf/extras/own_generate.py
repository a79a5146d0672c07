"""Classes of Transformers that replace ``generate``, such as BLIP-2's and Whisper's.

They may decode several texts and take the outputs apart, so the rounds run inside of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.utils import (
    GenerateBeamEncoderDecoderOutput,
    GenerateEncoderDecoderOutput,
)
from transformers.utils.generic import ModelOutput

from specdec_hf.arguments import PARAMETERS, shown
from specdec_hf.request.call import Call
from specdec_hf.request.entry import add_stop_strings, class_generate, take_withheld
from specdec_hf.request.reader import read_call
from specdec_hf.request.sampling import is_per_sequence
from specdec_hf.runner.protocol import CACHE_NAME, is_encoder_decoder


def by_own_generate(
    model: Any,
    inputs: dict[str, torch.Tensor | None],
    decode: Callable[[Any, Call], Any],
    seed: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Let a class that replaces ``generate`` prepare its inputs, such as BLIP-2 for its decoder.

    Args:
        inputs: ``inputs`` and ``input_ids``, where the caller gave them.
        decode: called with the model inside of a wrapper and a call; returns its output.
        seed, kwargs: the seed and the other arguments of the caller.
    """
    for name in filter(lambda name: is_per_sequence(kwargs.get(name)), PARAMETERS):
        raise ValueError(f"{name} must be a scalar for {type(model).__name__}")
    withheld = take_withheld(kwargs, kwargs.get("generation_config"))
    if kwargs.get("stop_strings") is not None:
        add_stop_strings(kwargs, withheld.tokenizer, kwargs.pop("stop_strings"))
    if withheld.assistant_model is not None:
        kwargs["assistant_model"] = withheld.assistant_model  # that of Whisper reads it, too
    calls = 0
    stats: Any = None

    def decode_one(
        model: Any, input_ids: Any, *, inputs_tensor: Any = None, **model_kwargs: Any
    ) -> Any:
        nonlocal calls, stats
        calls += 1
        if calls > 1 and seed is not None and model_kwargs["generation_config"].do_sample:
            raise ValueError(
                f"seed must be None where the generate of {type(model).__name__} decodes several "
                f"texts, each of which needs its own, got {shown(seed)}"
            )
        call = read_call(model, input_ids, withheld, inputs_tensor=inputs_tensor, **model_kwargs)
        output = decode(model, call)
        stats = getattr(output, "stats", None)
        return output

    kwargs.update((name, value) for name, value in inputs.items() if value is not None)
    output = class_generate(model)(custom_generate=decode_one, **kwargs)
    if calls == 0 or (calls > 1 and not is_encoder_decoder(model)):
        raise ValueError(
            f"{type(model).__name__} is not supported: its own generate decodes {calls} texts "
            "with custom_generate, not one"
        )
    if stats is not None and calls > 1:
        stats.note(f"{calls} texts were decoded; these are the statistics of the last")
    if stats is not None and isinstance(output, ModelOutput):
        output.stats = stats
    elif stats is not None and isinstance(output, dict):
        output["stats"] = stats
    return output


def plain_output(output: Any) -> ModelOutput:
    """The output in the form of Transformers, for a generate that takes it apart, as Whisper's.

    What plain generation does not give is left in attributes.
    """
    kind: type[ModelOutput] = GenerateEncoderDecoderOutput
    names = ["sequences", "scores", "logits", CACHE_NAME]
    if output.beam_indices is not None:
        kind = GenerateBeamEncoderDecoderOutput
        names += ["sequences_scores", "beam_indices"]
    plain = kind(**{name: getattr(output, name) for name in names})
    for name in ("attention_mask", "logprobs", "encoder_outputs", "stats"):
        setattr(plain, name, getattr(output, name))
    return plain
