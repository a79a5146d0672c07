"""Drafts for models that keep a state, such as recurrent and hybrid ones, by snapshots.

A state cannot forget a token, so it is copied before every window. Where a draft of the window is
rejected, the copy takes its place, and the tokens that were accepted are fed again, in front of the
next window. The first copy is kept, and all tokens are fed again after a cut that goes further back
than the last window: a draft model of another vocabulary may read new tokens for old text.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch

from specdec_hf.runner.plain_runner import PlainRunner
from specdec_hf.runner.protocol import Lengths


class _Snapshot(NamedTuple):
    """The state before a window, and how many columns the model had read."""

    columns: int
    state: tuple[Any, ...]


class StateRunner(PlainRunner):
    """Runs one sequence over the model's own cache or state, which snapshots roll back.

    The state after several tokens at once must be the state after one at a time, which the
    self-check measures.
    """

    kind = "snapshot"
    rolls_back = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._snapshots: list[_Snapshot] = []
        self._again = self._ids[:, :0]  # tokens of ``lengths`` that the state lacks

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor:
        """Feed the next tokens, as in `Runner`.

        Tokens that the sequence holds already are not fed again.
        """
        known = int(self.lengths[0] - starts[0]) if self.lengths[0] else 0
        tokens, starts = tokens[:, known:], starts + known
        if tokens.shape[1] < keep:
            raise ValueError(f"{keep} rows of logits need as many new tokens, got {tokens.shape}")
        size = self._again.shape[1]
        if size > tokens.shape[1]:
            self._read_again()
        elif size:
            tokens, starts = torch.cat([self._again, tokens], dim=1), starts - size
            self._again = self._again[:, :0]
        drafts = 0
        if self._outputs is None and self._prompt is not None:
            # A snapshot after the prompt, which is too long to be fed again.
            read = int(self._prompt.mask.sum()) - int(starts[0])
            drafts = min(tokens.shape[1] - read, keep - 1)
        if drafts > 0:
            rows = self._feed(tokens[:, :-drafts], starts, keep - drafts)
            starts = starts + tokens.shape[1] - drafts
            return torch.cat([rows, self._feed(tokens[:, -drafts:], starts, drafts)], dim=1)
        return self._feed(tokens, starts, keep)

    def truncate(self, lengths: Lengths) -> None:
        """Keep the first ``lengths[b]`` tokens, of which the state may read some once more."""
        size, held = int(lengths[0]), int(self._held[0])
        self.lengths = lengths.astype(lengths.dtype, copy=True)
        if size >= held:
            self._again = self._again[:, : size - held]
            if size == held:
                del self._snapshots[1:]
            return
        padding = self._ids.shape[1] - held
        while self._snapshots[-1].columns > size + padding:
            self._snapshots.pop()
        columns, (self._kwargs, self._outputs) = self._snapshots.pop()
        del self._snapshots[1:]
        self._again = self._ids[:, columns : size + padding]
        self._ids, self.mask = self._ids[:, :columns], self.mask[:, :columns]
        self._held = self.mask.sum(axis=1)

    def release(self) -> Any:
        """The state as plain ``generate`` would leave it; this object must not be used after."""
        with torch.inference_mode():
            self._read_again()
        return super().release()

    def _read_again(self) -> None:
        """Bring the state to ``lengths``."""
        tokens, self._again = self._again, self._again[:, :0]
        if tokens.shape[1]:
            self._feed(tokens, self.lengths - tokens.shape[1], keep=1)

    def _feed(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor:
        """Take a snapshot, then run the model over tokens that follow the state."""
        state = (self._kwargs, self._outputs)
        # Layers of attention rebind keys and values and never write into them.
        layers: list[Any] = getattr(self.cache, "layers", [])
        held = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        kept = copy.deepcopy(state, {id(x): x for x in held if isinstance(x, torch.Tensor)})
        self._snapshots.append(_Snapshot(self._ids.shape[1], kept))
        return super().forward(tokens, starts, keep)
