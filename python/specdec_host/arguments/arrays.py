"""What counts as an array: NumPy's own, and all that is read through DLPack or as a buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specdec_host import _library
from specdec_host.arguments.values import shown

if TYPE_CHECKING:
    from typing_extensions import Buffer

# NumPy has no bfloat16. Two bytes of it are known by the name of this field; so are those of the
# package ml_dtypes by their own name.
bfloat16 = np.dtype({"names": ["bfloat16"], "formats": [np.uint16]}, align=True)

# DLDeviceType of memory that the processor reads: CPU, CUDA host, ROCm host, CUDA managed.
_READABLE = (1, 3, 11, 13)


class SupportsDLPack(Protocol):
    """An array of another library, such as a torch tensor."""

    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...


Array: TypeAlias = "NDArray[Any] | SupportsDLPack | Buffer"
Param: TypeAlias = "float | Array"


def array_of(value: object, name: str) -> NDArray[Any] | None:
    """The value as an array over the same memory; None if it is no array.

    Raises:
        RuntimeError: it is an array that the processor cannot read.
    """
    if isinstance(value, np.ndarray):
        array: NDArray[Any] = value
    elif hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        array = _from_dlpack(value, name)
    elif isinstance(value, (bytes, bytearray)):  # text, and never numbers
        return None
    else:
        try:
            array = np.asarray(memoryview(value))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return None
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} must be an array without a mask, got {type(array).__name__}")
    if array.dtype.names == bfloat16.names and array.dtype.itemsize == 2:
        array = array.view(bfloat16)
    return array


def _from_dlpack(value: SupportsDLPack, name: str) -> NDArray[Any]:
    try:
        device = int(value.__dlpack_device__()[0])
        if device in _READABLE:
            return _read_dlpack(value)
    except Exception as error:  # whatever the other library raises
        raise RuntimeError(f"{name} cannot be read through DLPack: {error}") from error
    raise RuntimeError(f"{name} must be in memory of the CPU, got DLPack device type {device}")


def _read_dlpack(value: SupportsDLPack) -> NDArray[Any]:
    try:
        return np.from_dlpack(value)  # type: ignore[arg-type]
    except (BufferError, RuntimeError, TypeError, ValueError):
        array = _library.bfloat16_from_dlpack(value.__dlpack__(), bfloat16)
        if array is None:
            raise
        return array


def require_array(value: object, name: str) -> NDArray[Any]:
    """The value as an array.

    Raises:
        TypeError: it is no array.
    """
    array = array_of(value, name)
    if array is None:
        raise TypeError(f"{name} must be an array, got {shown(value)}")
    return array


def require_array_or_none(value: object, name: str) -> NDArray[Any] | None:
    """The value as an array, or None."""
    return None if value is None else require_array(value, name)


def shape(array: NDArray[Any]) -> str:
    """The shape as messages write it."""
    return f"[{', '.join(str(n) for n in array.shape)}]"


def to_float(array: NDArray[Any], name: str, dtype: type[np.floating[Any]]) -> NDArray[Any]:
    """The numbers of an array in this dtype.

    Raises:
        TypeError: it holds something else.
    """
    if array.dtype == bfloat16:
        array = (array["bfloat16"].astype(np.uint32) << 16).view(np.float32)
    elif array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be an array of numbers, got {array.dtype}")
    with np.errstate(over="ignore"):  # infinity is out of range, and told so by the op
        return array.astype(dtype, copy=False)
