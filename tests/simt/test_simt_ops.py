"""The CUDA source of `sample`, the verifiers and `ngram_propose`, run by the SIMT emulator.

It runs on the CPU and is called through the same binding as on a device. Every case has to agree
with the C++ kernels, and give the same bits for every number of blocks that share a row and every
order of threads.

processors: the multiprocessors of the device, from which the splits of a row follow.
tile: 512 entries of a row, which one warp takes (a warp tile).
"""

from __future__ import annotations

import functools

import proofs
import pytest
import torch
from proofs import (
    assert_outputs_close,
    assert_outputs_equal,
    chain_case,
    kept_case,
    sample_case,
    tree_case,
)
from proofs.history import ngram_case
from simt import emulator
from support.providers import verify_tree

from specdec_kernels.arguments.chain import ChainArguments
from specdec_kernels.arguments.sample import SampleArguments
from specdec_kernels.arguments.tree import TreeArguments

OPS = ("sample", "kept_tokens", "verify_chain")
CASES = [case for op in OPS for case in proofs.cases(op, heavy=True)]
TREES = proofs.cases("verify_tree", heavy=True)
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
    chain_case(3, 3, 4097, kind="probs", draft="sampled"),
    # More blocks than run at once.
    chain_case(5, 3, 4097, torch.bfloat16),
    # More drafts than a warp tests at once.
    chain_case(2, 40, 131, acceptance=0.99),
    kept_case(1, 2, V, k=300, filters="tensor"),
    kept_case(2, 1, V, torch.bfloat16, k=700),
]
LARGE_TREES = [
    tree_case(1, 5, V, rows="shared", layout="sliced"),
    tree_case(1, 5, V, torch.bfloat16, rule="multi_draft_wor", rows="shared", filters="tensor"),
    tree_case(2, 4, V, rule="traversal", kind="probs", rows="flat"),
    tree_case(1, 4, V, torch.float16, rule="k_seq", draft="wide", rows="shared"),
    tree_case(1, 5, V, rule="top_k_plus_one", draft="mapped", rows="shared"),
]
# Some cases of each op and rule that are small enough to run in every order of threads.
SMALL = [
    case
    for op in OPS
    for case in proofs.cases(op, rows=6)
    if case.vocabulary in {67, 131} or (op == "sample" and case.vocabulary == 1031)
]
EVERY = CASES + TREES + LARGE + LARGE_TREES
SMALL_TREES = [case for case in TREES if case.vocabulary <= 131]
PROCESSORS = (0, 3, 1000)  # one block for each row, up to one for every eight tiles


def outputs(simt, case, args=None, **running):
    with simt.running(**running):
        return simt.op(case.op)(*(args or case.args()))


