"""The decoder layers of heads: those of Llama or Qwen3, whose input may be joined from two."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from specdec_hf.heads.eagle_family.config import PairConfig


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

    def __init__(self, config: PairConfig, width: int, *, bias: bool = False) -> None:
        super().__init__()
        layer, size = config.layer, config.layer.hidden_size
        self.head_dim = config.head_dim
        self.projected = config.projected
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = Norm(self.head_dim, layer.rms_norm_eps)
            self.k_norm = Norm(self.head_dim, layer.rms_norm_eps)
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

    def norms_of_parts(self) -> list[torch.Tensor] | None:
        """The weights [H] of the norms of embeddings and hidden states, where `combine` is these.

        The residual is then what is not normalised; None where `combine` does something else.
        """
        return None

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
        return *self.attention_inputs(both, rotary), residual

    def attention_inputs(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B, H, n, D], keys and values [B, K, n, D] of inputs [B, n, width]."""
        heads = self._split(self.qkv_proj(x))
        turned = (sum(self.projected[:2])) // self.head_dim
        queries = self.projected[0] // self.head_dim
        qk, values = heads[:, :turned], heads[:, turned:]
        if self.qk_norm:
            qk = torch.cat([self.q_norm(qk[:, :queries]), self.k_norm(qk[:, queries:])], dim=1)
        qk = _rotate(qk, *rotary)
        return qk[:, :queries], qk[:, queries:], values

    def keys_and_values(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, K, n, D] of inputs [B, n, width] that ask for nothing."""
        rows = self.projected[0]
        bias = None if self.qkv_proj.bias is None else self.qkv_proj.bias[rows:]
        both = self._split(functional.linear(x, self.qkv_proj.weight[rows:], bias))
        keys, values = both.chunk(2, dim=1)
        return _rotate(self.k_norm(keys) if self.qk_norm else keys, *rotary), values

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """Heads [B, -1, n, D] of projections [B, n, -1]."""
        heads: torch.Tensor = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The hidden states [B, n, H] after the layer, given what attention returned."""
        hidden = residual + self.o_proj(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(hidden)).chunk(2, dim=-1)
        out: torch.Tensor = hidden + self.down_proj(functional.silu(gate) * up)
        return out


class StateLayer(HeadLayer):
    """A layer over hidden states alone, as those of a language model."""

    def __init__(self, config: PairConfig) -> None:
        size = config.layer.hidden_size
        super().__init__(config, size)
        self.input_layernorm = Norm(size, config.layer.rms_norm_eps)

    def project_states(
        self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `project`, of hidden states [B, n, H]."""
        return *self.attention_inputs(self.input_layernorm(hidden), rotary), hidden


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding of Llama, which turns pairs half a head apart."""
    left, right = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-right, left], dim=-1) * sines
