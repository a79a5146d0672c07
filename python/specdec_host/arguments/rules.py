"""The names that ops take as numbers: acceptance rules, kinds of rows, noise streams and methods.

They are those of specdec_kernels/arguments/rules.py, which this package must not import because it
loads torch; tests/host/test_torch_equality.py compares both. docs/rules.md gives the formula of
each rule.
"""

from __future__ import annotations

from typing import Literal, get_args

# Public functions pass the index of a name in its tuple, which is that of the C++ enumeration.
Rule = Literal[
    "token", "block", "greedy", "match", "typical", "lenient", "synthetic", "top_beta"
]  # fmt: skip
RULES: tuple[Rule, ...] = get_args(Rule)
TreeRule = Literal[
    "greedy", "match", "target_only", "multi_draft", "multi_draft_wor", "top_k_plus_one",
    "k_seq", "traversal", "typical",
]  # fmt: skip
TREE_RULES: tuple[TreeRule, ...] = get_args(TreeRule)
ALL_RULES = tuple(dict.fromkeys((*RULES, *TREE_RULES)))  # each name once

Kind = Literal["logits", "probs"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Noise = Literal["residual", "draft", "shared"]
NOISES: tuple[Noise, ...] = get_args(Noise)
Method = Literal["cdf", "gumbel"]
METHODS: tuple[Method, ...] = get_args(Method)
