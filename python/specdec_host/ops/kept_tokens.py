"""The tokens that the filters keep, with their probabilities."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec_host import _library
from specdec_host.arguments import conversion
from specdec_host.arguments.arrays import Array, Param, require_array, require_array_or_none
from specdec_host.arguments.rules import KINDS, Kind
from specdec_host.arguments.values import number_of


class KeptTokens(NamedTuple):
    """The result of `kept_tokens`, with the fields of `specdec_kernels.KeptTokens`."""

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    counts: NDArray[np.int32]
    status: NDArray[np.int32]


def kept_tokens(
    target: Array,
    *,
    max_kept: int,
    rows: Array | None = None,
    kind: Kind = "logits",
    temperature: Param = 1.0,
    top_k: int | Array = 0,
    top_p: Param = 1.0,
    min_p: Param = 0.0,
    token_bitmask: Array | None = None,
    target_indptr: Array | None = None,
) -> KeptTokens:
    """The tokens that the filters keep of target rows, from the likeliest on.

    The arguments are those of `specdec_kernels.kept_tokens`, with arrays in place of tensors, and
    so are the bits of the results. specdec_kernels/ops/kept_tokens.py documents both.

    Raises:
        RuntimeError: a shape, dtype or scalar is out of range; the message names it.
        TypeError: an argument has a wrong type, such as a list in place of an array.

    >>> logits = np.array([[0.0, 2.0, 1.0]], dtype=np.float32)
    >>> kept_tokens(logits, max_kept=2).ids.tolist()
    [[1, 2]]
    """
    return KeptTokens(
        *_library.kept_tokens(
            require_array(target, "target"),
            require_array_or_none(rows, "rows"),
            require_array_or_none(target_indptr, "target_indptr"),
            number_of(kind, "kind", KINDS),
            conversion.require_integer(max_kept, "max_kept"),
            *conversion.sampling(temperature, top_k, top_p, min_p),
            require_array_or_none(token_bitmask, "token_bitmask"),
        )
    )
