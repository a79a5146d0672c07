"""The acceptance rules by name, in the order of their numbers in csrc/include/specdec/."""

from __future__ import annotations

from typing import Literal, get_args

Rule = Literal["token", "block", "greedy", "match", "typical", "lenient", "synthetic"]
RULES: tuple[Rule, ...] = get_args(Rule)
# They keep the target's distribution; greedy keeps that of temperature 0.
LOSSLESS_RULES: tuple[Rule, ...] = ("token", "block", "greedy", "match")
# They compare the target's probabilities with the draft's.
RULES_READING_DRAFT: tuple[Rule, ...] = ("token", "block", "lenient")

TreeRule = Literal[
    "greedy", "match", "target_only", "multi_draft", "multi_draft_wor", "top_k_plus_one",
    "k_seq", "traversal", "typical",
]  # fmt: skip
TREE_RULES: tuple[TreeRule, ...] = get_args(TreeRule)
LOSSLESS_TREE_RULES: tuple[TreeRule, ...] = tuple(r for r in TREE_RULES if r != "typical")
TREE_RULES_READING_DRAFT: tuple[TreeRule, ...] = (
    "multi_draft", "multi_draft_wor", "top_k_plus_one", "k_seq", "traversal",
)  # fmt: skip
