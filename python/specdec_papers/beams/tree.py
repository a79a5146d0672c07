"""The beams of a prompt as a tree in a model's cache.

The text that all beams share is stored once. Its last token is the root of a tree that holds what
they do not share. When a round ends, the nodes that no beam goes through are dropped, and the root
moves down to where the beams part.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.drafting.context import History
from specdec_hf.runner.protocol import Lengths, Runner, to_device

Integers = NDArray[np.int64]


class TreeModel:
    """A model whose cache holds the shared text and the first nodes of the tree.

    Args:
        runner: that of the target or the draft model, with an empty cache.

    Attributes:
        held: [B], tokens of the shared text in the cache. Nodes of a prompt are only in the cache
            if its whole shared text is.
        fed: nodes of every prompt in the cache.
    """

    def __init__(self, runner: Runner) -> None:
        self.model, self.runner = runner.model, runner
        self.held: Lengths = np.zeros_like(runner.lengths)
        self.fed = 0

    def catch_up(self, text: History) -> torch.Tensor | None:
        """Feed the shared text that the cache lacks; logits [B, 1, V] of the root, or None."""
        missing = int((text.lengths - self.held).max())
        if missing == 0:
            return None
        tokens = to_device(text.last(missing), self.model.device)
        starts = text.lengths - missing
        self.held = text.lengths.copy()
        return self.runner.forward(tokens, starts, 1)

    def feed(self, text: History, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Feed nodes below the root.

        Args:
            text: the shared text.
            tokens: [B, m] int64 of the last m nodes, on the model's device.
            parents: [B, N] of all nodes; the first N - m must be in the cache.

        Returns:
            Logits [B, m, V].
        """
        self.fed = parents.shape[1]
        return self.runner.forward_tree(tokens, text.lengths - 1, parents)

    def keep(self, lengths: Lengths, kept: Integers, shared: Integers) -> None:
        """Drop nodes, and let the shared text end deeper in the tree.

        Args:
            lengths: [B], tokens of the shared text before.
            kept: [B, P], ascending numbers of the nodes that stay, then -1. They get the numbers 0,
                1, ... less ``shared[b]``.
            shared: [B], how many of them, the first ones, now belong to the shared text.
        """
        cached = (kept >= 0) & (kept < self.fed)
        if cached.any():
            device = self.model.device
            base = to_device(lengths, device)
            path = to_device(np.where(cached, kept, -1), device)
            self.runner.compact(base, path)
        number, present = cached.sum(axis=1), (kept >= 0).sum(axis=1)
        self.held = self.held + np.minimum(number, shared)
        # Numbers after the last node of a prompt belong to no node and need not be fed.
        nodes = int((present - shared).max())
        left = np.where(number < present, np.maximum(number - shared, 0), nodes)
        self.fed = int(left.min())


