"""Verification of trees in eager PyTorch, batched over sequences, as users write it: a loop over
the depth of the tree, and over siblings where the rule tries one after the other.

A law is a function from places [B], 0 the root and n+1 node n, to probabilities [B, V]. All return
the path [B, depth], then -1, the number of accepted nodes [B] and the token that follows [B].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Law = Callable[[Tensor], Tensor]
Outcome = tuple[Tensor, Tensor, Tensor]


def draw(weights: Tensor) -> Tensor:
    """A token of each row [B, V] by inverting its cdf."""
    cdf = weights.cumsum(-1)
    u = torch.rand(len(cdf), 1, device=cdf.device) * cdf[:, -1:]
    return torch.searchsorted(cdf, u, right=True)[:, 0].clamp(max=cdf.shape[1] - 1)


class _Walk:
    """Where each sequence is, and whether it still goes on."""

    def __init__(self, tokens: Tensor, children: Tensor, depth: int) -> None:
        self.rows = torch.arange(len(tokens), device=tokens.device)
        self.tokens, self.children = tokens, children
        self.here = torch.zeros_like(self.rows)
        self.accepted = torch.zeros_like(self.rows)
        self.alive = torch.ones_like(self.rows, dtype=torch.bool)
        self.path = torch.full((len(tokens), depth), -1, device=tokens.device)

    def family(self) -> tuple[Tensor, Tensor]:
        """Children [B, K] of where each sequence is, -1 for none, and their tokens."""
        nodes = self.children[self.here].where(self.alive[:, None], -1)
        return nodes, self.tokens.gather(1, nodes.clamp(min=0))

    def go(self, node: Tensor, stands: Tensor) -> None:
        """On to the nodes that stand; the other sequences end here."""
        step = torch.nn.functional.one_hot(self.accepted, self.path.shape[1] + 1)[:, :-1].bool()
        self.path = torch.where(step & stands[:, None], node[:, None], self.path)
        self.here = torch.where(stands, node + 1, self.here)
        self.accepted += stands
        self.alive = stands

    def follow(self, answer: Callable[[], Tensor]) -> Outcome:
        """The children that are the answer, as long as there are some."""
        y = torch.zeros_like(self.here)
        for _ in range(self.path.shape[1] + 1):
            y = torch.where(self.alive, answer(), y)
            nodes, tokens = self.family()
            hit = (nodes >= 0) & (tokens == y[:, None])
            stands = hit.any(-1)
            self.go(nodes.gather(1, hit.int().argmax(-1, keepdim=True))[:, 0], stands)
            if not stands.any():
                break
        return self.path, self.accepted, y


def greedy(target: Tensor, tokens: Tensor, children: Tensor, depth: int) -> Outcome:
    """The path of the most likely tokens. target: [B, N+1, V], anything in the order of the law."""
    best, walk = target.argmax(-1), _Walk(tokens, children, depth)
    return walk.follow(lambda: best[walk.rows, walk.here])


def target_only(p: Law, tokens: Tensor, children: Tensor, depth: int) -> Outcome:
    """The path of tokens drawn from the target."""
    walk = _Walk(tokens, children, depth)
    return walk.follow(lambda: draw(p(walk.here)))


def multi_draft(
    p: Law, q: Law, tokens: Tensor, children: Tensor, depth: int, *, replacement: bool = True
) -> Outcome:
    """SpecInfer's rule, or Sequoia's without replacement. q: of the children at a place."""
    walk = _Walk(tokens, children, depth)
    left = torch.empty(0)
    for _ in range(depth + 1):
        law = p(walk.here)
        node, stands, law = _siblings(walk, law, q, replacement)
        left = torch.where(walk.alive[:, None], law, left) if len(left) else law
        walk.go(node, stands)
        if not stands.any():
            break
    return walk.path, walk.accepted, draw(left)


def _siblings(
    walk: _Walk, law: Tensor, q_of: Law, replacement: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The child that stands, whether one does, and what is left of the law [B, V]."""
    nodes, tokens = walk.family()
    taken, stands = torch.zeros_like(walk.here), torch.zeros_like(walk.alive)
    trying = (nodes >= 0).any(-1)
    if not trying.any():
        return taken, stands, law
    q = q_of(walk.here)
    for node, x in zip(nodes.unbind(1), tokens[..., None].unbind(1), strict=True):
        trying = trying & (node >= 0)
        if not trying.any():
            break
        coin = torch.rand_like(law[:, 0])
        ok = trying & (coin * q.gather(1, x)[:, 0] < law.gather(1, x)[:, 0])
        taken, stands, trying = torch.where(ok, node, taken), stands | ok, trying & ~ok
        rest = (law - q).clamp(min=0)
        if not replacement:
            rest = rest.scatter(1, x, 0.0)
            q = q.scatter(1, x, 0.0)
            q = q / q.sum(-1, keepdim=True)
        mass = rest.sum(-1, keepdim=True)
        law = torch.where(trying[:, None] & (mass > 0), rest / mass, law)
    return taken, stands, law
