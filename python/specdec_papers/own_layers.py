"""Drafting with some layers of the target itself.

The layers that draft and target share see each token once: their keys and values go into the
target's own cache, and the verification goes on from the hidden states after them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.arguments import check_integer, shown
from specdec_hf.drafters.chain import ChainState, Stepper, room_in
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import (
    RULES_OF_DRAWN_DRAFTS,
    Cost,
    Draft,
    Drafter,
    Needs,
    State,
)
from specdec_hf.drafting.layer_numbers import check_exit, check_last_skipped
from specdec_hf.drafting.parsed import names_file
from specdec_hf.runner.protocol import Lengths, context_length, to_device
from specdec_hf.runner.spec_runner import SpecRunner

from specdec_papers.skipped_sublayers import SkippedSublayers
from specdec_papers.split_model import Skipped, SplitModel, check_split

if TYPE_CHECKING:
    from typing_extensions import Self


class OwnCacheStepper(Stepper):
    """The target as what drafts; override `extend`, and set `cost`.

    Args:
        call: the call, whose cache serves it; see `OwnCacheDrafter`.
    """

    def __init__(self, call: DrafterCall) -> None:
        self.model = call.runner.model  # the one that fills the cache
        self.device: torch.device = call.model.device
        self.call = call
        self.runner: SpecRunner = call.runner
        self._context_length = context_length(self.model)

    def room(self, texts: History, limits: NDArray[np.int64]) -> NDArray[np.int64]:
        """[B], how many of ``limits`` tokens each sequence can draft within the model's context."""
        return room_in(self._context_length, texts, limits)

    def catch_up(self, texts: History) -> torch.Tensor:
        """Logits [B, V] of each sequence's next token."""
        pending = to_device(texts.last(1), self.device)
        return self.extend(pending, texts.lengths - 1)

    def extend(self, tokens: torch.Tensor, starts: Lengths) -> torch.Tensor:
        """Logits [B, V] after one more token [B, 1]."""
        raise NotImplementedError

    def truncate(self, lengths: Lengths) -> None:
        """Do nothing, because the loop truncates the target's cache."""


class OwnCacheState(ChainState):
    """Draws chains with forwards of the target over its own cache.

    What a draft writes into the cache lies beyond the committed tokens, where the verification
    overwrites it.

    Args:
        call: the call.
        stepper: gives the rows.
        name: of the drafter, in notes.
    """

    def __init__(self, call: DrafterCall, stepper: OwnCacheStepper, name: str) -> None:
        super().__init__(call, stepper)
        self.name = name

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        runner: SpecRunner = self.call.runner
        if runner.later_inputs is not None:
            self.call.note(
                f"drafter {self.name} drafts nothing where the call has inputs other than text"
            )
            return None
        before = runner.lengths.copy()
        draft = super().propose(texts, limits)
        runner.truncate(before)
        return draft


class OwnCacheDrafter(Drafter):
    """Base class of drafters that run the target over its own cache.

    Their `begin` calls `_check_cache` before it makes an `OwnCacheStepper`, and returns an
    `OwnCacheState`. Their cost leaves the prompt out, because the cache holds it.
    """

    draws = True
    rules = RULES_OF_DRAWN_DRAFTS
    needs = Needs(target_forward=True)

    def _check_cache(self, call: DrafterCall) -> None:
        """Raise ValueError for a call whose cache drafts cannot be written to."""
        if call.runner is None or not call.runner.has_slots:
            kind = getattr(call.runner, "kind", None)
            raise ValueError(f"drafter {self.name} needs cache='spec', got {kind!r}")


class OwnLayers(OwnCacheStepper):
    """A part of the target as a draft model over the target's cache.

    Args:
        call: the call.
        split: the two parts of the target.

    Attributes:
        hidden: [B, 1, H] after the shared layers, of each token that was fed in the round.
    """

    def __init__(self, call: DrafterCall, split: SplitModel) -> None:
        super().__init__(call)
        self.split = split
        self.cost = Cost(split.first_share, reads_prompt=False)
        self.hidden: list[torch.Tensor] = []

    def catch_up(self, texts: History) -> torch.Tensor:
        self.hidden = []
        return super().catch_up(texts)

    def extend(self, tokens: torch.Tensor, starts: Lengths) -> torch.Tensor:
        logits, hidden = self.split.first(self.runner, tokens, starts)
        self.hidden.append(hidden)
        return logits[:, -1]

    def truncate(self, lengths: Lengths) -> None:
        """Forget the round; the loop truncates the target's cache."""
        self.hidden = []


class OwnLayersState(OwnCacheState):
    """Drafts with a part of the target, and goes on from there in the verification."""

    stepper: OwnLayers

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        if self.call.runner.tap.is_open:
            self.call.note(
                f"drafter {self.name} drafts nothing where the call returns hidden states"
            )
            return None
        return super().propose(texts, limits)

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor | None:
        own = self.stepper
        hidden, own.hidden = own.hidden, []
        if not hidden:
            return None
        known = torch.cat(hidden, dim=1)[:, : tokens.shape[1]]
        size = known.shape[1]
        if size < tokens.shape[1]:
            rest = own.split.shared(own.runner, tokens[:, size:], starts + size)
            known = torch.cat([known, rest], dim=1)
        return own.split.second(own.runner, known, starts, keep)


