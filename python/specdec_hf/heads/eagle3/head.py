"""The module of an EAGLE-3 head: one decoder layer over fused hidden states of the target.

The terms are those of `specdec_hf.heads.eagle_family.head`.

Source: EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specdec_hf.heads.eagle3.config import HeadConfig
from specdec_hf.heads.eagle_family.config import PairConfig
from specdec_hf.heads.eagle_family.head import PairHead
from specdec_hf.heads.eagle_family.layer import HeadLayer, Norm


class DecoderLayer(HeadLayer):
    """A layer that reads a token's embedding beside a hidden state, each normalised."""

    def __init__(self, config: PairConfig, *, norm_before_residual: bool) -> None:
        size, epsilon = config.layer.hidden_size, config.layer.rms_norm_eps
        super().__init__(config, 2 * size)
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = Norm(size, epsilon)
        self.hidden_norm = Norm(size, epsilon)

    def combine(
        self, embeddings: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        return both, normed if self.norm_before_residual else hidden

    def norms_of_parts(self) -> list[torch.Tensor] | None:
        norms = (self.input_layernorm, self.hidden_norm)
        of_heads = (self.q_norm, self.k_norm) if self.qk_norm else ()
        epsilons = {norm.eps for norm in (*norms, self.post_attention_layernorm, *of_heads)}
        if self.norm_before_residual or len(epsilons) > 1:
            return None
        return [norm.weight for norm in norms if norm.weight is not None]


class Eagle3Head(PairHead):
    """An EAGLE-3 head.

    Args:
        config: its sizes.
    """

    config: HeadConfig
    fc: nn.Linear
    midlayer: DecoderLayer

    def __init__(self, config: HeadConfig) -> None:
        size = config.layer.hidden_size
        fc = nn.Linear(config.features, size, bias=False)
        norm = Norm(size, eps=config.layer.rms_norm_eps)
        layer = DecoderLayer(config, norm_before_residual=config.norm_before_residual)
        super().__init__(config, fc, layer, norm)

    def begin_as(self, model: Any) -> None:
        """Start from the target's last layer and final norm, before training.

        The late features pass to the layer as they are, and tokens have no influence at first.

        Raises:
            ValueError: a target whose last layer has no weights of these names and shapes.
        """
        state = model.get_decoder().state_dict()
        last = f"layers.{model.config.get_text_config(decoder=True).num_hidden_layers - 1}."
        try:
            q, k, v = (state[f"{last}self_attn.{x}_proj.weight"] for x in "qkv")
            copied = {
                "midlayer.hidden_norm.weight": state[f"{last}input_layernorm.weight"],
                "midlayer.post_attention_layernorm.weight": state[
                    f"{last}post_attention_layernorm.weight"
                ],
                "midlayer.o_proj.weight": state[f"{last}self_attn.o_proj.weight"],
                "midlayer.gate_up_proj.weight": torch.cat(
                    [state[f"{last}mlp.{x}_proj.weight"] for x in ("gate", "up")]
                ),
                "midlayer.down_proj.weight": state[f"{last}mlp.down_proj.weight"],
                "norm.weight": state["norm.weight"],
            }
            own = dict(self.named_parameters())
            with torch.no_grad():
                for name, weight in copied.items():
                    own[name].copy_(weight)
                taken = self.midlayer.qkv_proj.weight
                size = self.config.layer.hidden_size
                taken[:, :size].normal_(0, 0.02)
                taken[:, size:].copy_(torch.cat([q, k, v]))
                self.fc.weight.normal_(0, 0.01)
                self.fc.weight[:, -size:] += torch.eye(size)
        except (KeyError, RuntimeError) as error:
            raise ValueError(
                f"the last layer of {type(model).__name__} cannot start the head: {error}"
            ) from error
