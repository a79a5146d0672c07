"""Checkpoints with layers of multi-token prediction, and what these layers compute.

Nothing here is the library's: tensors have the names of the publishers, and layers run over whole
texts, without a cache, as Transformers defines them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from support.hf_models import PAD, VOCAB
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3ForCausalLM,
    Glm4MoeForCausalLM,
    Glm4MoeLiteForCausalLM,
    Qwen3NextForCausalLM,
)

COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_experts_per_tok": 2, "max_position_embeddings": 256,
    "vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD,
    "initializer_range": 0.3,
}  # fmt: skip
EXPERTS = 4
APPENDED = {"enorm": "enorm", "hnorm": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"}


class Family(NamedTuple):
    """A model type: its class, its own fields, and how it names what a layer is made of."""

    model: Any
    fields: dict[str, Any]
    prefix: str = "model.layers.{}."
    inside: str = ""
    names: dict[str, str] = APPENDED

    def prefix_of(self, layer: int) -> str:
        """Of the names of layer ``layer``, counted from 0."""
        return self.prefix.format(COMMON["num_hidden_layers"] + layer)


LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": EXPERTS, "kv_lora_rank": 8, "q_lora_rank": 12,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
}  # fmt: skip
FAMILIES = {
    "deepseek_v3": Family(
        DeepseekV3ForCausalLM, {**LATENT, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    ),
    "glm4_moe": Family(
        Glm4MoeForCausalLM,
        {
            "num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": EXPERTS,
            "first_k_dense_replace": 1, "use_qk_norm": True,
        },
    ),
    "glm4_moe_lite": Family(Glm4MoeLiteForCausalLM, LATENT),
    "qwen3_next": Family(
        Qwen3NextForCausalLM,
        {
            "num_key_value_heads": 2, "head_dim": 16, "num_experts": EXPERTS,
            "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "mtp.", "layers.0.",
        {
            "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "join": "fc",
            "norm": "norm",
        },
    ),
}  # fmt: skip


@dataclass
class Layer:
    """A layer of multi-token prediction: a decoder layer, and what stands around it by name."""

    decoder: nn.Module
    around: dict[str, torch.Tensor]
    zero_centred: bool  # norms multiply by 1 + weight
    epsilon: float

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """One of the norms."""
        weight = self.around[name].float() + self.zero_centred
        return x * (x.square().mean(dim=-1, keepdim=True) + self.epsilon).rsqrt() * weight

    def states(self, target: Any, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Normalised outputs [1, n, H] of n pairs from the first place on."""
        rows = target.get_input_embeddings().weight[torch.tensor([tokens])]
        both = [self.norm("enorm", rows), self.norm("hnorm", hidden)]
        joined = torch.cat(both, dim=-1) @ self.around["join"].T
        positions = torch.arange(len(tokens))[None]
        rotary = target.get_decoder().rotary_emb(joined, positions)
        made = self.decoder(joined, position_embeddings=rotary, position_ids=positions)
        return self.norm("norm", made)


def target_of(name: str, **fields: Any) -> Any:
    """A tiny random model of a family."""
    family = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = family.model.config_class(**{**COMMON, **family.fields, **fields})
        return family.model(config).eval()


def layers_of(target: Any, count: int = 1) -> list[Layer]:
    """Random layers for a target, which choose experts by a bias, too."""
    config, zero_centred = copy.deepcopy(target.config), target.config.model_type == "qwen3_next"
    if zero_centred:
        config.layer_types = ["full_attention"] * 2
    config._attn_implementation = "sdpa"
    number, size, made = config.num_hidden_layers, config.hidden_size, []
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for _ in range(count):
        decoder = type(target.get_decoder().layers[-1])(config, number - 1).eval()
        with torch.no_grad():
            for weight in decoder.parameters():
                scale = 0.2 if weight.ndim == 1 else 0.6 * weight.shape[-1] ** -0.5
                weight.copy_(scale * random(*weight.shape))
                if weight.ndim == 1 and not zero_centred:
                    weight.add_(1)
            for bias in decoder.buffers():
                bias.copy_(random(*bias.shape))
        norms = {one: 0.4 * random(size) + (not zero_centred) for one in ("enorm", "hnorm", "norm")}
        join = random(size, 2 * size) * (2 * size) ** -0.5
        made.append(Layer(decoder, {**norms, "join": join}, zero_centred, config.rms_norm_eps))
    return made


