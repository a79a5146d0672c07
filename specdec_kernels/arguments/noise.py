"""The positions at which drafts are drawn, as the rule that verifies them needs them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import conversion
from .checks import check_ids, require, shape
from .rules import ALL_RULES
from .values import shown


def draft_positions(positions: Tensor, number: int, *, rule: str) -> Tensor:
    """The ``positions`` of `sample` for the drafts of one round.

    Args:
        positions: [B] int32 or int64, absolute index of the first drafted token; the ``positions``
            of `verify_chain` or `verify_tree` in this round.
        number: of drafts, gamma for a chain and N for a tree.
        rule: the rule that verifies them.

    Returns:
        [B, number] int64. Draft i of a chain, or node i of a tree, takes noise of the round, which
        no other round draws with: ``positions + ((i + 1) << 32)``. Rule match alone shares the
        noise of the position with the drafter: draft i of a chain takes ``positions + i``, and a
        node of a tree takes ``positions + depth - 1`` instead.

    Raises:
        ValueError: unknown rule, or a negative number.
        RuntimeError: positions are not [B] int32 or int64.
        TypeError: positions are no tensor, number is no integer, or rule no string.

    Source: docs/rules.md#noise.

    >>> draft_positions(torch.tensor([10]), 2, rule="token") - 10 >> 32
    tensor([[1, 2]])
    >>> draft_positions(torch.tensor([10, 20]), 3, rule="match")
    tensor([[10, 11, 12],
            [20, 21, 22]])
    """
    conversion.require_tensor(positions, "positions")
    conversion.require_integer(number, "number")
    require(positions.dim() == 1, f"positions must be [B], got {shape(positions)}")
    check_ids("positions", positions)
    if not isinstance(rule, str):
        raise TypeError(f"rule must be a string, got {shown(rule)}")
    if rule not in ALL_RULES:
        names = ", ".join(ALL_RULES)
        raise ValueError(f"rule must be one of {names}, got {shown(rule)}")
    if number < 0:
        raise ValueError(f"number must be at least 0, got {number}")
    drafts = torch.arange(number, device=positions.device)
    if rule != "match":
        drafts = (drafts + 1) << 32
    return positions.to(torch.int64)[:, None] + drafts
