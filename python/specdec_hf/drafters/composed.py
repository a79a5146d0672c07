"""Drafters that are made of others: what they are given goes on to their parts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.drafter import Drafter, Needs, Round

if TYPE_CHECKING:
    from typing_extensions import Self


class ComposedDrafter(Drafter):
    """Base class of drafters that are made of others.

    Attributes:
        drafters: its parts.
    """

    drafters: Sequence[Drafter]

    def check_tokenizer(self, tokenizer: Any) -> list[str]:
        return [note for part in self.drafters for note in part.check_tokenizer(tokenizer)]

    def for_target(self, model: Any) -> Self:
        """The same of parts that draft for a target; this one where no part is another.

        Raises:
            ValueError: a part cannot be made.
        """
        parts = [part.for_target(model) for part in self.drafters]
        if all(made is part for made, part in zip(parts, self.drafters, strict=True)):
            return self
        drafter = copy.copy(self)
        drafter.drafters = parts
        return drafter


def candidates_for(drafters: Sequence[Drafter]) -> Needs:
    """What a drafter needs that tells its parts of candidates."""
    return Needs(candidates=max((part.needs.candidates for part in drafters), default=0))


def round_for(part: Drafter, done: Round) -> Round:
    """A round as one part learns of it: with as many candidates as it needs, if any."""
    count, candidates = part.needs.candidates, done.candidates
    if candidates is not None:
        candidates = candidates.first(count) if count else None
    return replace(done, candidates=candidates, rejections=None)


def values_of(call: DrafterCall) -> dict[str, Any]:
    """What a call says, to make one of another class of."""
    names = [one.name for one in fields(DrafterCall) if one.init]
    return {name: getattr(call, name) for name in names}
