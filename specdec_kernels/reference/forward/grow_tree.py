"""Specification of `grow_tree_`: a head's forwards between `expand_tree` and `rerank_tree`."""

from __future__ import annotations

import functools
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

    def run_head(
        of_b: list[Tensor], ids: Tensor, states: Tensor, places: Tensor, slot: int, mask: Tensor
    ) -> Tensor:
        """Hidden states [m, C] of pairs that see slots [m, S]; they go to the slots from one on."""
        pairs = torch.cat([embeddings[ids], states], dim=-1)[None]
        return decoder_layers_(
            pairs, *head, head_norms, cos[None, places], sin[None, places], of_b,
            torch.tensor([slot]), mask[None, None], scale, epsilon, False,
        )[0]  # fmt: skip

    def children(states: Tensor, paths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of m nodes with these hidden states: tokens and scores [m, K], and the frontier [K]."""
        normed = rms_norm(states, norm, epsilon)
        logits = packed_linear(normed, output, hidden.shape[2], outputs, None)
        found, scores, frontier = expand_tree(logits[None], paths[None], width, None, 1.0)
        if draft_tokens is not None:
            found = torch.where(found < 0, found, draft_tokens.long()[found.clamp(min=0)])
        return found[0], scores[0], frontier[0]

    grown = []
    for b in range(len(hidden)):
        count, start = int(counts[b]), int(starts[b])
        feed = functools.partial(run_head, [cache[b : b + 1] for cache in caches])
        # All pairs are fed, those behind the last of this sequence too, whose slots are free.
        places = start + torch.arange(hidden.shape[1])
        mask = torch.arange(start + hidden.shape[1]) <= places[:, None]
        root = feed(tokens[b].long(), hidden[b], places, start, mask)[count - 1 : count]
        tree = _Tree(feed, children, root, start + count)
        while tree.level < int(limits[b]) and tree.continues(size, min_probability):
            tree.grow()
        grown.append(tree.best(size))
    if grown:
        return tuple(torch.stack(column) for column in map(list, zip(*grown, strict=True)))
    none = torch.empty((0, size), dtype=torch.int64)
    return none, none, none.float(), none[:, 0]


class _Tree:
    """The candidates below one pending token, whose text takes ``text`` slots.

    Args:
        feed, children: as above.
        root: its hidden state [1, C].
        text: slots before those of the tree.
    """

    def __init__(self, feed: Any, children: Any, root: Tensor, text: int) -> None:
        self.feed, self.children, self.text = feed, children, text
        self.states = root  # of the root and of the nodes that were fed
        self.fed: list[int] = []  # the candidate that each node fed is
        self.above: list[int] = []  # the node fed above each, -1: the root
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self.frontier = [-1]  # candidates whose children come next, -1: the root
        self.level = 0

    def continues(self, size: int, min_probability: float) -> bool:
        """Whether another level may give nodes that are kept, and is likely enough."""
        if self.level == 0:
            return True
        paths = torch.tensor([self.scores[node] for node in self.frontier])
        if paths.exp().sum() < min_probability:
            return False
        kept = sorted(self.scores, reverse=True)[:size]
        return len(kept) < size or float(paths.max()) > kept[-1]

    def grow(self) -> None:
        """Add the children of the frontier."""
        rows, paths = self.states, torch.zeros(1)
        if self.level > 0:
            rows = self._feed_frontier()
            paths = torch.tensor([self.scores[node] for node in self.frontier])
        tokens, scores, frontier = self.children(rows, paths)
        begin = len(self.tokens)
        self.tokens += tokens.flatten().tolist()
        self.scores += scores.flatten().tolist()
        self.parents += [node for node in self.frontier for _ in range(tokens.shape[1])]
        self.frontier = (begin + frontier).tolist()
        self.level += 1

    def _feed_frontier(self) -> Tensor:
        """The hidden states of the frontier, whose keys and values follow those fed before."""
        parents = [self.parents[node] for node in self.frontier]
        above = [self.fed.index(node) if node >= 0 else -1 for node in parents]
        begin, count = len(self.fed), len(above)
        self.fed, self.above = self.fed + self.frontier, self.above + above
        slots, root = self.text + len(self.fed), torch.tensor([self.text - 1])
        mask = tree_attention(torch.tensor([self.above]), root, slots, 0)[0][0, 1 + begin :]
        rows: Tensor = self.feed(
            torch.tensor([max(self.tokens[node], 0) for node in self.frontier]),
            self.states[torch.tensor(above) + 1], (root + self.level).expand(count),
            self.text + begin, mask,
        )  # fmt: skip
        self.states = torch.cat([self.states, rows])
        return rows

    def best(self, size: int) -> tuple[Tensor, ...]:
        """Tokens, parents and scores [size] of the nodes that are kept, and the levels drafted."""
        level, none = torch.tensor(self.level), torch.full((size,), -1)
        if not self.tokens:
            return none, none, torch.full((size,), -torch.inf), level
        scores = torch.tensor([self.scores])
        tokens, parents, nodes = rerank_tree(
            torch.tensor([self.tokens]), torch.tensor([self.parents]), scores, size
        )
        kept = scores[0, nodes[0].clamp(min=0)].masked_fill(nodes[0] < 0, -torch.inf)
        return tokens[0], parents[0], kept, level
