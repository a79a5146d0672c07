"""Inputs of the encoders of encoder-decoders that read images, sounds or the layout of a page."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from bench.tiny_models.compare import prompts
from bench.tiny_models.config import IMAGE

SAMPLES = 3200
FRAMES = (64, 256)
Media = dict[str, torch.Tensor]


def encoder_inputs(model: Any, lengths: tuple[int, ...]) -> Media | None:
    """The first form that plain generation takes; None for encoders of plain text.

    Raises:
        ValueError: plain generation takes none of the known forms.
    """
    forms = list(_forms(model, lengths))
    for form in forms:
        try:
            model.generate(**form, max_new_tokens=2, do_sample=False)
        except Exception:  # this form does not suit the model
            continue
        return form
    if forms or model.main_input_name != "input_ids":
        raise ValueError("no known form of its images or sounds")
    return None


def _forms(model: Any, lengths: tuple[int, ...]) -> Iterator[Media]:
    batch, name = len(lengths), model.main_input_name
    if "bbox" in inspect.signature(type(model).forward).parameters:
        inputs = prompts(lengths)
        yield {**inputs, "bbox": torch.zeros(*inputs["input_ids"].shape, 4)}
    elif name == "pixel_values":
        yield {name: _noise(batch, 3, IMAGE, IMAGE)}
    elif name == "flattened_patches":
        rows = _noise(batch, 16, 2 + model.config.vision_config.patch_embed_hidden_size)
        rows[..., :2] = torch.arange(32).reshape(16, 2) % 4 + 1
        yield {name: rows, "attention_mask": torch.ones(batch, 16, dtype=torch.long)}
    elif name in ("input_values", "inputs"):
        mask = torch.ones(batch, SAMPLES, dtype=torch.long)
        for b, length in enumerate(lengths):
            mask[b, SAMPLES * length // max(lengths) :] = 0
        yield {name: _noise(batch, SAMPLES), "attention_mask": mask}
        yield {name: _noise(batch, SAMPLES)}
    elif name == "input_features":
        widths = (16, 80, getattr(model.config, "feature_projection_input_dim", 160))
        for frames in FRAMES:
            for width in widths:
                for shape in ((batch, frames, width), (batch, width, frames)):
                    yield {name: _noise(*shape)}


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))
