"""Which nodes of merged drafts a tree of limited size keeps: those most likely to be committed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

DEPTHS = 3  # the first two tokens of a chain and the others have an acceptance each
MEMORY = 0.95  # weight of a round against the next one
PRIOR_ROUNDS = 2.0
PRIOR = 0.6  # acceptance of the first chain before anything was measured
PRIOR_OF_NEXT = 0.6  # acceptance of each further chain of a drafter, relative to the one before
# In every so many rounds a drafter that gives no probabilities has its first node in the tree.
EXPLORE_EVERY = 8


class Nodes:
    """The drafts of one sequence; equal beginnings of several are the same nodes.

    Attributes:
        tokens, parents: of each node; a parent is numbered before its children, -1 is the root.
        values: its worth, the largest that it was given, and whether it is the first node of a
            drafter that gives no values.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.values: list[tuple[float, bool]] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int, worth: float, *, first: bool = False) -> int:
        """The number of a child, which is new or was there before."""
        number = self._numbers.setdefault((parent, token), len(self.tokens))
        if number == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.values.append((worth, first))
        else:
            earlier, was_first = self.values[number]
            self.values[number] = max(earlier, worth), first or was_first
        return number

    def add_chain(self, chain: list[int], worth: list[float], *, first: bool) -> list[int]:
        """The numbers of a chain's nodes, up to its first -1."""
        path, node = [], -1
        for token, value in zip(chain, worth, strict=True):
            if token < 0:
                break
            node = self.add(node, token, value, first=first and node < 0)
            path.append(node)
        return path

    def add_tree(self, tokens: list[int], parents: list[int], worth: list[float]) -> None:
        """Add the present nodes of a tree; none is worth more than its parent, and NaN is 0."""
        numbers, most = {-1: -1}, {-1: 1.0}
        for n, (token, parent, value) in enumerate(zip(tokens, parents, worth, strict=True)):
            if token >= 0 and parent in numbers:
                most[n] = min(value if value > 0 else 0.0, most[parent])
                numbers[n] = self.add(numbers[parent], token, most[n])


class NodeBudget:
    """Shares the nodes of a tree among chains by the probability that each node is committed.

    This worth of a node is the probability that its drafter gives to the path down to it, where the
    drafter gives one, as heads do. Otherwise it is the product of the measured acceptance of its
    chain over the depths above it. It never rises along a path, so the best nodes are the
    beginnings of paths. Acceptance is measured by committed text alone, for each sequence by
    itself: only ``nodes`` may let drafts depend on time and on the rest of the batch.

    Args:
        ranks: [K], for each chain its number among those of its drafter.
        batch_size: number of sequences B.
    """

    def __init__(self, ranks: list[int], batch_size: int) -> None:
        prior = PRIOR * PRIOR_OF_NEXT ** np.array(ranks, dtype=np.float64)
        shape = (batch_size, len(ranks), DEPTHS)
        self._tried = np.full(shape, PRIOR_ROUNDS)
        self._accepted = PRIOR_ROUNDS * np.broadcast_to(prior[:, None], shape)
        self._rounds = 0

    def take(self, b: int, other: NodeBudget, index: int) -> None:
        """Go on as sequence ``b`` with what another budget has measured of sequence ``index``."""
        self._tried[b], self._accepted[b] = other._tried[index], other._accepted[index]

    def acceptance(self) -> NDArray[np.float64]:
        """[B, K, DEPTHS], measured share of tokens that were committed where their prefix was."""
        shares: NDArray[np.float64] = self._accepted / self._tried
        return shares

    def worth(self, length: int) -> NDArray[np.float64]:
        """[B, K, length], measured probability that each token of a chain is committed."""
        depths = np.minimum(np.arange(length), DEPTHS - 1)
        worth: NDArray[np.float64] = np.multiply.accumulate(self.acceptance()[:, :, depths], axis=2)
        return worth

    def choose(
        self,
        drafts: list[Nodes],
        size: int,
        min_probability: float = 0.0,
        nodes: Callable[[NDArray[np.float64]], int] | None = None,
    ) -> list[list[int]]:
        """The numbers of the nodes of each sequence that are kept, the most valuable first.

        Args:
            drafts: of each sequence.
            size: most nodes of a sequence.
            min_probability: nodes of less worth are left out, but for the first of a drafter that
                gives no values, whose acceptance could not be measured again otherwise.
            nodes: how many of ``size`` nodes are worth their time, by the worth [B, n] of those
                that each sequence has, in the order in which they are taken; 0 where one has fewer.
                None takes all. Every eighth tree begins with the first nodes of drafters without
                values, else the worth falls.
        """
        self._rounds += 1
        explores = nodes is not None and self._rounds % EXPLORE_EVERY == 0
        taken = []
        for tree in drafts:
            order = [1.0 if explores and first else worth for worth, first in tree.values]
            good = [n for n, (w, first) in enumerate(tree.values) if first or w >= min_probability]
            # Equal ones keep their order, in which a parent precedes its children.
            taken.append(sorted(good, key=order.__getitem__, reverse=True)[:size])
        most = max(map(len, taken))
        if nodes is not None and most:
            found = np.zeros((len(taken), most))
            for b, (tree, numbers) in enumerate(zip(drafts, taken, strict=True)):
                found[b, : len(numbers)] = [tree.values[n][0] for n in numbers]
            most = max(nodes(found), int(explores))
        return [numbers[:most] for numbers in taken]

    def cut(self, chains: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """Chains [B, K, L] that share no nodes, -1 behind what ``size`` nodes have room for.

        What is kept of drawn chains depends on how long they are, and never on which tokens they
        hold. Otherwise a token would be left out because of its value, and the text be biased.
        """
        worth = self.worth(chains.shape[2])
        worth[np.maximum.accumulate(chains < 0, axis=2)] = -1
        flat = worth.reshape(len(chains), -1)
        places = np.argsort(-flat, axis=1, kind="stable")
        ranks = np.argsort(places, axis=1, kind="stable").reshape(chains.shape)
        return np.where((ranks < size) & (worth >= 0), chains, -1)

    def observe(self, chains: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Learn how many tokens [B, K] of each chain [B, K, L] of a round were committed."""
        ends = np.minimum.accumulate(chains >= 0, axis=2).sum(axis=2)
        for depth in range(chains.shape[2]):
            bucket, memory = min(depth, DEPTHS - 1), MEMORY if depth < DEPTHS else 1.0
            tried = (ends > depth) & (accepted >= depth)
            trials, hits = self._tried[:, :, bucket], self._accepted[:, :, bucket]
            trials[tried] = trials[tried] * memory + 1
            hits[tried] = hits[tried] * memory + (accepted > depth)[tried]
