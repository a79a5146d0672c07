"""Numbers of the rules that judge trees, in the order of TREE_RULES."""

from __future__ import annotations

import triton.language as tl

GREEDY = tl.constexpr(0)
MATCH = tl.constexpr(1)
TARGET_ONLY = tl.constexpr(2)
MULTI_DRAFT = tl.constexpr(3)
MULTI_DRAFT_WOR = tl.constexpr(4)
TOP_K_PLUS_ONE = tl.constexpr(5)
K_SEQ = tl.constexpr(6)
TRAVERSAL = tl.constexpr(7)
TYPICAL = tl.constexpr(8)

LEAST_REST = tl.constexpr(1e-26)  # csrc/include/specdec/tree.h says why
