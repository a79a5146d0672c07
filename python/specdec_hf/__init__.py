"""Speculative decoding over Hugging Face models, verified by the fused ops of specdec_kernels.

>>> from specdec_hf import generate  # doctest: +SKIP
>>> out = generate(model, **inputs, drafter="prompt_lookup", max_new_tokens=64)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_hf.cache.rows import SpecCache
    from specdec_hf.decode.generate import SpeculativeDecoder, generate
    from specdec_hf.decode.session import SpecOutput
    from specdec_hf.decode.statistics import RowStats, SpecStats
    from specdec_hf.decode.streaming import Step
    from specdec_hf.drafters import (
        Draft,
        DraftContext,
        Drafter,
        History,
        ModelDrafter,
        PromptLookupDrafter,
    )
    from specdec_hf.schedules.schedules import BenefitGuard
    from specdec_hf.trees.layouts import (
        EagleTree,
        TreeSpec,
        TrieTree,
        load_acceptance,
        save_acceptance,
    )

__all__ = [
    "BenefitGuard",
    "Draft",
    "DraftContext",
    "Drafter",
    "EagleTree",
    "History",
    "ModelDrafter",
    "PromptLookupDrafter",
    "RowStats",
    "SpecCache",
    "SpecOutput",
    "SpecStats",
    "SpeculativeDecoder",
    "Step",
    "TreeSpec",
    "TrieTree",
    "generate",
    "load_acceptance",
    "save_acceptance",
]

# Loaded at first use, so that the command line answers --help without torch and transformers.
_MODULES = {
    "cache.rows": ("SpecCache",),
    "decode.session": ("SpecOutput",),
    "decode.statistics": ("RowStats", "SpecStats"),
    "decode.streaming": ("Step",),
    "drafters": (
        "Draft",
        "DraftContext",
        "Drafter",
        "History",
        "ModelDrafter",
        "PromptLookupDrafter",
    ),
    "decode.generate": ("SpeculativeDecoder", "generate"),
    "schedules.schedules": ("BenefitGuard",),
    "trees.layouts": ("EagleTree", "TreeSpec", "TrieTree", "load_acceptance", "save_acceptance"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
