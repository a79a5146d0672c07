"""The forms in which a drafter passes Q, the distribution that it drew its tokens from.

A draft is None (deterministic: Q is one-hot at the drafted token), an array of logits or
probabilities, a `SampledDraft` (what `sample` returned) or a `SparseDraft` (a few tokens with their
probabilities). A `DraftMap` goes with rows over a vocabulary smaller than the target's.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specdec_host.arguments import conversion
from specdec_host.arguments.arrays import (
    Array,
    Param,
    array_of,
    require_array,
    require_array_or_none,
    to_float,
)


class SampledDraft(NamedTuple):
    """Q as `sample` drew from it, with the fields of `specdec_kernels.SampledDraft`."""

    logits: Array
    logsumexp: Array
    threshold: Array
    temperature: Param
    token_bitmask: Array | None = None


class SparseDraft(NamedTuple):
    """Q as a few tokens with their probabilities: see `specdec_kernels.SparseDraft`."""

    ids: Array
    probs: Array


class DraftMap(NamedTuple):
    """The column of each target token in the rows of a draft model with a smaller vocabulary.

    columns: [V] int32 or int64, -1 where a token has none: see `specdec_kernels.DraftMap`.
    """

    columns: Array

    @classmethod
    def from_ids(cls, ids: Array, vocab: int) -> DraftMap:
        """From the target id of each draft column.

        The arguments and errors are those of `specdec_kernels.DraftMap.from_ids`.

        >>> DraftMap.from_ids(np.array([3, 0]), 4).columns.tolist()
        [1, -1, -1, 0]
        """
        return cls(_inverse("ids", _ids("ids", ids), vocab))

    @classmethod
    def from_offsets(cls, d2t: Array, vocab: int) -> DraftMap:
        """From the `d2t` of an EAGLE-3 file: column i is target id `i + d2t[i]`.

        The arguments and errors are those of `specdec_kernels.DraftMap.from_offsets`.

        >>> DraftMap.from_offsets(np.array([0, 2]), 4).columns.tolist()
        [0, -1, -1, 1]
        """
        offsets = _ids("d2t", d2t)
        return cls(_inverse("i + d2t[i]", offsets + np.arange(len(offsets)), vocab))


def _ids(name: str, value: Array) -> NDArray[Any]:
    ids = require_array(value, name)
    if ids.ndim != 1 or ids.dtype not in (np.int32, np.int64):
        raise ValueError(f"{name} must be [D] int32 or int64, got {list(ids.shape)} {ids.dtype}")
    return ids


def _inverse(name: str, ids: NDArray[Any], vocab: int) -> NDArray[np.int32]:
    """[vocab] int32: the index of each id in `ids`, else -1."""
    conversion.require_integer(vocab, "vocab")
    if vocab < 1:
        raise ValueError(f"vocab must be at least 1, got {vocab}")
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab:
        raise ValueError(f"{name} must be in [0, {vocab}), got {ids.min()} to {ids.max()}")
    if len(np.unique(ids)) != len(ids):
        raise ValueError(f"{name} must be distinct, got one twice")
    columns = np.full(vocab, -1, dtype=np.int32)
    columns[ids] = np.arange(len(ids), dtype=np.int32)
    return columns


Draft: TypeAlias = "Array | SampledDraft | SparseDraft | None"
_Vector = NDArray[Any] | None


def split_draft(
    draft: Draft,
) -> tuple[_Vector, _Vector, _Vector, _Vector, _Vector, float, _Vector]:
    """Rows, ids, logsumexp, threshold, the temperature as a vector and as a scalar, bitmask."""
    if draft is None:
        return None, None, None, None, None, 1.0, None
    if isinstance(draft, SampledDraft):
        logits = require_array(draft.logits, "draft logits")
        logsumexp = require_array(draft.logsumexp, "draft logsumexp")
        threshold = require_array(draft.threshold, "draft threshold")
        given = conversion.vector_and_scalar(draft.temperature, "draft temperature", 1.0)
        logsumexp = to_float(logsumexp, "draft logsumexp", np.float64)
        bitmask = require_array_or_none(draft.token_bitmask, "draft token_bitmask")
        return logits, None, logsumexp, threshold, *given, bitmask
    if isinstance(draft, SparseDraft):
        ids = require_array(draft.ids, "draft ids")
        return require_array(draft.probs, "draft probabilities"), ids, None, None, None, 1.0, None
    rows = array_of(draft, "draft")
    if rows is None:
        raise TypeError(
            "draft must be None, an array, a SampledDraft or a SparseDraft, "
            f"got {type(draft).__name__}"
        )
    return rows, None, None, None, None, 1.0, None


def map_columns(draft_map: DraftMap | None) -> _Vector:
    """The array that the ops take."""
    if draft_map is None:
        return None
    if not isinstance(draft_map, DraftMap):
        raise TypeError(f"draft_map must be a DraftMap or None, got {type(draft_map).__name__}")
    columns = require_array(draft_map.columns, "draft_map columns")
    return conversion.to_int32(columns) if columns.dtype == np.int64 else columns
