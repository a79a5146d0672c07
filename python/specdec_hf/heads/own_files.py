"""Heads without a published layout on disk: sizes in config.json, weights by the module's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TypeVar

import torch

from specdec_hf.heads.base import Head
from specdec_hf.heads.files import (
    WEIGHTS,
    check_tensors,
    checked_size,
    read_config,
    read_weights,
    write_head,
)

H = TypeVar("H", bound=Head)


def save_own(head: Head, folder: Path, names: Sequence[str], dtype: torch.dtype) -> None:
    """Write a head.

    Args:
        head: any device and dtype.
        folder: made where it is missing.
        names: of the fields of its config, in config.json.
        dtype: of the weights in the file.
    """
    sizes = dict(zip(names, astuple(head.config), strict=True))
    given = {"architectures": [type(head).__name__], **sizes}
    write_head(folder, given, dict(head.state_dict()), dtype)


def load_own(folder: str | Path, names: Sequence[str], make: Callable[..., H]) -> H:
    """A head from a folder, in float32 on the host.

    Args:
        folder: as it was written.
        names: of the sizes in config.json that ``make`` takes.
        make: gives the head whose weights are read.

    Raises:
        ValueError: a folder without such a head, or one whose config, names or shapes are wrong, by
            name.
    """
    folder = Path(folder)
    given, tensors = read_config(folder), read_weights(folder, WEIGHTS)
    head = make(*(checked_size(given, name) for name in names))
    expected = {name: list(weight.shape) for name, weight in head.state_dict().items()}
    check_tensors(tensors, expected, frozenset(), folder / WEIGHTS, type(head).__name__)
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return head.eval()
