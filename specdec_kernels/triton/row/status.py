"""The bits of a sequence's status word (`specdec_kernels.Status`) as constants of a kernel."""

from __future__ import annotations

import triton.language as tl

from ...arguments.status import Status

NOTHING_ALLOWED = tl.constexpr(int(Status.NOTHING_ALLOWED))
TARGET_INVALID = tl.constexpr(int(Status.TARGET_INVALID))
DRAFT_INVALID = tl.constexpr(int(Status.DRAFT_INVALID))
EMPTY_RESIDUAL = tl.constexpr(int(Status.EMPTY_RESIDUAL))
DRAFT_OUT_OF_RANGE = tl.constexpr(int(Status.DRAFT_OUT_OF_RANGE))
BAD_PARAMETER = tl.constexpr(int(Status.BAD_PARAMETER))
