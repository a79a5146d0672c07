"""Speculative decoding over Hugging Face models, verified by the fused ops of specdec_kernels.

>>> from specdec_hf import generate  # doctest: +SKIP
>>> out = generate(model, **inputs, drafter="prompt_lookup", max_new_tokens=64)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_hf.cache import SpecCache
    from specdec_hf.drafters import (
        Draft,
        DraftContext,
        Drafter,
        History,
        ModelDrafter,
        PromptLookupDrafter,
        TreeDraft,
        TreeDrafter,
    )
    from specdec_hf.loop import SpeculativeDecoder, generate
    from specdec_hf.policies import BenefitGuard
    from specdec_hf.session import SpecOutput
    from specdec_hf.stats import RowStats, SpecStats
    from specdec_hf.streaming import Step
    from specdec_hf.trees import (
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
    "TreeDraft",
    "TreeDrafter",
    "TreeSpec",
    "TrieTree",
    "generate",
    "load_acceptance",
    "save_acceptance",
]

# Loaded at first use, so that the command line answers --help without torch and transformers.
_MODULES = {
    "cache": ("SpecCache",),
    "drafters": (
        "Draft",
        "DraftContext",
        "Drafter",
        "History",
        "ModelDrafter",
        "PromptLookupDrafter",
        "TreeDraft",
        "TreeDrafter",
    ),
    "loop": ("SpeculativeDecoder", "generate"),
    "policies": ("BenefitGuard",),
    "session": ("SpecOutput",),
    "stats": ("RowStats", "SpecStats"),
    "streaming": ("Step",),
    "trees": ("EagleTree", "TreeSpec", "TrieTree", "load_acceptance", "save_acceptance"),
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
