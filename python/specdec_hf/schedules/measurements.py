"""Measurements of earlier calls with the same target and drafter.

They spare a call its first plain rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from specdec_hf.schedules.costs import Costs

# Earlier benefit from which on a call may begin to draft at once.
TRUSTED_BENEFIT = 1.05
# How much the last call counts against all before it. The benefit of one short text is noisy: where
# a drafter is known to fit its target, several calls must disagree.
WEIGHT_OF_A_CALL, WEIGHT_BESIDE_EXPECTED = 0.5, 0.25


@dataclass(frozen=True)
class Measurements:
    """Measurements of the calls so far.

    Attributes:
        costs: times by number of tokens.
        benefit: of speculation, as `BenefitGuard` measured it; None where nothing was drafted.
    """

    costs: Costs = field(default_factory=Costs)
    benefit: float | None = None

    @property
    def trusted(self) -> bool:
        """Whether drafting was worth it."""
        return self.benefit is not None and self.benefit >= TRUSTED_BENEFIT


# The measurements of one target, by what drafts (a draft model, or a class) and then by the shape
# of a round. Stored objects are replaced and never written to, because other threads read them.
Measured = WeakKeyDictionary[Any, dict[Hashable, Measurements]]


def what_drafts(drafter: Any) -> Any:
    """The draft model, or the class of a drafter that has none at the moment."""
    model = getattr(drafter, "model", None)
    return model if isinstance(model, nn.Module) else type(drafter)


def recall(measured: Measured, drafts: Any, shape: Hashable) -> Measurements:
    """A copy of what earlier calls have measured.

    Args:
        measured: of the target.
        drafts: from `what_drafts`.
        shape: of a round: batch size, tree, how its forwards run, and its smallest width.
    """
    found = measured.get(drafts, {}).get(shape)
    return Measurements() if found is None else copy.deepcopy(found)


def remember(
    measured: Measured,
    drafts: Any,
    shape: Hashable,
    costs: Costs,
    benefit: float | None,
    expected: float | None = None,
) -> None:
    """Keep the measurements of a call; without a benefit, the earlier one stays.

    ``expected`` is the benefit of the drafter's calls before the first one, of which a single
    unlucky text is not to be the measure.
    """
    earlier = recall(measured, drafts, shape).benefit
    if earlier is None:
        earlier = expected
    if benefit is None:
        benefit = earlier
    elif earlier is not None:
        weight = WEIGHT_OF_A_CALL if expected is None else WEIGHT_BESIDE_EXPECTED
        benefit = earlier + weight * (benefit - earlier)
    by_shape = measured.setdefault(drafts, {})
    by_shape[shape] = Measurements(copy.deepcopy(costs), benefit)
