"""Values of config fields that the rules of config.py cannot know, by class name or model type.

A value that is a dict changes the part of that name. ``layers`` fixes the number of layers, and
``default`` holds arguments of the config from which the rules start.
"""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]

_TIMM = "needs the package timm for its image tower"
_ASSISTANT = "drafts for another model and does not generate by itself"
_SPEAKS = "speaks with a generate of its own; the part that writes text is a class of this table"
# Class name -> why there is no tiny model of it.
NOT_BUILT = {
    "FastVlmForConditionalGeneration": _TIMM,
    "Gemma3nForConditionalGeneration": _TIMM,
    "PerceptionLMForConditionalGeneration": _TIMM,
    "VibeVoiceForConditionalGeneration": "needs the package diffusers to generate",
    "Qwen2_5OmniForConditionalGeneration": _SPEAKS,
    "Qwen3OmniMoeForConditionalGeneration": _SPEAKS,
    "Gemma4AssistantForCausalLM": _ASSISTANT,
    "Gemma4UnifiedAssistantForCausalLM": _ASSISTANT,
}
# Classes that generate text but are in none of Transformers' tables of them.
OTHERS = (
    "BarkCausalModel", "BlipForQuestionAnswering", "BlipTextLMHeadModel", "ClvpForCausalLM",
    "FlaubertWithLMHeadModel", "GPT2DoubleHeadsModel", "ImageGPTForCausalImageModeling",
)  # fmt: skip
# Model types of text configs whose models split rotary positions into three sections, also where
# the config does not say so.
MROPE = {
    "cohere_compass_text", "cosmos3_edge_text", "cosmos3_omni_text", "ernie4_5_vl_moe_text",
    "glm46v_text", "glm4v_moe_text", "glm4v_text", "glm5_next_text", "glm_image_text",
    "glm_ocr_text", "hunyuan_vl_text", "paddleocr_vl_text", "qwen2_5_omni_talker",
    "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_omni_moe_talker_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text",
    "qwen4_exp_text",
}  # fmt: skip

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LOCAL_AND_FULL = ["sliding_attention", "full_attention"]
_MOE = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
# The last two layers have no cache of their own.
_GEMMA3N: Fields = {
    "vocab_size_per_layer_input": 160, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
    "layers": 4, "layer_types": _LOCAL_AND_FULL * 2,
}  # fmt: skip
_GEMMA4: Fields = {**_GEMMA3N, "global_head_dim": 32}
_VQ = {
    "base_channels": 32, "channel_multiplier": (1, 2), "num_embeddings": 32, "resolution": 32,
    "latent_channels": 32, "embed_dim": 8, "num_res_blocks": 1,
}  # fmt: skip
_DECODER = {"is_decoder": True, "add_cross_attention": True}
_WINDOWS = {"window_size": 32, "fullatt_block_indexes": (1,)}
_ONE_TILE = {"image_grid_pinpoints": [[32, 32]]}
_VISION_START = {"vision_start_token_id": 110, "audio_start_token_id": 111}

