"""Drafting with a model of its own that is made of the first layers of the target."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch
from specdec_hf.arguments import check_integer, split_options
from specdec_hf.drafters.chain import ChainState
from specdec_hf.drafters.model import DraftModel, ModelDrafter, own_sampling
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.drafter import State
from specdec_hf.drafting.layer_numbers import check_first_layers
from specdec_hf.drafting.parsed import SAMPLING, sampling_of
from specdec_hf.runner.self_check import one_line
from specdec_hf.runner.structure import unknown_forward
from transformers.cache_utils import get_layer_types_and_kwargs

from specdec_papers.split_model import with_layers

if TYPE_CHECKING:
    from typing_extensions import Self

# The models made of a target, by their number of layers, with the target's state. Later calls draft
# with the same one, so that its self-check, graphs and costs are known.
_made: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()


class LayersDrafter(ModelDrafter, entry="layers"):
    """The target's first layers, its final norm and its head, as a model with a cache of its own.

    It drafts what `EarlyExitDrafter` drafts. The verification runs its layers again, but any cache
    serves, and it can draft trees. The weights are those of the target.

    Args:
        layers: how many of the target's layers draft.
        sampling: ``temperature``, ``top_k``, ``top_p`` and ``min_p`` as in `ModelDrafter`.

    Raises:
        TypeError: ``layers`` is no integer, or a sampling parameter no number.
        ValueError: ``layers`` is below 1, a sampling parameter is out of range, and, when a call
            begins, a target without as many layers.

    Attributes:
        model: that of the target of `for_target`; None before.
    """

    def __init__(self, layers: int, **sampling: float | None) -> None:
        self.layers = check_integer("layers", layers, 1)
        self.cache_kind = "auto"
        self.model: Any = None
        self.sampling = own_sampling(**sampling)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Drafts with N layers, and with the sampling parameters that follow it."""
        number, options = split_options(text, SAMPLING)
        if not (number.isdecimal() and len(number) < 5):
            raise ValueError(f"drafter must be layers:N with a number of layers, got {text!r}")
        return cls(int(number), **sampling_of(options))

    def check_config(self, config: Any) -> None:
        _check_layers(config, self.layers)

    def for_target(self, model: Any) -> LayersDrafter:
        """The drafter with the model that is made of this target.

        Raises:
            ValueError: it cannot be made.
        """
        made, state = _made.setdefault(model, {}), _state_of(model)
        if self.layers not in made or made[self.layers][0] != state:
            made[self.layers] = state, with_fewer_layers(model, self.layers)
        drafter = copy.copy(self)
        drafter.model = made[self.layers][1]
        return drafter

    def begin(self, call: DrafterCall) -> State:
        """Make an empty cache for the model that is made of the call's target.

        Raises:
            ValueError: it cannot be made.
        """
        return _LayersState(call, self.drafting_model(call))

    def drafting_model(self, call: DrafterCall) -> DraftModel:
        model = self.for_target(call.model).model
        return DraftModel(model, call, self.cache_kind, sampling=self.sampling)


class _LayersState(ChainState):
    """The chains of a model that no sequence of another call joins."""


def with_fewer_layers(model: Any, num_layers: int) -> Any:
    """A draft model of the first ``num_layers`` layers of ``model``: a view of its own modules.

    Raises:
        ValueError: the model has fewer layers, parts that read no text, a forward that is not that
            of its class, no one list of its layers, or layers that share a cache with later ones.
    """
    reason = unknown_forward(model)
    if reason is None:
        _check_layers(model.config, num_layers)
        path = _path_of_layers(model)
        reason = None if path else f"it has no one list of {model.config.num_hidden_layers} layers"
    if reason is not None:
        raise ValueError(f"drafter layers cannot draft for {type(model).__name__}: {reason}")
    layers = list(model.get_submodule(path))[:num_layers]
    types = getattr(model.config, "layer_types", None) or ()
    try:
        small = with_layers(model, path.split("."), layers, types[:num_layers])
        get_layer_types_and_kwargs(small.config)  # of its cache
    except Exception as error:  # raised inside a config that such layers do not go with
        raise ValueError(
            f"drafter layers cannot draft for {type(model).__name__}: its first {num_layers} "
            f"layers are no model of their own: {one_line(error)}"
        ) from error
    return small


def _check_layers(config: Any, layers: int) -> None:
    if config.get_text_config(decoder=True) is not config:
        raise ValueError(f"drafter layers needs a model of text alone, got {config.model_type!r}")
    check_first_layers(layers, config.num_hidden_layers)


def _path_of_layers(model: Any) -> str:
    """The name of the model's list of layers; empty where it is not known which one that is."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)}
    outermost = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    found = [n for n in outermost if len(lists[n]) == model.config.num_hidden_layers]
    return found[0] if len(found) == 1 else ""


def _state_of(model: Any) -> tuple[Any, ...]:
    """What differs after modules or the memory of weights were replaced."""
    memory = ((tensor.data_ptr(), tensor.dtype) for tensor in model.parameters())
    # A view holds the modules that it was made of, so that no others have their numbers.
    return model.config._attn_implementation, *map(id, model.modules()), *memory
