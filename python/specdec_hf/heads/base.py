"""What all heads have: a draft vocabulary, and an output matrix that may be the target's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specdec_hf.arguments import Refused
from specdec_hf.runner.protocol import num_parameters

if TYPE_CHECKING:
    from typing_extensions import Self


def state_of(weight: torch.Tensor) -> tuple[Any, ...]:
    """What differs after a weight was moved, converted, or changed in place."""
    version = 0 if weight.is_inference() else weight._version  # inference tensors count none
    return weight.device, weight.dtype, weight.data_ptr(), version


class FinalStateConfig:
    """Base class of configs of heads that read the final hidden state of a target alone."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that training stores beside that state: none."""
        return ()

    def for_layers(self, total: int) -> Self:
        """For a target of ``total`` layers: the same."""
        return self


class WholeVocabularyConfig:
    """Base class of configs of heads that draft the whole vocabulary."""

    vocab_size: int

    @property
    def draft_vocab_size(self) -> int:
        """The whole vocabulary."""
        return self.vocab_size


class Head(nn.Module):
    """Base class of heads.

    Args:
        draft_vocab_size: how many of the target's tokens the head can draft; 0 is all of them,
            whose number `borrow` finds out.
        hidden_size: size H of the states that the output matrix reads.

    Attributes:
        config: its sizes.
        tokens: [draft_vocab_size] int64, the target's id of each draft token, ascending.
        lm_head: [draft_vocab_size, H], the output matrix; `borrow` fills it from the target.
        own_lm_head: whether that matrix is the head's own, and stored with it.
    """

    config: Any
    tokens: torch.Tensor
    lm_head: torch.Tensor

    def __init__(self, draft_vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.own_lm_head = False
        self.register_buffer("tokens", torch.arange(draft_vocab_size), persistent=False)
        zeros = torch.zeros(draft_vocab_size, hidden_size)
        self.register_buffer("lm_head", zeros, persistent=False)

    def borrow(self, model: Any) -> None:
        """Take the rows of the target's output matrix for the draft vocabulary.

        Raises:
            ValueError: a target of other sizes.
        """
        if not len(self.tokens):
            rows = model.get_output_embeddings().weight
            self.tokens = torch.arange(len(rows), device=self.tokens.device)
        with torch.no_grad():
            self.lm_head = self.output_of(model).to(self.lm_head)

    def output_of(self, model: Any) -> torch.Tensor:
        """[draft_vocab_size, H], the rows of the target's output matrix; see `rows_of`."""
        rows = self.rows_of(model)
        return rows[self.tokens.to(rows.device)]

    def rows_of(self, model: Any) -> torch.Tensor:
        """[V, H], the target's output matrix.

        Raises:
            ValueError: a target of other sizes.
        """
        rows: torch.Tensor = model.get_output_embeddings().weight.detach()
        wanted = (self.config.vocab_size or len(rows), self.lm_head.shape[-1])
        if tuple(rows.shape) != wanted:
            raise Refused(
                f"the head needs a target with an output matrix {list(wanted)}, got "
                f"{list(rows.shape)} of {type(model).__name__}"
            )
        return rows

    def share_of(self, model: Any, outputs: int = 1) -> float:
        """Its parameters and ``outputs`` times its output matrix by the target's parameters."""
        ours = num_parameters(self) + outputs * self.lm_head.numel()
        return ours / max(num_parameters(model), 1)

    def begin_as(self, model: Any) -> None:
        """Set the weights that training begins with."""
        raise NotImplementedError


class WholeVocabularyHead(Head):
    """A head that drafts the whole vocabulary, through the target's output matrix itself.

    Args:
        hidden_size: as in `Head`.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(0, hidden_size)

    def borrow(self, model: Any) -> None:
        self.tokens = torch.arange(self.config.vocab_size, device=self.tokens.device)
        self.lm_head = self.rows_of(model)
