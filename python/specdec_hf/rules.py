"""The names of acceptance rules that the loop adds to those of the ops, and what they may change.

This module does without torch, because the command line reads it before it loads torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from specdec_hf.arguments import Refused

# The lossy rules, each with the options that only it takes: their defaults, or None where the
# caller must say how much is lost.
LOSSY_RULES: dict[str, dict[str, float | None]] = {
    "typical": {"typical_epsilon": 0.09, "typical_delta": 0.3},
    "lenient": {"lenience": None},
    "top_beta": {"top_beta_rank": None, "top_beta_distance": math.inf},
}
# Those that decide as greedy does in texts without sampling.
GREEDY_WITHOUT_SAMPLING = ("typical",)
# The name of a rule that is the caller's own function.
CUSTOM_RULE = "custom"
ARGUMENTS = ("P", "Q", "tokens", "uniforms", "parents")  # of such a function
# What verification can leave out. It is lossy, too, and shows what the part is for.
ABLATIONS = ("residual",)


def is_lossy(rule: str) -> bool:
    """Whether a rule is not sure to keep the target's distribution."""
    return rule in LOSSY_RULES or rule == CUSTOM_RULE


def text_depends_on_drafts(rule: str) -> bool:
    """Whether the text of a seed changes with what is drafted, or with whether anything is."""
    return rule not in ("greedy", "match", "target_only")


def name_of(rule: Callable[..., Any]) -> str:
    """A rule of the user's own in messages."""
    return f"rule {getattr(rule, '__name__', type(rule).__name__)}"


def check_takes(rule: Callable[..., Any], *, trees: bool) -> None:
    """Raises Refused for a function that cannot be called with the arguments of such drafts."""
    names = ARGUMENTS if trees else ARGUMENTS[:-1]
    try:
        signature = inspect.signature(rule)
    except ValueError:  # a built-in function
        return
    try:
        signature.bind(*names)
    except TypeError:
        drafts = "trees" if trees else "chains"
        raise Refused(
            f"{name_of(rule)} must take ({', '.join(names)}) where {drafts} are drafted, "
            f"got {name_of(rule).removeprefix('rule ')}{signature}"
        ) from None
