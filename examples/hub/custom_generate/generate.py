"""Speculative decoding as a ``custom_generate`` of Transformers: see README.md of this folder."""

from typing import Any

from specdec_hf import generate as speculative_generate


def generate(inputs: Any = None, *, model: Any, **arguments: Any) -> Any:
    """`specdec_hf.generate`, called as Transformers calls a ``custom_generate`` of a folder.

    Args:
        inputs: the prompts, [B, T]; ``input_ids`` is the same.
        model: the model whose ``generate`` was called.
        arguments: those of ``model.generate`` and those of `specdec_hf.generate`, such as
            ``drafter``, ``rule`` and ``seed``.
    """
    return speculative_generate(model, inputs, **arguments)
