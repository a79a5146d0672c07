"""Tiny random encoder-decoders whose text depends on what they attend to, and their inputs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from support.hf_models import with_noise
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCAB = 110
START = 2
# Seed of the weights, and how far they spread: the text repeats one token less than with others.
WEIGHTS = {"t5": (5, 3.0), "bart": (4, 0.7), "whisper": (5, 0.7)}
TEXT_MODELS = ("t5", "bart")
_SMALL = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None, "decoder_start_token_id": START,
    "tie_word_embeddings": False,
}  # fmt: skip


def build(name: str, vocab_size: int = VOCAB, seed: int | None = None) -> Any:
    """A random model without an end-of-sequence token, so that a test decides the lengths."""
    if name == "t5":
        model: Any = T5ForConditionalGeneration(
            T5Config(
                vocab_size=vocab_size, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                decoder_start_token_id=START, pad_token_id=0, eos_token_id=None,
                feed_forward_proj="gated-gelu", tie_word_embeddings=False,
            )
        )  # fmt: skip
    elif name == "bart":
        model = BartForConditionalGeneration(
            BartConfig(
                **_SMALL, vocab_size=vocab_size, max_position_embeddings=64,
                forced_eos_token_id=None,
            )
        )  # fmt: skip
    else:
        model = WhisperForConditionalGeneration(
            WhisperConfig(
                **_SMALL, vocab_size=vocab_size, num_mel_bins=8, max_source_positions=16,
                max_target_positions=64, suppress_tokens=None, begin_suppress_tokens=None,
            )
        )  # fmt: skip
    own, spread = WEIGHTS[name]
    generator = torch.Generator().manual_seed(own if seed is None else seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                scale = 1.0 if id(weight) in embeddings else weight.shape[-1] ** -0.5
                weight.copy_(spread * scale * torch.randn(weight.shape, generator=generator))
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    return model.eval()


@cache
def tiny(name: str) -> Any:
    """A model that tests share and must not change."""
    return build(name)


@cache
def perturbed(name: str, amount: float = 0.05) -> Any:
    """A drafter that often agrees with ``tiny(name)``: the same weights with some noise."""
    return with_noise(tiny(name), amount)


def texts(lengths: tuple[int, ...], vocab_size: int = VOCAB, seed: int = 1) -> dict[str, Any]:
    """Random texts for an encoder, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    ids = torch.randint(3, vocab_size, shape, generator=generator)
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def sounds(batch_size: int, frames: int = 32) -> dict[str, Any]:
    """Random spectrograms [B, 8, frames] for the tiny Whisper, which reads 32 at a time."""
    generator = torch.Generator().manual_seed(1)
    return {"input_features": torch.randn(batch_size, 8, frames, generator=generator)}


def inputs_for(name: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Inputs of ``generate`` for one of the tiny models."""
    return sounds(len(lengths)) if name == "whisper" else texts(lengths)
