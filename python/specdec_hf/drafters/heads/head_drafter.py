"""Drafters whose module is a trained head: how they come to it, and place it beside the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from specdec_hf.drafters.context import DraftContext
from specdec_hf.drafters.drafter import Drafter
from specdec_hf.drafters.heads.placed import H, PlacedHead

if TYPE_CHECKING:
    from typing_extensions import Self


class HeadDrafter(Drafter, Generic[H]):
    """Base class of drafters with a head; override `draft_with` and `propose`.

    Args:
        head: one of `kind`, or the folder of one. It is not changed. A `PlacedHead` shares its copy
            with other drafters.

    Attributes:
        kind: the class of heads.
        load: reads one from a folder.

    Raises:
        TypeError: no head.
        ValueError: a folder whose head cannot be read, by name of what is wrong.
    """

    kind: type[H]
    load: Callable[[str | Path], H]

    def __init__(self, head: H | PlacedHead[H] | str | Path) -> None:
        if isinstance(head, PlacedHead):
            self._head: PlacedHead[H] = head
        else:
            self._head = PlacedHead(head, self.kind, self.load)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """With the head in a folder."""
        return cls(text)

    def check_config(self, config: Any) -> None:
        self._head.check_config(config)

    def draft_with(self, head: H, context: DraftContext) -> Any:
        """The draft of a call, which has a ``relative_cost``; ``head`` fits the target."""
        raise NotImplementedError

    def start(self, context: DraftContext) -> None:
        """Place the head on the target's device.

        Raises:
            ValueError: a target that the head was not trained for.
        """
        self._draft = self.draft_with(self._head.on(context.model), context)
        self.relative_cost = self._draft.relative_cost
