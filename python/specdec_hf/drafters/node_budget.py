"""Which nodes of merged chains a tree of limited size keeps: those most likely to be committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEPTHS = 3  # the first two tokens of a chain and the others have an acceptance each
MEMORY = 0.95  # weight of a round against the next one
PRIOR_ROUNDS = 2.0
PRIOR = 0.6  # acceptance of the first chain before anything was measured
PRIOR_OF_NEXT = 0.6  # acceptance of each further chain of a drafter, relative to the one before
# In every so many rounds a drafter that gives no probabilities has its first node in the tree.
EXPLORE_EVERY = 8


class NodeBudget:
    """Shares the nodes of a tree among chains by the probability that each node is committed.

    This value of a node is the probability that its drafter gives to the path down to it, where the
    drafter gives one, as heads do. Otherwise it is the product of the measured acceptance of its
    chain over the depths above it. It never rises along a chain, so the best nodes are the
    beginnings of chains. Acceptance is measured by committed text alone, for each sequence by
    itself: only ``nodes`` may let drafts depend on time and on the rest of the batch.

    Args:
        ranks: [K], for each chain its number among those of its drafter.
        batch_size: number of sequences B.
    """

    def __init__(self, ranks: list[int], batch_size: int) -> None:
        self._ranks = ranks
        prior = PRIOR * PRIOR_OF_NEXT ** np.array(ranks, dtype=np.float64)
        shape = (batch_size, len(ranks), DEPTHS)
        self._tried = np.full(shape, PRIOR_ROUNDS)
        self._accepted = PRIOR_ROUNDS * np.broadcast_to(prior[:, None], shape)
        self._cuts = 0

    def take(self, b: int, other: NodeBudget, index: int) -> None:
        """Go on as sequence ``b`` with what another budget has measured of sequence ``index``."""
        self._tried[b], self._accepted[b] = other._tried[index], other._accepted[index]

    def acceptance(self) -> NDArray[np.float64]:
        """[B, K, DEPTHS], measured share of tokens that were committed where their prefix was."""
        shares: NDArray[np.float64] = self._accepted / self._tried
        return shares

    def cut(
        self,
        chains: NDArray[np.int64],
        size: int,
        *,
        merge: bool = True,
        values: NDArray[np.float64] | None = None,
        min_probability: float = 0.0,
        nodes: Callable[[NDArray[np.float64]], int] | None = None,
    ) -> NDArray[np.int64]:
        """Chains [B, K, L] with -1 after the tokens that ``size`` nodes have room for.

        Args:
            chains: -1 ends one.
            size: number of nodes.
            merge: whether equal prefixes share their nodes. False for chains that are drawn: what
                is kept then depends on how long they are, and never on which tokens they hold.
                Otherwise a token would be left out because of its value, and the text be biased.
            values: [B, K, L], what the drafter itself says of each node; NaN takes the measured
                acceptance. Only with ``merge``.
            min_probability: nodes of less value are left out, but for the first of a drafter that
                gives no values, whose acceptance could not be measured again otherwise.
            nodes: how many of ``size`` nodes are worth their time, by the values [B, n] of those
                that each sequence has, in the order in which they are taken; 0 where one has fewer.
                None takes all. Only with ``merge``. Every eighth tree begins with the first nodes
                of drafters without values, else the values fall.
        """
        cut = chains.copy()
        depths = np.minimum(np.arange(chains.shape[2]), DEPTHS - 1)
        worth = np.cumprod(self.acceptance()[:, :, depths], axis=2)
        given = np.isfinite(values) if values is not None and merge else np.zeros(worth.shape, bool)
        if values is not None:
            worth = np.where(given, values, worth)
        ends = np.minimum.accumulate(chains >= 0, axis=2).sum(axis=2)
        first = np.zeros(worth.shape, dtype=bool)
        first[:, :, 0] = (np.array(self._ranks) == 0) & ~given[:, :, 0]
        worth[np.arange(chains.shape[2]) >= ends[:, :, None]] = -1
        worth[(worth < min_probability) & ~first] = -1
        self._cuts += 1
        explores = nodes is not None and self._cuts % EXPLORE_EVERY == 0
        order = np.where(first & (worth >= 0), 1.0, worth) if explores else worth
        taken = [_in_order(*rows, size, merge) for rows in zip(chains, worth, order, strict=True)]
        most = size
        if nodes is not None and merge:
            found = np.zeros((len(chains), max(len(gains) for _, gains in taken)))
            for b, (_, gains) in enumerate(taken):
                found[b, : len(gains)] = gains
            most = max(nodes(found), int(explores)) if found.size else size
        for b, (numbers, _) in enumerate(taken):
            cut[b][(numbers < 0) | (numbers >= most)] = -1
        return cut

    def observe(self, chains: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Learn how many tokens [B, K] of each chain [B, K, L] of a round were committed."""
        ends = np.minimum.accumulate(chains >= 0, axis=2).sum(axis=2)
        for depth in range(chains.shape[2]):
            bucket, memory = min(depth, DEPTHS - 1), MEMORY if depth < DEPTHS else 1.0
            tried = (ends > depth) & (accepted >= depth)
            trials, hits = self._tried[:, :, bucket], self._accepted[:, :, bucket]
            trials[tried] = trials[tried] * memory + 1
            hits[tried] = hits[tried] * memory + (accepted > depth)[tried]


def _in_order(
    chains: NDArray[np.int64],
    worth: NDArray[np.float64],
    order: NDArray[np.float64],
    size: int,
    merge: bool,
) -> tuple[NDArray[np.int64], list[float]]:
    """The nodes of the chains [K, L] of one sequence, the most valuable first.

    Args:
        chains, worth: a token of negative worth is no node.
        order: which comes first, by falling numbers.
        size: most nodes.
        merge: whether equal prefixes share their nodes.

    Returns:
        [K, L], the number of each token's node, -1 for tokens without one; and the worth of each
        node.
    """
    numbers = [[-1] * chains.shape[1] for _ in chains]
    rows, values = chains.tolist(), worth.tolist()
    number_of, gains = dict[Any, int](), list[float]()
    for place in np.argsort(-order, axis=None, kind="stable").tolist():
        k, depth = divmod(place, chains.shape[1])
        if values[k][depth] < 0:
            break
        node = tuple(rows[k][: depth + 1]) if merge else (k, depth)
        if node not in number_of:
            if len(gains) == size:
                continue
            number_of[node] = len(gains)
            gains.append(values[k][depth])
        numbers[k][depth] = number_of[node]
    return np.array(numbers), gains
