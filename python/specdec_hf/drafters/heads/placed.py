"""A head on the device and in the dtype of a target, with the target's output matrix."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from specdec_hf.cache.protocol import vocab_size_of
from specdec_hf.heads.eagle3 import Eagle3Head
from specdec_hf.heads.files import load_head


class PlacedHead:
    """Keeps the copy of a head that the last target drafted with; the head is not changed.

    Args:
        head: an `Eagle3Head`, or the folder of one.

    Raises:
        TypeError: neither.
        ValueError: a folder without a head that can be read.
    """

    def __init__(self, head: Any) -> None:
        if isinstance(head, str | Path):
            head = load_head(head)
        if not isinstance(head, Eagle3Head):
            raise TypeError(
                f"head must be an Eagle3Head or the folder of one, got {type(head).__name__}"
            )
        self.head = head
        self._copy: tuple[Any, Eagle3Head] | None = None

    def check_config(self, config: Any) -> None:
        """Raise ValueError where a model of this configuration is not what it was trained for."""
        text, ours = config.get_text_config(decoder=True), self.head.config
        for what, wanted, given in (
            ("a vocabulary", ours.layer.vocab_size, vocab_size_of(config)),
            ("hidden states", ours.target_hidden_size, text.hidden_size),
        ):
            if wanted != given:
                raise ValueError(
                    f"the head was trained for a model with {what} of {wanted}, got {given}"
                )
        ours.on(text.num_hidden_layers)

    def on(self, model: Any) -> Eagle3Head:
        """The head for a target.

        Raises:
            ValueError: a target of other sizes.
        """
        self.check_config(model.config)
        weight = model.get_output_embeddings().weight
        if self._copy is None or self._copy[0] is not weight:
            placed = copy.deepcopy(self.head).to(model.device, weight.dtype)
            text = model.config.get_text_config(decoder=True)
            placed.config = placed.config.on(text.num_hidden_layers)
            placed.tokens = self.head.tokens.to(model.device)
            if not placed.own_lm_head:
                placed.borrow(model)
            self._copy = (weight, placed.eval().requires_grad_(False))
        return self._copy[1]
