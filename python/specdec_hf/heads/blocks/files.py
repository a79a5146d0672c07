"""Heads that draft a block of mask tokens, on disk in the layout of speculators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from specdec_hf.heads.blocks.config import BlockConfig
from specdec_hf.heads.blocks.head import BlockHead
from specdec_hf.heads.files import WEIGHTS, check_tensors, read_config, read_weights, write_head
from specdec_hf.heads.pairs.files import (
    EMBEDDINGS,
    OUTPUT,
    published_weights,
    read_published,
    read_vocabulary,
    vocabulary_shapes,
    vocabulary_tensors,
)

MAPS = ("d2t", "t2d")
B = TypeVar("B", bound=BlockHead)


def write_block(
    head: BlockHead, folder: Path, fields: dict[str, Any], dtype: torch.dtype, **more: torch.Tensor
) -> None:
    """Write a head; the maps of its draft vocabulary only where it drafts a part of the target's.

    Args:
        head: any device and dtype.
        folder: made where it is missing.
        fields: the content of config.json.
        dtype: of the weights in the file.
        more: tensors of the target by their names.
    """
    tensors = {**published_weights(head), **more, **vocabulary_tensors(head)}
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
        make: gives the head whose weights are read.
        target_owns: which of ``lm_head.weight`` and ``embed_tokens.weight`` are the target's even
            where the file holds them.

    Raises:
        ValueError: a folder without such a head, or one whose config, names or shapes are wrong, by
            name.
    """
    folder = Path(folder)
    config = config_from(read_config(folder))
    tensors = read_weights(folder, WEIGHTS)
    with torch.random.fork_rng(devices=[]):  # the weights that replace these are no random ones
        head = make(config)
    own = {name: list(weight.shape) for name, weight in published_weights(head).items()}
    shapes = vocabulary_shapes(config)
    if config.draft_vocab_size == config.vocab_size:
        shapes = {name: shape for name, shape in shapes.items() if name not in MAPS}
    # Earlier versions of the library also wrote what its training compares with.
    training = {f"verifier_{OUTPUT}": shapes[OUTPUT], "verifier_norm.weight": own["norm.weight"]}
    optional = {OUTPUT, EMBEDDINGS, *training}
    kind = type(head).__name__
    check_tensors(tensors, own | shapes | training, optional, folder / WEIGHTS, kind)
    read_published(head, tensors)
    left_out = target_owns(config)
    named = {name: x for name, x in tensors.items() if name not in left_out}
    read_vocabulary(head, named, folder / WEIGHTS)
    return head.eval()
