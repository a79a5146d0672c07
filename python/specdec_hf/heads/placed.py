"""A head on the device and in the dtype of a target, with its output matrix, and its drafters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from specdec_hf.arguments import Refused
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.drafter import Drafter, State
from specdec_hf.heads.base import Head, state_of
from specdec_hf.runner.protocol import vocab_size_of

if TYPE_CHECKING:
    from typing_extensions import Self


H = TypeVar("H", bound=Head)


class PlacedHead(Generic[H]):
    """Keeps the copy of a head that the last target drafted with; the head is not changed.

    A copy is made again for another target, and where the target's output matrix or a weight of the
    head was changed.

    Args:
        head: one of this kind, or the folder of one.
        kind: the class of heads.
        load: reads one from a folder.

    Raises:
        TypeError: neither.
        ValueError: a folder without a head that can be read.
    """

    def __init__(self, head: Any, kind: type[H], load: Callable[[str | Path], H]) -> None:
        if isinstance(head, str | Path):
            # New modules draw weights that are then replaced; the seeds of calls come from the same
            # generator.
            with torch.random.fork_rng(devices=[]):
                head = load(head)
        if not isinstance(head, kind):
            raise TypeError(
                f"head must be {kind.__name__} or the folder of such a head, got "
                f"{type(head).__name__}"
            )
        self.head = head
        self._copy: tuple[Any, tuple[Any, ...], H] | None = None

    def check_config(self, config: Any) -> None:
        """Raise ValueError where a model of this configuration is not what it was trained for."""
        check_sizes(self.head.config, config)

    def for_target(self, model: Any) -> H:
        """The head for a target.

        Raises:
            ValueError: a target of other sizes.
        """
        self.check_config(model.config)
        weight = model.get_output_embeddings().weight
        ours = (*self.head.parameters(), *self.head.buffers())
        state = model.device, *(state_of(x) for x in (weight, *ours))
        copied = self._copy  # another thread may replace it
        if copied is None or copied[0] is not weight or copied[1] != state:
            # Weights made in inference mode would count no changes, and would not be packed.
            with torch.inference_mode(False):
                placed = copy.deepcopy(self.head).to(model.device, weight.dtype)
                text = model.config.get_text_config(decoder=True)
                placed.config = placed.config.for_layers(text.num_hidden_layers)
                placed.tokens = self.head.tokens.to(model.device)
                if not placed.own_lm_head:
                    placed.borrow(model)
            self._copy = copied = (weight, state, placed.eval().requires_grad_(False))
        return copied[2]


def check_sizes(ours: Any, config: Any) -> None:
    """Raise ValueError where a model of this configuration is not what a head was trained for.

    Args:
        ours: the head's configuration.
        config: the model's.
    """
    text = config.get_text_config(decoder=True)
    for what, wanted, given in (
        ("a vocabulary", ours.vocab_size, vocab_size_of(config)),
        ("hidden states", ours.target_hidden_size, text.hidden_size),
    ):
        if wanted not in (0, given):
            raise Refused(f"the head was trained for a model with {what} of {wanted}, got {given}")
    ours.for_layers(text.num_hidden_layers)


class HeadDrafter(Drafter, Generic[H]):
    """Base class of drafters with a head; override `state_with`.

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

    def state_with(self, head: H, call: DrafterCall) -> State:
        """The state of a call, given the head on the target's device and in its dtype."""
        raise NotImplementedError

    def begin(self, call: DrafterCall) -> State:
        """Place the head on the target's device.

        Raises:
            ValueError: a target that the head was not trained for.
        """
        return self.state_with(self._head.for_target(call.model), call)
