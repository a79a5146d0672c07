"""Which chunks of a text a query attends to most, judged by the mean of the keys of each chunk.

A chunk is a run of tokens of one size; a chunk's score is about the attention that it would get if
each of its keys were their mean. Reading the means costs as many keys as there are chunks.

Source: Sun et al. 2024, "TriForce", arXiv 2404.11912, section 4.1.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.runner.packed.decoder_layer import FAMILIES
from specdec_hf.runner.protocol import to_device
from specdec_hf.runner.spec_runner import SpecRunner
from specdec_hf.runner.structure import unknown_structure

from specdec_kernels import kv_append_


class ChunkMeans:
    """The mean key of each chunk of a cache, by layer and head, made once when the chunk is whole.

    Args:
        runner: whose cache is read; its model has rotary embeddings.
        first: slot of the first chunk's first token.
        size: tokens of a chunk.

    Attributes:
        counts: [B], chunks of each sequence that have a mean.
        means: [N, B, H, C, D] float32 for N layers with H heads of keys; rows from ``counts[b]`` on
            have no meaning.
    """

    def __init__(self, runner: SpecRunner, first: int, size: int) -> None:
        self.runner = runner
        self.first, self.size = first, size
        self.counts = np.zeros(len(runner.lengths), dtype=np.int64)
        self.means = torch.empty(0)

    def extend(self, counts: NDArray[np.int64]) -> None:
        """Add the means of the chunks that are missing up to ``counts[b]`` of each sequence."""
        width = int((counts - self.counts).max())
        if width < 1:
            return
        keys = [layer.buffers[0] for layer in self.runner.cache.spec_layers]
        self._make_room(int(counts.max()), keys[0])
        begins = self.first + self.counts * self.size
        slots = begins[:, None] + np.arange(width * self.size)
        # Where fewer chunks are missing, means of other slots follow, which are written again.
        np.minimum(slots, keys[0].shape[2] - 1, out=slots)
        device = self.means.device
        columns, rows = torch.from_numpy(slots), torch.arange(len(slots), device=device)[:, None]
        new = []
        for layer in keys:
            at = rows.to(layer.device), columns.to(layer.device)
            taken = layer.transpose(1, 2)[at].unflatten(1, (width, self.size))
            new.append(taken.mean(dim=2, dtype=torch.float32).transpose(1, 2).to(device))
        starts = to_device(self.counts, device)
        kv_append_(list(self.means), new, starts)
        self.counts = np.maximum(self.counts, counts)

    def _make_room(self, chunks: int, keys: torch.Tensor) -> None:
        capacity = self.means.shape[3] if self.means.ndim == 5 else 0
        if chunks <= capacity:
            return
        batch_size, heads, _, size = keys.shape
        layers = len(self.runner.cache.spec_layers)
        shape = (layers, batch_size, heads, chunks + chunks // 8 + 8, size)
        larger = torch.zeros(shape, dtype=torch.float32, device=self.runner.device)
        if capacity:
            larger[:, :, :, :capacity] = self.means
        self.means = larger


def chunk_scores(
    queries: torch.Tensor, means: torch.Tensor, counts: torch.Tensor, scale: float
) -> torch.Tensor:
    """How much a query attends to each chunk, if a chunk is one key: its mean.

    Each head of queries gives its chunks a softmax of ``scale * query . mean``; the scores of a
    head of keys are the sum over the heads of queries that share it. With one head of queries for
    each head of keys, as in the source, the best chunks are those of the largest product.

    Args:
        queries: [N, R, H_q, D], of any dtype.
        means: [N, R, H, C, D] float32; H divides H_q.
        counts: [R] int64, chunks that each sequence has; at least 1.
        scale: of the attention.

    Returns:
        [N, R, H, C] float32, -1 beyond ``counts[b]``.
    """
    grouped = queries.float().unflatten(2, (means.shape[2], -1))
    logits = grouped @ means.transpose(-1, -2) * scale  # [N, R, H, G, C]
    absent = torch.arange(means.shape[3], device=means.device) >= counts[:, None]
    weights = logits.masked_fill(absent[:, None, None], -torch.inf).softmax(dim=-1)
    scores: torch.Tensor = weights.sum(dim=3).masked_fill(absent[:, None], -1.0)
    return scores


def queries_of(model: Any, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The queries of one token of each sequence in every layer, from the states before the layers.

    Args:
        model: that `unserved_reason` allows, or its packed model.
        states: [R, N, H], the hidden states that each of the N layers reads.
        positions: [R] int64 of the tokens.

    Returns:
        [N, R, H_q, D], rotated.
    """
    base = model.base_model
    cos, sin = base.rotary_emb(states, positions[:, None])
    queries = []
    for n, layer in enumerate(base.layers):
        attention = layer.self_attn
        projected = attention.q_proj(layer.input_layernorm(states[:, n : n + 1]))
        query = projected.unflatten(-1, (-1, attention.head_dim))
        norm = getattr(attention, "q_norm", None)
        if norm is not None:
            query = norm(query)
        rotate = vars(sys.modules[type(attention).__module__])["apply_rotary_pos_emb"]
        query = query.transpose(1, 2)
        queries.append(rotate(query, query, cos, sin)[0][:, :, 0])
    return torch.stack(queries)


def scale_of(model: Any) -> float:
    """What the attention of a model multiplies its scores by."""
    scale: float = model.base_model.layers[0].self_attn.scaling
    return scale


def unserved_reason(model: Any, max_length: int) -> str | None:
    """Why the queries of a model are not known here, or None.

    Args:
        model: the causal language model.
        max_length: tokens of the longest text.
    """
    reason = unknown_structure(model)
    if reason is not None:
        return reason
    kinds = {type(layer) for layer in getattr(model.base_model, "layers", [model.base_model])}
    other = next((kind for kind in kinds if kind.__module__ not in FAMILIES), None)
    if other is not None:
        return f"its layers must be those of {', '.join(FAMILIES.values())}, got {other.__name__}"
    window = getattr(model.config, "sliding_window", None)
    if window is not None and window < max_length:
        return f"its attention has a window of {window} tokens, which texts of {max_length} exceed"
    return None
