"""Inputs of multimodal models, made from their configs: random images and sounds, no processor.

How many placeholder tokens an image takes is asked of the model itself: its features are computed
once, and their rows are counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from bench.tiny_models.compare import prompts
from bench.tiny_models.config import IMAGE
from bench.tiny_models.encoders import encoder_inputs

FRAMES = 64
Media = dict[str, torch.Tensor]


def own_inputs(model: Any, lengths: tuple[int, ...] = (9,)) -> dict[str, torch.Tensor] | None:
    """Inputs of ``generate`` with one image or sound per sequence; None if the class takes none.

    Raises:
        ValueError: none of the known forms of images and sounds suits the model.
    """
    takes = set(inspect.signature(type(model).forward).parameters)
    name = type(model).__name__
    if name in WHOLE:
        return WHOLE[name](model, lengths)
    if model.config.is_encoder_decoder and _placeholder(model.config, "image") is None:
        return encoder_inputs(model, lengths)
    for kind, method in (("image", "get_image_features"), ("audio", "get_audio_features")):
        features = getattr(model, method, None) or getattr(
            getattr(model, "model", None), method, None
        )
        token = _placeholder(model.config, kind)
        if features is None or token is None:
            continue
        batch = len(lengths)
        for media in (
            _images(model.config, batch) if kind == "image" else _sounds(model.config, batch)
        ):
            known = inspect.signature(features).parameters
            if not takes >= set(media):
                continue
            try:
                with torch.no_grad():
                    given = {
                        k: v
                        for k, v in media.items()
                        if k in known or "kwargs" in known or "args" in known
                    }
                    rows = _count(features(**given), model.config)
            except Exception:  # this form does not suit the model
                continue
            if rows and rows % batch == 0:
                return {**_text(lengths, token, rows // batch, takes, kind), **media}
    if takes & {"pixel_values", "input_features", "flattened_patches", "image_pixel_values"}:
        raise ValueError("no known form of its images or sounds")
    return None


def _text(lengths: tuple[int, ...], token: int, count: int, takes: set[str], kind: str) -> Media:
    """Prompts whose third token is followed by the placeholders."""
    inputs = prompts(lengths)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    rows = []
    for row, bits in zip(ids, mask, strict=True):
        start = int((bits == 0).sum()) + 2
        rows.append(torch.cat([row[:start], torch.full((count,), token), row[start:]]))
    ids = torch.stack(rows)
    wide = torch.cat([mask, torch.ones(len(lengths), count, dtype=mask.dtype)], dim=1)
    inputs = {"input_ids": ids, "attention_mask": wide}
    if "mm_token_type_ids" in takes:
        inputs["mm_token_type_ids"] = (ids == token).long() * (1 if kind == "image" else 3)
    if "moe_mm_token_type_ids" in takes:
        inputs["moe_mm_token_type_ids"] = inputs["mm_token_type_ids"]
    if "token_type_ids" in takes:
        inputs["token_type_ids"] = (ids == token).long()
    return inputs


def _placeholder(config: Any, kind: str) -> int | None:
    for part in (config, *(getattr(config, n, None) for n in ("vision_config", "audio_config"))):
        for name in (f"{kind}_token_id", f"{kind}_token_index", f"{kind}_patch_id"):
            token = getattr(part, name, None)
            if isinstance(token, int):
                return token
    return None


def _count(features: Any, config: Any) -> int:
    """Rows of the language model's width in what a feature method returns."""
    found = getattr(features, "pooler_output", features)
    found = features.last_hidden_state if found is None else found
    width = config.get_text_config(decoder=True).hidden_size
    tensors = [found] if isinstance(found, torch.Tensor) else list(found)
    flat = [t for x in tensors for t in ([x] if isinstance(x, torch.Tensor) else list(x))]
    return sum(t.numel() for t in flat) // width if all(t.shape[-1] == width for t in flat) else 0


