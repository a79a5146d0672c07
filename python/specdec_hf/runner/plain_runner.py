"""Forwards over Transformers' own cache, fed as ``model.generate`` feeds it.

`SpecRunner` gives the forward position ids and a mask of its own, which not every model takes. The
runners here leave both to the model: ``prepare_inputs_for_generation`` makes the inputs of every
forward from the tokens so far and a 2-D mask of the padding. Only the roll back is ours. It cuts
these inputs and the cache together, so that no class of ours holds the cache alone.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.utils.generic import ModelOutput

from specdec_hf.runner.encoded import Encoded, caches_in, decoder_cache
from specdec_hf.runner.protocol import (
    CACHE_NAME,
    HiddenStateTap,
    Lengths,
    forward_arguments,
    rounded,
    to_device,
)
from specdec_kernels import kv_realign_

# Model inputs that have a column for each token; the names are those of Transformers.
_COLUMN_INPUTS = ("position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class Prompt(NamedTuple):
    """The input as the caller gave it, padding included.

    Attributes:
        input_ids: [B, T] int64.
        mask: [B, T] bool, False where the input is padding.
    """

    input_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]


class PlainRunner:
    """Runs a batch over one cache of Transformers. All sequences end in the last column.

    Kinds:

    - "dynamic": one sequence, rolled back with ``crop``. Its left padding stays where it was.
    - "aligned": several sequences. After a round in which they kept different numbers of drafts,
      `kv_realign_` moves the tokens of each to the right, until all end in one column again.
    - "plain": any state that the model keeps, never rolled back: for decoding without drafts.
    - "none": no cache; each forward reads the whole sequence again. One sequence.

    Args:
        model: the causal LM whose forward will fill the cache.
        batch_size: number of sequences B.
        kind: one of those above.
        prompt: the input, where its padding must be fed as given. The first forward then feeds
            these columns in place of the tokens of its argument that are the prompt.
        inputs: further model inputs of the first forward, such as ``token_type_ids``.
        past: a cache that holds the first columns of ``prompt``; it will be changed.
        keep_mask: whether the model gets a mask that hides nothing. Plain ``generate`` gives it one
            where any sequence of the batch has padding.
        encoded: what an encoder-decoder's decoder reads of its encoder. The sequences are then
            those of the decoder.
    """

    def __init__(
        self,
        model: Any,
        batch_size: int,
        kind: str = "dynamic",
        *,
        prompt: Prompt | None = None,
        inputs: dict[str, Any] | None = None,
        past: Cache | None = None,
        keep_mask: bool = False,
        encoded: Encoded | None = None,
    ) -> None:
        self.model = model
        self._keep_mask = keep_mask
        self._of_decoder = encoded is not None
        # Names of the mask and the positions of the sequences that grow.
        before = "decoder_" if self._of_decoder else ""
        self._mask_name, self._positions_name = f"{before}attention_mask", f"{before}position_ids"
        if encoded is not None:
            inputs = {**encoded.copied().inputs, **(inputs or {})}
        self.kind = kind
        self.lengths: Lengths = np.zeros(batch_size, dtype=np.int64)
        self._takes = frozenset(forward_arguments(model))
        self._prompt = prompt
        self._kwargs: dict[str, Any] = {"use_cache": kind != "none", **(inputs or {})}
        self._outputs: ModelOutput | None = None  # of the last forward, without its rows
        self.tap = HiddenStateTap()
        columns = 0
        if past is not None:
            assert prompt is not None
            columns = past.get_seq_length()
            if kind == "aligned":
                # The first roll back may realign in place, before a forward rebinds these tensors.
                layers: list[Any] = decoder_cache(past).layers
                for layer in layers:
                    if isinstance(getattr(layer, "keys", None), torch.Tensor):
                        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
            self._kwargs[CACHE_NAME] = past
            self.lengths = prompt.mask[:, :columns].sum(axis=1).astype(np.int64)
        elif kind == "plain" or (self._of_decoder and kind == "dynamic"):
            model._prepare_cache_for_generation(
                GenerationConfig(use_cache=True), self._kwargs, None, batch_size, 0
            )
        elif kind != "none":
            # A sliding layer drops what left its window, so its tokens cannot be moved, and several
            # drafts cannot be forgotten. Layers without a window keep all tokens, and the model's
            # own mask hides the same ones.
            fresh: Cache = DynamicCache(config=model.config if kind == "dynamic" else None)
            fresh.layers = [
                DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer
                for layer in fresh.layers
            ]
            if self._of_decoder:
                fresh = EncoderDecoderCache(fresh, DynamicCache())
            self._kwargs[CACHE_NAME] = fresh
        if kind in ("dynamic", "aligned"):
            self.cache.activate_past_recording()
        self._held = self.lengths.copy()  # tokens in the cache, those to be rolled back included
        shape = (batch_size, columns)
        self._mask = np.ones(shape, dtype=bool) if prompt is None else prompt.mask[:, :columns]
        ids = np.zeros(shape, dtype=np.int64) if prompt is None else prompt.input_ids[:, :columns]
        self._ids = to_device(ids, model.device)  # [B, W]

    @property
    def cache(self) -> Any:
        """The model's own cache."""
        return self._kwargs.get(CACHE_NAME)

    def begin_after(self, outputs: Any) -> None:
        """Go on after a prefill that filled ``past`` and gave these outputs."""
        self._outputs = _state_of(outputs, **{CACHE_NAME: self.cache})

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor:
        """Feed the next tokens of every sequence, as in `Runner`."""
        kept = np.minimum(self.lengths, np.maximum(starts, 0))
        if (starts > self.lengths).any():
            raise ValueError(
                f"the cache holds {self.lengths.tolist()} tokens, asked to start at {starts}"
            )
        lengths = starts + tokens.shape[1]
        self._roll_back(kept)
        mask = np.arange(tokens.shape[1]) >= -starts[:, None]
        first = self._outputs is None
        if first and self._prompt is not None:
            read = int((self._prompt.mask.sum(axis=1) - starts).max())
            tokens, mask = self._prompt_columns(tokens, mask, read)
        columns, size = self._ids.shape[1], tokens.shape[1]
        self._ids = torch.cat([self._ids, tokens], dim=1)
        self._mask = np.concatenate([self._mask, mask], axis=1)
        self._extend_inputs(size, first)
        if not first and not self._of_decoder and (starts < 0).any():
            self._restart_positions(starts, size)
        if "logits_to_keep" in self._takes:
            self._kwargs["logits_to_keep"] = keep
        whole = self.kind == "none" or columns == 0
        inputs = self.model.prepare_inputs_for_generation(
            self._ids,
            next_sequence_length=None if whole else size,
            is_first_iteration=first,
            **self._kwargs,
        )
        if "logits_to_keep" in self._takes:
            inputs["logits_to_keep"] = keep  # some models put in a number of their own
        if self.tap.is_open:
            inputs["output_hidden_states"] = True
        outputs = self.model(**inputs, return_dict=True)
        if self.tap.is_open:
            self.tap.add(outputs.hidden_states, slice(-size, None))
        logits: torch.Tensor = outputs.logits
        self._outputs = _state_of(outputs)
        self.lengths, self._held = lengths, lengths.copy()
        return rounded(logits if logits.shape[1] == keep else logits[:, -keep:])

    def truncate(self, lengths: Lengths) -> None:
        """Keep the first ``lengths[b]`` tokens of each sequence."""
        self.lengths = lengths.astype(np.int64, copy=True)

    def release(self) -> Any:
        """The cache as plain ``generate`` would leave it; this object must not be used after."""
        self._roll_back(self.lengths)
        if self._outputs is not None and self.kind in ("plain", "snapshot"):
            self._kwargs = self.model._update_model_kwargs_for_generation(
                self._outputs, self._kwargs, is_encoder_decoder=self._of_decoder
            )
        names = [name for name in ALL_CACHE_NAMES if self._kwargs.get(name) is not None]
        cache: Any = self._kwargs[names[0]] if names else None
        own_tensors(cache)
        return cache

    @property
    def mask(self) -> NDArray[np.bool_]:
        """[B, W], which columns of the model's cache hold a token."""
        return self._mask

    @property
    def columns(self) -> NDArray[np.int64]:
        """[B], the column of each sequence's first token."""
        columns: NDArray[np.int64] = self._mask.argmax(axis=1)
        return columns

    def align(self) -> None:
        """Bring the model's cache to ``lengths``, which the next forward would do."""
        self._roll_back(self.lengths)

    def _prompt_columns(
        self, tokens: torch.Tensor, mask: NDArray[np.bool_], read: int
    ) -> tuple[torch.Tensor, NDArray[np.bool_]]:
        """Tokens and mask of the first forward: the prompt as given for the first ``read``."""
        assert self._prompt is not None
        done = self._ids.shape[1]
        ids = to_device(self._prompt.input_ids[:, done:], tokens.device)
        given = self._prompt.mask[:, done:]
        return (
            torch.cat([ids, tokens[:, read:]], dim=1),
            np.concatenate([given, mask[:, read:]], axis=1),
        )

    def _extend_inputs(self, size: int, first: bool) -> None:
        """Bring the model's inputs to the columns of the tokens, ``size`` more than before."""
        model, kwargs = self.model, self._kwargs
        mask = to_device(self._mask.astype(np.int64), self._ids.device)
        if first:
            kwargs[self._mask_name] = mask
            takes_positions = "position_ids" in self._takes and not self._of_decoder
            if kwargs.get("position_ids") is None and takes_positions:
                kwargs["position_ids"] = model._prepare_position_ids_for_generation(
                    self._ids, kwargs
                )
        else:
            assert self._outputs is not None
            kwargs = model._update_model_kwargs_for_generation(
                self._outputs, kwargs, is_encoder_decoder=self._of_decoder, num_new_tokens=size
            )
            # Each new token has the type of the last old one, as in plain generation. Transformers
            # would repeat the types of the last tokens, as many as are new.
            types = kwargs.get("token_type_ids")
            if types is not None and not self._of_decoder:
                old = types[:, : self._mask.shape[1] - size]
                new = old[:, -1:].expand(-1, size)
                kwargs["token_type_ids"] = torch.cat([old, new], dim=-1)
        # Plain generate drops a mask that hides nothing.
        hides = self._keep_mask or not self._mask.all()
        kwargs[self._mask_name] = mask if hides else None
        if self._of_decoder and self.kind == "aligned" and self._positions_name in self._takes:
            # Plain generation leaves them out, because it never moves a sequence to the right.
            held = mask.cumsum(dim=-1) - 1
            kwargs[self._positions_name] = held.clamp(min=0) if hides else None
        if self._mask_name not in self._takes:
            del kwargs[self._mask_name]
        self._kwargs = kwargs

    def _restart_positions(self, starts: Lengths, size: int) -> None:
        """Position ids of sequences whose first token lies in this window."""
        ids = self._kwargs.get("position_ids")
        if isinstance(ids, torch.Tensor) and ids.ndim == 2:
            ids = ids.clone()
            positions = torch.from_numpy(np.maximum(starts[:, None] + np.arange(size), 0))
            rows = to_device(np.flatnonzero(starts < 0), ids.device)
            ids[rows, -size:] = positions.to(ids.device, ids.dtype)[rows]
            self._kwargs["position_ids"] = ids

    def _roll_back(self, kept: Lengths) -> None:
        """Forget all but ``kept[b]`` tokens of each sequence, and let all end in one column."""
        columns = self._ids.shape[1]
        if self.kind == "plain" or columns == 0:
            # A sequence that has ended is fed its last token again, and its logits are not used.
            return
        ends = columns - (self._held - kept)  # [B] column after the last kept token
        starts = np.where(kept > 0, self.columns, ends)
        if self.kind == "aligned":
            width = int((ends - starts).max())
            shifts = width - ends
        else:
            width, shifts = int(ends[0]), np.zeros_like(ends)
        if shifts.any():
            self._realign(starts, ends, shifts)
        if self.cache is not None:
            # Even crop(0) has an effect: a sliding layer drops what left its window only in crop.
            self.cache.crop(width - columns)
        source = np.arange(width) - shifts[:, None]  # [B, width] the column each comes from
        valid = source >= starts[:, None] if shifts.any() else np.ones_like(source, dtype=bool)
        index = np.clip(source, 0, columns - 1)
        self._mask = np.take_along_axis(self._mask, index, axis=1) & valid
        moved = to_device(index, self._ids.device)
        self._ids = self._ids.gather(1, moved)
        for name in () if self._of_decoder else _COLUMN_INPUTS:
            x = self._kwargs.get(name)
            if isinstance(x, torch.Tensor) and x.shape[-1] == columns:
                self._kwargs[name] = x.gather(-1, moved.to(x.device).expand(*x.shape[:-1], width))
        self._held = kept.copy()

    def _realign(self, starts: Lengths, ends: Lengths, shifts: Lengths) -> None:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for layer in decoder_cache(self.cache).layers:
            if layer.is_initialized and layer.keys is not None:
                by_device.setdefault(layer.keys.device, []).extend((layer.keys, layer.values))
        for device, buffers in by_device.items():
            where = (to_device(x, device) for x in (starts, ends - starts, shifts))
            kv_realign_(buffers, *where)


