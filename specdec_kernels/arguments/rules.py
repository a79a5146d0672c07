"""The names that ops take as numbers: acceptance rules, kinds of rows, noise streams and methods.

Public functions take names; the schemas of the ops take the index of the name in its tuple here,
because PyTorch's stable ABI leaks every string that a native op is called with. The order of a
tuple is that of the C++ enumeration that its comment names.
tests/project/test_schemas.py compares both. docs/rules.md gives the formula of each rule. The file
is a link in specdec_host too, so it must not import torch.
"""

from __future__ import annotations

from typing import Literal, get_args

# enum class Rule, csrc/include/specdec/chain.h
Rule = Literal[
    "token", "block", "greedy", "match", "typical", "lenient", "synthetic", "top_beta"
]  # fmt: skip
RULES: tuple[Rule, ...] = get_args(Rule)
# The output follows the target's distribution; that of greedy follows it at temperature 0.
LOSSLESS_RULES: tuple[Rule, ...] = ("token", "block", "greedy", "match")
# The acceptance probability depends on the draft distribution Q.
RULES_READING_DRAFT: tuple[Rule, ...] = ("token", "block", "lenient")

# enum class TreeRule, csrc/include/specdec/tree.h
TreeRule = Literal[
    "greedy", "match", "target_only", "multi_draft", "multi_draft_wor", "top_k_plus_one",
    "k_seq", "traversal", "typical",
]  # fmt: skip
TREE_RULES: tuple[TreeRule, ...] = get_args(TreeRule)
ALL_RULES = tuple(dict.fromkeys((*RULES, *TREE_RULES)))  # each name once
LOSSLESS_TREE_RULES: tuple[TreeRule, ...] = tuple(r for r in TREE_RULES if r != "typical")
TREE_RULES_READING_DRAFT: tuple[TreeRule, ...] = (
    "multi_draft", "multi_draft_wor", "top_k_plus_one", "k_seq", "traversal",
)  # fmt: skip

# enum class Kind, csrc/include/specdec/draft.h
Kind = Literal["logits", "probs"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# enum class Noise, csrc/arguments/sample.h
Noise = Literal["residual", "draft", "shared"]
NOISES: tuple[Noise, ...] = get_args(Noise)
# enum class Method, csrc/arguments/sample.h
Method = Literal["cdf", "gumbel"]
METHODS: tuple[Method, ...] = get_args(Method)
# enum class Schedule, csrc/include/specdec/cuda_plan.h; only tests and benchmarks ask for one
SCHEDULES = ("auto", "lazy", "parallel")