GIVEN: dict[str, Fields] = {
    # Decoders of text.
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"num_hidden_layers": 2, "encoder_hash_byte_group_vocab": 64},
    "blt_local_decoder": {"hidden_size_global": 64},
    "blt_local_encoder": {"hidden_size_global": 64},
    "clvp_decoder": {"eos_token_id": 1, "bos_token_id": 2},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": _MOE,
    "dots1": {**_MOE, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
        "index_head_dim": 16, "index_topk": 8,
    },
    "falcon_h1": {"mamba_d_head": 16},
    "gemma3n_text": {
        **_GEMMA3N, "intermediate_size": 128, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "laurel_rank": 8,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layers": 2, "layer_types": ["conv", "full_attention"]},
    "led": {"attention_window": 8},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "mllama_text_model": {"layers": 4, "cross_attention_layers": [1, 3]},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"layers": 3},
    "reformer": {
        "hash_seed": 0,
        "axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 16), "num_buckets": 2,
        "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 4, "attn_layers": ["local", "lsh"],
    },
    "roc_bert": {
        "pronunciation_embed_dim": 16, "shape_embed_dim": 16, "shape_vocab_size": 64,
        "pronunciation_vocab_size": 64,
    },
    "xlnet": {"d_head": 16},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 2,
        "attention_hidden_size": 128, "attention_head_dim": 32,
    },
    "zamba2": {
        "layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "n_mamba_heads": 8,
    },
    # Models that read images.
    "apertus1p5": {"image_token_offset": 128, "audio_token_offset": 144},
    "apertus1p5_vision_tokenizer": {"codebook_size": 16},
    "wavtokenizer_encoder": {"codebook_dim": 64, "codebook_size": 16},
    "aria": {
        "projector_patch_to_query_dict": {16: 4}, "max_value_projector_patch_to_query_dict": 4,
    },
    "blip-2": {"num_query_tokens": 4, "image_token_index": 100},
    "chameleon": {"vocabulary_map": {"<image>": 100}, "vq_config": _VQ},
    "cohere_compass_text": {
        "rope_parameters": {k: {**_ROPE, "mrope_section": [4, 2, 2]} for k in _LOCAL_AND_FULL}
    },
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [64, 64]},
    "unlimited_ocr_sam_vision_model": {"downsample_channels": (64, 64)},
    "deepseek_ocr2": {"text_config": {**_MOE, "mlp_layer_types": ["dense", "sparse"]}},
    "dots3_note_vision_encoder": {
        "layers": 2, "pyramid_num_routed": [-1, 4], "adapter_in_dim": 64, "adapter_out_dim": 64,
    },
    "encoder-decoder": {"decoder": _DECODER},
    "speech-encoder-decoder": {"decoder": _DECODER},
    "vision-encoder-decoder": {"decoder": _DECODER},
    "emu3": {
        "vocabulary_map": {"<image>": 100},
        "vq_config": {"base_channels": 32, "channel_multiplier": (1, 2), "codebook_size": 32},
    },
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    "exaone4_5_vision": _WINDOWS,
    "gemma4": {"default": {"vision_config": {"model_type": "gemma4_vision"}}},
    "gemma3": {"mm_tokens_per_image": 4},
    "granite4_vision": {
        **_ONE_TILE, "deepstack_layer_map": [(-2, 0)], "spatial_target_layers": [0, 1, 0, 1],
        "downsample_rate": "1/2",
    },
    "hy_v4_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    "inkling_vision": {"num_hidden_layers": 3},
    "instructblip": {"num_query_tokens": 4, "image_token_index": 100},
    "instructblipvideo": {"num_query_tokens": 4, "video_token_index": 100},
    "janus": {"vq_config": _VQ},
    "kosmos-2": {"latent_query_num": 4},
    "kosmos-2.5": {"latent_query_num": 4},
    "llama4_vision_model": {
        "intermediate_size": 256, "vision_output_dim": 64, "projector_input_dim": 64,
        "projector_output_dim": 64,
    },
    "llava_next": _ONE_TILE,
    "llava_next_video": _ONE_TILE,
    "llava_onevision": _ONE_TILE,
    "minicpmv4_6": {"image_token_id": 100, "video_token_id": 101},
    "mllama": {
        "vision_config": {
            "num_hidden_layers": 2, "num_global_layers": 1, "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 192,
        }
    },
    "muse_glimmer": {"out_hidden_size": 256},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "qwen2_5_vl_vision": _WINDOWS,
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "radio": {"video_temporal_patch_size": 2},
    "step3p7": {"text_config": {"sliding_window": 8}},
    # Models that read or write sounds.
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "granite_speech_encoder": {"context_size": 8, "max_pos_emb": 8, "input_dim": 16},
    "granite_speech": {"window_size": 15},
    "granite_speech_plus": {"window_size": 15},
    "qwen3_asr_encoder": {"n_window": 16},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "phi4_multimodal_audio": {
        "ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64, "nemo_conv_channels": 16,
    },
    "qwen2_5_omni_thinker": _VISION_START,
    "qwen2_5_omni_vision_encoder": _WINDOWS,
    "qwen3_omni_moe_thinker": _VISION_START,
    "vibevoice_acoustic_tokenizer_encoder": {
        "hidden_size": 16, "num_filters": 4, "depths": (1, 1, 1), "downsampling_ratios": (2, 2),
    },
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 32},
    "voxtral": {"audio_token_id": 101},
    "voxtral_realtime": {"audio_token_id": 101},
}  # fmt: skip
