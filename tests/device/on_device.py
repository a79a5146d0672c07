"""`sample`, the verifiers and `ngram_propose` on a CUDA device against the C++ kernels.

test_cuda.py and bench/gpu.sh run this file in a process of its own, because it needs Triton's
compiler and the rest of the suite Triton's interpreter. The tests of the CUDA kernels come first
(`-k cuda`), then those of the kernels that Triton has to compile (`-k triton`).
"""

from __future__ import annotations

import importlib
import importlib.util

import proofs
import pytest
import torch
from proofs import (
    OUTPUTS,
    assert_close,
    assert_outputs_close,
    assert_outputs_equal,
    chain_case,
    sample_case,
    tree_case,
)
from proofs.history import ngram_case
from support.programs import output_of
from support.providers import sample, serves, verify

import specdec_kernels as sk
from specdec_kernels import indexing
from specdec_kernels._library import INDEXED_OPS
from specdec_kernels._library import OPS as OP_MODULES
from specdec_kernels.arguments.chain import ChainArguments

OPS = ("sample", "verify_chain")
WIDE = 131073  # 33 tiles, so that a row is split among several blocks
LARGE = [
    sample_case(4, WIDE), sample_case(4, WIDE, torch.bfloat16, filters="tensor"),
    sample_case(4, WIDE, torch.bfloat16, method="gumbel"), chain_case(4, 5, WIDE, torch.bfloat16),
    chain_case(4, 5, WIDE, filters="scalar"),
    chain_case(3, 4, WIDE, torch.bfloat16, rule="block", filters="tensor"),
    chain_case(4, 3, WIDE, torch.bfloat16, draft="sampled", filters="scalar", layout="ragged"),
]  # fmt: skip
CASES = [*(case for op in OPS for case in proofs.cases(op, heavy=True)), *LARGE]
VARIED = {
    op: [*[c for c in proofs.cases(op) if c.rows > 1][:4], *[c for c in LARGE if c.op == op]]
    for op in OPS
}
TREES = [
    tree_case(3, 8, WIDE, torch.bfloat16, rule=rule, rows="shared")
    for rule in ("multi_draft_wor", "top_k_plus_one", "traversal")
]
HISTORIES = [
    *proofs.cases("ngram_propose"), ngram_case(40, 100_000, 5, ids=1000, lengths="full"),
    ngram_case(70_000, 9, 3),
]  # fmt: skip
PROVIDERS = [
    *(["cuda"] if sk.has_cuda_kernels() else []),
    *(["triton"] if importlib.util.find_spec("triton") else []),
]
REPLAYS = 20
ID_SIZES = (64, 512, 4096, 32768, 2**18, 2**20)  # in small and large blocks of the allocator

cuda_only = pytest.mark.skipif("cuda" not in PROVIDERS, reason="_C.so has no CUDA kernels")


@pytest.fixture(scope="module", params=PROVIDERS)
def name(request):
    """A provider. With module scope, all tests of one provider run before those of the next."""
    return request.param


def implementation(name, op):
    """The op by the CUDA kernels, behind the dispatcher, or what serves it beside Triton's."""
    if name == "cuda":
        assert sk.providers()[op]["cuda"] == "cuda"
        return getattr(torch.ops.specdec_kernels, op).default
    if op in INDEXED_OPS:
        return indexing.implementation(op)
    return getattr(importlib.import_module(f"specdec_kernels.triton.{OP_MODULES[op]}"), op)


def on_device(name, case, device="cuda"):
    if not serves(name, case):
        pytest.skip(f"{name} has no kernel of this rule")  # refused by name: see TRITON_RULES
    return [t.cpu() for t in implementation(name, case.op)(*case.args(device))]


def bits(t):
    """Floats as integers, so that -0 differs from 0 and a NaN equals itself."""
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.cpu().view(sizes[t.element_size()]) if t.is_floating_point() else t.cpu()


