"""What this process has found out about models; nothing of it is written to a model."""

from __future__ import annotations

import json
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from specdec_hf.cache.fit import Fit, coarse_arithmetic


@dataclass(eq=False)
class ModelRecord:
    """What was made for one model, or for one head, and is kept as long as it is.

    Attributes:
        compiled: its `CompiledForward`, or the `CompiledStep` of a head.
        digest: the state of its weights, and their digest.
        agreement: (key of a shipped head and of the weights, the share of tokens they agree on).
        head: (key of the files, `PlacedHead`) of the model's own head.
        measured: times of its rounds, by what drafts.
    """

    compiled: Any = None
    digest: tuple[Any, str] | None = None
    agreement: tuple[Any, float | None] | None = None
    head: tuple[Any, Any] | None = None
    measured: weakref.WeakKeyDictionary[Any, Any] = field(default_factory=weakref.WeakKeyDictionary)


_records: weakref.WeakKeyDictionary[Any, ModelRecord] = weakref.WeakKeyDictionary()
_fits: dict[Hashable, dict[Hashable, Fit]] = {}


def record_of(model: Any) -> ModelRecord:
    """The record of a model, which is empty at first."""
    return _records.setdefault(model, ModelRecord())


def fits_of(model: Any) -> dict[Hashable, Fit]:
    """The results of comparisons, which hold for all models of one class and configuration."""
    return _fits.setdefault((*_configuration(model), coarse_arithmetic(model)), {})


def forget_fits() -> None:
    """Forget all results of comparisons, so that each is made again."""
    _fits.clear()


def _configuration(model: Any) -> tuple[Any, ...]:
    """A key of the model's class, modules and configuration; it holds no weights and no model."""
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
