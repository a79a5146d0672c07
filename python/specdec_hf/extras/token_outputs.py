"""Scores, logits and hidden states of the committed tokens, as plain ``generate`` returns them.

A round scores all drafts and commits some. Only the rows that committed tokens were chosen from are
kept, and they stay on the device.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.request.sampling import Sampling
from specdec_hf.runner.protocol import HiddenStates, to_device
from specdec_kernels import sample


class TokenOutputs:
    """What a call returns of every new token, collected round by round.

    Args:
        names: which of "scores", "logits" and "hidden_states".
        batch_size: number of sequences B.
    """

    def __init__(self, names: frozenset[str], batch_size: int) -> None:
        self._names = names
        # By "scores", "logits" or the number of a layer: rows [n, X] of each sequence.
        self._rows: dict[str | int, list[list[torch.Tensor]]] = defaultdict(
            lambda: [[] for _ in range(batch_size)]
        )
        self._prompt: tuple[torch.Tensor, ...] = ()

    def record(
        self,
        raw: torch.Tensor,
        processed: torch.Tensor,
        hidden: HiddenStates,
        rows: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> None:
        """Keep the rows of one forward that committed tokens were chosen from.

        Args:
            raw: [B, R, V], logits of the last R columns of the forward.
            processed: the same after the logits processors.
            hidden: hidden states of the forward, of all layers where they are wanted.
            rows: [B, n], which of the R rows each token was chosen from.
            counts: [B], how many of the n tokens were committed.
        """
        columns: dict[str | int, torch.Tensor] = {}
        if "scores" in self._names:
            columns["scores"] = processed
        if "logits" in self._names:
            columns["logits"] = raw
        if "hidden_states" in self._names:
            before = hidden[0].shape[1] - raw.shape[1]
            if not self._prompt:
                self._prompt = tuple(x[:, : before + 1].clone() for x in hidden.values())
            columns |= {number: x[:, before:] for number, x in hidden.items()}
        for b in np.flatnonzero(counts).tolist():
            taken = rows[b, : counts[b]].tolist()
            for name, x in columns.items():
                self._rows[name][b].append(x[b, taken])

    def tensors(self, steps: int, mask: NDArray[np.bool_], sampling: Sampling) -> dict[str, Any]:
        """The entries of the output, tuples over the new tokens.

        Args:
            steps: new tokens of the longest sequence. Rows that a sequence lacks are NaN.
            mask: [B, P], which columns of the prompt plain generation would have fed, and which of
                them hold a token. Hidden states of the others are 0.
            sampling: the parameters that scores are filtered by.
        """
        stacked = {
            name: torch.stack([_padded(torch.cat(parts), steps) for parts in sequences])
            for name, sequences in self._rows.items()
        }
        made: dict[str, Any] = {}
        if "scores" in stacked:
            made["scores"] = filtered(stacked["scores"].float(), sampling).unbind(dim=1)
        if "logits" in stacked:
            made["logits"] = stacked["logits"].float().unbind(dim=1)
        if self._prompt:
            layers = [stacked[number] for number in range(len(self._prompt))]
            prompt = tuple(_prompt_columns(x, mask) for x in self._prompt)
            later = [tuple(x[:, t : t + 1] for x in layers) for t in range(1, steps)]
            made["hidden_states"] = (prompt, *later)
        return made


def filtered(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits [B, n, V] float32 over the temperature, -inf where a filter removes the token.

    Sequences of temperature 0 keep their logits.
    """
    if isinstance(sampling.temperature, float) and sampling.temperature == 0:
        return logits
    batch_size, steps = logits.shape[:2]
    parameters: dict[str, Any] = {
        name: value.repeat_interleave(steps) if isinstance(value, torch.Tensor) else value
        for name, value in sampling.to_dict().items()
    }
    zeros = torch.zeros(batch_size * steps, dtype=torch.int64, device=logits.device)
    drawn = sample(logits.flatten(0, 1), **parameters, seeds=zeros, positions=zeros)
    temperature = torch.as_tensor(sampling.temperature, device=logits.device).view(-1, 1, 1)
    survives = logits >= drawn.threshold.view(batch_size, steps, 1)
    scores = (logits / temperature).masked_fill(~survives, -torch.inf)
    return torch.where(temperature > 0, scores, logits)


def _padded(rows: torch.Tensor, steps: int) -> torch.Tensor:
    """Rows [n, X] with NaN after them up to [steps, X]."""
    return torch.nn.functional.pad(rows, (0, 0, 0, steps - len(rows)), value=torch.nan)


def _prompt_columns(states: torch.Tensor, mask: NDArray[np.bool_]) -> torch.Tensor:
    """The last P columns of [B, n, H], with 0 in the padding."""
    width = mask.shape[1]
    columns = torch.nn.functional.pad(states, (0, 0, max(width - states.shape[1], 0), 0))
    held = to_device(mask, states.device)
    return columns[:, -width:].masked_fill(~held[:, :, None], 0)
