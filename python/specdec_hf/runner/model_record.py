"""What was made for a model and is kept as long as the model is."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class ModelRecord:
    """What was made for one model, or for one head, and is kept as long as it is.

    Attributes:
        compiled: its `CompiledForward`, or the `CompiledStep` of a head.
        packed: each `PackedModel`, or `PackedStep` of a head, by whether it is rounded.
        blocks: the `BlockFile` that it was read from.
        digest: the state of its weights, and their digest.
        agreement: (key of a shipped head and of the weights, the share of tokens they agree on).
        head: (key of the files, `PlacedHead`) of the model's own head.
        mtp: (key of the files and of its place, `MtpHead`) of its layers of multi-token prediction.
        drafters: by folder and place, the draft model that was read there: (key of the files and of
            the tokenizer, the model with tokenizers).
        measured: times of its rounds, by what drafts.
    """

    compiled: Any = None
    packed: dict[bool, Any] = field(default_factory=dict)
    blocks: Any = None
    digest: tuple[Any, str] | None = None
    agreement: tuple[Any, float | None] | None = None
    head: tuple[Any, Any] | None = None
    mtp: tuple[Any, Any] | None = None
    drafters: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    measured: weakref.WeakKeyDictionary[Any, Any] = field(default_factory=weakref.WeakKeyDictionary)


_records: weakref.WeakKeyDictionary[Any, ModelRecord] = weakref.WeakKeyDictionary()


def record_of(model: Any) -> ModelRecord:
    """The record of a model, which is empty at first."""
    return _records.setdefault(model, ModelRecord())
