"""The names of acceptance rules that the loop adds to those of the ops, and what they may change.

This module does without torch, because the command line reads it before it loads torch.
"""

from __future__ import annotations

import math

# The lossy rules, each with the options that only it takes: their defaults, or None where the
# caller must say how much is lost.
LOSSY_RULES: dict[str, dict[str, float | None]] = {
    "typical": {"typical_epsilon": 0.09, "typical_delta": 0.3},
    "lenient": {"lenience": None},
    "top_beta": {"top_beta_rank": None, "top_beta_distance": math.inf},
}
# The name of a rule that is the caller's own function.
CUSTOM_RULE = "custom"
# What verification can leave out. It is lossy, too, and shows what the part is for.
ABLATIONS = ("residual",)


def is_lossy(rule: str) -> bool:
    """Whether a rule is not sure to keep the target's distribution."""
    return rule in LOSSY_RULES or rule == CUSTOM_RULE


def text_depends_on_drafts(rule: str) -> bool:
    """Whether the text of a seed changes with what is drafted, or with whether anything is."""
    return rule not in ("greedy", "match", "target_only")
