"""The acceptance rules by name; docs/rules.md gives the formula of each.

The order is that of `enum class Rule` (chain.h) and `TreeRule` (tree.h) in csrc/include/specdec.
"""

from __future__ import annotations

from typing import Literal, get_args

Rule = Literal["token", "block", "greedy", "match", "typical", "lenient", "synthetic"]
RULES: tuple[Rule, ...] = get_args(Rule)
# The output follows the target's distribution; that of greedy follows it at temperature 0.
LOSSLESS_RULES: tuple[Rule, ...] = ("token", "block", "greedy", "match")
# The acceptance probability depends on the draft distribution Q.
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