def assert_bits_equal(op, got, want):
    """Outputs are equal bit for bit, NaNs and signs of zero included."""
    for output, g, w in zip(OUTPUTS[op], got, want, strict=True):
        assert g.dtype == w.dtype, f"{output}: {g.dtype}, not {w.dtype}"
        if not torch.equal(bits(g), bits(w)):
            assert_close(output, g.cpu(), w.cpu())
            assert_close(f"bits of {output}", bits(g), bits(w))


def write_ids():
    """Fill memory of the allocator with token ids, which a later workspace may consist of."""
    held = []
    for size in ID_SIZES:
        for _ in range(16 if size < 2**16 else 2):
            ids = torch.empty(size, dtype=torch.int64, device="cuda")
            ids[::2].fill_(151643)
            ids[1::2].fill_(70000)
            held.append(ids)
    return held


def capture(name, op, args, pool=None):
    """A graph of one call, and its outputs. Replays read ``args`` again: the caller holds them."""
    call = implementation(name, op)
    call(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = call(*args)
    return graph, out


def replayed(graph, out):
    for t in out:
        t.zero_()
    graph.replay()
    return out


FRESH = """
import torch
from device import on_device
from support import providers
cases = [c for c in on_device.LARGE if c.op == "verify_chain"]
inputs = [c.args("cuda") for c in cases]
for case, args in zip(cases, inputs):
    on_device.write_ids()
    got = on_device.implementation("cuda", case.op)(*args)
    on_device.assert_bits_equal(case.op, got, on_device.implementation("cuda", case.op)(*args))
    want = on_device.proofs.providers(case.op)["cpp"](*case.args())
    providers.assert_outputs_close(case.op, [t.cpu() for t in got], want)
"""


@cuda_only
def test_cuda_first_calls_of_a_process_survive_token_ids_in_their_workspace():
    """Launch numbers of a new process are small, and could be mistaken for token ids."""
    output_of("-c", FRESH)


@cuda_only
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_calls_give_the_same_bits_again(case):
    """Which blocks come last, and which rows are read in vain, differs from call to call."""
    args = case.args("cuda")
    want = implementation("cuda", case.op)(*args)
    for _ in range(REPLAYS):
        assert_bits_equal(case.op, implementation("cuda", case.op)(*args), want)


@cuda_only
@pytest.mark.parametrize("case", [*LARGE, *TREES], ids=str)
def test_cuda_calls_are_captured_and_replayed_over_any_workspace(case):
    want = on_device("cuda", case)
    args = case.args("cuda")
    graph, out = capture("cuda", case.op, args)
    for _ in range(REPLAYS):
        write_ids()  # freed at once, so that the next workspace takes this memory
        assert_bits_equal(case.op, replayed(graph, out), want)
        assert_bits_equal(case.op, implementation("cuda", case.op)(*args), want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_cpu(name, case):
    want = proofs.providers(case.op)["cpp"](*case.args())
    assert_outputs_close(case.op, on_device(name, case), want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("case", [c for op in OPS for c in VARIED[op]], ids=str)
def test_a_device_that_is_not_the_current_one(name, case):
    assert_bits_equal(case.op, on_device(name, case, "cuda:1"), on_device(name, case))


def test_calls_on_two_streams_are_independent(name):
    chosen = [c for op in OPS for c in VARIED[op] if serves(name, c)]
    want = [on_device(name, c) for c in chosen]
    inputs = [c.args("cuda") for c in chosen]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for turn in range(REPLAYS):
        got = []
        for i, (case, args) in enumerate(zip(chosen, inputs, strict=True)):
            with torch.cuda.stream(streams[(i + turn) % 2]):
                got.append(implementation(name, case.op)(*args))
        torch.cuda.synchronize()
        for case, g, w in zip(chosen, got, want, strict=True):
            assert_bits_equal(case.op, g, w)


@pytest.mark.parametrize("case", VARIED["verify_chain"], ids=str)
def test_a_call_reads_what_the_call_before_it_wrote(name, case):
    """Launches may overlap, but each has to wait for inputs that another kernel still writes."""
    args = ChainArguments(*case.args("cuda"))
    call = implementation(name, "verify_chain")
    target = args.target.clone()
    for i in range(REPLAYS):
        shifted = target.roll(i, -1)
        want = [t.cpu() for t in call(*args._replace(target=shifted))]
        args.target.zero_()
        args.target.copy_(shifted)
        assert_bits_equal("verify_chain", call(*args), want)


def _sample_then_verify(name, target, draft, seeds, wait, **filters):
    """Outputs of both ops; `verify_chain` reads three outputs of `sample`."""
    b, gamma, v = draft.shape
    positions = torch.arange(gamma, device="cuda").repeat(b)
    drawn = sample(
        implementation(name, "sample"),
        draft.view(-1, v),
        seeds=seeds.repeat_interleave(gamma),
        positions=positions,
        **filters,
    )
    if wait:
        torch.cuda.synchronize()
    tokens, logsumexp, threshold = (drawn[i].view(b, gamma) for i in (0, 2, 3))
    verdict = verify(
        implementation(name, "verify_chain"),
        target,
        tokens,
        draft,
        sampled=(logsumexp, threshold, filters.get("temperature", 1.0)),
        seeds=seeds,
        positions=torch.zeros_like(seeds),
        **filters,
    )
    if wait:
        torch.cuda.synchronize()
    return {"sample": drawn, "verify_chain": verdict}


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.8, "top_k": 50, "top_p": 0.9}], ids=["plain", "filtered"]
)
def test_verification_waits_for_the_sampling_before_it(name, filters):
    args = ChainArguments(*LARGE[3].args("cuda"))
    target, draft = args.target, args.draft
    rounds = [torch.arange(len(target), device="cuda") + 100 * i for i in range(100)]
    want = [_sample_then_verify(name, target, draft, s, True, **filters) for s in rounds]
    got = [_sample_then_verify(name, target, draft, s, False, **filters) for s in rounds]
    for g, w in zip(got, want, strict=True):
        for op in OPS:
            assert_bits_equal(op, g[op], w[op])


