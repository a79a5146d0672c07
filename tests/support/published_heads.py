"""Heads of random weights in the layouts of their publishers, and what they compute.

The names and fields are those of published checkpoints; nothing here uses the library's own heads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

TOKENS = tuple(range(3, 40))  # of the target, which the head can draft
FREQUENCIES = "layers.0.self_attn.rotary_emb.inv_freq"  # readers make them from the config
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"


def layer_fields(target: Any) -> dict[str, Any]:
    """The fields of the decoder layer in config.json, which differ from the target's."""
    return {
        "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 40, "model_type": "llama",
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "rms_norm_eps": 1e-5,
        "num_hidden_layers": 1, "max_position_embeddings": 512, "rope_theta": 700.0,
        "rope_scaling": None, "vocab_size": target.config.vocab_size, "attention_bias": False,
        "tie_word_embeddings": False, "pad_token_id": 0,
    }  # fmt: skip


def random_tensors(target: Any, layer: str = "midlayer", seed: int = 3) -> dict[str, torch.Tensor]:
    """Tensors by their published names, with an output matrix and without embeddings."""
    fields, generator = layer_fields(target), torch.Generator().manual_seed(seed)
    size, inner, head = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    queries, keys = fields["num_attention_heads"] * head, fields["num_key_value_heads"] * head
    shapes = {
        "fc.weight": (size, 3 * target.config.hidden_size), "norm.weight": (size,),
        f"{layer}.self_attn.q_proj.weight": (queries, 2 * size),
        f"{layer}.self_attn.k_proj.weight": (keys, 2 * size),
        f"{layer}.self_attn.v_proj.weight": (keys, 2 * size),
        f"{layer}.self_attn.o_proj.weight": (size, queries),
        f"{layer}.mlp.gate_proj.weight": (inner, size),
        f"{layer}.mlp.up_proj.weight": (inner, size),
        f"{layer}.mlp.down_proj.weight": (size, inner),
        f"{layer}.hidden_norm.weight": (size,), f"{layer}.input_layernorm.weight": (size,),
        f"{layer}.post_attention_layernorm.weight": (size,), "lm_head.weight": (len(TOKENS), size),
    }  # fmt: skip
    tensors = {
        name: 0.3 * torch.randn(shape, generator=generator) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    known = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    known[list(TOKENS)] = True
    return tensors | {"d2t": torch.tensor(TOKENS) - torch.arange(len(TOKENS)), "t2d": known}


def write(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    name: str = "model.safetensors",
) -> Path:
    """A folder as it is downloaded."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / name)
    return folder


def authors(target: Any, folder: Path, **fields: Any) -> Path:
    """As the authors publish heads: the layers that they read go without saying."""
    config = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": len(TOKENS)}
    return write(folder, config | layer_fields(target) | fields, random_tensors(target))


def specforge(target: Any, folder: Path) -> Path:
    """As SpecForge writes them: layer n means the state after layer n, counted from 0."""
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "use_aux_hidden_state": True}
    return authors(
        target, folder, architectures=["LlamaForCausalLMEagle3"], eagle_config=layers,
        target_hidden_size=target.config.hidden_size,
    )  # fmt: skip


def speculators(target: Any, folder: Path, **fields: Any) -> Path:
    """As vLLM's library does: nested, with embeddings, and n is the state before layer n."""
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0", "draft_vocab_size": len(TOKENS),
        "norm_before_residual": True, "norm_before_fc": False, "fc_norm": False,
        "norm_output": False, "target_hidden_size": None, "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "transformer_layer_config": layer_fields(target),
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
        },
    } | fields  # fmt: skip
    tensors = random_tensors(target, "layers.0")
    rows = target.get_input_embeddings().weight.detach()
    return write(folder, config, tensors | {"embed_tokens.weight": rows.flip(0).contiguous()})


