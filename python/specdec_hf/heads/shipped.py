"""The EAGLE-3 head of a target: one that lies beside it, or one that this package ships.

A head that is shipped serves the weights that it was trained for and no others. They are known by
a digest, which `record_target` writes into the head's config.json.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from pathlib import Path
from typing import Any

import torch

from specdec_hf.heads.base import state_of
from specdec_hf.heads.files import CONFIG, checked_size, read_config

HEAD_FOLDER = "specdec_head"  # in the folder of a target
SHIPPED = Path(__file__).parent / "shipped"  # a folder for each head
TARGET = "target_digest"  # in config.json

# By model: the state of its weights, and their digest.
_digests: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()


def head_for(model: Any) -> Path | None:
    """The folder of the head for a target, or None.

    It is the folder ``specdec_head`` of the folder that the target was loaded from, else that of
    the shipped head for these weights. What lies beside the target is not compared with it.

    Raises:
        ValueError: a shipped head whose config.json cannot be read or names no target.
    """
    name = getattr(model.config, "_name_or_path", None)
    if name and (Path(name) / HEAD_FOLDER).is_dir():
        return Path(name) / HEAD_FOLDER
    for folder in shipped_heads():
        config = read_config(folder)
        wanted = config.get(TARGET)
        if not isinstance(wanted, str):
            raise ValueError(f"{folder / CONFIG} must hold {TARGET}, got {wanted!r}")
        if _has_sizes(model, config) and digest_of(model) == wanted:
            return folder
    return None


def shipped_heads() -> list[Path]:
    """The folders of the heads that are shipped; each has the name of its target."""
    return sorted(file.parent for file in SHIPPED.glob(f"*/{CONFIG}"))


def is_shipped(folder: Path) -> bool:
    """Whether a head's folder is of this package: its head was measured with its target."""
    return folder.parent == SHIPPED


def record_target(folder: Path, model: Any) -> None:
    """Write the digest of a head's target into its config.json.

    Raises:
        ValueError: a folder without a config.json, or a target whose weights cannot be read.
    """
    digest = digest_of(model)
    if digest is None:
        raise ValueError(f"the weights of {type(model).__name__} must be plain tensors in memory")
    config = read_config(folder) | {TARGET: digest}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def digest_of(model: Any) -> str | None:
    """SHA-256 of the names, shapes and numbers of all weights, which are rounded to bfloat16.

    So copies of a checkpoint in float32 and in bfloat16 have the same digest, on any device. One in
    float16 has another. It is kept with the model and made again where weights changed; what is
    written through ``weight.data`` is not seen.

    Returns:
        None where a weight is not a plain tensor, or is not in memory.
    """
    weights = dict(sorted(model.named_parameters()))
    if not all(map(_is_plain, weights.values())):
        return None
    state = tuple((name, *state_of(weight)) for name, weight in weights.items())
    known = _digests.get(model)
    if known is None or known[0] != state:
        known = _digests[model] = (state, _digest(weights))
    return known[1]


@torch.no_grad()
def _digest(weights: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(f"{name} {list(weight.shape)}\n".encode())
        bits = weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
        digest.update(bits.numpy().tobytes())
    return digest.hexdigest()


def _is_plain(weight: torch.Tensor) -> bool:
    """Whether the numbers of a weight are in this process: not of meta or sharded tensors."""
    return type(weight.detach()) is torch.Tensor and not weight.is_meta


def _has_sizes(model: Any, config: dict[str, Any]) -> bool:
    """Whether a target has the sizes that a head needs, for which no weight is read."""
    text = model.config.get_text_config(decoder=True)
    return all(
        getattr(text, name, None) == checked_size(config, ours)
        for name, ours in (("vocab_size", "vocab_size"), ("hidden_size", "target_hidden_size"))
    )
