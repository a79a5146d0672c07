"""Speculative decoding over Hugging Face models, verified by the fused ops of specdec_kernels.

>>> from specdec_hf import generate  # doctest: +SKIP
>>> out = generate(model, **inputs, max_new_tokens=64)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_hf.cache.check_model import ModelCheck, check_model
    from specdec_hf.cache.spec_cache import SpecCache
    from specdec_hf.decode.batch_queue import BatchQueue, QueuedSequence
    from specdec_hf.decode.check_drafter import DrafterCheck, check_drafter
    from specdec_hf.decode.generate import SpeculativeDecoder, generate
    from specdec_hf.decode.output import SpecOutput
    from specdec_hf.decode.statistics import SequenceStats, SpecStats
    from specdec_hf.decode.streaming import Step
    from specdec_hf.decode.warm_up import warm_up
    from specdec_hf.drafters.context import Candidates, DraftContext, History
    from specdec_hf.drafters.drafter import Draft, Drafter, DraftOutcome
    from specdec_hf.drafters.heads.blockwise import BlockwiseDrafter
    from specdec_hf.drafters.heads.eagle3 import Eagle3Drafter
    from specdec_hf.drafters.heads.eagle3_chain import Eagle3ChainDrafter
    from specdec_hf.drafters.heads.exit_head import ExitHeadDrafter
    from specdec_hf.drafters.heads.medusa import MedusaDrafter
    from specdec_hf.drafters.heads.pass_head import PassHeadDrafter
    from specdec_hf.drafters.model_free.nasd import NasdDrafter
    from specdec_hf.drafters.model_free.ngram import NgramDrafter
    from specdec_hf.drafters.model_free.ngram_table import NgramTable
    from specdec_hf.drafters.model_free.prompt_lookup import PromptLookupDrafter
    from specdec_hf.drafters.model_free.random import RandomDrafter
    from specdec_hf.drafters.model_free.rest import RestDrafter
    from specdec_hf.drafters.model_free.suffix_automaton import SuffixAutomatonDrafter
    from specdec_hf.drafters.models.candidate_generator import from_candidate_generator
    from specdec_hf.drafters.models.cascade import HorizontalCascade
    from specdec_hf.drafters.models.early_exit import EarlyExitDrafter
    from specdec_hf.drafters.models.layer_skip import LayerSkipDrafter
    from specdec_hf.drafters.models.layers import LayersDrafter
    from specdec_hf.drafters.models.model import ModelDrafter
    from specdec_hf.drafters.models.remote import RemoteDrafter, serve_drafter
    from specdec_hf.drafters.models.text import TextDrafter
    from specdec_hf.drafters.models.vertical_cascade import VerticalCascade
    from specdec_hf.drafters.trees.auto import AutoDrafter
    from specdec_hf.drafters.trees.lookahead import LookaheadDrafter
    from specdec_hf.drafters.trees.token_recycling import TokenRecyclingDrafter
    from specdec_hf.heads.blockwise import BlockwiseHeads
    from specdec_hf.heads.eagle3 import Eagle3Head
    from specdec_hf.heads.exit import ExitHead
    from specdec_hf.heads.files import load_head, save_head
    from specdec_hf.heads.medusa import MedusaHeads
    from specdec_hf.heads.pass_head import PassHead
    from specdec_hf.schedules.benefit_guard import BenefitGuard
    from specdec_hf.trees.acceptance_file import load_acceptance, save_acceptance
    from specdec_hf.trees.layouts import EagleTree, TreeSpec, TrieTree

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
    "cache.check_model": ("ModelCheck", "check_model"),
    "cache.spec_cache": ("SpecCache",),
    "decode.batch_queue": ("BatchQueue", "QueuedSequence"),
    "decode.output": ("SpecOutput",),
    "decode.statistics": ("SequenceStats", "SpecStats"),
    "decode.streaming": ("Step",),
    "decode.warm_up": ("warm_up",),
    "drafters.context": ("Candidates", "DraftContext", "History"),
    "drafters.drafter": ("Draft", "DraftOutcome", "Drafter"),
    "drafters.heads.blockwise": ("BlockwiseDrafter",),
    "drafters.heads.eagle3": ("Eagle3Drafter",),
    "drafters.heads.eagle3_chain": ("Eagle3ChainDrafter",),
    "drafters.heads.exit_head": ("ExitHeadDrafter",),
    "drafters.heads.medusa": ("MedusaDrafter",),
    "drafters.heads.pass_head": ("PassHeadDrafter",),
    "heads.blockwise": ("BlockwiseHeads",),
    "heads.eagle3": ("Eagle3Head",),
    "heads.medusa": ("MedusaHeads",),
    "heads.exit": ("ExitHead",),
    "heads.pass_head": ("PassHead",),
    "heads.files": ("load_head", "save_head"),
    "drafters.models.cascade": ("HorizontalCascade",),
    "drafters.models.candidate_generator": ("from_candidate_generator",),
    "drafters.trees.auto": ("AutoDrafter",),
    "drafters.trees.lookahead": ("LookaheadDrafter",),
    "drafters.models.early_exit": ("EarlyExitDrafter",),
    "drafters.models.layer_skip": ("LayerSkipDrafter",),
    "drafters.models.layers": ("LayersDrafter",),
    "drafters.models.model": ("ModelDrafter",),
    "drafters.model_free.nasd": ("NasdDrafter",),
    "drafters.model_free.ngram": ("NgramDrafter",),
    "drafters.model_free.ngram_table": ("NgramTable",),
    "drafters.model_free.prompt_lookup": ("PromptLookupDrafter",),
    "drafters.model_free.random": ("RandomDrafter",),
    "drafters.models.remote": ("RemoteDrafter", "serve_drafter"),
    "drafters.model_free.rest": ("RestDrafter",),
    "drafters.model_free.suffix_automaton": ("SuffixAutomatonDrafter",),
    "decode.check_drafter": ("DrafterCheck", "check_drafter"),
    "drafters.models.text": ("TextDrafter",),
    "drafters.models.vertical_cascade": ("VerticalCascade",),
    "decode.generate": ("SpeculativeDecoder", "generate"),
    "drafters.trees.token_recycling": ("TokenRecyclingDrafter",),
    "schedules.benefit_guard": ("BenefitGuard",),
    "trees.acceptance_file": ("load_acceptance", "save_acceptance"),
    "trees.layouts": ("EagleTree", "TreeSpec", "TrieTree"),
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
