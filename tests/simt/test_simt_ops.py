"""The CUDA source of `sample`, `verify_chain` and `ngram_propose`, run by the SIMT emulator.

It runs on the CPU and is called through the same binding as on a device. Every case has to agree
with the C++ kernels, and give the same bits for every schedule, group size and order of threads.

schedule: "lazy" (a group of blocks takes one sequence and stops reading at the first rejection) or
"parallel" (each row is split among groups).
group: the blocks that work on one row together.
tile: 512 entries of a row, which one warp takes (a warp tile).
"""

from __future__ import annotations

import functools

import proofs
import pytest
import torch
from proofs import assert_outputs_close, assert_outputs_equal, chain_case, sample_case
from proofs.history import ngram_case
from simt import emulator
from simt.emulator import CHAIN_KERNELS
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_kernels import _warm_up

OPS = ("sample", "verify_chain")
CASES = [case for op in OPS for case in proofs.cases(op, heavy=True)]
# More tiles than eight blocks take at once, an incomplete last tile, and rows at odd addresses.
V = 40_001
LARGE = [
    sample_case(2, V, filters="tensor", layout="sliced"),
    sample_case(1, V, torch.bfloat16, filters="topp"),
    sample_case(1, V, noise="shared", method="gumbel", filters="topk"),
    chain_case(2, 2, V, torch.bfloat16, filters="tensor"),
    chain_case(1, 2, V, kind="probs", layout="sliced"),
    chain_case(1, 3, V, rule="block", draft="sampled", layout="ragged"),
    chain_case(1, 2, V, torch.float16, rule="block", draft="mapped"),
    chain_case(1, 2, V, rule="typical", draft="none", filters="warm"),
    chain_case(1, 2, V, rule="top_beta", draft="none", filters="warm"),
    chain_case(1, 2, V, rule="match", draft="none"),
    # Kernels of their own serve the ratio test, but not this pair of kinds or dtypes.
    chain_case(3, 3, 4097, kind="probs", draft="sampled"),
    # More groups than run at once.
    chain_case(5, 3, 4097, torch.bfloat16),
    # More drafts than the kernel keeps in shared memory.
    chain_case(2, 40, 131, acceptance=0.99),
]
# Some cases of each op and rule that are small enough to run in every order of threads.
SMALL = [
    case
    for op in OPS
    for case in proofs.cases(op, rows=6)
    if case.vocabulary in {67, 131} or (op == "sample" and case.vocabulary == 1031)
]


def outputs(simt, case, args=None, **sharing):
    with simt.sharing(**sharing):
        return simt.op(case.op)(*(args or case.args()))


@functools.cache
def of_one_block(simt, case):
    """The outputs of groups of one block, one after the other, which all others have to equal."""
    return outputs(simt, case, schedule="lazy", group=1)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_agrees_with_the_cpu_kernels(simt, case):
    assert_outputs_close(
        case.op, outputs(simt, case), proofs.providers(case.op)["cpp"](*case.args())
    )


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("share", list(emulator.SHARES)[1:])
@pytest.mark.parametrize("case", CASES[::3] + LARGE, ids=str)
def test_every_schedule_and_group_size_gives_the_same_bits(simt, case, share):
    schedule, group = emulator.SHARES[share]
    got = outputs(simt, case, schedule=schedule, group=group)
    assert_outputs_equal(case.op, got, of_one_block(simt, case))


@pytest.mark.parametrize("case", LARGE[::2], ids=str)
def test_a_device_without_clusters_gives_the_same_bits(simt, case):
    assert_outputs_equal(case.op, outputs(simt, case, capability=8), outputs(simt, case))


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("order", list(emulator.ORDERS)[1:])
@pytest.mark.parametrize("case", SMALL[::2], ids=str)
def test_every_order_of_threads_gives_the_same_bits(simt, case, order):
    for schedule in ("lazy", "parallel"):
        got = outputs(simt, case, schedule=schedule, group=2, order=order)
        assert_outputs_equal(case.op, got, of_one_block(simt, case))


