"""The numbers of the tree rules, as constants of a kernel."""

from __future__ import annotations

import triton.language as tl

from ...arguments.rules import TREE_RULES

GREEDY = tl.constexpr(TREE_RULES.index("greedy"))
MATCH = tl.constexpr(TREE_RULES.index("match"))
TARGET_ONLY = tl.constexpr(TREE_RULES.index("target_only"))
MULTI_DRAFT = tl.constexpr(TREE_RULES.index("multi_draft"))
MULTI_DRAFT_WOR = tl.constexpr(TREE_RULES.index("multi_draft_wor"))
TOP_K_PLUS_ONE = tl.constexpr(TREE_RULES.index("top_k_plus_one"))
K_SEQ = tl.constexpr(TREE_RULES.index("k_seq"))
TRAVERSAL = tl.constexpr(TREE_RULES.index("traversal"))
TYPICAL = tl.constexpr(TREE_RULES.index("typical"))

# If the tokens not yet tried have less mass than this in Q, no further sibling can have been drawn
# from them. csrc/include/specdec/tree.h explains the number.
LEAST_MASS = tl.constexpr(1e-26)
