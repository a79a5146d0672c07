"""What the loops of verify_chain and sample cost now, and what they should cost.

A work describes a loop by what it does, not by where it is: whoever changes what a loop loads,
computes or stores for its entries changes its work here, and lowers its ceiling to the new count.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.sass.loops import Work

# A part of the mangled name of each kernel.
ROWS, DECIDE, BLOCK = "11rows_kernel", "13decide_kernel", "12block_kernel"
TREE_ROWS, TREE, SAMPLE = "16tree_rows_kernel", "11tree_kernel", "13sample_kernel"
NAMES = {
    ROWS: "verify_chain, rows",
    DECIDE: "verify_chain, decide",
    BLOCK: "verify_chain, rule block",
    TREE_ROWS: "verify_tree, rows",
    TREE: "verify_tree",
    SAMPLE: "sample",
}
SOURCES = ("chain/verify_chain.cu", "tree/verify_tree.cu", "row/sample.cu")

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
    """What a kernel needs at most now."""

    kernel: str
    registers: int
    least_blocks: int  # that run at once on a multiprocessor
    code_kib: float


GOAL_FILL_BF16, GOAL_FILL_F32 = 7.0 * 16, 8.5 * 16  # 16 entries of the 512 are a lane's
GOAL_RESIDUAL_BF16, GOAL_RESIDUAL_PROBS = 280, 220
LOOPS = (
    LoopBudget(ROWS, FILL_BF16, 109.5, GOAL_FILL_BF16),
    LoopBudget(ROWS, FILL_BF16_UNALIGNED, 142, None),
    LoopBudget(ROWS, FILL_F32, 124, GOAL_FILL_F32),
    LoopBudget(DECIDE, RESIDUAL_BF16, 271, GOAL_RESIDUAL_BF16),
    LoopBudget(DECIDE, RESIDUAL_PROBS, 194, GOAL_RESIDUAL_PROBS),
    LoopBudget(SAMPLE, FILL_BF16, 109.5, GOAL_FILL_BF16),
    LoopBudget(SAMPLE, FILL_BF16_UNALIGNED, 142, None),
    LoopBudget(SAMPLE, FILL_F32, 124, GOAL_FILL_F32),
)
KERNELS = (
    KernelBudget(ROWS, 64, 4, 211.0),
    KernelBudget(DECIDE, 80, 3, 227.1),
    KernelBudget(BLOCK, 80, 3, 149.2),
    KernelBudget(TREE_ROWS, 64, 4, 176.5),
    KernelBudget(TREE, 128, 2, 415.8),
    KernelBudget(SAMPLE, 64, 4, 172.6),
)
