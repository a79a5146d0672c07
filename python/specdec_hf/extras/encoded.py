"""The part of an encoder-decoder's inputs that stays the same in every forward of its decoder.

The encoder runs once a call. Its output, its mask and whatever else ``model.generate`` passes on
reach every forward of the decoder, whose cross-attention computes its keys and values in the first
of them and reads them from the cache afterwards. Rejected drafts are forgotten in the decoder's
self-attention alone: no text changes what the encoder said.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Encoded:
    """The output of an encoder for a batch, and what goes with it.

    Attributes:
        inputs: keyword arguments of ``prepare_inputs_for_generation``: ``encoder_outputs``, the
            encoder's ``attention_mask``, and others of the model. Tensors with an entry for each
            sequence are [B, ...].
        batch_size: number of sequences B.
        padding_id: the padding id, which takes no position where a decoder counts positions by ids;
            None for other decoders. Tokens after it in one forward get other positions than in a
            forward of their own.
    """

    inputs: dict[str, Any]
    batch_size: int
    padding_id: int | None = None

    @property
    def outputs(self) -> Any:
        """What the encoder returned."""
        return self.inputs["encoder_outputs"]

    def select(self, indices: Sequence[int]) -> Encoded:
        """A copy of some sequences, in the order of their indices; one may occur more than once."""
        chosen = {name: self._select(value, indices) for name, value in self.inputs.items()}
        return Encoded(chosen, len(indices), self.padding_id)

    def copied(self) -> Encoded:
        """A copy for one cache: some decoders add to what they read in place."""
        return self.select(range(self.batch_size))

    def _select(self, value: Any, indices: Sequence[int]) -> Any:
        if isinstance(value, torch.Tensor):
            per_sequence = value.ndim > 0 and value.shape[0] == self.batch_size
            return (
                value[torch.tensor(indices, device=value.device)] if per_sequence else value.clone()
            )
        if isinstance(value, dict):  # a ModelOutput too
            chosen = copy.copy(value)
            for name, entry in value.items():
                chosen[name] = self._select(entry, indices)
            return chosen
        if isinstance(value, list | tuple):
            return type(value)(self._select(entry, indices) for entry in value)
        return value


def skipped_padding_id(model: Any) -> int | None:
    """`Encoded.padding_id` of a model."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            skipped = getattr(module, "padding_idx", None)
            return skipped if isinstance(skipped, int) else None
    return None
