"""Numbers of the rules and of the status bits, as in csrc/include/specdec/chain.h."""

from __future__ import annotations

import triton.language as tl

TOKEN = tl.constexpr(0)
BLOCK_RULE = tl.constexpr(1)  # BLOCK is the name of a scan step
GREEDY = tl.constexpr(2)
MATCH = tl.constexpr(3)
TYPICAL = tl.constexpr(4)
LENIENT = tl.constexpr(5)
SYNTHETIC = tl.constexpr(6)

TARGET_NOT_FINITE = tl.constexpr(1)
DRAFT_NOT_FINITE = tl.constexpr(2)
EMPTY_RESIDUAL = tl.constexpr(4)
DRAFT_OUT_OF_RANGE = tl.constexpr(8)
BAD_PARAMETER = tl.constexpr(16)
