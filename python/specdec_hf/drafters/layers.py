"""Drafting with a model of its own that is made of the first layers of the target."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from specdec_hf.arguments import check_integer, split_options
from specdec_hf.drafters.model import ModelDrafter, own_sampling
from specdec_hf.drafting.context import DraftContext
from specdec_hf.drafting.registry import SAMPLING, sampling_of

if TYPE_CHECKING:
    from typing_extensions import Self

# The models made of a target, by their number of layers. Later calls draft with the same one, so
# that its self-check, graphs and costs are known.
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
            starts, a target without as many layers.
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

    def draft_for(self, target: Any) -> None:
        """Take the model that is made of this target.

        Raises:
            ValueError: it cannot be made.
        """
        made = _made.setdefault(target, {})
        small = made.get(self.layers)
        if small is None or not _shares_weights(small, target):
            small = made[self.layers] = with_fewer_layers(target, self.layers)
        self.model = small

    def start(self, context: DraftContext) -> None:
        self.draft_for(context.model)
        super().start(context)


def with_fewer_layers(model: Any, num_layers: int) -> Any:
    """A draft model of the first ``num_layers`` layers of ``model``; all weights are shared.

    Raises:
        ValueError: the model has fewer layers, parts that read no text, or weights that a model of
            its class without the other layers does not have.
    """
    _check_layers(model.config, num_layers)
    fields = {**model.config.to_dict(), "num_hidden_layers": num_layers}
    if fields.get("layer_types"):  # its length is checked against the number of layers
        fields["layer_types"] = fields["layer_types"][:num_layers]
    config = type(model.config).from_dict(fields)
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        small = type(model)(config)
    wanted = dict(small.named_parameters()).keys() | dict(small.named_buffers()).keys()
    shared = {name: tensor for name, tensor in model.state_dict().items() if name in wanted}
    small.load_state_dict(shared, strict=False, assign=True)
    small.tie_weights()
    _share_buffers(model, small)
    if any(tensor.is_meta for tensor in small.state_dict().values()):
        raise ValueError(f"drafter layers cannot share the weights of {type(model).__name__}")
    small.generation_config = model.generation_config
    return small.eval()


def _check_layers(config: Any, layers: int) -> None:
    if config.get_text_config(decoder=True) is not config:
        raise ValueError(f"drafter layers needs a model of text alone, got {config.model_type!r}")
    total = config.num_hidden_layers
    if not 1 <= layers <= total:
        raise ValueError(f"drafter layers:N must have N in [1, {total}], got {layers}")


def _share_buffers(model: Any, small: Any) -> None:
    """Let ``small`` share the non-persistent buffers (rotary frequencies) of ``model``."""
    buffers = dict(model.named_buffers())
    for name, _ in list(small.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        small.get_submodule(owner).register_buffer(leaf, buffers[name], persistent=False)


def _shares_weights(small: Any, model: Any) -> bool:
    """Whether a model that was made of another still has its weights, which may have been moved."""
    theirs = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    ours = {**dict(small.named_parameters()), **dict(small.named_buffers())}
    same = (tensor.data_ptr() == theirs[name].data_ptr() for name, tensor in ours.items())
    attention = small.config._attn_implementation == model.config._attn_implementation
    return attention and small.dtype == model.dtype and all(same)
