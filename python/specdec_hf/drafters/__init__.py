"""Where drafts come from: a smaller model, the prompt itself, or the user's own `Drafter`."""

from specdec_hf.drafters.base import Draft, DraftContext, Drafter, History, TreeDraft, TreeDrafter
from specdec_hf.drafters.model import ModelDrafter
from specdec_hf.drafters.prompt_lookup import PromptLookupDrafter

__all__ = [
    "Draft",
    "DraftContext",
    "Drafter",
    "History",
    "ModelDrafter",
    "PromptLookupDrafter",
    "TreeDraft",
    "TreeDrafter",
]
