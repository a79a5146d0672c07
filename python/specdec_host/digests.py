"""Digests of arrays, by which it is seen that they have changed."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_host import _library
from specdec_host.arguments.arrays import Array, require_array
from specdec_host.arguments.checks import check_integer
from specdec_host.threads import get_num_threads


def digests(arrays: Sequence[Array], *, threads: int | None = None) -> list[int]:
    """A digest of 64 bits for each array, which tells whether its bytes have changed.

    All bytes count, and their places: 0.0 and -0.0 differ, and so do two NaNs with other bits.
    Other bytes have the same digest with probability 2^-63, unless somebody looks for such bytes,
    which is easy: this is no cryptographic digest.

    Args:
        arrays: contiguous, of any dtype and shape, which do not count.
        threads: most threads; None takes `get_num_threads`. No digest depends on it.

    Raises:
        TypeError: one is no array, or ``threads`` no integer.
        ValueError: one is not contiguous, or ``threads`` is not in [1, 1024].

    Source: NH of Black et al., UMAC: fast and secure message authentication, 1999.

    Example:
        >>> import numpy as np
        >>> weight = np.ones((4, 3), np.float32)
        >>> before = digests([weight])
        >>> weight[2, 1] = -1
        >>> digests([weight]) == before
        False
    """
    checked = [require_array(array, f"arrays[{i}]") for i, array in enumerate(arrays)]
    for i, array in enumerate(checked):
        if not array.flags.c_contiguous:
            raise ValueError(f"arrays[{i}] must be contiguous, got strides {array.strides}")
    limit = get_num_threads() if threads is None else check_integer("threads", threads, 1, 1024)
    return _library.digests(checked, limit)
