"""Top-k, top-p and min-p over rows that are split between ranks, as one threshold a row.

The threshold of top-k is the largest logit at and above which at least k logits lie, and that of
top-p the largest at and above which the mass reaches top_p. Both are found by selection on *keys*,
integers in the order of the logits: each round halves the interval of the key `BITS` times, from
counts or masses that the ranks add up. The number of rounds and what a row exchanges in them
depend neither on the vocabulary nor on the data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .collectives import Collectives

BITS = 4  # of the 32 of a key that each round decides
_LOWEST = -(2**31)


def ordered_keys(logits: Tensor) -> Tensor:
    """int32 keys in the order of the float32 values; -0 ties with 0, and NaN is above all."""
    values = logits.float() + 0.0  # -0 becomes 0
    bits = torch.where(values.isnan(), 2**31 - 1, values.view(torch.int32))
    return bits ^ (bits >> 31 & 2**31 - 1)


def values_of_keys(keys: Tensor) -> Tensor:
    """The float32 values of int64 keys."""
    bits = keys.to(torch.int32)
    return (bits ^ (bits >> 31 & 2**31 - 1)).view(torch.float32)


class Selection:
    """Counts and masses of the logits of a shard from a key on.

    logits: [R, W], this rank's part of each row. weights: [R, W] int64, their masses, which are
    summed exactly.
    """

    def __init__(self, logits: Tensor, weights: Callable[[], Tensor] | None) -> None:
        self._keys, order = ordered_keys(logits).sort(-1)
        above = None
        if weights is not None:
            ordered = weights().gather(-1, order)
            above = ordered.flip(-1).cumsum(-1).flip(-1)
            above = torch.cat([above, torch.zeros_like(above[:, :1])], -1)
        self._mass_above = above

    def counts(self, keys: Tensor) -> Tensor:
        """[R, K] int64, how many logits of the shard are at or above each key [R, K]."""
        return self._keys.shape[-1] - self._index(keys)

    def masses(self, keys: Tensor) -> Tensor:
        """[R, K] int64, the mass of these logits."""
        assert self._mass_above is not None
        return self._mass_above.gather(-1, self._index(keys))

    def _index(self, keys: Tensor) -> Tensor:
        return torch.searchsorted(self._keys, keys.to(torch.int32))


def select_key(
    collectives: Collectives, measure: Callable[[Tensor], Tensor], goal: Tensor
) -> Tensor:
    """[R] int64: the largest key for which the sum of `measure` over ranks reaches the goal.

    measure: gives [R, K] int64 for keys [R, K]; it falls as the key grows.
    goal: [R] float64; it must be reached at the lowest key.
    """
    rows = len(goal)
    steps = torch.arange(1, 2**BITS, device=goal.device)
    key = torch.full((rows,), _LOWEST, device=goal.device)
    for shift in range(32 - BITS, -1, -BITS):
        keys = key[:, None] + (steps << shift)
        sums = collectives.total(lambda keys=keys: measure(keys), *keys.shape)  # type: ignore[misc]
        key = key + ((sums.double() >= goal[:, None]).sum(-1) << shift)
    return key


def thresholds(
    collectives: Collectives,
    parts: list[tuple[Tensor, Callable[[], Tensor]]],
    top_k: Tensor | None,
    top_p: Tensor | None,
    vocab: int,
) -> Tensor:
    """[R] float64: the smallest logit of each row that top-k and top-p keep.

    parts: the R rows, a few at a time: logits [r, W], and what gives their masses [r, W] int64.
    top_k: [R] int64; top_p: [R] float64; None where the filter is off for all rows.
    """
    rows = [len(logits) for logits, _ in parts]
    lowest = torch.full((sum(rows),), _LOWEST, device=parts[0][0].device)
    if top_k is None and top_p is None:
        return torch.full_like(lowest, -torch.inf, dtype=torch.float64)
    made: list[Selection] = []

    def each(measure: Callable[[Selection, Tensor], Tensor], keys: Tensor) -> Tensor:
        """Of all rows. It sorts them once: inside an exchange, which reports what it raises."""
        if not made:
            made[:] = [Selection(x, weights if top_p is not None else None) for x, weights in parts]
        return torch.cat([measure(*x) for x in zip(made, keys.split(rows), strict=True)])

    keep = lowest
    if top_k is not None:
        on = (top_k > 0) & (top_k < vocab)
        goal = torch.where(on, top_k, 1).double()
        found = select_key(collectives, lambda keys: each(Selection.counts, keys), goal)
        keep = torch.where(on, found, lowest)
    if top_p is not None:
        start = keep[:, None]
        mass = collectives.total(lambda: each(Selection.masses, start), *start.shape)[:, 0]
        goal = top_p * mass.double()
        found = select_key(collectives, lambda keys: each(Selection.masses, keys), goal)
        keep = torch.where(top_p < 1, found, keep)
    return torch.where(keep == _LOWEST, -torch.inf, values_of_keys(keep).double())