class BeamTree:
    """The nodes of every prompt that are in the target's cache, on the host.

    Attributes:
        tokens, parents: [B, N]; a prompt with fewer than N nodes has absent ones at the end, token
            0 below the root.
    """

    def __init__(self, batch_size: int) -> None:
        self.tokens: Integers = np.zeros((batch_size, 0), dtype=np.int64)
        self.parents: Integers = np.zeros((batch_size, 0), dtype=np.int64)

    @property
    def size(self) -> int:
        """N, the number of nodes."""
        return int(self.tokens.shape[1])

    def extend(self, tokens: Integers, parents: Integers) -> None:
        """Add nodes [B, m] at the end."""
        self.tokens = np.concatenate([self.tokens, tokens], axis=1)
        self.parents = np.concatenate([self.parents, parents], axis=1)

    def prune(self, tips: Integers) -> tuple[Integers, Integers, list[list[int]], Integers]:
        """Keep the nodes on the paths to some, and take those that all paths share from the tree.

        Args:
            tips: [B, w], numbers of nodes; -1 is the root.

        Returns:
            ``kept`` [B, P] and ``shared`` [B] as in `TreeModel.keep`, the tokens of the shared
            nodes of each prompt, and the new numbers of the tips.
        """
        kept: list[list[int]] = []
        shared: Integers = np.zeros(len(tips), dtype=np.int64)
        for b, row in enumerate(tips.tolist()):
            paths = [self.path(b, tip) for tip in row]
            kept.append(sorted({node for path in paths for node in path}))
            for level in zip(*paths, strict=False):
                if len(set(level)) > 1:
                    break
                shared[b] += 1
        texts = [self.tokens[b, nodes[: shared[b]]].tolist() for b, nodes in enumerate(kept)]
        table: Integers = np.full((len(tips), max(map(len, kept))), -1, dtype=np.int64)
        size = max(len(nodes) - int(n) for nodes, n in zip(kept, shared, strict=True))
        tokens = np.zeros((len(tips), size), dtype=np.int64)
        parents, renamed = np.full_like(tokens, -1), np.empty_like(tips)
        for b, nodes in enumerate(kept):
            table[b, : len(nodes)] = nodes
            first = int(shared[b])
            number = {node: max(n - first, -1) for n, node in enumerate(nodes)} | {-1: -1}
            for node in nodes[first:]:
                tokens[b, number[node]] = self.tokens[b, node]
                parents[b, number[node]] = number[int(self.parents[b, node])]
            renamed[b] = [number[tip] for tip in tips[b].tolist()]
        self.tokens, self.parents = tokens, parents
        return table, shared, texts, renamed

    def path(self, b: int, node: int) -> list[int]:
        """Numbers of the nodes from below the root down to ``node``; empty for the root, -1."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = int(self.parents[b, node])
        return nodes[::-1]


class DraftedBeams(NamedTuple):
    """Nodes of a draft on the draft model's device, level by level.

    tokens: [B, gamma * u] int64.
    parents: [B, gamma * u] int64, numbers of nodes of the tree that they extend.
    """

    tokens: torch.Tensor
    parents: torch.Tensor


@torch.inference_mode()
def draft_beams(
    drafter: TreeModel,
    text: History,
    tree: BeamTree,
    scores: torch.Tensor,
    *,
    width: int,
    gamma: int,
    eos: frozenset[int],
) -> DraftedBeams:
    """Continue the target's beams with the draft model. It does not wait for the device.

    Args:
        drafter: the draft model.
        text: the shared text.
        tree: ends with the last tokens of the target's w beams.
        scores: [B, w] float32, of these beams.
        width: u, beams of the draft, at least w.
        gamma: steps, at least 1.
        eos: tokens that end a sequence, so that no beam goes on with them.

    Source: Leviathan et al., arXiv 2211.17192, appendix A.4.
    """
    device, first = drafter.model.device, tree.size
    drafter.catch_up(text)
    fed = drafter.fed
    tokens = to_device(tree.tokens[:, fed:], device)
    parents = to_device(tree.parents, device)
    logits = drafter.feed(text, tokens, parents)[:, -scores.shape[1] :]
    ends = torch.tensor(sorted(eos), dtype=torch.int64, device=device)
    totals, vocab_size = scores.to(device), logits.shape[2]
    width = min(width, logits.shape[1] * vocab_size)
    numbers = torch.arange(first - totals.shape[1], first, device=device).expand_as(totals)
    drawn: list[torch.Tensor] = []
    for step in range(gamma):
        if step:
            logits = drafter.feed(text, drawn[-1], parents)
        log_probs = logits.float().log_softmax(-1).index_fill(2, ends, -torch.inf)
        totals, index = (log_probs + totals[:, :, None]).flatten(1).topk(width)
        drawn.append(index % vocab_size)
        parents = torch.cat([parents, numbers.gather(1, index // vocab_size)], dim=1)
        numbers = torch.arange(width, device=device).expand_as(totals) + first + step * width
    return DraftedBeams(torch.cat(drawn, dim=1), parents[:, first:])
