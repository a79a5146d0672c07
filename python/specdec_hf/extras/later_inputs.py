"""Inputs of the forwards that follow a prefill made by the model's own methods.

Plain generation carries some inputs from token to token: token types, masks of cross-attention,
positions that are not the number of tokens before. The loop feeds several tokens at once, and
another number of them for every sequence, which is right where each new token gets the same inputs
as the one before it, and a position larger by one. `LaterInputs` checks that.
"""

from __future__ import annotations

from typing import Any

import torch

from specdec_hf.runner.protocol import CACHE_NAME, Lengths, to_device

# Inputs that the cache or the forward of the loop gives.
_OF_THE_LOOP = frozenset(
    {"input_ids", "inputs_embeds", "attention_mask", "position_ids", CACHE_NAME}
    | {"use_cache", "logits_to_keep", "return_dict", "cache_position"}
)


class LaterInputs:
    """Inputs that a forward needs beyond ids, mask and cache, because plain generation passes them.

    Args:
        model: the model.
        input_ids: [B, T] int64, the prompt; T is 0 where it is given as embeddings alone.
        model_kwargs: keyword arguments of ``prepare_inputs_for_generation`` at the prefill.
        outputs: the outputs of the prefill.
        past: the cache that the prefill filled.
        lengths: [B] tokens that it holds of each prompt.

    Raises:
        ValueError: an input that changes from token to token, by name.
    """

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        outputs: Any,
        past: Any,
        lengths: Lengths,
    ) -> None:
        self.model = model
        self.input_ids = input_ids
        # The logits and the cache of the prefill are large, and no update reads them.
        kept = {k: v for k, v in outputs.items() if k not in ("logits", CACHE_NAME)}
        self._outputs = type(outputs)(**kept)
        first_state = {k: v for k, v in model_kwargs.items() if k != CACHE_NAME}
        self._states = [(0, first_state)] * 2  # new tokens and arguments: at first, and latest
        self._prepared: dict[int, dict[str, Any]] = {}
        first, second = self.native(past, 1, 1), self.native(past, 2, 1)
        for name in sorted((first.keys() | second.keys()) - _OF_THE_LOOP):
            if not _equal(first.get(name), second.get(name)):
                raise ValueError(f"{name} is not supported: it changes from token to token")
        self._positions: torch.Tensor | None = first.get("position_ids")  # [..., B, 1]
        if self._positions is not None and not _equal(
            self._positions + 1, second.get("position_ids")
        ):
            raise ValueError("position_ids is not supported: positions do not grow by one")
        self._lengths = to_device(lengths, model.device)[:, None]

    def native(
        self, past: Any, new_tokens: int, size: int, ids: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """The inputs that plain generation passes to the forward of the last ``size`` tokens.

        Args:
            past: the cache.
            new_tokens: how many tokens follow the prompt.
            size: how many of them are fed.
            ids: [B, new_tokens], the new tokens; zeros by default.
        """
        count, kwargs = self._states[1] if self._states[1][0] <= new_tokens else self._states[0]
        for _ in range(new_tokens - count):
            kwargs = self.model._update_model_kwargs_for_generation(
                self._outputs, dict(kwargs), is_encoder_decoder=False
            )
        self._states[1] = (new_tokens, kwargs)
        if ids is None:
            ids = self.input_ids.new_zeros((self.input_ids.shape[0], new_tokens))
        prepared: dict[str, Any] = self.model.prepare_inputs_for_generation(
            torch.cat([self.input_ids, ids.to(self.input_ids.device)], dim=1),
            next_sequence_length=size,
            **{**kwargs, CACHE_NAME: past},
        )
        return {name: value for name, value in prepared.items() if value is not None}

    def add_to(self, inputs: dict[str, Any], size: int) -> dict[str, Any]:
        """The inputs of a window or tree of ``size`` tokens, completed.

        Args:
            inputs: those that the cache of the loop made. Its ``position_ids`` [B, size] count the
                tokens before each token.
            size: tokens per sequence in this forward.
        """
        if size not in self._prepared:
            prepared = self.native(inputs[CACHE_NAME], size, size)
            self._prepared[size] = {k: v for k, v in prepared.items() if k not in _OF_THE_LOOP}
        completed = {**self._prepared[size], **inputs}
        if self._positions is None:
            completed.pop("position_ids", None)
        elif "position_ids" in completed:
            completed["position_ids"] = self._positions + (inputs["position_ids"] - self._lengths)
        return completed


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and bool((a == b).all())
    return a is b or (isinstance(a, bool | int | float | str) and a == b)
