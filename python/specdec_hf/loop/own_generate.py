"""Classes that replace ``generate``: they prepare inputs, and may decode several texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.utils import (
    GenerateBeamEncoderDecoderOutput,
    GenerateEncoderDecoderOutput,
)
from transformers.utils.generic import ModelOutput

from specdec_hf.arguments import shown
from specdec_hf.hf_arguments.inputs import class_generate
from specdec_hf.hf_arguments.sampling import PARAMETERS, is_per_sequence
from specdec_hf.loop.output import SpecOutput
from specdec_hf.runner.encoded import is_encoder_decoder


def by_own_generate(
    model: Any,
    given: dict[str, torch.Tensor | None],
    decoder: Callable[..., Any],
    seed: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Let a class that replaces ``generate`` prepare its inputs, such as BLIP-2 for its decoder.

    Args:
        model: the model.
        given: ``inputs`` and ``input_ids``, where the caller gave them.
        decoder: a `SpeculativeDecoder` with the options of the call.
        seed: the seed among these options.
        kwargs: the other arguments of the caller.

    Raises:
        ValueError: an argument or a class that cannot be served in this way, by name.
    """
    for name in filter(lambda name: is_per_sequence(kwargs.get(name)), PARAMETERS):
        raise ValueError(f"{name} must be a scalar for {type(model).__name__}")
    calls = 0
    stats: Any = None

    def decode(model: Any, ids: torch.Tensor, *, inputs_tensor: Any = None, **others: Any) -> Any:
        nonlocal calls, stats
        calls += 1
        if calls > 1 and seed is not None and others["generation_config"].do_sample:
            raise ValueError(
                f"seed must be None where the generate of {type(model).__name__} decodes several "
                f"texts, each of which needs its own, got {shown(seed)}"
            )
        output = decoder(model, ids, inputs_tensor=inputs_tensor, **others)
        stats = getattr(output, "stats", None)
        return output

    kwargs.update((name, value) for name, value in given.items() if value is not None)
    output = class_generate(model)(custom_generate=decode, **kwargs)
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


def plain_output(output: SpecOutput) -> ModelOutput:
    """The output in the form of Transformers, for a generate that takes it apart, as Whisper's.

    What plain generation does not give is left in attributes.
    """
    kind: type[ModelOutput] = GenerateEncoderDecoderOutput
    names = ["sequences", "scores", "logits", "past_key_values"]
    if output.beam_indices is not None:
        kind = GenerateBeamEncoderDecoderOutput
        names += ["sequences_scores", "beam_indices"]
    plain = kind(**{name: getattr(output, name) for name in names})
    for name in ("attention_mask", "logprobs", "encoder_outputs", "stats"):
        setattr(plain, name, getattr(output, name))
    return plain
