"""Which nodes of merged chains a tree of limited size keeps: those most likely to be committed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

DEPTHS = 3  # the first two tokens of a chain and the others have an acceptance each
MEMORY = 0.95  # weight of a round against the next one
PRIOR_ROUNDS = 2.0
PRIOR = 0.6  # acceptance of the first chain before anything was measured
PRIOR_OF_NEXT = 0.6  # acceptance of each further chain of a drafter, relative to the one before


class NodeBudget:
    """Shares the nodes of a tree among chains by the probability that each node is committed.

    This value of a node is the probability that its drafter gives to the path down to it, where the
    drafter gives one, as heads do. Otherwise it is the product of the measured acceptance of its
    chain over the depths above it. It never rises along a chain, so the best nodes are the
    beginnings of chains. Acceptance is measured by committed text alone, for each sequence by
    itself, so that the drafts of a sequence depend neither on time nor on the rest of the batch.

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
        least: float = 0.0,
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
            least: nodes of less value are left out, but for the first of a drafter that gives no
                values, whose acceptance could not be measured again otherwise.
        """
        cut = chains.copy()
        depths = np.minimum(np.arange(chains.shape[2]), DEPTHS - 1)
        worth = np.cumprod(self.acceptance()[:, :, depths], axis=2)
        given = np.isfinite(values) if values is not None and merge else np.zeros(worth.shape, bool)
        if values is not None:
            worth = np.where(given, values, worth)
        ends = np.minimum.accumulate(chains >= 0, axis=2).sum(axis=2)
        for b in range(len(chains)):
            nodes: set[Any] = set()
            kept = np.zeros(chains.shape[1], dtype=np.int64)
            order = np.argsort(-worth[b], axis=None, kind="stable")
            for k, depth in zip(*np.unravel_index(order, worth[b].shape), strict=True):
                first = depth == 0 and self._ranks[k] == 0 and not given[b, k, 0]
                if depth >= ends[b, k] or (worth[b, k, depth] < least and not first):
                    continue
                node = tuple(chains[b, k, : depth + 1].tolist()) if merge else (k, depth)
                if node in nodes or len(nodes) < size:
                    nodes.add(node)
                    kept[k] = max(kept[k], depth + 1)
            cut[b][np.arange(chains.shape[2]) >= kept[:, None]] = -1
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