@pytest.mark.parametrize("schedule", ["lazy", "parallel"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_workspace_holds_only_statistics_of_tiles(simt, schedule, rule):
    # At most 20 bytes for each tile of 512 entries, rounded up to 16; no row is copied.
    b, gamma, group = 5, 2, 2
    rows, contexts = gamma + 1, b if schedule == "parallel" else emulator.MULTIPROCESSORS
    statistics = 2 * (rows if schedule == "parallel" else 2) + 3
    rest = 8 * b + 8 + (contexts * group * rows * 256 if rule == "block" else 0)
    for v in (4096, 40_001):
        sizes = set()
        for dtype in (torch.float32, torch.bfloat16):
            outputs(simt, chain_case(b, gamma, v, dtype, rule=rule), schedule=schedule, group=group)
            sizes.add(simt.last_plan().workspace_bytes)
        assert len(sizes) == 1
        assert sizes.pop() <= contexts * statistics * (20 * -(-v // 512) + 15) + rest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_equal_logits_does_not_overflow(simt, dtype):
    # Every weight is 1, which is the largest sum that a tile can have.
    for case in (sample_case(2, 4096, dtype), chain_case(2, 2, 4096, dtype)):
        args = [
            torch.zeros_like(a)
            if isinstance(a, torch.Tensor) and a.dtype == dtype and a.dim() >= 2
            else a
            for a in case.args()
        ]
        want = proofs.providers(case.op)["cpp"](*args)
        assert_outputs_close(case.op, outputs(simt, case, args), want)


def test_launch_numbers_are_never_small_integers(simt):
    numbers = [simt.next_launch() for _ in range(10_000)]
    assert len(set(numbers)) == len(numbers)
    assert all(2**40 <= n < 255 * 2**40 for n in numbers)


# Words that reused memory may hold; the first three would be tickets if launches counted from 1.
@pytest.mark.covering(test=1)
@pytest.mark.parametrize(
    "fill", [70_000, 131_073, 151_643, 0, emulator.ALL_ONES, 0x3F80_3F80_3F80_3F80]
)
@pytest.mark.parametrize("case", [LARGE[0], LARGE[3], LARGE[5], LARGE[-2]], ids=str)
def test_the_workspace_may_hold_anything(simt, case, fill):
    args, want = case.args(), of_one_block(simt, case)
    for schedule, group, order in (
        ("lazy", 2, "forward"),
        ("parallel", 8, "forward"),
        ("parallel", 1, "interleaved-1"),
        ("parallel", 1, "interleaved-2"),
    ):
        share = {"schedule": schedule, "group": group, "order": order, "fill": fill}
        assert_outputs_equal(case.op, outputs(simt, case, args, **share), want)


@pytest.mark.parametrize(
    ("kernel", "how"),
    [
        *(("logits", {"rule": rule}) for rule in ("token", "lenient", "greedy")),
        *(("logits", {"draft": draft}) for draft in ("none", "sampled", "wide", "narrow")),
        ("logits", {"layout": "ragged", "limits": True}),
        *(("probs", {"kind": "probs", "rule": rule}) for rule in ("token", "lenient", "greedy")),
        ("probs", {"kind": "probs", "draft": "none"}),
        *(
            ("general", {"rule": rule})
            for rule in ("block", "match", "typical", "top_beta", "synthetic")
        ),
        *(("general", {"draft": draft}) for draft in ("sparse", "mapped")),
        *(("general", {"filters": filters}) for filters in ("scalar", "tensor")),
        ("general", {"kind": "probs", "filters": "warm"}),
    ],
    ids=str,
)
def test_each_call_is_served_by_the_smallest_kernel_that_can(simt, kernel, how):
    outputs(simt, chain_case(2, 2, 67, **how))
    assert simt.last_chain_kernel() == kernel


class OnEmulator(TorchDispatchMode):
    """Runs `verify_chain` in the emulator as well, and notes the kernels that served it."""

    def __init__(self, simt):
        super().__init__()
        self.simt, self.kernels = simt, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.specdec_kernels.verify_chain.default:
            self.simt.op("verify_chain")(*args)
            self.kernels.add(self.simt.last_chain_kernel())
        return func(*args, **(kwargs or {}))


def test_warm_up_launches_every_kernel_of_chains(simt):
    """One that has not run yet would load its code inside the first capture of a call."""
    with OnEmulator(simt) as emulator:
        _warm_up._calls(torch.device("cpu"), 1)["verify_chain"]()
    assert emulator.kernels == set(CHAIN_KERNELS)


def test_a_driver_that_is_too_old_is_named(simt):
    case = SMALL[0]
    with (
        simt.driver(12_080),
        pytest.raises(
            RuntimeError,
            match=r"the CUDA kernel launch failed: CUDA driver version is insufficient for CUDA "
            r"runtime version \(cudaErrorInsufficientDriver\); the driver supports CUDA 12\.8, the "
            r"kernels were built with CUDA 13\.0: update the driver, build with an older CUDA, or "
            r"set SPECDEC_CUDA_PROVIDER=triton$",
        ),
    ):
        outputs(simt, case)
    with simt.driver(0), pytest.raises(RuntimeError, match="there is no CUDA driver, the kernels"):
        outputs(simt, case)
    outputs(simt, case)


@pytest.mark.parametrize(("pending", "capability"), [(0, 11), (1, 12)])
def test_asking_a_device_hides_no_earlier_error(simt, pending, capability):
    """A partition too small for the largest clusters answers with an error of its own."""
    case = chain_case(2, 2, 67)
    simt.last_error(pending)
    with simt.partition(4):
        got = outputs(simt, case, capability=capability)
    assert (simt.last_error() != 0) == (pending != 0)
    assert_outputs_equal(case.op, got, of_one_block(simt, case))


NGRAMS = [*proofs.cases("ngram_propose"), ngram_case(2, 9000, 300, ids=50, lengths="full")]


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("order", emulator.ORDERS)
@pytest.mark.parametrize("case", NGRAMS, ids=str)
def test_ngram_propose_agrees_with_the_reference_in_every_order_of_threads(simt, case, order):
    torch.use_deterministic_algorithms(True)
    want = proofs.providers(case.op)["reference"](*case.args())
    assert_outputs_equal(case.op, outputs(simt, case, order=order), want)


@pytest.mark.full
def test_ngram_propose_takes_more_sequences_than_the_grid_holds(simt):
    """A grid has at most 65536 blocks."""
    n = 65_538
    history = torch.tensor([[1, 2, 1]]).repeat(n, 1)
    history[:, 1] = torch.arange(n)
    tokens, counts = simt.op("ngram_propose")(history, torch.full((n,), 3), 1, 1, 1)
    wanted = torch.where(history[:, 1] == 1, 1, torch.arange(n))
    assert tokens[:, 0].equal(wanted)
    assert (counts == 1).all()
