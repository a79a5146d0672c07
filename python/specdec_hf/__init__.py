"""Speculative decoding over Hugging Face models, verified by the fused ops of specdec_kernels.

>>> from specdec_hf import generate  # doctest: +SKIP
>>> out = generate(model, **inputs, max_new_tokens=64)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_hf.api import SpeculativeDecoder, generate, warm_up
    from specdec_hf.batch_queue import BatchQueue, QueuedSequence
    from specdec_hf.cache.check_model import ModelCheck, check_model
    from specdec_hf.cache.spec_cache import SpecCache
    from specdec_hf.check_drafter import DrafterCheck, check_drafter
    from specdec_hf.decode.output import SpecOutput
    from specdec_hf.decode.statistics import SequenceStats, SpecStats
    from specdec_hf.decode.streaming import Step
    from specdec_hf.drafters.candidate_generator import from_candidate_generator
    from specdec_hf.drafters.cascade import HorizontalCascade, VerticalCascade
    from specdec_hf.drafters.copying import PromptLookupDrafter, RestDrafter, SuffixAutomatonDrafter
    from specdec_hf.drafters.layers import LayersDrafter
    from specdec_hf.drafters.lookahead import LookaheadDrafter
    from specdec_hf.drafters.model import ModelDrafter
    from specdec_hf.drafters.nasd import NasdDrafter
    from specdec_hf.drafters.ngram import NgramDrafter, RandomDrafter
    from specdec_hf.drafters.ngram_table import NgramTable
    from specdec_hf.drafters.own_layers import EarlyExitDrafter, LayerSkipDrafter
    from specdec_hf.drafters.remote import RemoteDrafter, serve_drafter
    from specdec_hf.drafters.text import TextDrafter
    from specdec_hf.drafters.token_recycling import TokenRecyclingDrafter
    from specdec_hf.drafting.context import Candidates, DraftContext, History
    from specdec_hf.drafting.drafter import Draft, Drafter, DraftOutcome
    from specdec_hf.heads.auto import AutoDrafter
    from specdec_hf.heads.blockwise import BlockwiseDrafter, BlockwiseHeads
    from specdec_hf.heads.eagle3.drafter import Eagle3ChainDrafter, Eagle3Drafter
    from specdec_hf.heads.eagle3.files import load_head, save_head
    from specdec_hf.heads.eagle3.head import Eagle3Head
    from specdec_hf.heads.exit_head import ExitHead, ExitHeadDrafter
    from specdec_hf.heads.medusa import MedusaDrafter, MedusaHeads
    from specdec_hf.heads.pass_head import PassHead, PassHeadDrafter
    from specdec_hf.schedules.benefit_guard import BenefitGuard
    from specdec_hf.trees import EagleTree, TreeSpec, TrieTree, load_acceptance, save_acceptance

__all__ = [
    "AutoDrafter",
    "BatchQueue",
    "BenefitGuard",
    "BlockwiseDrafter",
    "BlockwiseHeads",
    "Candidates",
    "Draft",
    "DraftContext",
    "DraftOutcome",
    "Drafter",
    "DrafterCheck",
    "Eagle3ChainDrafter",
    "Eagle3Drafter",
    "Eagle3Head",
    "EagleTree",
    "EarlyExitDrafter",
    "ExitHead",
    "ExitHeadDrafter",
    "History",
    "HorizontalCascade",
    "LayerSkipDrafter",
    "LayersDrafter",
    "LookaheadDrafter",
    "MedusaDrafter",
    "MedusaHeads",
    "ModelCheck",
    "ModelDrafter",
    "NasdDrafter",
    "NgramDrafter",
    "NgramTable",
    "PassHead",
    "PassHeadDrafter",
    "PromptLookupDrafter",
    "QueuedSequence",
    "RandomDrafter",
    "RemoteDrafter",
    "RestDrafter",
    "SequenceStats",
    "SpecCache",
    "SpecOutput",
    "SpecStats",
    "SpeculativeDecoder",
    "Step",
    "SuffixAutomatonDrafter",
    "TextDrafter",
    "TokenRecyclingDrafter",
    "TreeSpec",
    "TrieTree",
    "VerticalCascade",
    "check_drafter",
    "check_model",
    "from_candidate_generator",
    "generate",
    "load_acceptance",
    "load_head",
    "save_acceptance",
    "save_head",
    "serve_drafter",
    "warm_up",
]

# Names are loaded at first use, so that the command line answers --help without importing torch and
# transformers. No submodule may be called ``generate``: importing it would replace the function.
_MODULES = {
    "api": (
        "SpeculativeDecoder",
        "generate",
        "warm_up",
    ),
    "batch_queue": (
        "BatchQueue",
        "QueuedSequence",
    ),
    "cache.check_model": (
        "ModelCheck",
        "check_model",
    ),
    "cache.spec_cache": ("SpecCache",),
    "check_drafter": (
        "DrafterCheck",
        "check_drafter",
    ),
    "decode.output": ("SpecOutput",),
    "decode.statistics": (
        "SequenceStats",
        "SpecStats",
    ),
    "decode.streaming": ("Step",),
    "drafters.candidate_generator": ("from_candidate_generator",),
    "drafters.cascade": (
        "HorizontalCascade",
        "VerticalCascade",
    ),
    "drafters.copying": (
        "PromptLookupDrafter",
        "RestDrafter",
        "SuffixAutomatonDrafter",
    ),
    "drafters.layers": ("LayersDrafter",),
    "drafters.lookahead": ("LookaheadDrafter",),
    "drafters.model": ("ModelDrafter",),
    "drafters.nasd": ("NasdDrafter",),
    "drafters.ngram": (
        "NgramDrafter",
        "RandomDrafter",
    ),
    "drafters.ngram_table": ("NgramTable",),
    "drafters.own_layers": (
        "EarlyExitDrafter",
        "LayerSkipDrafter",
    ),
    "drafters.remote": (
        "RemoteDrafter",
        "serve_drafter",
    ),
    "drafters.text": ("TextDrafter",),
    "drafters.token_recycling": ("TokenRecyclingDrafter",),
    "drafting.context": (
        "Candidates",
        "DraftContext",
        "History",
    ),
    "drafting.drafter": (
        "Draft",
        "DraftOutcome",
        "Drafter",
    ),
    "heads.auto": ("AutoDrafter",),
    "heads.blockwise": (
        "BlockwiseDrafter",
        "BlockwiseHeads",
    ),
    "heads.eagle3.drafter": (
        "Eagle3ChainDrafter",
        "Eagle3Drafter",
    ),
    "heads.eagle3.files": (
        "load_head",
        "save_head",
    ),
    "heads.eagle3.head": ("Eagle3Head",),
    "heads.exit_head": (
        "ExitHead",
        "ExitHeadDrafter",
    ),
    "heads.medusa": (
        "MedusaDrafter",
        "MedusaHeads",
    ),
    "heads.pass_head": (
        "PassHead",
        "PassHeadDrafter",
    ),
    "schedules.benefit_guard": ("BenefitGuard",),
    "trees": (
        "EagleTree",
        "TreeSpec",
        "TrieTree",
        "load_acceptance",
        "save_acceptance",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    except ImportError as error:
        from specdec_hf.requirements import explain  # noqa: PLC0415  # rarely needed

        raise ImportError(explain(error)) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
