"""Look-ahead embeddings: learnt inputs that follow the text, at which the target itself drafts.

The target reads the pending token and L embeddings after it in one forward. The logits at the
pending token are those of its next token, and the ones at embedding k are a guess of the token k
places further on. The embeddings are all that is learnt; the target stays as it is.

Source: PaSS, arXiv 2311.13581.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.arguments import check_integer
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Cost, Draft
from specdec_hf.heads.base import FinalStateConfig, WholeVocabularyConfig, WholeVocabularyHead
from specdec_hf.heads.files import load_own, save_own
from specdec_hf.heads.placed import HeadDrafter
from specdec_hf.runner.protocol import (
    CACHE_NAME,
    Lengths,
    forward_arguments,
    to_device,
    vocab_size_of,
)
from specdec_hf.runner.spec_runner import SpecRunner
from specdec_hf.schedules.base import MAX_DRAFT_LENGTH
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from specdec_papers.own_layers import OwnCacheDrafter, OwnCacheState, OwnCacheStepper
from specdec_papers.split_model import run_embeddings

_SIZES = ("hidden_size", "vocab_size", "num_embeddings")
MAX_EMBEDDINGS = MAX_DRAFT_LENGTH - 1  # beside the target's next token


@dataclass(frozen=True)
class PassConfig(FinalStateConfig, WholeVocabularyConfig):
    """Sizes of look-ahead embeddings, which draft the whole vocabulary.

    Attributes:
        target_hidden_size: H, of the target's hidden states and embeddings.
        vocab_size: of the target, all of which is drafted.
        num_embeddings: L, how many tokens are drafted beyond the target's next one.
    """

    target_hidden_size: int
    vocab_size: int
    num_embeddings: int

    @classmethod
    def for_target(cls, model: Any, num_embeddings: int) -> PassConfig:
        """For a model whose forward takes embeddings; raises ValueError for another one."""
        number = check_integer("num_embeddings", num_embeddings, 1, MAX_EMBEDDINGS)
        size = model.config.get_text_config(decoder=True).hidden_size
        check_takes_embeddings(model, size)
        return cls(size, vocab_size_of(model), number)


def check_takes_embeddings(model: Any, size: int) -> None:
    """Raise ValueError for a model whose forward takes no embeddings [B, n, size]."""
    name = type(model).__name__
    if "inputs_embeds" not in forward_arguments(model):
        raise ValueError(
            f"look-ahead embeddings need a model whose forward takes inputs_embeds, got {name}"
        )
    width = model.get_input_embeddings().weight.shape[-1]
    if width != size:
        raise ValueError(
            "look-ahead embeddings need a model whose embeddings are as wide as its hidden states, "
            f"{size}, got {width} of {name}"
        )


class PassHead(WholeVocabularyHead):
    """L look-ahead embeddings.

    Args:
        config: its sizes.

    Attributes:
        embeddings: [L, H].
    """

    config: PassConfig

    def __init__(self, config: PassConfig) -> None:
        super().__init__(config.target_hidden_size)
        self.config = config
        zeros = torch.zeros(config.num_embeddings, config.target_hidden_size)
        self.embeddings = nn.Parameter(zeros)
        self._target: Any = None

    def begin_as(self, model: Any) -> None:
        """Draw embeddings with the mean and the spread of the target's own."""
        rows = model.get_input_embeddings().weight.detach().float().cpu()
        with torch.no_grad():
            noise = torch.randn(self.embeddings.shape, device="cpu")
            self.embeddings.copy_(rows.mean(dim=0) + rows.std(dim=0) * noise)
        self._target = weakref.ref(model)  # a copy of the head is not to copy the target

    def states(self, embeddings: torch.Tensor, cuts: torch.Tensor, steps: int) -> torch.Tensor:
        """The states that the output matrix reads in training; `begin_as` must have been called.

        One forward of the target serves all places: each group of look-ahead embeddings follows its
        own place and sees neither what the text goes on with nor other groups.

        Args:
            embeddings: [B, T, H] of texts.
            cuts: [B, C] int64, the places that the look-ahead embeddings follow.
            steps: how many of them.

        Returns:
            [B, C, steps, H], with gradients for the look-ahead embeddings alone.
        """
        model, size, (batch_size, number) = self._target(), embeddings.shape[1], cuts.shape
        own = self.embeddings[:steps].repeat(batch_size, number, 1)
        fed = torch.cat([embeddings, own], dim=1).to(model.dtype)
        parents = _parents(size, cuts, steps)
        runner = SpecRunner(model, batch_size, fed.shape[1])
        inputs = runner.tree_window(np.zeros(batch_size, dtype=np.int64), parents)
        del inputs[CACHE_NAME]  # keys and values need gradients, which the cache has not
        decoder = model.get_decoder()
        frozen = {name: weight.detach() for name, weight in decoder.named_parameters()}
        given = {"inputs_embeds": fed, "use_cache": False, "return_dict": True, **inputs}
        final = functional_call(decoder, frozen, kwargs=given).last_hidden_state
        out: torch.Tensor = final[:, size:].unflatten(1, (number, steps))
        return out

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of states [..., H]."""
        return functional.linear(states, self.lm_head)


def _parents(size: int, cuts: torch.Tensor, steps: int) -> torch.Tensor:
    """A tree [B, N]: a text of ``size`` tokens as a chain, and a chain of ``steps`` at each cut.

    The root is the first token of the text, so that its token t is node t - 1.
    """
    batch_size, number = cuts.shape
    text = torch.arange(-1, size - 2, device=cuts.device).expand(batch_size, -1)
    groups = size - 1 + steps * torch.arange(number, device=cuts.device)
    below = groups[:, None] + torch.arange(-1, steps - 1, device=cuts.device)
    below = below.repeat(batch_size, 1, 1)
    below[:, :, 0] = cuts - 1
    return torch.cat([text, below.flatten(1)], dim=1)


def save_pass(head: PassHead, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write look-ahead embeddings; see `save_own`."""
    save_own(head, folder, _SIZES, dtype)


