"""The threads that one call of an op uses."""

from __future__ import annotations

from specdec_host import _library
from specdec_host.arguments.checks import check_integer


def get_num_threads() -> int:
    """Most threads that one call of an op uses.

    At first that is OMP_NUM_THREADS or, where it is not set, the number of processors.
    """
    return _library.get_num_threads()


def set_num_threads(number: int) -> None:
    """Let calls of ops from now on use at most this many threads. No result depends on it.

    Raises:
        TypeError: the number is no integer.
        ValueError: it is not in [1, 1024].
    """
    _library.set_num_threads(check_integer("number", number, 1, 1024))
