"""Providers and the cases of `verify_tree` with which they prove what a result may depend on."""

from __future__ import annotations

import torch
from proofs import tree_case
from support.providers import KERNEL_PROVIDERS

from specdec_kernels import TREE_RULES

CASES = [
    *(tree_case(6, 7, 257, rule=r) for r in TREE_RULES),
    tree_case(6, 7, 257, torch.bfloat16, rows="shared", filters="tensor"),
    tree_case(6, 7, 257, draft="sampled", rows="flat", filters="tensor"),
    tree_case(6, 7, 257, kind="probs", rows="flat"),
    tree_case(6, 7, 257, rule="multi_draft_wor", draft="sparse", rows="shared"),
    tree_case(6, 7, 257, rule="traversal", draft="mapped-sampled", filters="tensor"),
    tree_case(6, 7, 257, rule="k_seq", kind="probs", rows="shared"),
]
# Each row costs Triton's interpreter a second: one rule from the root down, one from the leaves up.
RULES = {"cuda": TREE_RULES, "triton": ("multi_draft_wor", "traversal")}
TREE_PAIRS = [("cpp", c) for c in CASES] + [
    (n, tree_case(3, 3, 67, rule=r, rows="shared"))
    for n in KERNEL_PROVIDERS
    if n != "cpp"
    for r in RULES[n]
]
