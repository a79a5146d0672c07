"""Forwards of a model over a part of the keys and values that another runner's cache holds.

A key holds the rotation of its position, so it can be moved: here a slot is no position. What is
held of a text lies in the first slots, in order of position, by layer and head; the tokens to come
follow it, at the positions that they have in the text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.runner.forwards import ForwardPolicy
from specdec_hf.runner.protocol import Lengths, to_device
from specdec_hf.runner.spec_runner import SpecRunner

from specdec_kernels import kv_append_


class SparseRunner(SpecRunner):
    """Runs the model of another runner over a part of its cache.

    Lengths and starts count tokens of the text, as in `SpecRunner`. The end of what is held is the
    end of the text, without gaps: the token at position p lies in slot ``p - left_out[b]`` there.

    Args:
        source: whose model runs, and whose cache is read; nothing is written there.
        capacity: slots to allocate at first.

    Attributes:
        left_out: [B], tokens of each sequence that are not held.
    """

    def __init__(self, source: SpecRunner, capacity: int) -> None:
        policy = ForwardPolicy(omits_mask=source.policy.omits_mask, one_by_one=False)
        super().__init__(source.model, len(source.lengths), capacity, policy, source.later_inputs)
        self.source = source
        self.left_out: Lengths = np.zeros(len(source.lengths), dtype=np.int64)
        self._copied: Lengths = self.left_out.copy()  # tokens that need not be copied any more

    @property
    def lengths(self) -> Lengths:
        """[B], tokens of each sequence that were fed or copied, those left out included."""
        return self.cache.lengths + self.left_out

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of this cache."""
        return bytes_of_cache(self)

    def window(self, starts: Lengths, size: int, padding: int = 0) -> dict[str, Any]:
        """As `SpecRunner.window`: positions are those of the text, and slots those of the cache."""
        inputs = super().window(starts - self.left_out, size, padding)
        positions = inputs["position_ids"] + to_device(self.left_out, self.device)[:, None]
        return {**inputs, "position_ids": positions.clamp(0, self._last_position)}

    def tree_window(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Raise ValueError, because trees are not fed."""
        raise ValueError("a sparse cache serves chains alone, got a tree")

    def truncate(self, lengths: Lengths) -> None:
        """Keep the first ``lengths[b]`` tokens of each sequence, those left out included."""
        super().truncate(lengths - self.left_out)

    def hold(self, sequences: NDArray[np.int64], slots: torch.Tensor, counts: Lengths) -> None:
        """Hold these slots of the source's cache in the place of all that some sequences held.

        Args:
            sequences: [R].
            slots: [N, R, H, n] int64 for each of the N layers and of its H heads of keys, in order
                of position; their end is the end of the sequence's text.
            counts: [R], how many of the n are taken; those after them are any slots.
        """
        ends, width = self.source.lengths[sequences], slots.shape[3]
        self._make_room(width)
        rows = to_device(sequences, self.device)
        heads = torch.arange(slots.shape[2], device=slots.device)[:, None]
        for own, theirs, chosen in zip(*self._layers(), slots, strict=True):
            for into, taken in zip(own.buffers, theirs.buffers, strict=True):
                at = (x.to(taken.device) for x in (rows[:, None, None], heads, chosen))
                into[rows.to(into.device), :, :width] = taken[tuple(at)]
        self.left_out[sequences] = ends - counts
        self._copied[sequences] = ends
        self.cache.lengths[sequences] = counts

    def copy_committed(self) -> None:
        """Copy the tokens that the source has committed since, over what was computed of them."""
        begins, ends = self._copied, self.source.lengths
        width = int((ends - begins).max())
        if width > 0:
            self._make_room(int((begins - self.left_out).max()) + width)
            columns = np.minimum(begins[:, None] + np.arange(width), ends[:, None] - 1)
            slots = to_device(columns, self.device)
            rows = torch.arange(len(ends), device=self.device)
            # Where fewer are new, what follows them lies beyond the end.
            starts = to_device(begins - self.left_out, self.device)
            by_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
            for own, theirs in zip(*self._layers(), strict=True):
                for into, taken in zip(own.buffers, theirs.buffers, strict=True):
                    at = rows[:, None].to(taken.device), slots.to(taken.device)
                    new = taken.transpose(1, 2)[at].transpose(1, 2)
                    caches, entries = by_device.setdefault(taken.device, ([], []))
                    caches.append(into)
                    entries.append(new)
            for device, (caches, entries) in by_device.items():
                kv_append_(caches, entries, starts.to(device))
        self._copied = ends.copy()
        self.cache.lengths = ends - self.left_out

    def _layers(self) -> tuple[list[Any], list[Any]]:
        """The layers of this cache, which have buffers, and those of the source's."""
        own, theirs = self.cache.spec_layers, self.source.cache.spec_layers
        for mine, other in zip(own, theirs, strict=True):
            if not mine.is_initialized:
                mine.lazy_initialization(*other.buffers)
        return own, theirs

    def _make_room(self, slots: int) -> None:
        if slots >= self.cache.cursor.capacity:
            self.cache.grow(slots + 1)


def bytes_of_cache(runner: SpecRunner) -> int:
    """Bytes that the keys and values of a runner's cache take."""
    layers = [layer for layer in runner.cache.spec_layers if layer.is_initialized]
    return sum(tensor.nbytes for layer in layers for tensor in layer.buffers)
