"""Heads that draft in parallel on disk: Medusa's in the published layout, and blockwise ones.

Published Medusa heads are a safetensors file of ``{head}.{block}.linear.weight`` and ``.bias`` and,
where each head has an output matrix of its own, ``{head}.{blocks}.weight``. Blockwise heads have no
published layout. In both, ``d2t`` is there where the heads draft a part of the vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specdec_hf.heads.blockwise import BlockwiseHeads
from specdec_hf.heads.files import (
    WEIGHTS,
    check_tensors,
    checked_size,
    draft_tokens,
    read_config,
    read_weights,
    write_head,
)
from specdec_hf.heads.medusa import MedusaHeads
from specdec_hf.heads.parallel import ParallelConfig, ParallelHeads

MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"


def save_medusa(head: MedusaHeads, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write Medusa heads; their output matrices only where these are their own.

    Args:
        head: any device and dtype.
        folder: made where it is missing.
        dtype: of the weights in the file.
    """
    blocks = head.config.inner
    tensors = {}
    for k in range(head.config.num_heads):
        for block in range(blocks):
            tensors[f"{k}.{block}.linear.weight"] = head.weights[block, k]
            tensors[f"{k}.{block}.linear.bias"] = head.biases[block, k]
        if head.own_lm_head:
            tensors[f"{k}.{blocks}.weight"] = head.lm_head[k]
    fields = {"medusa_num_heads": head.config.num_heads, "medusa_num_layers": blocks}
    _write(head, folder, fields, tensors, dtype, MEDUSA_WEIGHTS)


def load_medusa(folder: str | Path) -> MedusaHeads:
    """Medusa heads from a folder, in float32 on the host.

    There are as many as the file holds: the config of the heads that their authors published
    counts fewer.

    Raises:
        ValueError: a folder without heads, pickled ones, or ones whose config, names or shapes are
            wrong, by name.
    """
    folder = Path(folder)
    given, tensors = read_config(folder), read_weights(folder, MEDUSA_WEIGHTS)
    blocks = checked_size(given, "medusa_num_layers")
    numbers = [int(name.partition(".")[0]) for name in tensors if name.partition(".")[0].isdigit()]
    heads = max(checked_size(given, "medusa_num_heads"), max(numbers, default=0) + 1)
    own = f"0.{blocks}.weight" in tensors
    first = tensors.get("0.0.linear.weight", torch.empty(0))
    rows = tensors[f"0.{blocks}.weight"] if own else torch.empty(0)
    size = checked_size(given, "hidden_size", len(first) or 1)
    config = _config(given, size, heads, blocks, tensors, len(rows))
    expected: dict[str, list[int]] = {}
    for k in range(heads):
        for block in range(blocks):
            expected[f"{k}.{block}.linear.weight"] = [size, size]
            expected[f"{k}.{block}.linear.bias"] = [size]
        if own:
            expected[f"{k}.{blocks}.weight"] = [config.draft_vocab_size, size]
    head = MedusaHeads(config)
    _begin(head, tensors, expected, folder / MEDUSA_WEIGHTS)
    state = {}
    for name, part in (("weights", "weight"), ("biases", "bias")):
        of = [[tensors[f"{k}.{b}.linear.{part}"] for k in range(heads)] for b in range(blocks)]
        state[name] = torch.stack([torch.stack(block) for block in of]).float()
    head.load_state_dict(state)
    if own:
        head.lm_head = torch.stack([tensors[f"{k}.{blocks}.weight"] for k in range(heads)]).float()
        head.own_lm_head = True
    return head.eval()


def save_blockwise(head: BlockwiseHeads, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write blockwise heads; see `save_medusa`."""
    fields = {"num_heads": head.config.num_heads, "inner_size": head.config.inner}
    _write(head, folder, fields, dict(head.state_dict()), dtype, WEIGHTS)


def load_blockwise(folder: str | Path) -> BlockwiseHeads:
    """Blockwise heads from a folder; see `load_medusa`."""
    folder = Path(folder)
    given, tensors = read_config(folder), read_weights(folder, WEIGHTS)
    size, heads, inner = (
        checked_size(given, name) for name in ("hidden_size", "num_heads", "inner_size")
    )
    head = BlockwiseHeads(_config(given, size, heads, inner, tensors))
    expected = {name: list(weight.shape) for name, weight in head.state_dict().items()}
    _begin(head, tensors, expected, folder / WEIGHTS)
    head.load_state_dict({name: tensors[name].float() for name in expected})
    return head.eval()


def _config(
    given: dict[str, Any],
    size: int,
    heads: int,
    inner: int,
    tensors: dict[str, torch.Tensor],
    rows: int = 0,
) -> ParallelConfig:
    """The sizes of heads whose own output matrices have so many rows."""
    if "d2t" in tensors:
        return ParallelConfig(
            size, heads, inner, checked_size(given, "vocab_size"), tensors["d2t"].numel()
        )
    vocab_size = checked_size(given, "vocab_size", rows, minimum=0)
    if rows and rows != vocab_size:
        raise ValueError(
            f"output matrices of heads without d2t must have vocab_size = {vocab_size} rows, got "
            f"{rows}"
        )
    return ParallelConfig(size, heads, inner, vocab_size, rows or vocab_size)


def _begin(
    head: ParallelHeads,
    tensors: dict[str, torch.Tensor],
    expected: dict[str, list[int]],
    path: Path,
) -> None:
    """Give heads their draft vocabulary, once the tensors are found to be as expected."""
    if "d2t" in tensors:
        expected = expected | {"d2t": [head.config.draft_vocab_size]}
    check_tensors(tensors, expected, frozenset(), path, type(head).__name__)
    if "d2t" in tensors:
        head.tokens = draft_tokens(tensors["d2t"], head.config.vocab_size)


def _write(
    head: ParallelHeads,
    folder: Path,
    fields: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    name: str,
) -> None:
    config = head.config
    if 0 < config.draft_vocab_size != config.vocab_size:
        tokens = head.tokens.cpu()
        tensors["d2t"] = tokens - torch.arange(len(tokens))
    sizes = {"hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size}
    given = {"architectures": [type(head).__name__], **fields, **sizes}
    write_head(folder, given, tensors, dtype, name)
