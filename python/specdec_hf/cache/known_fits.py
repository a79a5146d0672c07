"""The results of self-checks, which hold for all models of one class and configuration."""

from __future__ import annotations

import json
from typing import Any

from specdec_hf.cache.fit import Fit

known: dict[tuple[Any, ...], Fit] = {}  # of this process


def forget() -> None:
    """Forget all results, so that the next use of each cache is checked again."""
    known.clear()


def configuration(model: Any) -> tuple[Any, ...]:
    """A hashable key of the model's class, modules and configuration.

    It holds neither weights nor the model.
    """
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "architectures"):
        config.pop(name, None)
    # The classes of the modules tell apart quantized, adapted and patched models.
    modules = frozenset(type(module) for module in model.modules())
    patched = getattr(model.__dict__.get("forward"), "__code__", None)
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    return (
        type(model), modules, patched, attention, model.dtype, model.device.type,
        json.dumps(config, sort_keys=True, default=str),
    )  # fmt: skip
