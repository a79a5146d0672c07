"""Sampling parameters of a batch, and their application outside of the ops where it is needed.

The ops apply temperature, top-k, top-p and min-p in this order. Servers apply min-p before the two
others, and the logprobs that they serve may be those of processed logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Parameters(NamedTuple):
    """Sampling parameters and noise of each sequence: see `verify_chain`.

    temperature, top_p, min_p: scalar or [B].
    top_k: scalar or [B] int32 or int64, 0 for all tokens.
    seeds: [B] int64.
    positions: [B] int64, the absolute index of the token that the first row of a sequence decides.
    """

    temperature: float | Tensor
    top_k: int | Tensor
    top_p: float | Tensor
    min_p: float | Tensor
    seeds: Tensor
    positions: Tensor

    def without_filters(self) -> Parameters:
        """For rows that have been through the filters: temperature 0 or 1, and nothing else."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = (temperature != 0).float()
        return self._replace(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)


# Masks logits [R, V] by top-k and top-p, each None or [R].
TopKTopP = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


def min_p_first(rows: Tensor, counts: Tensor, parameters: Parameters) -> tuple[Tensor, Parameters]:
    """Apply min-p where it comes before top-p, the only filter that it does not commute with.

    Args:
        rows: [R, V] logits.
        counts: [B], how many of the rows belong to each sequence.
        parameters: of the sequences.

    Returns:
        Rows with -inf where `p < min_p * max(p)`, in a float32 copy, and the parameters without
        min-p; or the arguments, where there is no min-p or no top-p.
    """
    if isinstance(parameters.min_p, Tensor) and isinstance(parameters.top_p, Tensor):
        return apply_min_p(rows, counts, parameters), parameters._replace(min_p=0.0)
    return rows, parameters


def filtered(
    rows: Tensor, counts: Tensor, parameters: Parameters, top_k_top_p: TopKTopP
) -> tuple[Tensor, Parameters]:
    """Logits [R, V] float32 with all parameters applied, and the parameters that remain.

    Args:
        rows, counts, parameters: as in `min_p_first`.
        top_k_top_p: the server's own, because it serves the logprobs of its result.
    """
    top_k, top_p = (
        _per_row(value, counts, rows) if isinstance(value, Tensor) else None
        for value in (parameters.top_k, parameters.top_p)
    )
    if isinstance(parameters.min_p, Tensor):
        rows = apply_min_p(rows, counts, parameters)
    if top_k is not None:
        top_k = torch.where(top_k == 0, rows.shape[-1], top_k)
    rows = divided(rows, counts, parameters)
    return top_k_top_p(rows, top_k, top_p), parameters.without_filters()


def divided(rows: Tensor, counts: Tensor, parameters: Parameters) -> Tensor:
    """Logits [R, V] in a float32 copy, over the temperature where that is not 0."""
    temperature = _per_row(parameters.temperature, counts, rows)
    return rows.float() / torch.where(temperature == 0, 1.0, temperature)[:, None]


def apply_min_p(rows: Tensor, counts: Tensor, parameters: Parameters) -> Tensor:
    """Rows [R, V] in a float32 copy, with -inf where `p < min_p * max(p)`: see `min_p_first`."""
    temperature = _per_row(parameters.temperature, counts, rows)
    min_p = _per_row(parameters.min_p, counts, rows)
    rows = rows.to(torch.float32, copy=True)
    # Where both are 0, the threshold is not a number and masks nothing.
    threshold = rows.amax(-1) + temperature * min_p.log()
    return rows.masked_fill_(rows < threshold[:, None], -torch.inf)


def _per_row(value: float | Tensor, counts: Tensor, rows: Tensor) -> Tensor:
    """[R] from a scalar or [B]."""
    if not isinstance(value, Tensor):
        return torch.full((len(rows),), value, device=rows.device)
    return value.repeat_interleave(counts, output_size=len(rows))
