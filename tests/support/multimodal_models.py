"""Tiny random models with inputs other than text, and such inputs for two left-padded prompts."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from support.hf_models import with_noise
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Blip2Config,
    Blip2ForConditionalGeneration,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
)

VOCAB = 99
MEDIUM = 95  # the token that images and sounds take the place of
PAD = 0
IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD}
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    **IDS,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 32,
    "initializer_range": 0.3,
}


def _llava() -> Any:
    return LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=LlamaConfig(**TEXT), vision_config=CLIPVisionConfig(**VISION),
            image_token_index=MEDIUM, image_seq_length=4, vision_feature_layer=-1,
        )
    )  # fmt: skip


def _qwen2_vl() -> Any:
    text = {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    vision = {
        "depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1,
    }  # fmt: skip
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config=text, vision_config=vision, image_token_id=MEDIUM, video_token_id=96,
            vision_start_token_id=97, vision_end_token_id=98,
        )
    )  # fmt: skip


def _gemma3() -> Any:
    text = Gemma3TextConfig(
        **{**TEXT, "num_hidden_layers": 3}, sliding_window=8, sliding_window_pattern=2
    )
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text, vision_config=SiglipVisionConfig(**VISION), mm_tokens_per_image=4,
            image_token_index=MEDIUM, boi_token_index=96, eoi_token_index=97,
        )
    )  # fmt: skip


def _paligemma() -> Any:
    return PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(
            text_config=GemmaConfig(**TEXT), vision_config=SiglipVisionConfig(**VISION),
            image_token_index=MEDIUM, projection_dim=32,
        )
    )  # fmt: skip


def _mllama() -> Any:
    text = {k: v for k, v in TEXT.items() if k not in ("head_dim", "bos_token_id")}
    text |= {"num_hidden_layers": 3, "cross_attention_layers": [1], "bos_token_id": 1}
    vision = {
        "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 1, "attention_heads": 4,
        "num_global_layers": 1, "image_size": 8, "patch_size": 4, "max_num_tiles": 1,
        "intermediate_layers_indices": [0], "vision_output_dim": 64,
        "supported_aspect_ratios": [[1, 1]],
    }  # fmt: skip
    config = MllamaConfig(text_config=text, vision_config=vision, image_token_index=MEDIUM)
    model = MllamaForConditionalGeneration(config)
    with torch.no_grad():  # closed gates would hide the image
        for name, weight in model.named_parameters():
            if "gate" in name and weight.numel() == 1:
                weight.fill_(1.0)
    return model


def _qwen2_audio() -> Any:
    audio = {
        "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
        "num_mel_bins": 8, "max_source_positions": 16,
    }  # fmt: skip
    return Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(
            text_config=Qwen2Config(**TEXT), audio_config=audio, audio_token_index=MEDIUM
        )
    )


def _blip2() -> Any:
    vision = {k: v for k, v in VISION.items() if k != "projection_dim"}
    qformer = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20,
        "intermediate_size": 16, "encoder_hidden_size": 32, "initializer_range": 0.3,
    }  # fmt: skip
    return Blip2ForConditionalGeneration(
        Blip2Config(
            vision_config=vision, qformer_config=qformer, text_config=LlamaConfig(**TEXT),
            num_query_tokens=4, image_token_index=MEDIUM,
        )
    )  # fmt: skip


def _gpt2() -> Any:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=256, n_embd=32, n_layer=2, n_head=4,
            initializer_range=0.3, **IDS,
        )
    )  # fmt: skip


def _bert() -> Any:
    return BertLMHeadModel(
        BertConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=37, max_position_embeddings=128, is_decoder=True,
            type_vocab_size=9, initializer_range=0.3, **IDS,
        )
    )  # fmt: skip


BUILDERS = {
    "llava": _llava,
    "qwen2_vl": _qwen2_vl,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
    "mllama": _mllama,
    "qwen2_audio": _qwen2_audio,
    "gpt2": _gpt2,
    "bert": _bert,
    "blip2": _blip2,
}


@cache
def tiny(name: str) -> Any:
    """A model that tests share and must not change."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        model = BUILDERS[name]().eval()
    finally:
        torch.set_rng_state(state)
    for one in (model, getattr(model, "language_model", model)):
        if hasattr(one, "generation_config"):
            one.generation_config.eos_token_id = None
            one.generation_config.pad_token_id = PAD
    return model


@cache
def perturbed(name: str) -> Any:
    """A drafter that sometimes agrees with ``tiny(name)``."""
    return with_noise(tiny(name), 0.05)


def inputs(name: str, padded: int = 3) -> dict[str, torch.Tensor]:
    """Inputs for two prompts, the second with ``padded`` columns of left padding."""
    generator = torch.Generator().manual_seed(1)
    columns, medium = {"qwen2_vl": (24, 8), "qwen2_audio": (16, 8)}.get(name, (13, 4))
    ids = torch.randint(1, 90, (2, columns), generator=generator)
    ids[:, -4:] = ids[:, -8:-4]  # for prompt lookup
    mask = torch.ones_like(ids)
    if name not in ("gpt2", "bert"):
        ids[:, 4 : 4 + (1 if name == "mllama" else medium)] = MEDIUM
    ids[1, :padded], mask[1, :padded] = PAD, 0
    made = {"input_ids": ids, "attention_mask": mask}

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if name in ("llava", "gemma3", "paligemma", "blip2"):
        made["pixel_values"] = random(2, 3, 8, 8)
    if name == "qwen2_vl":
        ids[:, 3] = 97
        made["pixel_values"] = random(2 * 32, 48)
        made["image_grid_thw"] = torch.tensor([[1, 8, 4]] * 2)
        made["mm_token_type_ids"] = (ids == MEDIUM).long()
    if name == "gemma3":
        made["token_type_ids"] = (ids == MEDIUM).long()
    if name == "paligemma":
        made["token_type_ids"] = torch.zeros_like(ids)
    if name == "mllama":
        made["pixel_values"] = random(2, 1, 1, 3, 8, 8)
        made["aspect_ratio_ids"] = torch.ones(2, 1, dtype=torch.int64)
        made["aspect_ratio_mask"] = torch.ones(2, 1, 1, dtype=torch.int64)
        made["cross_attention_mask"] = torch.ones(2, columns, 1, 1, dtype=torch.int64)
        made["cross_attention_mask"][:, :4] = 0
    if name == "qwen2_audio":
        made["input_features"] = random(2, 8, 32)
        made["feature_attention_mask"] = torch.ones(2, 32, dtype=torch.int64)
    if name in ("gpt2", "bert"):
        made["token_type_ids"] = torch.zeros_like(ids)
        made["token_type_ids"][:, 7:] = 5
    return made


def of_sequence(made: dict[str, torch.Tensor], b: int) -> dict[str, torch.Tensor]:
    """The inputs of sequence ``b`` alone, its padding included."""
    count = len(made["input_ids"])
    return {
        name: x.view(count, -1, *x.shape[1:])[b].view(-1, *x.shape[1:]) for name, x in made.items()
    }