class OwnLayersDrafter(OwnCacheDrafter):
    """Base class of drafters that are a part of the target; override `parts`.

    Attributes:
        skipped: sublayers that the draft leaves out of the layers where it resumes.
    """

    skipped: Skipped = frozenset()

    def parts(self, total: int) -> tuple[int, int]:
        """For a model of ``total`` layers, how many the draft shares and where it resumes."""
        raise NotImplementedError

    def exit_of(self, model: Any) -> Any:
        """A module between the draft's last layer and the final norm, or None.

        Raises:
            ValueError: a target that the module was not made for.
        """
        return None

    def check_config(self, config: Any) -> None:
        self.parts(config.get_text_config(decoder=True).num_hidden_layers)

    def begin(self, call: DrafterCall) -> State:
        """Take the target apart.

        Raises:
            ValueError: a cache or a model that this does not go with.
        """
        self._check_cache(call)
        model = call.runner.model
        self.check_config(model.config)
        shared, resume = self.parts(model.config.get_text_config(decoder=True).num_hidden_layers)
        split = SplitModel(model, shared, resume, self.exit_of(call.model), self.skipped)
        if call.forwards.self_check:
            check_split(model, split)
        return OwnLayersState(call, OwnLayers(call, split), self.name)


class EarlyExitDrafter(OwnLayersDrafter, entry="early_exit"):
    """The target after its first layers; the verification runs the others, so none runs twice.

    It needs cache "spec" and a model with a plain list of layers, such as Llama, Qwen and GPT-2.
    Models that were trained to exit early accept more of its drafts.

    Args:
        layers: how many of the target's layers draft.

    Raises:
        TypeError: ``layers`` is no integer.
        ValueError: ``layers`` is below 1, and, when a call begins, not below the target's number.

    Source: Elhoushi et al. 2024, "LayerSkip", arXiv 2404.16710.
    """

    def __init__(self, layers: int) -> None:
        self.layers = check_integer("layers", layers, 1)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Exits after N layers."""
        if not (text.isdecimal() and len(text) < 5):
            raise ValueError(f"drafter must be early_exit:N with a number of layers, got {text!r}")
        return cls(int(text))

    def parts(self, total: int) -> tuple[int, int]:
        check_exit(self.layers, total)
        return self.layers, total


class LayerSkipDrafter(OwnLayersDrafter, entry="layer_skip"):
    """The target without a run of layers, or without single attention and MLP sublayers.

    The layers before the first that is touched see each token once, as with `EarlyExitDrafter`.
    Those after it run again in the verification, because in drafting they see the hidden states of
    fewer layers; they then overwrite the keys and values of the drafts. Until then they attend to
    the target's own keys and values of the committed text, so drafts need no cache of their own.

    Args:
        first, last: the layers that are left out, counted from 0; at least one layer comes before
            them.
        skipped: sublayers that are left out, in their place; ``build layer_skip`` of the command
            line searches for them.

    Raises:
        TypeError: a number that is no integer, or ``skipped`` of another type.
        ValueError: not 1 <= first <= last, both or neither of a run and ``skipped``, and, when a
            call starts, layers that the target lacks or that were found for another model.

    Source: Zhang et al. 2023, "Draft & Verify", arXiv 2309.08168.
    """

    def __init__(
        self,
        first: int | None = None,
        last: int | None = None,
        *,
        skipped: SkippedSublayers | None = None,
    ) -> None:
        if skipped is not None and not isinstance(skipped, SkippedSublayers):
            raise TypeError(f"skipped must be a SkippedSublayers, got {shown(skipped)}")
        if (skipped is None) == (first is None and last is None):
            raise ValueError(
                "either first and last or skipped must be given, got "
                + ("neither" if skipped is None else "both")
            )
        self.found = skipped
        if skipped is not None:
            self.first, self.last, self.skipped = skipped.first, skipped.last, skipped.pairs()
            return
        self.first, self.last = check_integer("first", first, 1), check_integer("last", last)
        if self.last < self.first:
            raise ValueError(f"last must be at least first = {first}, got {last}")

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Skips layers A to B, or the sublayers that a file lists."""
        if names_file("layer_skip", text):
            return cls(skipped=SkippedSublayers.load(text))
        first, _, last = text.partition("-")
        return cls(int(first), int(last))

    def check_config(self, config: Any) -> None:
        if self.found is not None:
            self.found.check_config(config)
        super().check_config(config)

    def parts(self, total: int) -> tuple[int, int]:
        check_last_skipped(self.last, total)
        return self.first, self.first if self.skipped else self.last + 1
