"""Drafting with the first layers of the target and a trained exit.

The exit is a norm and a projection between an inner layer and the target's final norm.

Source: the exits of Elhoushi et al. 2024, "LayerSkip", arXiv 2404.16710, with weights of their own
in the place of a target that was trained for them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from specdec_hf.arguments import check_integer
from specdec_hf.heads.base import WholeVocabularyConfig, WholeVocabularyHead
from specdec_hf.heads.files import load_own, save_own
from specdec_hf.heads.placed import HeadDrafter
from specdec_hf.runner.protocol import vocab_size_of
from torch import nn
from torch.nn import functional

from specdec_papers.own_layers import OwnLayersDrafter

_SIZES = ("hidden_size", "vocab_size", "layer")


@dataclass(frozen=True)
class ExitConfig(WholeVocabularyConfig):
    """Sizes of an early-exit head.

    Attributes:
        target_hidden_size: H, of the target's hidden states.
        vocab_size: of the target, all of which is drafted.
        layer: after how many of the target's layers it exits.
    """

    target_hidden_size: int
    vocab_size: int
    layer: int

    @classmethod
    def for_target(cls, model: Any, layer: int) -> ExitConfig:
        """For a model that has this layer and at least one after it."""
        text = model.config.get_text_config(decoder=True)
        size = check_integer("layer", layer, 1, text.num_hidden_layers - 1)
        return cls(text.hidden_size, vocab_size_of(model), size)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that training stores."""
        return (self.layer,)

    def for_layers(self, total: int) -> ExitConfig:
        """The same; raises ValueError for a target of so few layers."""
        if self.layer >= total:
            raise ValueError(
                f"the head needs a model of more layers than the {self.layer} that it exits after, "
                f"got {total}"
            )
        return self


class ExitHead(WholeVocabularyHead):
    """Projects the normalised states of an inner layer to what the target's final norm reads.

    It takes the place of the layers after that one, so it is called as they are.

    Args:
        config: its sizes.
    """

    config: ExitConfig

    def __init__(self, config: ExitConfig) -> None:
        super().__init__(config.target_hidden_size)
        size = config.target_hidden_size
        self.config = config
        self.norm = nn.RMSNorm(size, 1e-5)
        self.projection = nn.Linear(size, size, bias=False)
        self._final: Any = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """States [..., H] in the place of the last layer's."""
        out: torch.Tensor = self.projection(self.norm(hidden_states))
        return out

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of the exit, in training; `begin_as` must have been called."""
        return functional.linear(self._final(self(hidden_states)), self.lm_head)

    def begin_as(self, model: Any) -> None:
        """Start as an exit without weights of its own.

        Raises:
            ValueError: a target whose decoder has no final norm of this name.
        """
        final = getattr(model.get_decoder(), "norm", None)
        if final is None:
            raise ValueError(f"{type(model).__name__} must have a final norm called norm")
        self._final = copy.deepcopy(final).requires_grad_(False).forward
        with torch.no_grad():
            self.norm.weight.fill_(1)
            self.projection.weight.copy_(torch.eye(self.config.target_hidden_size))


def save_exit(head: ExitHead, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write an early-exit head; see `save_own`."""
    save_own(head, folder, _SIZES, dtype)


def load_exit(folder: str | Path) -> ExitHead:
    """An early-exit head from a folder; see `load_own`."""
    return load_own(folder, _SIZES, lambda *sizes: ExitHead(ExitConfig(*sizes)))


class ExitHeadDrafter(OwnLayersDrafter, HeadDrafter[ExitHead], entry="exit_head"):
    """As `EarlyExitDrafter`, with a trained norm and projection before the final norm.

    Its arguments and errors are those of `HeadDrafter`.
    """

    kind, load = ExitHead, staticmethod(load_exit)

    def check_config(self, config: Any) -> None:
        self._head.check_config(config)

    def parts(self, total: int) -> tuple[int, int]:
        return self._head.head.config.layer, total

    def exit_of(self, model: Any) -> Any:
        return self._head.for_target(model)
