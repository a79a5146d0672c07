"""The interface that the decoding loop needs of what runs a model.

Transformers' caches roll back a whole batch by one common number of tokens. In speculative decoding
each sequence of a batch keeps another number of drafts, so a runner cuts its cache to one length
per sequence. Terms of this package:

- runner: owns the forward of a model in one call: the model, its cache, and how forwards run.
- slot: the place of one token's key and value; in `SpecCache`, token ``t`` of a sequence lies in
  slot ``t``.
- window: the tokens that one forward adds to the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence, Set
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.generation.utils import ALL_CACHE_NAMES

Lengths = NDArray[np.int64]
# What forwards and their outputs call the cache: Transformers 5.23 says past_key_values.
CACHE_NAME: str = ALL_CACHE_NAMES[0]
# By the number of layers before them: 0 is the embeddings.
HiddenStates = dict[int, torch.Tensor]
# Rotary embeddings whose angles depend on the largest place of a forward.
ROPES_BY_LENGTH = ("dynamic", "longrope")
# Plain generation of these reads the whole text again when such angles change.
REREADING = ("phi3", "phimoe")


def to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of an array of the host on a device, which does not change with the array."""
    return torch.from_numpy(values.copy()).to(device, non_blocking=True)


class HiddenStateTap:
    """Keeps hidden states of the forwards of a runner until they are taken.

    Attributes:
        is_open: whether forwards ask the model for them.
        layers: after how many layers they are kept; None keeps all.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.layers: frozenset[int] | None = None
        self._forwards: list[HiddenStates] = []

    def open(
        self, layers: Collection[int] | None = None, first: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Keep the states of every later forward, beside those that an earlier call asked for.

        Args:
            layers: after how many layers; None keeps all.
            first: all of those of a prefill that the model made itself.
        """
        before = self.layers if self.is_open else frozenset()
        both = None if layers is None or before is None else before | frozenset(layers)
        self.is_open, self.layers = True, both
        if first is not None:
            self.add(first)

    def add(
        self, states: Sequence[torch.Tensor] | HiddenStates, columns: slice = slice(None)
    ) -> None:
        """Keep what was asked for of one forward.

        Args:
            states: [B, n, H] of the embeddings and of each layer, or those that were asked for.
            columns: which of the n tokens are no padding.
        """
        layers = range(len(states)) if self.layers is None else self.layers
        self._forwards.append({layer: states[layer][:, columns] for layer in layers})

    def take(self) -> HiddenStates:
        """The states [B, n, H] of all forwards since the last call, one after the other.

        It is empty where none are kept, or none were made.
        """
        made, self._forwards = self._forwards, []
        if len(made) < 2:
            return made[0] if made else {}
        return {n: torch.cat([states[n] for states in made], dim=1) for n in made[0]}


class Runner(Protocol):
    """Runs a model whose cache forgets rejected drafts sequence by sequence.

    Attributes:
        kind: the name of its kind of cache, as in `make_runner`.
        tap: keeps hidden states of the forwards.
        lengths: [B] int64, committed tokens of each sequence that the cache holds.
    """

    kind: str
    tap: HiddenStateTap

    @property
    def lengths(self) -> Lengths: ...

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor:
        """Run the model over the next tokens of every sequence and cache their keys and values.

        Args:
            tokens: [B, n] int64 on the model's device. The cache holds ``starts[b] + n`` tokens of
                sequence ``b`` afterwards.
            starts: [B] position of each sequence's first token; a negative one is left padding.
            keep: how many rows of logits to return, counted from the end.

        Returns:
            Logits [B, keep, V].
        """
        ...

    def truncate(self, lengths: Lengths) -> None:
        """Keep the first ``lengths[b]`` tokens of sequence ``b``."""
        ...


def vocab_size_of(model: Any) -> int:
    """The number of token ids of a model, or of a configuration."""
    config = getattr(model, "config", model)
    size: int = config.get_text_config(decoder=True).vocab_size
    return size


def num_parameters(module: Any) -> int:
    """The number of parameters of a module; those that several of its modules share count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def rope_types(model: Any) -> set[str]:
    """The kinds of the rotary embeddings of a model, by the names of Transformers."""
    given = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    # They are of the model, or of each type of layer.
    kinds = [one.get("rope_type") for one in (given, *given.values()) if isinstance(one, dict)]
    return {kind for kind in kinds if kind is not None}


def tokens_before_rope_switch(model: Any, length: int) -> int | None:
    """How many tokens may follow before a forward turns all its tokens by other angles, or None.

    Rotary embeddings of the kinds `ROPES_BY_LENGTH` turn all tokens of a forward by its largest
    place, as soon as that is beyond a bound.

    Args:
        model: whose forward it is.
        length: tokens of the longest sequence. None is returned where it is beyond the bound.
    """
    config = model.config.get_text_config(decoder=True)
    given = getattr(config, "rope_parameters", None) or {}
    bounds = [
        one["original_max_position_embeddings"]
        if one["rope_type"] == "longrope"
        else config.max_position_embeddings
        for one in (given, *given.values())
        if isinstance(one, dict) and one.get("rope_type") in ROPES_BY_LENGTH
    ]
    return min((bound - length for bound in bounds if bound >= length), default=None)


def rereads_at_rope_switch(model: Any) -> bool:
    """Whether plain generation reads a text again where `tokens_before_rope_switch` ends."""
    return model.config.model_type in REREADING and "longrope" in rope_types(model)


def context_length(model: Any) -> int | None:
    """The number of positions the model was made for, None when its config does not say."""
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    # Some configs say -1, or nothing at all, where positions are relative.
    return length if isinstance(length, int) and length > 0 else None


def run_inputs(model: Any, inputs: dict[str, Any], keep: int) -> torch.Tensor:
    """Logits [B, keep, V] of the last tokens of a forward with these inputs and no others."""
    if "logits_to_keep" in forward_arguments(model):
        inputs = {**inputs, "logits_to_keep": keep}
    logits: torch.Tensor = model(use_cache=True, return_dict=True, **inputs).logits
    return rounded(logits[:, -keep:])


def rounded(logits: torch.Tensor) -> torch.Tensor:
    """Logits as they leave a model: float64 becomes float32, the widest dtype that the ops take.

    `model.generate` rounds them in the same way before it reads them. Logits that become equal are
    a tie, of which greedy decoding takes the lowest id, there and here.
    """
    return logits.float() if logits.dtype == torch.float64 else logits


def run_embeddings(
    model: Any, runner: Any, embeddings: torch.Tensor, starts: NDArray[np.int64], keep: int
) -> torch.Tensor:
    """As `SpecRunner.forward`, for tokens given as embeddings [B, n, H]."""
    inputs = runner.window(starts, embeddings.shape[1])
    return run_inputs(model, {"inputs_embeds": embeddings, **inputs}, keep)


def model_inside(model: Any) -> Any:
    """The model that a wrapper such as a compiled or a PEFT model forwards to, or the model itself.

    Wrappers pass on arguments that the signature of their own forward does not name.
    """
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), model)


def forward_arguments(model: Any) -> Set[str]:
    """Names of the arguments that the forward of a model, or of the model inside, takes."""
    return inspect.signature(model_inside(model).forward).parameters.keys()


def keeps_cache(model: Any) -> bool:
    """Whether the model's forward takes any cache at all."""
    return not forward_arguments(model).isdisjoint(ALL_CACHE_NAMES)