def _state_of(outputs: Any, **changes: Any) -> Any:
    """Outputs without their rows: the next forward needs the state, and rows would hold memory."""
    kept = {k: v for k, v in outputs.items() if k not in ("logits", "hidden_states")}
    return type(outputs)(**{**kept, **changes})


class SeparateRunner:
    """Runs the sequences of a batch alone, one forward after the other.

    This serves models for which a sequence of a batch depends on its padding. Each sequence keeps
    the padding it was given, so its text is that of plain ``generate``.

    Args:
        runners: a `PlainRunner` of one sequence each.
    """

    def __init__(self, runners: list[PlainRunner]) -> None:
        self.runners = runners
        self.kind = runners[0].kind
        self.tap = HiddenStateTap()

    @property
    def lengths(self) -> Lengths:
        """[B] int64, committed tokens of each sequence that the caches hold."""
        return np.concatenate([runner.lengths for runner in self.runners])

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor:
        """Feed the next tokens of every sequence, as in `Runner`."""
        logits, hidden = [], []
        for b, runner in enumerate(self.runners):
            if self.tap.is_open:
                runner.tap.open(self.tap.layers)
            logits.append(runner.forward(tokens[b : b + 1], starts[b : b + 1], keep))
            hidden.append(runner.tap.take())
        if self.tap.is_open:
            self.tap.add({layer: torch.cat([one[layer] for one in hidden]) for layer in hidden[0]})
        return torch.cat(logits)

    def truncate(self, lengths: Lengths) -> None:
        """Keep the first ``lengths[b]`` tokens of each sequence."""
        for runner, length in zip(self.runners, lengths, strict=True):
            runner.truncate(np.array([length]))