def _noise(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(shape, generator=generator)


def _images(config: Any, batch: int) -> Iterator[Media]:
    vision = getattr(config, "vision_config", None) or config
    patch = getattr(vision, "patch_size", 8)
    patch = patch if isinstance(patch, int) else 8
    size = getattr(vision, "image_size", IMAGE)
    size = size if isinstance(size, int) else IMAGE
    frames = (
        getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", 1) or 1
    )
    side = 4
    grid = torch.tensor([[1, side, side]] * batch)
    for depth in {frames, 1}:
        pixels = _noise(batch * side * side, 3 * depth * patch * patch)
        yield {"pixel_values": pixels, "image_grid_thw": grid}
        yield {
            "pixel_values": pixels, "image_grid_thw": grid,
            "image_merge_sizes": torch.tensor([2] * batch),
        }  # fmt: skip
    yield {
        "pixel_values": _noise(batch * side * side, 3, patch, patch), "image_grid_thw": grid,
    }  # fmt: skip
    yield {
        "pixel_values": _noise(batch, side * side, 3 * patch * patch),
        "spatial_shapes": torch.tensor([[side, side]] * batch),
        "pixel_attention_mask": torch.ones(batch, side * side, dtype=torch.long),
    }
    positions = torch.stack(
        torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1
    )
    yield {
        "pixel_values": _noise(batch, side * side, 3 * patch * patch),
        "image_position_ids": positions.reshape(1, -1, 2).expand(batch, -1, -1),
    }
    sizes = torch.tensor([[size, size]] * batch)
    yield {"pixel_values": _noise(batch, 2, 3, size, size), "image_sizes": sizes}
    yield {"pixel_values": _noise(batch, 3, size, size), "image_sizes": sizes}
    yield {"pixel_values": _noise(batch, 3, size, size)}
    tiles = _noise(batch, 1, 3, size, size)
    yield {"pixel_values": tiles}
    yield {
        "pixel_values": tiles,
        "pixel_attention_mask": torch.ones(batch, 1, size, size, dtype=torch.long),
    }
    yield {
        "pixel_values": _noise(batch, 3, size, size),
        "high_res_pixel_values": _noise(batch, 3, size, size),
    }


def _sounds(config: Any, batch: int) -> Iterator[Media]:
    audio = (
        getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    )
    bins = next(
        (getattr(audio, n) for n in ("num_mel_bins", "n_mel_bins", "input_dim", "input_feat_size")
         if getattr(audio, n, None)), 16,
    )  # fmt: skip
    longest = 2 * (getattr(audio, "max_source_positions", None) or FRAMES // 2)
    for frames in (FRAMES, longest):
        for shape in ((batch, bins, frames), (batch, frames, bins)):
            sound = _noise(*shape)
            mask = torch.ones(batch, frames, dtype=torch.long)
            yield {"input_features": sound, "input_features_mask": mask}
            yield {"input_features": sound, "input_features_mask": mask.bool()}
            yield {"input_features": sound, "feature_attention_mask": mask}
            yield {"input_features": sound}


def _pixels(model: Any, lengths: tuple[int, ...]) -> Media:
    size = model.config.vision_config.image_size
    return {**prompts(lengths), "pixel_values": _noise(len(lengths), 3, size, size)}


def _kosmos(model: Any, lengths: tuple[int, ...]) -> Media:
    inputs = _text(lengths, 100, model.config.latent_query_num, set(), "image")
    size = model.config.vision_config.image_size
    return {
        **inputs, "pixel_values": _noise(len(lengths), 3, size, size),
        "image_embeds_position_mask": (inputs["input_ids"] == 100).long(),
    }  # fmt: skip


def _mllama(model: Any, lengths: tuple[int, ...]) -> Media:
    vision, batch = model.config.vision_config, len(lengths)
    tiles, size = vision.max_num_tiles, vision.image_size
    inputs = prompts(lengths)
    return {
        **inputs,
        "pixel_values": _noise(batch, 1, tiles, 3, size, size),
        "aspect_ratio_ids": torch.ones(batch, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.tensor([[[1] + [0] * (tiles - 1)]] * batch),
        "cross_attention_mask": inputs["attention_mask"][:, :, None, None]
        * torch.tensor([1] + [0] * (tiles - 1)),
    }


def _idefics(model: Any, lengths: tuple[int, ...]) -> Media:
    inputs, batch = prompts(lengths), len(lengths)
    size = model.config.vision_config.image_size
    return {
        **inputs, "pixel_values": _noise(batch, 1, 3, size, size),
        "image_attention_mask": torch.ones(*inputs["input_ids"].shape, 1, dtype=torch.long),
    }  # fmt: skip


def _qwen2_audio(model: Any, lengths: tuple[int, ...]) -> Media:
    audio, batch = model.config.audio_config, len(lengths)
    frames = 2 * audio.max_source_positions
    count = ((frames - 1) // 2 + 1 - 2) // 2 + 1
    return {
        **_text(lengths, model.config.audio_token_index, count, set(), "audio"),
        "input_features": _noise(batch, audio.num_mel_bins, frames),
        "feature_attention_mask": torch.ones(batch, frames, dtype=torch.long),
    }


# Classes whose inputs have a form of their own.
WHOLE: dict[str, Any] = {
    "GitForCausalLM": _pixels,
    "BlipForConditionalGeneration": _pixels,
    "IdeficsForVisionText2Text": _idefics,
    "Kosmos2ForConditionalGeneration": _kosmos,
    "MllamaForConditionalGeneration": _mllama,
    "Qwen2AudioForConditionalGeneration": _qwen2_audio,
}
