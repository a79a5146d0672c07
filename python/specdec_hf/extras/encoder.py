"""Encoder-decoders: what the encoder read and said, and the prompt of the decoder.

``model.generate`` prepares both before it calls a ``custom_generate``. The loop lets it do so for
its own `generate` too, because classes of models differ in their decoders' first tokens and in what
their encoders take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from specdec_hf.extras.encoded import Encoded, skipped_padding_id
from specdec_hf.runner.protocol import CACHE_NAME, forward_arguments

# The loop itself gives these to every forward of a decoder.
_MADE_BY_THE_LOOP = frozenset({"decoder_attention_mask", CACHE_NAME, "use_cache", "logits_to_keep"})
# Plain generation would pass them to every forward, as if every token had the same.
_REFUSED = ("decoder_inputs_embeds", "decoder_position_ids", "labels", "cache_position")


@dataclass(frozen=True, eq=False)
class EncoderSource:
    """What the encoder of a call read, for whoever drafts from it.

    Attributes:
        inputs: [B, ...] ids, or features of sounds or images.
        kwargs: its other inputs, such as ``attention_mask`` [B, S].
        copies: how many sequences that follow one another read the same.
    """

    inputs: torch.Tensor
    kwargs: dict[str, Any]
    copies: int = 1

    @property
    def reads_text(self) -> bool:
        """Whether the inputs are ids of the model's vocabulary."""
        return self.inputs.ndim == 2 and self.inputs.dtype in (torch.int32, torch.int64)

    @torch.no_grad()
    def encode(self, model: Any) -> Encoded:
        """Run the encoder of another model on the same."""
        batch_size = len(self.inputs)
        each = range(0, batch_size, self.copies)
        given = Encoded(self.kwargs, batch_size).select(each).inputs
        kwargs = {
            name: value.to(model.device) if isinstance(value, torch.Tensor) else value
            for name, value in given.items()
        }
        inputs, name, kwargs = model._prepare_model_inputs(
            self.inputs[:: self.copies].to(model.device), None, kwargs
        )
        kwargs = model._maybe_prepare_encoder_kwargs_for_generation(
            inputs, kwargs, name, GenerationConfig()
        )
        takes = forward_arguments(model)
        encoded = Encoded({k: v for k, v in kwargs.items() if k in takes}, len(each))
        return encoded.select([b // self.copies for b in range(batch_size)])

    def texts(self, vocab_size: int) -> list[NDArray[np.int64]] | None:
        """The ids that the encoder read of each sequence, without padding; None if it read others.

        Args:
            vocab_size: of the decoder.
        """
        ids = self.inputs
        if not self.reads_text:
            return None
        host = ids.to("cpu", torch.int64).numpy()
        mask = (host >= 0) & (host < vocab_size)
        held = self.kwargs.get("attention_mask")
        if isinstance(held, torch.Tensor) and held.shape == ids.shape:
            mask &= held.cpu().numpy() != 0
        return [row[bits] for row, bits in zip(host, mask, strict=True)]


def read_encoder(
    model: Any, model_kwargs: dict[str, Any], inputs_tensor: torch.Tensor | None, batch_size: int
) -> tuple[Encoded, EncoderSource | None]:
    """What an encoder said and read, from what ``model.generate`` gives a ``custom_generate``.

    Args:
        model: the encoder-decoder.
        model_kwargs: the keyword arguments.
        inputs_tensor: the input of the encoder, one row for each prompt; None where unknown.
        batch_size: number of sequences.

    Raises:
        ValueError: an argument that the loop cannot feed token by token, by name.
    """
    for name in _REFUSED:
        if model_kwargs.get(name) is not None:
            raise ValueError(f"{name} is not supported")
    inputs = {
        name: value
        for name, value in model_kwargs.items()
        if value is not None and name not in _MADE_BY_THE_LOOP
    }
    encoded = Encoded(inputs, batch_size, skipped_padding_id(model))
    # Embeddings are of one model only. Where the caller gave encoder_outputs alone, Transformers
    # fills in ids below 0.
    if inputs_tensor is None or "inputs_embeds" in inputs or bool((inputs_tensor == -100).all()):
        return encoded, None
    copies = batch_size // len(inputs_tensor)
    kwargs = {name: value for name, value in inputs.items() if name != "encoder_outputs"}
    return encoded, EncoderSource(inputs_tensor.repeat_interleave(copies, dim=0), kwargs, copies)
