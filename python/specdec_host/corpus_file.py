"""The file of a corpus: a header of 64 bytes, its tokens, then its suffix array, little-endian."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC = b"SDCORPUS"
VERSION = 1
HEADER = struct.Struct("<8sIIQ32s8x")  # magic, version, vocabulary, tokens, fingerprint
ID = np.dtype("<i4")


class CorpusFile(NamedTuple):
    """The content of a file; its arrays are mapped, not read."""

    tokens: NDArray[np.int32]
    suffixes: NDArray[np.int32]
    vocab_size: int
    fingerprint: bytes


def write(path: str | Path, content: CorpusFile) -> None:
    """Write a file. Another file of that name is replaced when all is written.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    header = HEADER.pack(
        MAGIC, VERSION, content.vocab_size, len(content.tokens), content.fingerprint
    )
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(header)
            for array in (content.tokens, content.suffixes):
                array.astype(ID, copy=False).tofile(file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def map_file(path: str | Path) -> CorpusFile:
    """Map what `write` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is of another kind or version, or truncated.
    """
    with Path(path).open("rb") as file:
        header = file.read(HEADER.size)
        size = os.fstat(file.fileno()).st_size
    if header[: len(MAGIC)] != MAGIC or len(header) < HEADER.size:
        raise ValueError(f"{path} is no corpus: it must begin with {MAGIC.decode()} and a header")
    _, version, vocab_size, count, fingerprint = HEADER.unpack(header)
    if version != VERSION:
        raise ValueError(f"{path} must be a corpus of version {VERSION}, got version {version}")
    wanted = HEADER.size + 2 * count * ID.itemsize
    if size != wanted or count == 0:
        raise ValueError(f"{path} must have {wanted} bytes for {count} tokens, got {size}")
    arrays = np.memmap(path, ID, mode="r", offset=HEADER.size, shape=(2, count))
    return CorpusFile(arrays[0], arrays[1], vocab_size, fingerprint)
