"""Tiny configurations of any model class, made by rules from the names of its config's fields.

A rule gives a field a small value wherever its name occurs: in the config itself or in the configs
of its parts (text, vision, audio). Widths, heads and sizes of images are the same for all parts, so
that parts fit each other. families.py holds what the rules cannot know.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from transformers import PreTrainedConfig

from bench.tiny_models.families import GIVEN, MROPE

VOCAB = 160
ORDINARY = (10, 100)  # ids of plain text; special tokens get ids from 100 on
HIDDEN, HEADS, HEAD_DIM = 64, 4, 16
WINDOW = 8  # shorter than the text that is generated
CONTEXT = 128
IMAGE, PATCH = 32, 8

_HEADS = r"heads$|_head$|^n_head$"
_WIDTH = (
    r"^(d_model|n_embd|emb_dim|embed_dim|hidden_dim|decoder_dim|projection_dim|output_dim|dim"
    r"|lru_width|word_embed_proj_dim|projector_output_dim|embedding_dim)$|hidden_size$"
    r"|embedding_size$|(out|output)_hidden_size$"
)
# Name of an integer field -> its largest value. The first pattern that is found in a name counts.
SIZES: tuple[tuple[str, int], ...] = (
    (r"^vocab_size|text_vocab_size|^(src|tgt|decoder)_vocab_size|unpadded_vocab_size", VOCAB),
    (r"num_mel_bins|n_mel_bins|feature_size|input_feat_size", 16),
    (r"linear_num_key_heads", 2),
    (r"(mamba|ssm).*heads", 8),
    (r"mamba.*head_?dim|mamba_d_head", 16),
    (r"mamba_d_ssm", 128),
    # Tokens that no head of an indexer scores above 0 tie, and ties depend on the forward's shape.
    (r"^index(er)?_n_heads", 16),
    (_HEADS, HEADS),
    (r"qk_(rope|nope)_head_dim|^v_head_dim|^rotary_dim", 8),
    (r"(^|_)(head_dim|head_size|d_kv|d_head|dim_head|kv_channels|attention_head_dim)$", HEAD_DIM),
    (r"qk_head_dim", 16),
    (r"lora_rank|adapter_rank|gated_norm_rank|hc_lowrank|d_rel", 16),
    (r"moe.*intermediate_size|expert.*(intermediate_size|ffn_hidden_size|dim$)", 32),
    (r"intermediate_size|ffn_dim|ffn_hidden_size|^d_?ff$|^dim_ff$|^d_inner$|mlp_dim", 2 * HIDDEN),
    (_WIDTH, HIDDEN),
    (r"experts_per_tok|moe_k$|moe_topk|moe_top_k|top_k_experts", 2),
    (r"num_.*experts$|n_routed_experts|n_experts$|moe_num_experts", 4),
    (r"shared_experts", 1),
    (r"^(n_group|topk_group|num_expert_group)$", 1),
    (r"(state_size|d_state)$", 8),
    (r"(chunk_size|attention_chunk_size)$", 8),
    (r"sliding_window|attention_window_size|^local_attention$|^window_size$", WINDOW),
    (r"^(n_layers?|depth|layers|num_blocks)$|(num_|encoder_|decoder_|_)(hidden_)?layers$", 2),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"original_max_position_embeddings", CONTEXT // 2),
    (r"max_.*position|n_positions|n_ctx|max_seq_len|context_length|^seq_len$", CONTEXT),
    (r"num_position_embeddings", (IMAGE // PATCH) ** 2),
    (r"image_size|crop_size", IMAGE),
    (r"^patch_size$", PATCH),
)  # fmt: skip
# Names of integer fields that a pattern above finds by mistake.
KEEP = re.compile(r"sliding_window_pattern|shared_layers|residual_layers|use_|_interval|lookup")
TOKEN_ID = re.compile(r"(token_id|token_index|_(bos|eos|pad|nothink|start|end|patch)_id)$")
PARTIAL = 0.5
PARTS = ("default", "layers")  # keys of `GIVEN` that are no fields
PAD = 0
# Fields that some classes leave unset although their models need them.
UNSET = {"head_dim": HEAD_DIM, "num_key_value_heads": HEADS // 2}


def shrink(default: PreTrainedConfig, ids: dict[str, int], layers: int) -> dict[str, Any]:
    """Keyword arguments of a small config of the class of ``default``.

    Args:
        default: the config that the class makes without arguments.
        ids: name of each special token -> its id; new names are added.
        layers: layers of the text model.
    """
    given = GIVEN.get(default.model_type, {})
    small: dict[str, Any] = {}
    for field in dataclasses.fields(default):
        name = field.name
        # A field that may differ from layer to layer cannot be read as an attribute.
        value = vars(default).get(default.attribute_map.get(name, name))
        if isinstance(value, PreTrainedConfig):
            count = GIVEN.get(value.model_type, {}).get("layers", layers)
            part = {**shrink(value, ids, count), **given.get(name, {})}
            small[name] = type(value)(**part)
        elif name in ("bos_token_id", "eos_token_id", "decoder_start_token_id"):
            small[name] = None if "None" in str(field.type) else PAD + 1
        elif name == "pad_token_id":
            small[name] = PAD
        elif name in UNSET and value is None:
            small[name] = UNSET[name]
        elif TOKEN_ID.search(name) and isinstance(value, int) and value >= 0:
            small[name] = ids.setdefault(name, ORDINARY[1] + len(ids))
        elif name == "use_cache":
            small[name] = True
        elif name == "tie_word_embeddings":
            # A tied random model repeats its last token whatever it attends to.
            small[name] = False
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int) and not KEEP.search(name):
            limit = next((size for pattern, size in SIZES if re.search(pattern, name)), None)
            if limit is not None:
                small[name] = min(limit, value)
            if name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
                small[name] = min(layers, value)
    _key_value_heads(default, small)
    _rope(default, small)
    fields = {k: v for k, v in given.items() if k not in PARTS}
    return {
        **small,
        **{k: v for k, v in fields.items() if not isinstance(small.get(k), PreTrainedConfig)},
    }


def _key_value_heads(default: PreTrainedConfig, small: dict[str, Any]) -> None:
    """Grouped heads stay grouped, and equal numbers stay equal."""
    for name in small:
        if re.search(r"key_value_heads|kv_n_heads|num_kv_heads", name):
            heads = next(
                (vars(default)[n] for n in ("num_attention_heads", "n_heads", "num_heads")
                 if n in vars(default)), None,
            )  # fmt: skip
            value = vars(default)[name] or 1
            small[name] = HEADS if heads is None or value >= heads else min(value, HEADS // 2)


def _rope(default: PreTrainedConfig, small: dict[str, Any]) -> None:
    """Sections of multimodal rotary positions must fill half of the rotated part of a head."""
    rope = vars(default).get("rope_parameters")
    if not isinstance(rope, dict):
        return
    nested = any(isinstance(part, dict) for part in rope.values())
    sections = default.model_type in MROPE
    parts = {
        key: _section(part, sections) if isinstance(part, dict) else part
        for key, part in (rope if nested else {"": rope}).items()
    }
    small["rope_parameters"] = parts if nested else parts[""]


def _section(rope: dict[str, Any], sections: bool) -> dict[str, Any]:
    rope = dict(rope)
    if "mrope_section" in rope or sections:
        rope["partial_rotary_factor"] = max(rope.get("partial_rotary_factor", 1.0), PARTIAL)
        half = int(HEAD_DIM * rope["partial_rotary_factor"]) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = CONTEXT // 2
    return rope


def layer_kinds(config: PreTrainedConfig) -> dict[str, set[Any]]:
    """Name of each list that has an entry per layer -> its different entries."""
    text = config.get_text_config(decoder=True)
    count = getattr(text, "num_hidden_layers", None)
    return {
        name: set(value)
        for name, value in vars(text).items()
        if isinstance(value, list | tuple)
        and len(value) == count
        and len(set(map(str, value))) <= 4
        and all(isinstance(entry, str | int | bool) for entry in value)
    }


def tiny_config(
    name: str, config_class: type[PreTrainedConfig], fields: dict[str, Any]
) -> PreTrainedConfig:
    """The smallest config by the rules whose layers are of all kinds that the default has.

    Args:
        name: class of the model.
        config_class: class of its config.
        fields: values in place of those that the rules give.
    """
    own = {**GIVEN.get(config_class.model_type, {}), **GIVEN.get(name, {}), **fields}
    default = config_class(**own.pop("default", {}))
    own = {k: v for k, v in own.items() if not isinstance(vars(default).get(k), PreTrainedConfig)}
    wanted = layer_kinds(default)
    best: tuple[int, PreTrainedConfig] | None = None
    failure: Exception | None = None
    layers = own.pop("layers", None)
    for count in (2, 3, 4, 5, 6, 8, 12) if layers is None else (layers,):
        try:
            config = config_class(**{**shrink(default, {}, count), **own})
        except Exception as error:
            failure = error
            continue
        have = layer_kinds(config)
        missing = sum(len(kinds - have.get(name, set())) for name, kinds in wanted.items())
        if best is None or missing < best[0]:
            best = (missing, config)
        if missing == 0:
            break
    if best is None:
        assert failure is not None
        raise failure
    return best[1]
