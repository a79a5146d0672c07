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
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, EncoderDecoderCache
from transformers.generation.utils import ALL_CACHE_NAMES

if TYPE_CHECKING:
    from specdec_hf.extras.encoded import Encoded


Lengths = NDArray[np.int64]
# What forwards and their outputs call the cache: Transformers 5.23 says past_key_values.
CACHE_NAME: str = ALL_CACHE_NAMES[0]
DEFERRED = "deferred"  # in the place of positions and mask: what makes them of the first slots
EPILOGUE = "epilogue"  # what becomes of the logits; see `SpecRunner.forward`
# By the number of layers before them: 0 is the embeddings.
HiddenStates = dict[int, torch.Tensor]
# Rotary embeddings whose angles depend on the largest place of a forward.
ROPES_BY_LENGTH = ("dynamic", "longrope")
# Plain generation of these reads the whole text again when such angles change.
REREADING = ("phi3", "phimoe")
# A CPU computes the padding of a forward like tokens. Another pass over the weights takes about as
# long as so many tokens, so prompts of very different lengths are read one sequence at a time.
TOKENS_OF_A_PASS = 48


def to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of an array of the host on a device, which does not change with the array."""
    return torch.from_numpy(values.copy()).to(device, non_blocking=True)


def _alone(states: torch.Tensor) -> torch.Tensor:
    """The states, copied where their memory holds more than twice as much."""
    return states.clone() if states.untyped_storage().nbytes() > 2 * states.nbytes else states


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
        kept = {layer: states[layer][:, columns] for layer in layers}
        # The states of all layers may share a memory, which is not kept for those of a few.
        self._forwards.append({layer: _alone(own) for layer, own in kept.items()})

    def pop(self) -> HiddenStates:
        """The states [B, n, H] of all forwards since the last call, one after the other.

        It is empty where none are kept, or none were made.
        """
        made, self._forwards = self._forwards, []
        if len(made) < 2:
            return made[0] if made else {}
        return {n: torch.cat([states[n] for states in made], dim=1) for n in made[0]}


class Prompt(NamedTuple):
    """The input as the caller gave it, padding included.

    Attributes:
        input_ids: [B, T] int64.
        mask: [B, T] bool, False where the input is padding.
    """

    input_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]

    def of_sequence(self, b: int) -> Prompt:
        """That of one sequence."""
        return Prompt(self.input_ids[b : b + 1], self.mask[b : b + 1])


@dataclass(frozen=True)
class CacheRequest:
    """What is asked of a cache.

    Attributes:
        batch_size: number of sequences B.
        kind: "auto", "spec", "aligned" or "dynamic". "auto" takes the first of them that suits the
            model, "snapshot" for models that keep a state, or the model's own cache without roll
            back where nothing is drafted.
        drafts: whether tokens will have to be forgotten.
        tree: whether trees of drafts will be fed, which only "spec" can.
        self_check: False trusts what is known of the model without running it.
        prompt: the input, where its padding must be fed as given.
        encoded: what the decoder of an encoder-decoder reads of its encoder.
    """

    batch_size: int
    kind: str = "auto"
    drafts: bool = True
    tree: bool = False
    self_check: bool = True
    prompt: Prompt | None = None
    encoded: Encoded | None = None

    @property
    def padded(self) -> bool:
        """Whether sequences will be padded."""
        if self.prompt is not None and not self.prompt.mask.all():
            return True
        # The decoders of an encoder-decoder begin with the same number of tokens.
        return self.encoded is None and self.batch_size > 1


class Runner(ABC):
    """Runs a model whose cache forgets rejected drafts sequence by sequence.

    Attributes:
        kind: the name of its kind of cache, as in `CacheKind`.
        has_slots: whether each sequence has slots of its own, so that trees can be fed, sequences
            taken over from other runners, and tokens fed beyond the model's context.
        rolls_back: whether tokens can be forgotten.
        model: what runs: a user's model, or its packed model.
        tap: keeps hidden states of the forwards.
        omitted: the kinds of forwards that had no mask.
    """

    kind: str
    has_slots = False
    rolls_back = True
    model: Any
    tap: HiddenStateTap
    omitted: Set[str] = frozenset()

    @property
    @abstractmethod
    def lengths(self) -> Lengths:
        """[B] int64, committed tokens of each sequence that the cache holds."""

    @abstractmethod
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

    @abstractmethod
    def truncate(self, lengths: Lengths) -> None:
        """Keep the first ``lengths[b]`` tokens of sequence ``b``."""

    def forward_tree(
        self, tokens: torch.Tensor, roots: Lengths, parents: torch.Tensor
    ) -> torch.Tensor:
        """Run the model over a tree, or over its last nodes, and cache their keys and values.

        Args:
            tokens: [B, n] int64: the last n tokens of [root, node 0, node 1, ...]. Tokens that are
                left out must be in the cache already, which holds all afterwards, in this order.
            roots: [B] position of each sequence's root.
            parents: [B, N] of all nodes, -1 for children of the root.

        Returns:
            Logits [B, n, V].
        """
        raise NotImplementedError(f"cache={self.kind!r} has no slots for a tree")

    def compact(self, base: torch.Tensor, path: torch.Tensor) -> None:
        """Move an accepted path to the slots after the root; see `SpecCache.compact`."""
        raise NotImplementedError(f"cache={self.kind!r} has no slots for a tree")

    def take(self, b: int, other: Any, index: int = 0, length: int | None = None) -> None:
        """Take over the cache of a sequence of another runner; see `SpecCache.take`."""
        raise NotImplementedError(f"cache={self.kind!r} holds what its sequences share")


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


def rounded(logits: torch.Tensor) -> torch.Tensor:
    """Logits as they leave a model: float64 becomes float32, the widest dtype that the ops take.

    `model.generate` rounds them in the same way before it reads them. Logits that become equal are
    a tie, of which greedy decoding takes the lowest id, there and here.
    """
    return logits.float() if logits.dtype == torch.float64 else logits


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


def is_encoder_decoder(model: Any) -> bool:
    """Whether the text of a model is that of a decoder that attends to an encoder."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def decoder_cache(cache: Any) -> Any:
    """The part of a cache that grows with the text: that of self-attention."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def counts_tokens(cache: Any) -> bool:
    """Whether a cache says how many tokens it holds: layers that keep states alone do not."""
    layers = decoder_cache(cache).layers
    return not layers or any(isinstance(layer, CacheLayerMixin) for layer in layers)


def caches_in(cache: Any) -> tuple[Any, ...]:
    """The caches of self-attention and cross-attention, or the one that a cache is."""
    if isinstance(cache, EncoderDecoderCache):
        return cache.self_attention_cache, cache.cross_attention_cache
    return (cache,)
