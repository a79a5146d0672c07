"""Specification of `grow_tree_`: a head's forwards between `expand_tree` and `rerank_tree`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..tree.expand_tree import expand_tree
from ..tree.layout import rerank_tree, tree_attention
from .decoder_layer import decoder_layers_, rms_norm
from .linear import packed_linear


def grow_tree_(
    hidden: Tensor,
    tokens: Tensor,
    counts: Tensor,
    starts: Tensor,
    limits: Tensor,
    embeddings: Tensor,
    norms: Sequence[Tensor],
    weights: Sequence[Tensor],
    in_features: Sequence[int],
    out_features: Sequence[int],
    qkv_biases: Sequence[Tensor],
    output_biases: Sequence[Tensor],
    mlp_biases: Sequence[Tensor],
    head_norms: Sequence[Tensor],
    norm: Tensor,
    output: Tensor,
    outputs: int,
    draft_tokens: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    caches: Sequence[Tensor],
    scale: float,
    epsilon: float,
    width: int,
    size: int,
    min_probability: float,
) -> tuple[Tensor, ...]:
    """One tree after the other: a sequence's does not depend on the others of its batch."""
    head = norms, weights, in_features, out_features, qkv_biases, output_biases, mlp_biases
    trees = []
    for b in range(len(hidden)):
        count, start, limit = int(counts[b]), int(starts[b]), int(limits[b])
        of_b = [cache[b : b + 1] for cache in caches]

        def feed(of: Tensor, states: Tensor, places: Tensor, slot: int, mask: Tensor) -> Tensor:
            """Hidden states [1, m, C] of pairs that see slots [m, S]."""
            pairs = torch.cat([embeddings[of], states], dim=-1)[None]
            return decoder_layers_(
                pairs, *head, head_norms, cos[None, places], sin[None, places], of_b,
                torch.tensor([slot]), mask[None, None], scale, epsilon, False,
            )  # fmt: skip

        def children(states: Tensor, paths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Of nodes with these hidden states [m, C]: tokens and scores [m, K], frontier [K]."""
            normed = rms_norm(states, norm, epsilon)
            logits = packed_linear(normed, output, hidden.shape[2], outputs, None)
            found = expand_tree(logits[None], paths[None], width, None, 1.0)
            return tuple(x[0] for x in found)

        # All pairs are fed, those behind the last of this sequence too, whose slots are free.
        places = start + torch.arange(hidden.shape[1])
        mask = torch.arange(start + hidden.shape[1]) <= places[:, None]
        states = feed(tokens[b].long(), hidden[b], places, start, mask)[:, count - 1]
        trees.append(
            _grow(feed, children, states, start + count, limit, draft_tokens, width, size,
                  min_probability)
        )  # fmt: skip
    stacked = [torch.stack(list(column)) for column in zip(*trees, strict=True)]
    if stacked:
        return tuple(stacked)
    none = hidden.new_empty((0, size), dtype=torch.int64)
    return none, none, none.float(), none[:, 0]


def _grow(
    feed: Any,
    children: Any,
    states: Tensor,
    text: int,
    limit: int,
    draft_tokens: Tensor | None,
    width: int,
    size: int,
    min_probability: float,
) -> tuple[Tensor, ...]:
    """The tree below one pending token with hidden state [1, C], whose text takes ``text`` slots."""
    tokens, parents, scores = [], [], []
    fed: list[int] = []  # the candidate that each node fed is
    above = torch.empty(1, 0, dtype=torch.int64)  # the node fed above each, -1: the root
    last = torch.tensor([-1])  # the candidates whose children come next, -1: the root
    level = 0
    while level < limit:
        if level > 0:
            paths = torch.tensor([scores[node] for node in frontier])
            if paths.exp().sum() < min_probability:
                break
            if len(scores) >= size and paths.max() <= sorted(scores, reverse=True)[size - 1]:
                break
            # The node above each of them was expanded, and so was fed; the root is not counted.
            places = [fed.index(parents[node]) if parents[node] >= 0 else -1 for node in frontier]
            above = torch.cat([above, torch.tensor([places])], dim=1)
            begin, fed, last = len(fed), fed + frontier, torch.tensor(frontier)
            slots = text + len(fed)
            mask = tree_attention(above, torch.tensor([text - 1]), slots, 0)[0][0, 1 + begin :]
            given = torch.tensor([max(tokens[node], 0) for node in frontier])
            made = feed(
                given, states[torch.tensor(places) + 1], torch.tensor([text - 1 + level]).expand(width),
                text + begin, mask,
            )[0]  # fmt: skip
            states = torch.cat([states, made])
            rows = made
        else:
            paths, rows = torch.zeros(1), states
        found, found_scores, chosen = children(rows, paths)
        if draft_tokens is not None:
            found = torch.where(found < 0, found, draft_tokens.long()[found.clamp(min=0)])
        frontier = (len(tokens) + chosen).tolist()
        tokens += found.flatten().tolist()
        scores += found_scores.flatten().tolist()
        parents += last.repeat_interleave(width).tolist()
        level += 1
    if not tokens:
        none = torch.full((size,), -1)
        return none, none, torch.full((size,), -torch.inf), torch.tensor(0)
    all_scores = torch.tensor([scores])
    best = rerank_tree(torch.tensor([tokens]), torch.tensor([parents]), all_scores, size)
    kept = all_scores[0, best[2][0].clamp(min=0)].masked_fill(best[2][0] < 0, -torch.inf)
    return best[0][0], best[1][0], kept, torch.tensor(level)
