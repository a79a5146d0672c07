"""Forwards over Transformers' own cache, fed as ``model.generate`` feeds it.

`SpecRunner` gives the forward position ids and a mask of its own, which not every model takes. The
runners here leave both to the model: ``prepare_inputs_for_generation`` makes the inputs of every
forward from the tokens so far and a 2-D mask of the padding. Only the roll back is ours. It cuts
these inputs and the cache together, so that no class of ours holds the cache alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.utils.generic import ModelOutput

from specdec_hf.runner.protocol import (
    CACHE_NAME,
    HiddenStateTap,
    Lengths,
    Prompt,
    Runner,
    forward_arguments,
    rounded,
    to_device,
)

if TYPE_CHECKING:
    from specdec_hf.extras.encoded import Encoded

# Model inputs that have a column for each token; the names are those of Transformers.
_COLUMN_INPUTS = ("position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class PlainRunner(Runner):
    """Runs a batch over any state that its model keeps, never rolled back: for plain decoding.

    All sequences end in the last column.

    Args:
        model: the causal LM whose forward will fill the cache.
        batch_size: number of sequences B.
        prompt: the input, where its padding must be fed as given. The first forward then feeds
            these columns in place of the tokens of its argument that are the prompt.
        inputs: further model inputs of the first forward, such as ``token_type_ids``.
        past: a cache that holds the first columns of ``prompt``; it will be changed.
        keep_mask: whether the model gets a mask that hides nothing. Plain ``generate`` gives it one
            where any sequence of the batch has padding.
        encoded: what an encoder-decoder's decoder reads of its encoder. The sequences are then
            those of the decoder.
    """

    kind = "plain"
    rolls_back = False
    uses_cache = True
    lengths: Lengths = np.zeros(0, dtype=np.int64)  # in the place of a property

    def __init__(
        self,
        model: Any,
        batch_size: int = 1,
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
        self.lengths = np.zeros(batch_size, dtype=np.int64)
        self._takes = frozenset(forward_arguments(model))
        self._prompt = prompt
        self._kwargs: dict[str, Any] = {"use_cache": self.uses_cache, **(inputs or {})}
        self._outputs: ModelOutput | None = None  # of the last forward, without its rows
        self.tap = HiddenStateTap()
        columns = 0
        if past is not None:
            assert prompt is not None
            columns = past.get_seq_length()
            self._kwargs[CACHE_NAME] = past
            self.lengths = prompt.mask[:, :columns].sum(axis=1).astype(np.int64)
        else:
            self._begin_cache(batch_size)
        self._held = self.lengths.copy()  # tokens in the cache, those to be rolled back included
        shape = (batch_size, columns)
        self.mask = np.ones(shape, dtype=bool) if prompt is None else prompt.mask[:, :columns]
        ids = np.zeros(shape, dtype=np.int64) if prompt is None else prompt.input_ids[:, :columns]
        self._ids = to_device(ids, model.device)  # [B, W]

    def _begin_cache(self, batch_size: int) -> None:
        """Make an empty cache where the model is to use one."""
        self.model._prepare_cache_for_generation(
            GenerationConfig(use_cache=True), self._kwargs, None, batch_size, 0
        )

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
            done = self._ids.shape[1]
            columns = to_device(self._prompt.input_ids[:, done:], tokens.device)
            tokens = torch.cat([columns, tokens[:, read:]], dim=1)
            mask = np.concatenate([self._prompt.mask[:, done:], mask[:, read:]], axis=1)
        whole, size = not self.uses_cache or not self._ids.shape[1], tokens.shape[1]
        self._ids = torch.cat([self._ids, tokens], dim=1)
        self.mask = np.concatenate([self.mask, mask], axis=1)
        self._extend_inputs(size, first)
        if not first and not self._of_decoder and (starts < 0).any():
            self._restart_positions(starts, size)
        if "logits_to_keep" in self._takes:
            self._kwargs["logits_to_keep"] = keep
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
        """The cache that plain ``generate`` would leave; this object must not be used after."""
        if self._outputs is not None:
            self._kwargs = self.model._update_model_kwargs_for_generation(
                self._outputs, self._kwargs, is_encoder_decoder=self._of_decoder
            )
        found = (self._kwargs.get(name) for name in ALL_CACHE_NAMES)
        return next((cache for cache in found if cache is not None), None)

    def _extend_inputs(self, size: int, first: bool) -> None:
        """Bring the model's inputs to the columns of the tokens, ``size`` more than before."""
        model, kwargs = self.model, self._kwargs
        mask = to_device(self.mask.astype(np.int64), self._ids.device)
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
                old = types[:, : self.mask.shape[1] - size]
                new = old[:, -1:].expand(-1, size)
                kwargs["token_type_ids"] = torch.cat([old, new], dim=-1)
        # Plain generate drops a mask that hides nothing.
        hides = self._keep_mask or not self.mask.all()
        kwargs[self._mask_name] = mask if hides else None
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
        """Forget all but ``kept[b]`` tokens of each sequence, and let all end in one column.

        Nothing is forgotten here: a sequence that has ended is fed its last token again, and its
        logits are not used.
        """


def _state_of(outputs: Any, **changes: Any) -> Any:
    """Outputs without their rows: the next forward needs the state, and rows would hold memory."""
    kept = {k: v for k, v in outputs.items() if k not in ("logits", "hidden_states")}
    return type(outputs)(**{**kept, **changes})


class RollbackRunner(PlainRunner):
    """Forgets tokens: it cuts the inputs of the model and its cache together."""

    rolls_back = True

    def release(self) -> Any:
        self._roll_back(self.lengths)
        return self.cache

    def _new_columns(self, starts: Lengths, ends: Lengths) -> tuple[int, Lengths]:
        """The number of columns after a roll back, and [B] how far to the right tokens moved."""
        return int(ends[0]), np.zeros_like(ends)

    def _roll_back(self, kept: Lengths) -> None:
        columns = self._ids.shape[1]
        if columns == 0:
            return
        ends = columns - (self._held - kept)  # [B] column after the last kept token
        starts = np.where(kept > 0, self.mask.argmax(axis=1), ends)
        width, shifts = self._new_columns(starts, ends)
        if self.cache is not None:
            # Even crop(0) has an effect: a sliding layer drops what left its window only in crop.
            self.cache.crop(width - columns)
        source = np.arange(width) - shifts[:, None]  # [B, width] the column each comes from
        valid = source >= starts[:, None] if shifts.any() else np.ones_like(source, dtype=bool)
        index = np.clip(source, 0, columns - 1)
        self.mask = np.take_along_axis(self.mask, index, axis=1) & valid
        moved = to_device(index, self._ids.device)
        self._ids = self._ids.gather(1, moved)
        for name in () if self._of_decoder else _COLUMN_INPUTS:
            x = self._kwargs.get(name)
            if isinstance(x, torch.Tensor) and x.shape[-1] == columns:
                self._kwargs[name] = x.gather(-1, moved.to(x.device).expand(*x.shape[:-1], width))
        self._held = kept.copy()


class NoCacheRunner(RollbackRunner):
    """Runs one sequence without a cache: each forward reads the whole sequence again."""

    kind = "none"
    uses_cache = False

    def _begin_cache(self, batch_size: int) -> None:
        pass
