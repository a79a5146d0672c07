"""What the loops of verify_chain and sample cost now, and what they should cost.

A work describes a loop by what it does, not by where it is: whoever changes what a loop loads,
computes or stores for its entries changes its work here, and lowers its ceiling to the new count.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.sass.loops import Work
from bench.sass.routes import Route

# A part of the mangled name of each kernel; verify_chain has one for each Variant of
# csrc/cuda/chain/view.cuh.
GENERAL, LOGITS, PROBS = (f"chain_kernelILNS0_7VariantE{n}E" for n in range(3))
SAMPLE = "sample_kernel"
NAMES = {
    LOGITS: "verify_chain, logits",
    PROBS: "verify_chain, probs",
    GENERAL: "verify_chain, general",
    SAMPLE: "sample",
}
SOURCES = {
    LOGITS: "chain/logits.cu",
    PROBS: "chain/probs.cu",
    GENERAL: "chain/general.cu",
    SAMPLE: "row/sample.cu",
}

_EXP = r"MUFU\.EX2"
_LOG = r"MUFU\.LG2"
_LOAD = r"LDG\S*\.128"
_FAR_LOAD = r"LDG\S*\.128\S* .*\+0x[46]00"  # a float32 warp tile is 2 KiB, others are 1 KiB
_OTHER_LOAD = r"LDG?\b(?!\S*\.128)"
_STORE = r"(STG|ST)\b"
_UNITS = r"F2I"
_REDUCTION = r"REDUX"
_VOTE = r"VOTE"
_UNPACK_BF16 = r"LOP3.*0xffff0000|PRMT|H(FMA|ADD)2\.BF16"
_NEGATIVE_PART = r"FMNMX\S* R\d+, RZ, -"  # only rule block sums it


def _fill(name: str, tiles: int, loads: int, far: int, unpacked: int) -> Work:
    """The maxima and the masses of the warp tiles of an iteration."""
    return Work(
        name,
        exactly={_EXP: 16 * tiles, _LOG: 0, _OTHER_LOAD: 0, _VOTE: 0},
        loads={_LOAD: loads * tiles, _FAR_LOAD: far * tiles},
        at_least={
            _STORE: 2 * tiles,
            _UNITS: tiles,
            _REDUCTION: tiles,
            _UNPACK_BF16: unpacked * tiles,
        },
        entries=512 * tiles,
        rounds=(1,),
    )


FILL_BF16 = _fill("fill from bfloat16 logits", tiles=2, loads=2, far=0, unpacked=8)
FILL_BF16_UNALIGNED = _fill(
    "fill from bfloat16 logits at odd addresses", tiles=1, loads=4, far=0, unpacked=8
)
FILL_F32 = _fill("fill from float32 logits", tiles=1, loads=4, far=2, unpacked=0)
RESIDUAL_BF16 = Work(
    "residual from bfloat16 logits",
    exactly={_EXP: 32, _LOG: 0, _OTHER_LOAD: 0, _STORE: 2, _NEGATIVE_PART: 0},
    loads={_LOAD: 4, _FAR_LOAD: 0},
    at_least={_UNITS: 1, _UNPACK_BF16: 16},
    rounds=(1,),
)
# The target's row is not read before, so that its own mass is summed too.
RESIDUAL_PROBS = Work(
    "residual from float32 probabilities",
    exactly={_UNITS: 8, _STORE: 4, _EXP: 0, _OTHER_LOAD: 0, _NEGATIVE_PART: 0},
    loads={_LOAD: 8},
    rounds=(1,),
)


@dataclass(frozen=True)
class LoopBudget:
    """Warp instructions for 512 entries of a row: at most `ceiling`.

    goal: set before the loop was written; None if none was set.
    """

    kernel: str
    work: Work
    ceiling: float
    goal: float | None


@dataclass(frozen=True)
class KernelBudget:
    """What a kernel needs at most now, and the goals; None where none was set."""

    kernel: str
    registers: int
    least_blocks: int  # that run at once on a multiprocessor
    code_kib: float
    goal_registers: int | None = None
    goal_blocks: int | None = None
    goal_code_kib: float | None = None


GOAL_FILL_BF16, GOAL_FILL_F32 = 7.0 * 16, 8.5 * 16  # 16 entries of the 512 are a lane's
GOAL_RESIDUAL_BF16, GOAL_RESIDUAL_PROBS = 280, 220
LOOPS = (
    LoopBudget(LOGITS, FILL_BF16, 113, GOAL_FILL_BF16),
    LoopBudget(LOGITS, FILL_BF16_UNALIGNED, 147, None),
    LoopBudget(LOGITS, FILL_F32, 125, GOAL_FILL_F32),
    LoopBudget(LOGITS, RESIDUAL_BF16, 271, GOAL_RESIDUAL_BF16),
    LoopBudget(PROBS, RESIDUAL_PROBS, 194, GOAL_RESIDUAL_PROBS),
    LoopBudget(SAMPLE, FILL_BF16, 110.5, GOAL_FILL_BF16),
    LoopBudget(SAMPLE, FILL_BF16_UNALIGNED, 144, None),
    LoopBudget(SAMPLE, FILL_F32, 124, GOAL_FILL_F32),
    # The general kernel serves what the others do not. No goal was set for it.
    LoopBudget(GENERAL, FILL_BF16, 111.5, None),
    LoopBudget(GENERAL, FILL_BF16_UNALIGNED, 145, None),
    LoopBudget(GENERAL, FILL_F32, 126, None),
    LoopBudget(GENERAL, RESIDUAL_BF16, 270, None),
    LoopBudget(GENERAL, RESIDUAL_PROBS, 194, None),
)
KERNELS = (
    KernelBudget(LOGITS, 64, 4, 154.3, 64, 4, 150),
    KernelBudget(PROBS, 64, 4, 118.9, 64, 4, 150),
    KernelBudget(SAMPLE, 64, 4, 152.6, 64, 4),
    KernelBudget(GENERAL, 96, 2, 372.1),
)


@dataclass(frozen=True)
class RouteBudget:
    """What a route in a kernel costs at most, in the cycles of a `Cost`."""

    kernel: str
    route: Route
    cycles: int
    warm: int
    cold: int


# What one warp does in a kernel of the ratio test, from its first instruction on. A turn of
# measurements shifts the mass of one of a thread's two warp tiles (F2I, SHF), and ends with the
# logarithm of the row's mass.
_OPEN = ("open_sequence", "find_drafts")
_FILL = ("open_row_and_draft", "prepare_fills", "fill_masses", "lane_units", "warp_mass")
_ARRIVE = ("last_group", "add_arrival")
_MEASURE = ("entry_of_draft", "largest", "F2I", "SHF", "sum_before", "log_of")
_TEST = ("test_draft", "accept_draft", "follow_tests")
_ROW = (*_FILL, *_MEASURE, *_MEASURE, "take_measured", "accepts_ratio", "accept_draft")
_RESIDUAL = ("reject", "subtract", "prepare", "sum_residual")
_CHOOSE = ("sum_and_choose", "largest", "sum_before", "choose", "after_residual")
_DRAW = ("draw", "read_values", "warp_tile_pick", "drawn", "EXIT")
_REJECT = (*_RESIDUAL, *_CHOOSE, *_DRAW)
_ONE_GROUP = (*_OPEN, *_FILL, *_ARRIVE)
_LAST_GROUP = (*_ONE_GROUP, "begin")
_DECIDE = (*_TEST, "open_row_and_draft", "take_measured", *_REJECT)
LOGITS_ROUTES = (
    Route("row-parallel, to the ticket", _ONE_GROUP),
    Route("row-parallel, one turn of measurements", (*_LAST_GROUP, *_MEASURE, *_DECIDE)),
    Route("row-parallel, two turns", (*_LAST_GROUP, *_MEASURE, *_MEASURE, *_DECIDE)),
    Route("row-lazy, first draft rejected", (*_OPEN, *_ROW, *_REJECT)),
    Route("row-lazy, second draft rejected", (*_OPEN, *_ROW, "accept", *_ROW, *_REJECT)),
)
PROBS_ROUTE = Route("row-lazy", (*_OPEN, *_TEST, "open_row_and_draft", *_REJECT))
_COUNTED = (
    (2036, 2570, 13846),
    (9061, 11882, 51168),
    (10308, 13415, 52702),
    (8816, 11389, 47998),
    (13227, 17070, 53664),
)
ROUTES = (
    *(
        RouteBudget(LOGITS, route, *cycles)
        for route, cycles in zip(LOGITS_ROUTES, _COUNTED, strict=True)
    ),
    RouteBudget(PROBS, PROBS_ROUTE, 5939, 7847, 34206),
)