def published(target: Any, layers: Sequence[Layer]) -> dict[str, torch.Tensor]:
    """The tensors of layers by the names of the publisher, one for each expert."""
    family, tensors = FAMILIES[target.config.model_type], {}
    for number, layer in enumerate(layers):
        prefix = family.prefix_of(number)
        for name, tensor in layer.around.items():
            tensors[f"{prefix}{family.names[name]}.weight"] = tensor
        for name, tensor in layer.decoder.state_dict().items():
            stem, _, kind = f"{prefix}{family.inside}{name}".rpartition(".")
            if kind == "gate_up_proj":
                for expert, both in enumerate(tensor):
                    gate, up = both.chunk(2)
                    tensors[f"{stem}.{expert}.gate_proj.weight"] = gate
                    tensors[f"{stem}.{expert}.up_proj.weight"] = up
            elif kind == "down_proj":
                for expert, one in enumerate(tensor):
                    tensors[f"{stem}.{expert}.down_proj.weight"] = one
            else:
                tensors[f"{stem}.{kind}"] = tensor
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def write(target: Any, tensors: dict[str, torch.Tensor], folder: Path, shards: int = 2) -> Path:
    """Write a model's checkpoint and tensors beside its own, in shards or in one file."""
    target.save_pretrained(folder)
    single = folder / "model.safetensors"
    if not shards:
        save_file({**load_file(single), **tensors}, single, {"format": "pt"})
        return folder
    files = {"model-0.safetensors": load_file(single)}
    single.unlink()
    for shard in range(shards):
        names = sorted(tensors)[shard::shards]
        files[f"model-{shard + 1}.safetensors"] = {name: tensors[name] for name in names}
    for file, held in files.items():
        save_file(held, folder / file, {"format": "pt"})
    where = {name: file for file, held in files.items() for name in held}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def checkpoint(
    name: str, folder: Path, count: int = 1, shards: int = 2
) -> tuple[Any, list[Layer], Path]:
    """A target loaded from a checkpoint, the layers in it, and its folder."""
    target = target_of(name, **({} if count == 1 else {"num_nextn_predict_layers": count}))
    layers = layers_of(target, count)
    write(target, published(target, layers), folder, shards)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), layers, folder


@torch.no_grad()
def expected_logits(
    target: Any, layers: Sequence[Layer], tokens: list[int], drafts: list[int], unseen: int = 0
) -> torch.Tensor:
    """Logits [V] of the draft that follows a text and some drafts.

    Args:
        target: the target.
        layers: its layers of multi-token prediction.
        tokens: committed ones, the pending one included.
        drafts: tokens that were drafted after it.
        unseen: tokens at the beginning of the text whose hidden states no layer reads.
    """
    ids = torch.tensor([tokens[:-1]])
    hidden = target(ids, output_hidden_states=True).hidden_states[-1][:, unseen:]
    whole, number, pairs = [*tokens[unseen:], *drafts], len(layers), hidden.shape[1]
    for k in range(min(len(drafts), number - 1) + 1):
        read, hidden = hidden, layers[k].states(target, whole[k + 1 : k + 1 + pairs], hidden)
    for _ in range(number, len(drafts) + 1):
        read = torch.cat([read, hidden[:, -1:]], dim=1)
        hidden = layers[-1].states(target, whole[number : number + read.shape[1]], read)
    return target.get_output_embeddings()(hidden[0, -1])