def copy_of(past: Any) -> Any:
    """A copy of a caller's cache that the model may extend without changing the caller's."""
    if isinstance(past, EncoderDecoderCache):
        return EncoderDecoderCache(*map(copy_of, caches_in(past)))
    if not past.is_croppable:
        return copy.deepcopy(past)
    fresh = copy.copy(past)
    fresh.layers = [_copy_of_layer(layer) for layer in past.layers]
    return fresh


def own_tensors(cache: Any) -> None:
    """Make a cache one that its user may write into, as plain ``generate`` leaves it."""
    for part in caches_in(cache):
        for layer in getattr(part, "layers", ()):
            if hasattr(layer, "record_past"):
                layer.record_past = False
            # The layers hold inference tensors. A clone made outside inference mode is a normal
            # tensor. A layer without a cache of its own holds None.
            if isinstance(getattr(layer, "keys", None), torch.Tensor):
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
            _clone_states(layer)


def _copy_of_layer(layer: Any) -> Any:
    # Layers rebind keys and values and never write into them.
    fresh = copy.copy(layer)
    _clone_states(fresh)
    return fresh


def _clone_states(layer: Any) -> None:
    """Give a layer its own states of a convolution or recurrence.

    They lie in dicts, and a forward of one token writes into them.
    """
    for name, value in list(vars(layer).items()):
        if isinstance(value, dict):
            states = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in value.items()}
            setattr(layer, name, states)
