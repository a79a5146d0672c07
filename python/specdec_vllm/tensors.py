"""The tensors of a server in the forms that the ops take."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec_kernels import SampledDraft


def dense_drafts(drafts: Tensor, starts: Tensor, lengths: Tensor, gamma: int) -> Tensor:
    """Drafted ids [B, gamma], -1 where a sequence has fewer, from a vector of all of them.

    Args:
        drafts: [N] int32 or int64.
        starts, lengths: [B]; `drafts[starts[b]]` is the first draft of sequence b.
        gamma: the number of columns, at least the largest length.
    """
    columns = torch.arange(gamma, device=drafts.device)
    if drafts.numel() == 0:
        return drafts.new_full((len(starts), gamma), -1)
    index = (starts[:, None] + columns).clamp_(max=drafts.numel() - 1)
    return torch.where(columns < lengths[:, None], drafts[index], -1)


def stored_rows(
    states: Tensor | None, index: Tensor, target: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The arguments `draft` and `draft_rows` of `verify_chain` for rows in a store of requests.

    Where the target needs them wider, or the store is not contiguous, the rows of the batch are
    copied, not those of the store.

    Args:
        states: [S, gamma, D] logits; None if there are none.
        index: [B], the place of each request in the store.
        target: logits of the target.
    """
    if states is None:
        return None, None
    if as_wide_as(states[:0], target).dtype != states.dtype or not states.is_contiguous():
        return as_wide_as(states[index], target), None
    gamma = states.shape[1]
    return states.flatten(0, 1), index[:, None] * gamma + torch.arange(gamma, device=index.device)


def as_wide_as(rows: Tensor, target: Tensor) -> Tensor:
    """Rows in float32 if the target's are; kernels for CUDA read rows of two dtypes slowly.

    A target narrower than its draft stays: its copy would be larger than what it saves.
    """
    return rows.float() if target.dtype == torch.float32 else rows


def probabilities(rows: Tensor, shape: tuple[int, int]) -> SampledDraft:
    """A draft of probabilities for a target of logits.

    Args:
        rows: [N, D] float32, the probabilities that the drafts were sampled from.
        shape: (B, gamma), that of the drafted ids.
    """
    return SampledDraft(
        rows.log(),
        rows.new_zeros(shape, dtype=torch.float64),
        rows.new_full(shape, -torch.inf),
        1.0,
    )


def scaled_logits(rows: Tensor, temperature: Tensor) -> SampledDraft:
    """A draft of logits with a temperature of its own.

    Args:
        rows: [B, gamma, D], the logits before the temperature.
        temperature: [B] float32 that the drafts were sampled at; 0 for the argmax.
    """
    divisor = torch.where(temperature == 0, 1.0, temperature)[:, None, None]
    return SampledDraft(
        rows,
        (rows.float() / divisor).logsumexp(-1).double(),
        rows.new_full(rows.shape[:2], -torch.inf, dtype=torch.float32),
        temperature,
    )


def with_bonus_rows(rows: Tensor, lengths: Tensor, bonus: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of drafts, each sequence's followed by one in which only its bonus token is possible.

    Args:
        rows: [N, V] logits.
        lengths: [B] int32, how many of them belong to each sequence.
        bonus: [B, 1] or [B], drawn already.

    Returns:
        Rows [N+B, V], and where each sequence's begin, [B+1] int32.
    """
    indptr = torch.nn.functional.pad((lengths + 1).cumsum(0), (1, 0)).int()
    out = rows.new_full((len(rows) + len(lengths), rows.shape[-1]), -torch.inf)
    number = torch.arange(len(lengths), device=rows.device)
    out[torch.arange(len(rows), device=rows.device) + number.repeat_interleave(lengths)] = rows
    out[indptr[1:].long() - 1, bonus.flatten().long()] = 0.0
    return out, indptr


def expand(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """[num_tokens] from one value of each sequence, `replace_from` replaced.

    Args:
        x: [B].
        cu_num_tokens: [B], the last index of each sequence plus one.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def seeds_for(
    generators: Mapping[int, torch.Generator],
    number: int,
    device: torch.device,
    *,
    source: torch.Generator | None,
) -> Tensor:
    """A seed [number] int64 for each request: random, drawn for one call.

    Args:
        generators: index of a request in the batch -> its own, which draws its seed.
        source: of the other seeds, on the CPU; None for torch's default generator, from which
            other code of the process draws too.
    """
    seeds = torch.randint(2**63 - 1, (number,), generator=source)
    for i, generator in generators.items():
        drawn = torch.randint(2**63 - 1, (1,), generator=generator, device=generator.device)
        seeds[i] = drawn.item()
    return seeds.to(device, non_blocking=True)