@functools.cache
def of_whole_rows(simt, case):
    """The outputs where one block reads a row, one after the other, which all others equal."""
    return outputs(simt, case, processors=0)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_agrees_with_the_cpu_kernels(simt, case):
    assert_outputs_close(
        case.op, outputs(simt, case), proofs.providers(case.op)["cpp"](*case.args())
    )


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("processors", PROCESSORS[1:])
@pytest.mark.parametrize("case", CASES[::3] + SMALL_TREES + LARGE + LARGE_TREES, ids=str)
def test_every_number_of_splits_gives_the_same_bits(simt, case, processors):
    got = outputs(simt, case, processors=processors)
    assert_outputs_equal(case.op, got, of_whole_rows(simt, case))


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("order", list(emulator.ORDERS)[1:])
@pytest.mark.parametrize("case", [*SMALL[::2], *SMALL_TREES, *LARGE[1::4], LARGE_TREES[0]], ids=str)
def test_every_order_of_threads_gives_the_same_bits(simt, case, order):
    got = outputs(simt, case, processors=16, order=order)
    assert_outputs_equal(case.op, got, of_whole_rows(simt, case))


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("filters", ["off", "topk"])
def test_the_workspace_holds_no_row(simt, rule, filters):
    """For each row 20 bytes a tile of 512 entries, a summary, and with filters its survivors."""
    b, gamma = 5, 2
    rows, sums = 2 * gamma + 1, 4 * (gamma + 1 if rule == "block" else 1)
    for v in (4096, 40_001):
        sizes = set()
        for dtype in (torch.float32, torch.bfloat16):
            outputs(simt, chain_case(b, gamma, v, dtype, rule=rule, filters=filters))
            sizes.add(simt.last_bytes())
        assert len(sizes) == 1
        survivors = 0 if filters == "off" else 8 * 1024 * (gamma + 1)
        each = (rows + sums) * (20 * -(-v // 512) + 15) + rows * 64 + survivors
        assert sizes.pop() <= b * (each + 16 * (gamma + 1) * 3 + 8 * (rows + 2 * gamma + 2)) + 1024


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
@pytest.mark.parametrize(
    "case", [LARGE[0], LARGE[3], LARGE[5], LARGE[-2], *SMALL_TREES[::3], *LARGE_TREES], ids=str
)
def test_the_workspace_may_hold_anything(simt, case, fill):
    args, want = case.args(), of_whole_rows(simt, case)
    for order in ("forward", "interleaved-1", "interleaved-2"):
        got = outputs(simt, case, args, processors=16, order=order, fill=fill)
        assert_outputs_equal(case.op, got, want)


RECORDS = {"sample": SampleArguments, "verify_chain": ChainArguments, "verify_tree": TreeArguments}


def size_of(simt, case, args):
    """The workspace that suffices for calls of the size of this one."""
    a = RECORDS[case.op](*args)
    size = simt.op(f"{case.op}_workspace_bytes")
    if case.op == "sample":
        return size(*a.logits.shape)
    drafts = args[1].shape
    return size(*drafts, max(t.shape[-1] for t in (a.target, a.draft) if t is not None), a.rule)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("case", [c for c in EVERY if c.op in RECORDS], ids=str)
def test_the_size_of_a_workspace_bounds_that_of_each_call(simt, case):
    args = case.args()
    outputs(simt, case, args)
    assert simt.last_bytes() <= size_of(simt, case, args)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("case", [LARGE[0], LARGE[3], chain_case(3, 4, 67, filters="tensor"),
                                  chain_case(1, 2, 4096, draft="wide", filters="tensor"),
                                  LARGE_TREES[1]], ids=str)  # fmt: skip
def test_a_workspace_of_one_byte_less_is_named(simt, case):
    """These calls need all that calls of their size can need."""
    args = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in case.args()]
    out = [t.to("meta") for t in of_whole_rows(simt, case)]
    bytes_ = size_of(simt, case, args)
    outputs(simt, case)
    assert simt.last_bytes() == bytes_
    validate = simt.op(f"validate_{case.op}_out")
    validate(*args, *out, torch.empty(bytes_, dtype=torch.uint8, device="meta"))
    few = torch.empty(bytes_ - 1, dtype=torch.uint8, device="meta")
    message = f"workspace must have at least {bytes_} bytes for this call, got {bytes_ - 1}$"
    with pytest.raises(RuntimeError, match=message):
        validate(*args, *out, few)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("order", ["forward", "interleaved-1"])
@pytest.mark.parametrize("start", [0, 1, 63])
def test_one_workspace_serves_calls_of_any_op_and_size_in_turn(simt, start, order):
    """It holds what the call before left there, begins anywhere, and ends where the size says."""
    small = [case for case in SMALL if case.op in RECORDS]
    calls = [*small[::3], LARGE[0], *SMALL_TREES[::3], LARGE[5], LARGE_TREES[1], *small[1::3]]
    most = max(size_of(simt, case, case.args()) for case in calls)
    memory = torch.randint(0, 256, (start + most + 64,), generator=torch.Generator().manual_seed(1))
    memory = memory.to(torch.uint8)
    memory[start + most :] = 0xA5
    for case in calls:
        args = case.args()
        own = memory[start : start + size_of(simt, case, args)]
        behind = memory[start + len(own) :].clone()
        with simt.working_in(own):
            got = outputs(simt, case, args, processors=16, order=order)
        assert_outputs_equal(case.op, got, of_whole_rows(simt, case))
        assert behind.equal(memory[start + len(own) :])


def test_a_larger_call_needs_no_less_workspace(simt):
    for op, rules, drafts in (("sample", [()], ()), ("verify_chain", range(8), (0, 1, 5)),
                              ("verify_tree", range(9), (0, 1, 33))):  # fmt: skip
        size = simt.op(f"{op}_workspace_bytes")
        for rule in rules:
            each = [[size(b, *n, v, *([] if op == "sample" else [rule]))
                     for v in (1, 67, 513, 4096, 151_936)]
                    for b in (0, 1, 3) for n in ([(d,) for d in drafts] or [()])]  # fmt: skip
            table = torch.tensor(each).view(3, -1, 5)
            assert all((table.diff(dim=d) >= 0).all() for d in range(3))
            assert (table[1:].diff(dim=2)[..., -1] > 0).all()


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


@pytest.mark.parametrize(
    ("rule", "n"),
    [
        *(("target_only", 1), ("multi_draft_wor", 31), ("traversal", 32), ("traversal", 33)),
        *(("multi_draft_wor", 700), pytest.param("traversal", 700, marks=pytest.mark.full)),
    ],
)
def test_a_tree_may_have_more_nodes_than_a_block_has_threads(simt, rule, n):
    case = tree_case(1, n, 23, rule=rule, rows="shared", draft="sparse", acceptance=0.3)
    want = proofs.providers("verify_tree")["cpp"](*case.args())
    for processors in PROCESSORS if n < 100 else PROCESSORS[1:2]:
        got = outputs(simt, case, processors=processors, order="seed-1")
        assert_outputs_close("verify_tree", got, want)


def test_the_factor_of_k_seq_is_that_of_all_siblings(simt):
    """rho is computed from the acceptance probability P(x) / (rho * Q(x)) of the first of four."""
    p, uniforms = torch.tensor([0.1, 0.1, 0.4, 0.4]), torch.full((1, 9), 0.999).double()
    got = verify_tree(
        simt.op("verify_tree"), p.expand(1, 5, 4), torch.arange(4)[None], torch.full((1, 4), -1),
        torch.full((1, 4, 4), 0.25), kind="probs", rule="k_seq", uniforms=uniforms,
    )  # fmt: skip
    rho = 0.1 / 0.25 / float(got[5][0, 0])
    beta = sum(min(0.25, x / rho) for x in p.tolist())
    assert 1 < rho < 1.6
    assert 1 - (1 - beta) ** 4 == pytest.approx(rho * beta, abs=1e-5)
