"""Speculative decoding over Hugging Face models, verified by the fused ops of specdec_kernels.

>>> from specdec_hf import generate  # doctest: +SKIP
>>> out = generate(model, **inputs, drafter="prompt_lookup", max_new_tokens=64)  # doctest: +SKIP
"""

from specdec_hf.cache import SpecCache
from specdec_hf.drafters import (
    Draft,
    DraftContext,
    Drafter,
    History,
    ModelDrafter,
    PromptLookupDrafter,
)
from specdec_hf.loop import SpeculativeDecoder, generate
from specdec_hf.policies import BenefitGuard
from specdec_hf.session import SpecOutput
from specdec_hf.stats import RowStats, SpecStats
from specdec_hf.streaming import Step

__all__ = [
    "BenefitGuard",
    "Draft",
    "DraftContext",
    "Drafter",
    "History",
    "ModelDrafter",
    "PromptLookupDrafter",
    "RowStats",
    "SpecCache",
    "SpecOutput",
    "SpecStats",
    "SpeculativeDecoder",
    "Step",
    "generate",
]
