"""The module of an EAGLE-3 head: one decoder layer over fused hidden states of the target.

Terms:

- features: the target's hidden states of one token after the chosen layers, side by side.
- pair: the input of the head at one place: a token, and the features of the token before it or,
  from the second draft on, the head's own hidden state there. It gives the hidden state from which
  the next token is drafted.
- draft vocabulary: the target's tokens that the head can draft.

Source: EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import pad
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_hf.heads.base import Head
from specdec_hf.heads.eagle3.config import HeadConfig


class Norm(nn.RMSNorm):
    """A norm whose weights are used in the dtype of its input, which autocast leaves to others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input, normalised."""
        assert self.weight is not None
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class HeadLayer(nn.Module):
    """A Llama layer over pairs, without what it does to its input; override `combine`.

    The attention itself is left to the caller: drafting keeps keys and values in a cache, training
    has those of all places at hand.

    Args:
        config: of the head.
        width: numbers of the input of the projections to queries, keys and values.
        bias: whether these projections have a bias.
    """

    def __init__(self, config: HeadConfig, width: int, *, bias: bool = False) -> None:
        super().__init__()
        layer, size = config.layer, config.layer.hidden_size
        self.head_dim = config.head_dim
        self.projected = config.projected
        self.post_attention_layernorm = Norm(size, layer.rms_norm_eps)
        self.qkv_proj = nn.Linear(width, sum(self.projected), bias=bias)
        self.o_proj = nn.Linear(self.projected[0], size, bias=False)
        self.gate_up_proj = nn.Linear(size, 2 * layer.intermediate_size, bias=False)
        self.down_proj = nn.Linear(layer.intermediate_size, size, bias=False)

    def combine(
        self, embeddings: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of the projections [B, n, width] and the residual [B, n, H] of n pairs."""
        raise NotImplementedError

    def project(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, rotary: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B, H, n, D], keys and values [B, K, n, D], and the residual of n pairs.

        Args:
            embeddings: [B, n, H] of their tokens.
            hidden: [B, n, H].
            rotary: cosines and sines [B or 1, 1, n, D] of their places.
        """
        both, residual = self.combine(embeddings, hidden)
        heads = self.qkv_proj(both).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        turned = (sum(self.projected[:2])) // self.head_dim
        queries = self.projected[0] // self.head_dim
        qk, values = heads[:, :turned], heads[:, turned:]
        qk = _rotate(qk, *rotary)
        return qk[:, :queries], qk[:, queries:], values, residual

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The hidden states [B, n, H] after the layer, given what attention returned."""
        hidden = residual + self.o_proj(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(hidden)).chunk(2, dim=-1)
        out: torch.Tensor = hidden + self.down_proj(functional.silu(gate) * up)
        return out


class DecoderLayer(HeadLayer):
    """A layer that reads a token's embedding beside a hidden state, each normalised."""

    def __init__(self, config: HeadConfig) -> None:
        size, epsilon = config.layer.hidden_size, config.layer.rms_norm_eps
        super().__init__(config, 2 * size)
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = Norm(size, epsilon)
        self.hidden_norm = Norm(size, epsilon)

    def combine(
        self, embeddings: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        return both, normed if self.norm_before_residual else hidden


class PairHead(Head):
    """A head with one decoder layer over pairs.

    Args:
        config: its sizes.
        fc: gives hidden states [B, n, H] from features.
        midlayer: the decoder layer.
        norm: of the hidden states, before the output matrix.

    Attributes:
        embeddings: [V, H] of the target's tokens, of the head's own; None takes the target's.
    """

    config: HeadConfig
    embeddings: torch.Tensor | None

    def __init__(
        self, config: HeadConfig, fc: nn.Module, midlayer: HeadLayer, norm: nn.Module
    ) -> None:
        super().__init__(config.draft_vocab_size, config.layer.hidden_size)
        self.config = config
        self.fc, self.midlayer, self.norm = fc, midlayer, norm
        self.register_buffer("embeddings", None, persistent=False)
        self.rotary = LlamaRotaryEmbedding(config.layer)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, n, H] from features [B, n, layers * E]."""
        fused: torch.Tensor = self.fc(features)
        return fused

    def embed(self, model: Any) -> Any:
        """What gives the embeddings [..., H] of the target's tokens, given the target."""
        if self.embeddings is None:
            return model.get_input_embeddings()
        return partial(functional.embedding, weight=self.embeddings)

    def turns(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [B, 1, n, D] of the rotary embedding at places [B, n]."""
        cosines, sines = self.rotary(self.lm_head, places)
        return cosines[:, None], sines[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., draft_vocab_size] from hidden states [..., H]."""
        return functional.linear(self.norm(hidden), self.lm_head)


class Eagle3Head(PairHead):
    """An EAGLE-3 head.

    Args:
        config: its sizes.
    """

    fc: nn.Linear
    midlayer: DecoderLayer

    def __init__(self, config: HeadConfig) -> None:
        size = config.layer.hidden_size
        fc = nn.Linear(config.features, size, bias=False)
        norm = Norm(size, eps=config.layer.rms_norm_eps)
        super().__init__(config, fc, DecoderLayer(config), norm)

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


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding of Llama, which turns pairs half a head apart."""
    left, right = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-right, left], dim=-1) * sines


class HeadCache:
    """Buffers [B, K, S, D] of keys and values; the pair at place p of a sequence lies in slot p.

    Args:
        config: of the head.
        batch_size: number of sequences B.
        like: a tensor of the head's dtype and device.
        capacity: slots S to allocate at first; the buffers grow when needed.
    """

    def __init__(
        self, config: HeadConfig, batch_size: int, like: torch.Tensor, capacity: int = 256
    ) -> None:
        shape = (batch_size, config.kv_heads, capacity, config.head_dim)
        # Zeros, because attention multiplies hidden slots by a weight of 0, and 0 * NaN is NaN. A
        # graph is made for tensors of inference mode or for others, so they are always others.
        with torch.inference_mode(False):
            self._keys, self._values = like.new_zeros(shape), like.new_zeros(shape)

    @property
    def batch_size(self) -> int:
        """The number of sequences."""
        return self._keys.shape[0]

    def suffices(self, other: HeadCache) -> bool:
        """Whether it holds as many sequences as another one, and as many slots."""
        mine, theirs = self._keys.shape, other._keys.shape
        return mine[0] == theirs[0] and mine[2] >= theirs[2]

    def clear(self) -> None:
        """Set all slots to zero."""
        self._keys.zero_()
        self._values.zero_()

    def buffers(self, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values with room for more than this many slots, as in `SpecCache`."""
        capacity = self._keys.shape[2]
        if slots >= capacity:
            more = max(slots + 1, capacity + capacity // 2) - capacity
            with torch.inference_mode(False):
                self._keys, self._values = (
                    pad(x, (0, 0, 0, more)) for x in (self._keys, self._values)
                )
        return self._keys, self._values
