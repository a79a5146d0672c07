"""Draft steps of an EAGLE-3 head as CUDA graphs, and the buffers that graphs belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from specdec_hf.cache.widths import Widths, padded
from specdec_hf.compiled.lent_graphs import Borrower, LentGraphs
from specdec_hf.heads.cache import HeadCache

# Inputs of a step with a row for each pair.
ROWS = ("embeddings", "hidden", "places", "mask")


class ReplayedStep(tuple[torch.Tensor, torch.Tensor]):
    """Hidden states and logits of a step that was replayed."""

    replayed = True


class StepGraphs(LentGraphs):
    """The recorded steps of a head, over the buffers of a `HeadCache` that one call borrows.

    A step sees all slots of the buffers but the last one, and has one of `BUCKETS` pairs.
    """

    _cache: HeadCache | None = None

    def refuse(self, reason: str) -> None:
        super().refuse(reason)
        self._cache = None

    def lend(
        self, cache: HeadCache, user: Any, borrower: Borrower, weights: tuple[int, ...]
    ) -> HeadCache | str:
        """The buffers for a call, or why it runs without graphs.

        Args:
            cache: empty, of the call; it is kept if no other fits.
            user: has the buffers until the call ends.
            borrower: the call.
            weights: addresses of the head's.
        """
        if reason := self.refusal(user):
            return reason
        if self._cache is None or not self._cache.suffices(cache):
            self._cache = cache
        self._cache.clear()
        self.keep([self._cache.buffers(0)])
        self.begin(user, borrower, weights)
        return self._cache

    def run(self, step: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Replay a step, which is recorded first if it is the first of its kind.

        Args:
            step: gives hidden states and logits from inputs by name.
            inputs: as of `Eagle3Step.states`, with a mask.

        Returns:
            Hidden states [B, n, H] and logits [B, n, V], or None where ``step`` itself must run:
            the inputs are not those of the call that has the buffers, or nothing is recorded.
        """
        keys, values = inputs["keys"], inputs["values"]
        if self._cache is None or self._cache.buffers(0)[0] is not keys:
            return None
        if self.reason or not self._recorder.here():
            return None
        self.keep([(keys, values)])  # they may have grown
        size = inputs["places"].shape[1]
        width = Widths().of(size)
        hidden = keys.shape[2] - 1 - inputs["mask"].shape[2]
        given = {**inputs, "mask": pad(inputs["mask"], (0, hidden))}
        given |= {name: padded(given[name], width) for name in ROWS}
        # Turns are gathered here, so that their tables may move.
        given |= {
            name: inputs[name][given["places"]].flatten(0, 1) for name in ("cosines", "sines")
        }
        places = torch.arange(given["places"].numel(), device=keys.device)
        given["places"] = places.view_as(given["places"])
        del given["keys"], given["values"]

        def run(given: dict[str, Any]) -> list[torch.Tensor]:
            states, logits = step(**given, keys=keys, values=values)
            return [logits, states]

        outputs = self.replay(run, given)
        if outputs is None:
            return None
        logits, states = outputs
        return ReplayedStep((states[:, :size], logits[:, :size]))
