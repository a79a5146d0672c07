"""Heads that draft a block of mask tokens, on disk in the layout of speculators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from specdec_hf.heads.eagle_family.files import (
    EMBEDDINGS,
    OUTPUT,
    head_tensors,
    read_head,
    vocabulary_shapes,
)
from specdec_hf.heads.files import MAPS, WEIGHTS, read_config, read_weights, write_head

from specdec_papers.mask_tokens.config import BlockConfig
from specdec_papers.mask_tokens.head import BlockHead

B = TypeVar("B", bound=BlockHead)


def write_block(
    head: BlockHead, folder: Path, fields: dict[str, Any], dtype: torch.dtype, **more: torch.Tensor
) -> None:
    """Write a head, and ``more`` tensors, those of the target, where it has none of its own.

    The maps of its draft vocabulary are written only where it drafts a part of the target's.
    """
    tensors = {**more, **head_tensors(head)}
    if head.config.draft_vocab_size == head.config.vocab_size:
        tensors = {name: x for name, x in tensors.items() if name not in MAPS}
    write_head(folder, fields, tensors, dtype)


def read_block(
    folder: str | Path,
    config_from: Callable[[dict[str, Any]], Any],
    make: Callable[[Any], B],
    target_owns: Callable[[BlockConfig], tuple[str, ...]],
) -> B:
    """A head from a folder, in float32 on the host.

    Args:
        folder: the folder.
        config_from: reads the content of config.json.
        make: the class of the head.
        target_owns: which of ``lm_head.weight`` and ``embed_tokens.weight`` are the target's even
            where the file holds them.

    Raises:
        ValueError: a folder without such a head, or one whose config, names or shapes are wrong, by
            name.
    """
    folder = Path(folder)
    config: Any = config_from(read_config(folder))
    shapes = vocabulary_shapes(config)
    if config.draft_vocab_size == config.vocab_size:
        shapes = {name: shape for name, shape in shapes.items() if name not in MAPS}
    # Earlier versions of the library also wrote what its training compares with.
    output, size = shapes[OUTPUT], config.layer.hidden_size
    training = {f"verifier_{OUTPUT}": output, "verifier_norm.weight": [size]}
    return read_head(
        lambda: make(config), read_weights(folder, WEIGHTS), shapes | training,
        {OUTPUT, EMBEDDINGS, *training}, folder / WEIGHTS, make.__name__, target_owns(config),
    )  # fmt: skip
