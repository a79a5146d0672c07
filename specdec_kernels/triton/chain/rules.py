"""The numbers of the chain rules, as constants of a kernel."""

from __future__ import annotations

import triton.language as tl

from ...arguments.rules import RULES

TOKEN = tl.constexpr(RULES.index("token"))
BLOCK_RULE = tl.constexpr(RULES.index("block"))  # kernels call the width of a scan step BLOCK
GREEDY = tl.constexpr(RULES.index("greedy"))
MATCH = tl.constexpr(RULES.index("match"))
TYPICAL = tl.constexpr(RULES.index("typical"))
LENIENT = tl.constexpr(RULES.index("lenient"))
SYNTHETIC = tl.constexpr(RULES.index("synthetic"))
TOP_BETA = tl.constexpr(RULES.index("top_beta"))
