"""What a run of training was begun with, so that another one does not go on in its folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

SAMPLED = 64  # numbers of each weight that tell models apart
# Fields of a config that change nothing in what the model computes, or are given elsewhere.
_LEFT_OUT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


def origin_of(model: Any, prompts: Sequence[str], texts: Sequence[str]) -> dict[str, str]:
    """Digests of the target and of the data, and the target's dtype, by their names."""
    return {
        "model": _digest_of(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompts": _hash(prompts),
        "texts": _hash(texts),
    }


@torch.no_grad()
def _digest_of(model: Any) -> str:
    """Of the config, and of some numbers of each weight."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in _LEFT_OUT}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        chosen = flat[:: max(1, len(flat) // SAMPLED)].float().cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(chosen.numpy().tobytes())
    return digest.hexdigest()


def _hash(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()


def check_origin(folder: Any, begun: dict[str, str], given: dict[str, str]) -> None:
    """Raises ValueError for a folder that was begun with another model, dtype or data."""
    for name, value in given.items():
        if begun.get(name) == value:
            continue
        if name == "dtype" and name in begun:
            what = f"dtype = {begun[name]}, got {value}"
        else:
            what = f"{'another' if name == 'model' else 'other'} {name}"
        raise ValueError(f"{folder} was begun with {what}: give the same, or another folder")
