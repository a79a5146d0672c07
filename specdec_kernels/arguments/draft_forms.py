"""The forms in which a drafter passes Q, the distribution that it drew its tokens from.

A draft is None (deterministic: Q is one-hot at the drafted token), a tensor of logits or
probabilities, a `SampledDraft` (what `sample` returned) or a `SparseDraft` (a few tokens with their
probabilities). A `DraftMap` goes with rows over a vocabulary smaller than the target's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import conversion
from .conversion import Param


class SampledDraft(NamedTuple):
    """Q as `sample` drew from it: the logits, and the statistics that `sample` returned.

    Attributes:
        logits: [B, gamma, V] (or ragged [R-B, V]), as they were given to `sample`.
        logsumexp: [B, gamma], `Sampled.logsumexp` of each row.
        threshold: [B, gamma], `Sampled.threshold` of each row.
        temperature: scalar or [B], as given to `sample`; at 0 the draft is deterministic. Another
            temperature than the one that was sampled with describes another distribution, and the
            output would no longer follow the target's.
        token_bitmask: [B, gamma, ceil(V/32)] (or ragged) int32, as given to `sample`; None if none
            was.
    """

    logits: Tensor
    logsumexp: Tensor
    threshold: Tensor
    temperature: Param
    token_bitmask: Tensor | None = None


class SparseDraft(NamedTuple):
    """Q as a few tokens with their probabilities, for drafters that draw from their top k.

    Attributes:
        ids: [B, gamma, K] (or ragged [R-B, K]) int32 or int64, K >= 1: ids of the target's
            vocabulary, in any order, negative where unused. Probabilities of an id that occurs
            twice are added.
        probs: of the same shape, float32, bfloat16 or float16; the K of each row sum to 1.
    """

    ids: Tensor
    probs: Tensor


class DraftMap(NamedTuple):
    """The column of each target token in the rows of a draft model with a smaller vocabulary.

    Drafted ids are ids of the target's vocabulary, with a map too. Without a map, column v of a
    draft row is token v: with D columns, tokens v >= D have Q = 0, and drafts v >= V are rejected.

    Attributes:
        columns: [V] int32 or int64, the draft's column of each target id, -1 where it has none.
            Kernels read int32; each call converts int64.
    """

    columns: Tensor

    @classmethod
    def from_ids(cls, ids: Tensor, vocab: int) -> DraftMap:
        """From the target id of each draft column.

        Call it once and keep the map: it reads `ids` on the host.

        Args:
            ids: [D] int32 or int64, distinct, in [0, vocab).
            vocab: V, the last dimension of the target rows.

        Raises:
            TypeError: ids is not a tensor, or vocab not an integer.
            ValueError: its shape or dtype is wrong, vocab is below 1, or an id is out of range or
                occurs twice.

        >>> DraftMap.from_ids(torch.tensor([3, 0]), 4).columns
        tensor([ 1, -1, -1,  0], dtype=torch.int32)
        """
        _check_ids("ids", ids)
        return cls(_inverse("ids", ids, vocab))

    @classmethod
    def from_offsets(cls, d2t: Tensor, vocab: int) -> DraftMap:
        """From the `d2t` of an EAGLE-3 file: column i is target id `i + d2t[i]`.

        Call it once and keep the map: it reads `d2t` on the host.

        Args:
            d2t: [D] int32 or int64.
            vocab: V, the last dimension of the target rows.

        Raises:
            TypeError: d2t is not a tensor, or vocab not an integer.
            ValueError: as `from_ids`, for the ids `i + d2t[i]`.

        >>> DraftMap.from_offsets(torch.tensor([0, 2]), 4).columns
        tensor([ 0, -1, -1,  1], dtype=torch.int32)
        """
        _check_ids("d2t", d2t)
        ids = d2t + torch.arange(len(d2t), device=d2t.device)
        return cls(_inverse("i + d2t[i]", ids, vocab))


def _check_ids(name: str, ids: Tensor) -> None:
    conversion.require_tensor(ids, name)
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be [D] int32 or int64, got {list(ids.shape)} {ids.dtype}")


def _inverse(name: str, ids: Tensor, vocab: int) -> Tensor:
    """[vocab] int32: the index of each id in `ids`, else -1."""
    conversion.require_integer(vocab, "vocab")
    if vocab < 1:
        raise ValueError(f"vocab must be at least 1, got {vocab}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(
            f"{name} must be in [0, {vocab}), got {int(ids.min())} to {int(ids.max())}"
        )
    if len(ids.unique()) != len(ids):
        raise ValueError(f"{name} must be distinct, got one twice")
    columns = torch.full((vocab,), -1, dtype=torch.int32, device=ids.device)
    columns[ids.long()] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    return columns


def split_draft(
    draft: Tensor | SampledDraft | SparseDraft | None,
) -> tuple[
    Tensor | None,
    Tensor | None,
    Tensor | None,
    Tensor | None,
    Tensor | None,
    float,
    Tensor | None,
]:
    """Rows, ids, logsumexp, threshold, the temperature as a vector and as a scalar, bitmask."""
    if draft is None or isinstance(draft, Tensor):
        return draft, None, None, None, None, 1.0, None
    if isinstance(draft, SampledDraft):
        logits, logsumexp, threshold, temperature, bitmask = draft
        conversion.require_tensor(logits, "draft logits")
        conversion.require_tensor(logsumexp, "draft logsumexp")
        conversion.require_tensor(threshold, "draft threshold")
        given = conversion.vector_and_scalar(temperature, "draft temperature", 1.0)
        conversion.require_tensor_or_none(bitmask, "draft token_bitmask")
        return logits, None, logsumexp.to(torch.float64), threshold, *given, bitmask
    if isinstance(draft, SparseDraft):
        conversion.require_tensor(draft.ids, "draft ids")
        conversion.require_tensor(draft.probs, "draft probabilities")
        return draft.probs, draft.ids, None, None, None, 1.0, None
    raise TypeError(
        f"draft must be None, a tensor, a SampledDraft or a SparseDraft, got {type(draft).__name__}"
    )


def map_columns(draft_map: DraftMap | None) -> Tensor | None:
    """The tensor that the ops take."""
    if draft_map is None:
        return None
    if not isinstance(draft_map, DraftMap):
        raise TypeError(f"draft_map must be a DraftMap or None, got {type(draft_map).__name__}")
    columns = draft_map.columns
    conversion.require_tensor(columns, "draft_map columns")
    return conversion.to_int32(columns) if columns.dtype == torch.int64 else columns