def load_pass(folder: str | Path) -> PassHead:
    """Look-ahead embeddings from a folder; see `load_own`."""
    maxima = {"num_embeddings": MAX_EMBEDDINGS}
    return load_own(folder, _SIZES, lambda *sizes: PassHead(PassConfig(*sizes)), maxima)


class LookAheadStepper(OwnCacheStepper):
    """The target over the pending token and look-ahead embeddings, in one forward a round.

    Args:
        call: the call.
        head: in the target's dtype, on its device.

    Attributes:
        most: tokens that it can draft.
        size: most tokens of the round.
    """

    # One forward of the target makes all drafts of a round.
    cost = Cost(1.0, at_once=True, reads_prompt=False)

    def __init__(self, call: DrafterCall, head: PassHead) -> None:
        super().__init__(call)
        self.head = head
        self.most = 1 + head.config.num_embeddings
        self.size = 1
        self._rows: Iterator[torch.Tensor] = iter(())

    def catch_up(self, texts: History) -> torch.Tensor:
        """Run the forward; logits [B, V] of each sequence's next token."""
        pending = to_device(texts.last(1), self.device)
        given = self.model.get_input_embeddings()(pending)
        own = self.head.embeddings[: self.size - 1].to(given).expand(len(given), -1, -1)
        fed = torch.cat([given, own], dim=1)
        logits = run_embeddings(self.model, self.runner, fed, texts.lengths - 1, keep=self.size)
        self._rows = iter(logits.unbind(dim=1))
        return next(self._rows)

    def extend(self, tokens: torch.Tensor, starts: Lengths) -> torch.Tensor:
        """Logits [B, V] at the next look-ahead embedding, whichever token was drawn before."""
        return next(self._rows)


class LookAheadState(OwnCacheState):
    """Draws the drafts of one forward, which reads no more embeddings than the round can use."""

    stepper: LookAheadStepper

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        own = self.stepper
        own.size = min(int(limits.max()), own.most)
        return super().propose(texts, np.minimum(limits, own.most))


class PassHeadDrafter(HeadDrafter[PassHead], OwnCacheDrafter, entry="pass_head"):
    """The target's next token, and a guess of the following ones at look-ahead embeddings.

    The first draft is drawn from the target's own distribution, so that it is accepted but for
    rounding. The verification is another forward: where nothing more is accepted, two forwards
    give two tokens.

    Its arguments and errors are those of `HeadDrafter`.

    Source: Monea et al. 2023, "PaSS", arXiv 2311.13581.
    """

    kind, load = PassHead, staticmethod(load_pass)

    def state_with(self, head: PassHead, call: DrafterCall) -> LookAheadState:
        self._check_cache(call)
        check_takes_embeddings(call.model, head.config.target_hidden_size)
        return LookAheadState(call, LookAheadStepper(call, head), self.name)