@pytest.mark.parametrize("op", OPS)
def test_graphs_replay_with_other_inputs(name, op):
    """Graphs are replayed in the order of their capture, and in the reverse order."""
    graphs = []
    for case in (c for c in VARIED[op] if serves(name, c)):
        args = case.args("cuda")
        graphs.append((case, args, *capture(name, op, args)))
    for turn in range(6):
        for case, args, graph, out in graphs[:: -1 if turn % 2 else 1]:
            rows = args[0]  # target of verify_chain, logits of sample
            rows.copy_(rows.roll(1, 0))
            replayed(graph, out)
            assert_bits_equal(case.op, out, implementation(name, op)(*args))


@pytest.mark.parametrize("case", [c for op in OPS for c in VARIED[op]], ids=str)
def test_a_replay_survives_another_graph_that_overwrites_its_workspace(name, case):
    """The graphs share a pool, so that the second gets memory that the first has freed."""
    want = on_device(name, case)
    args, pool = case.args("cuda"), torch.cuda.graph_pool_handle()
    graph, out = capture(name, case.op, args, pool)
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other, pool=pool):
        held = write_ids()
    for _ in range(REPLAYS):
        other.replay()
        assert_bits_equal(case.op, replayed(graph, out), want)
    del held


@pytest.mark.parametrize("case", HISTORIES, ids=str)
def test_copied_drafts_agree_with_the_cpu_without_a_wait_and_in_a_graph(name, case):
    op, args = implementation(name, case.op), case.args("cuda")
    want = torch.ops.specdec_kernels.ngram_propose.default(*case.args())
    assert_outputs_equal(case.op, on_device(name, case), want)
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, out = capture(name, case.op, args)
    if len(args[0]):
        args[0].copy_(args[0].roll(1, 0))
    want = [t.cpu() for t in op(*args)]
    assert_outputs_equal(case.op, [t.cpu() for t in replayed(graph, out)], want)
