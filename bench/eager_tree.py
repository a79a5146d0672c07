"""Tree verification in batched eager PyTorch, as users write it: a baseline.

It loops over the depth of the tree and, for rules that try siblings one by one, over siblings.

A tree's rows are numbered from the root: row 0 belongs to the root and row n+1 to node n.
`Distribution` is a function from rows [B] to probabilities [B, V]. Every rule returns the path
[B, depth] (then -1), the number of accepted nodes [B] and the recovered or bonus token [B].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Distribution = Callable[[Tensor], Tensor]
Outcome = tuple[Tensor, Tensor, Tensor]


def draw(weights: Tensor) -> Tensor:
    """One token for each row of weights [B, V], by inverting the cdf."""
    cdf = weights.cumsum(-1)
    u = torch.rand(len(cdf), 1, device=cdf.device) * cdf[:, -1:]
    return torch.searchsorted(cdf, u, right=True)[:, 0].clamp(max=cdf.shape[1] - 1)


class _Traversal:
    """The row that each sequence has reached, and whether it is still going down."""

    def __init__(self, tokens: Tensor, children: Tensor, depth: int) -> None:
        self.sequences = torch.arange(len(tokens), device=tokens.device)
        self.tokens, self.children = tokens, children
        self.here = torch.zeros_like(self.sequences)
        self.accepted = torch.zeros_like(self.sequences)
        self.alive = torch.ones_like(self.sequences, dtype=torch.bool)
        self.path = torch.full((len(tokens), depth), -1, device=tokens.device)

    def family(self) -> tuple[Tensor, Tensor]:
        """Children [B, K] of the node that each sequence has reached (-1 for none) and tokens."""
        nodes = self.children[self.here].where(self.alive[:, None], -1)
        return nodes, self.tokens.gather(1, nodes.clamp(min=0))

    def step(self, node: Tensor, accepted: Tensor) -> None:
        """Step down to the accepted nodes; the other sequences end here."""
        last = torch.nn.functional.one_hot(self.accepted, self.path.shape[1] + 1)[:, :-1].bool()
        self.path = torch.where(last & accepted[:, None], node[:, None], self.path)
        self.here = torch.where(accepted, node + 1, self.here)
        self.accepted += accepted
        self.alive = accepted

    def follow(self, answer: Callable[[], Tensor]) -> Outcome:
        """Step down to the child whose token is the answer, until there is none."""
        y = torch.zeros_like(self.here)
        for _ in range(self.path.shape[1] + 1):
            y = torch.where(self.alive, answer(), y)
            nodes, tokens = self.family()
            hit = (nodes >= 0) & (tokens == y[:, None])
            found = hit.any(-1)
            self.step(nodes.gather(1, hit.int().argmax(-1, keepdim=True))[:, 0], found)
            if not found.any():
                break
        return self.path, self.accepted, y


def greedy(target: Tensor, tokens: Tensor, children: Tensor, depth: int) -> Outcome:
    """The path of the most likely tokens. target [B, N+1, V] holds logits or probabilities."""
    best, at = target.argmax(-1), _Traversal(tokens, children, depth)
    return at.follow(lambda: best[at.sequences, at.here])


def target_only(p: Distribution, tokens: Tensor, children: Tensor, depth: int) -> Outcome:
    """The path of tokens drawn from the target."""
    at = _Traversal(tokens, children, depth)
    return at.follow(lambda: draw(p(at.here)))


def multi_draft(
    p: Distribution,
    q: Distribution,
    tokens: Tensor,
    children: Tensor,
    depth: int,
    *,
    replacement: bool = True,
) -> Outcome:
    """SpecInfer's rule, or Sequoia's for siblings drawn without replacement.

    q: the distribution that the children of a row's node were drawn from.
    """
    at = _Traversal(tokens, children, depth)
    last = torch.empty(0)
    for _ in range(depth + 1):
        node, accepted, residual = _siblings(at, p(at.here), q, replacement)
        last = torch.where(at.alive[:, None], residual, last) if len(last) else residual
        at.step(node, accepted)
        if not accepted.any():
            break
    return at.path, at.accepted, draw(last)


def _siblings(
    at: _Traversal, p: Tensor, q_of: Distribution, replacement: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(accepted child, whether there is one, P or the residual after the rejections [B, V])."""
    nodes, tokens = at.family()
    chosen, accepted = torch.zeros_like(at.here), torch.zeros_like(at.alive)
    trying = (nodes >= 0).any(-1)
    if not trying.any():
        return chosen, accepted, p
    q = q_of(at.here)
    for node, x in zip(nodes.unbind(1), tokens[..., None].unbind(1), strict=True):
        trying = trying & (node >= 0)
        if not trying.any():
            break
        u = torch.rand_like(p[:, 0])
        ok = trying & (u * q.gather(1, x)[:, 0] < p.gather(1, x)[:, 0])
        chosen, accepted, trying = torch.where(ok, node, chosen), accepted | ok, trying & ~ok
        residual = (p - q).clamp(min=0)
        if not replacement:
            residual = residual.scatter(1, x, 0.0)
            q = q.scatter(1, x, 0.0)
            q = q / q.sum(-1, keepdim=True)
        mass = residual.sum(-1, keepdim=True)
        p = torch.where(trying[:, None] & (mass > 0), residual / mass, p)
    return chosen, accepted, p