def eagle(target: Any, folder: Path, **fields: Any) -> Path:
    """As the authors of the first EAGLE do, with embeddings and the frequencies of angles."""
    config = layer_fields(target) | {"architectures": ["LlamaForCausalLM"]} | fields
    size, rows = config["hidden_size"], target.get_input_embeddings().weight.detach()
    wide = random_tensors(target, "layers.0")
    unused = ("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d")
    norms = ("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight")
    tensors = {name: x for name, x in wide.items() if name not in unused + norms}
    generator = torch.Generator().manual_seed(5)
    for x in "qkv":
        name = f"layers.0.self_attn.{x}_proj"
        tensors[f"{name}.weight"] = wide[f"{name}.weight"][:, :size].contiguous()
        if config.get("qkv_bias"):
            tensors[f"{name}.bias"] = torch.randn(len(wide[f"{name}.weight"]), generator=generator)
    tensors["fc.weight"] = 0.3 * torch.randn(size, 2 * size, generator=generator)
    if config.get("bias", True):
        tensors["fc.bias"] = torch.randn(size, generator=generator)
    tensors["embed_tokens.weight"] = rows.flip(0).contiguous()
    tensors[FREQUENCIES] = torch.ones(config["head_dim"] // 2)
    return write(folder, config, tensors)


@torch.no_grad()
def expected_eagle_states(
    target: Any, folder: Path, embeddings: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """Hidden states [1, n, H] after pairs, by Transformers' own layer without its first norm."""
    given = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    config = LlamaConfig.from_dict(given)
    config.attention_bias = given.get("qkv_bias", False)
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0).eval()
    layer.input_layernorm = torch.nn.Identity()
    if config.attention_bias:
        layer.self_attn.o_proj.bias = None
    name = "layers.0."
    state = {k[len(name) :]: x for k, x in tensors.items() if k.startswith(name)}
    del state[FREQUENCIES.removeprefix(name)]
    layer.load_state_dict(state)
    joined = functional.linear(
        torch.cat([embeddings, features], -1), tensors["fc.weight"], tensors.get("fc.bias")
    )
    n = joined.shape[1]
    turns = LlamaRotaryEmbedding(config)(joined, torch.arange(n)[None])
    mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
    return layer(joined, attention_mask=mask, position_embeddings=turns)


def medusa(target: Any, folder: Path, blocks: int = 1, own: bool = True) -> Path:
    """Four Medusa heads as their authors publish them, whose config counts two."""
    size, generator = target.config.hidden_size, torch.Generator().manual_seed(4)
    tensors = {}
    for k in range(4):
        for block in range(blocks):
            weight = torch.randn(size, size, generator=generator)
            tensors[f"{k}.{block}.linear.weight"] = 0.1 * weight
            tensors[f"{k}.{block}.linear.bias"] = 0.1 * weight[0]
        if own:
            rows = torch.randn(target.config.vocab_size, size, generator=generator)
            tensors[f"{k}.{blocks}.weight"] = rows
    config = {
        "base_model_name_or_path": "target", "medusa_num_heads": 2, "medusa_num_layers": blocks,
        "transformers_version": "4.31.0",
    }  # fmt: skip
    return write(folder, config, tensors, MEDUSA_WEIGHTS)


@torch.no_grad()
def expected_logits(
    tensors: dict[str, torch.Tensor],
    embeddings: torch.Tensor,
    features: torch.Tensor,
    *,
    layer: str = "midlayer",
    norm_before_residual: bool = False,
    **fields: Any,
) -> torch.Tensor:
    """Logits [1, n, draft vocabulary] of the first draft step.

    Args:
        tensors: by published names.
        embeddings: [1, n, H] of each pair's token.
        features: [1, n, 3 E] of the token before it.
        layer: name of the decoder layer.
        norm_before_residual: the variant of config.json.
        fields: those of `layer_fields`.
    """

    def weight(name: str) -> torch.Tensor:
        return tensors[f"{layer}.{name}.weight"]

    def norm(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + fields["rms_norm_eps"]).rsqrt() * by

    hidden = features @ tensors["fc.weight"].T
    normed = norm(hidden, weight("hidden_norm"))
    both = torch.cat([norm(embeddings, weight("input_layernorm")), normed], dim=-1)
    q, k, v = (
        (both @ weight(f"self_attn.{x}_proj").T).unflatten(-1, (-1, fields["head_dim"]))
        for x in "qkv"
    )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    places = torch.arange(hidden.shape[1])[None]
    cosines, sines = LlamaRotaryEmbedding(LlamaConfig(**fields))(hidden, places)
    q, k = apply_rotary_pos_emb(q, k, cosines, sines)
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    scores = q @ k.transpose(2, 3) / fields["head_dim"] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    attended = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
    hidden = normed if norm_before_residual else hidden
    hidden = hidden + attended.transpose(1, 2).flatten(2) @ weight("self_attn.o_proj").T
    normed = norm(hidden, weight("post_attention_layernorm"))
    gated = functional.silu(normed @ weight("mlp.gate_proj").T) * (normed @ weight("mlp.up_proj").T)
    hidden = hidden + gated @ weight("mlp.down_proj").T
    return norm(hidden, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
