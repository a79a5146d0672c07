"""The CUDA kernels on a device: the cases of the CPU tests, streams and CUDA graphs.

This file is the entry of the tests that need a GPU. The other files of this folder need Triton's
compiler where the rest of the suite needs its interpreter, so that each runs in its own process:
test_triton_ops_on_the_device starts them, and bench/gpu.sh runs them directly.
"""

from __future__ import annotations

from pathlib import Path

import proofs
import pytest
import torch
from kv import edge_cases
from kv.edge_cases import check_far_apart
from proofs import check, same
from support.programs import output_of

import specdec_kernels as sk
from specdec_kernels import indexing, reference
from specdec_kernels._library import CACHE_OPS

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(not sk.has_cuda_kernels(), reason="_C.so was built without CUDA kernels"),
]

append = torch.ops.specdec_kernels.kv_append_.default
truncate = torch.ops.specdec_kernels.kv_truncate_.default


@pytest.fixture(params=["cuda", "indexing"])
def op(request):
    """A function from the name of a cache op to that of a provider."""
    if request.param == "indexing":
        return indexing.implementation
    return lambda name: getattr(torch.ops.specdec_kernels, name).default


CASES = [
    *(c for op in CACHE_OPS for c in proofs.cases(op)),
    *edge_cases.all_cases(), *edge_cases.large_cases(),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}{case}")
def test_the_device_leaves_the_bytes_of_the_reference(op, case):
    check(op(case.op), case, "cuda")


@pytest.mark.parametrize("seed", range(60))
def test_random_caches_and_paths(op, seed):
    for name in CACHE_OPS:
        check(op(name), edge_cases.random_case(name, seed), "cuda")


def test_the_device_addresses_more_than_2_to_the_31_elements(op):
    check_far_apart(op("kv_append_"), op("kv_truncate_"), "cuda")


def test_a_call_runs_on_the_current_stream_and_does_not_wait(op):
    """It sees the results of work queued on a side stream before it."""
    cache, entry = torch.zeros(1, 1, 8, 4, device="cuda"), torch.ones(1, 1, 2, 4, device="cuda")
    positions = torch.zeros(1, dtype=torch.int64, device="cuda")
    op("kv_append_")([cache], [entry], positions)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        entry.fill_(3)
        positions.fill_(5)
        op("kv_append_")([cache], [entry], positions)
        assert not stream.query()
    stream.synchronize()
    assert cache[0, 0, :, 0].tolist() == [1, 1, 0, 0, 0, 3, 3, 0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_another_device():
    check(append, edge_cases.append("cuda1", [(2, 5, 2, 8)], [1]), "cuda:1")
    lengths = torch.zeros(1, dtype=torch.int64, device="cuda:1")
    with pytest.raises(RuntimeError, match=r"caches\[0\] must be on the device of .*, cuda:1, got"):
        truncate([torch.zeros(1, 1, 2, 3, device="cuda:0")], lengths, lengths, True)


def test_mixed_devices_are_refused():
    cache, entry = torch.zeros(1, 1, 2, 3, device="cuda"), torch.zeros(1, 1, 1, 3, device="cuda")
    with pytest.raises(RuntimeError, match=r"caches\[0\] must be on the device of .*, cpu, got"):
        append([cache], [entry], torch.zeros(1, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"entries\[0\] must be on .*, cuda:0, got"):
        append([cache], [entry.cpu()], torch.zeros(1, dtype=torch.int64, device="cuda"))


def _capture(f):
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        f()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return graph


CAPTURES_AT_ONCE = """
import torch, specdec_kernels as sk
sk.warm_up()
logits, seeds = torch.eye(8, device="cuda")[:3] * 90, torch.arange(3, device="cuda")
probs, one = torch.eye(8, device="cuda")[:3], dict(seeds=seeds[:1], positions=seeds[:1])
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    tokens = sk.sample(logits, seeds=seeds, positions=seeds).tokens
    verdicts = [
        sk.verify_chain(logits[None], tokens[None, :2], **one),
        sk.verify_chain(probs[None], tokens[None, :2], probs[None, :2], kind="probs", **one),
        sk.verify_chain(logits[None], tokens[None, :2], top_k=2, **one),
    ]
graph.replay()
print(tokens.tolist(), *(verdict.tokens.tolist() for verdict in verdicts))
"""


def test_after_warm_up_a_new_process_captures_at_once():
    said = output_of("-c", CAPTURES_AT_ONCE, TRITON_INTERPRET="0")
    assert said == "[0, 1, 2]" + 3 * " [[0, 1, 2]]" + "\n"


@pytest.mark.parametrize("count", [2, 100, 300])
def test_a_captured_round_replays_with_other_lengths(op, count):
    """The entries are allocated during capture; positions and lengths change on the device."""
    caches = [torch.randn(3, 2, 11, 16, device="cuda").half() for _ in range(count)]
    entries = [torch.randn(3, 4, 2, 16, device="cuda").half().transpose(1, 2) for _ in caches]
    lengths, kept = (torch.zeros(3, dtype=torch.int64, device="cuda") for _ in range(2))

    def one_round():
        op("kv_append_")(caches, [e + 1 for e in entries], lengths)
        lengths.add_(4)
        op("kv_truncate_")(caches, lengths, kept, True)

    graph = _capture(one_round)
    torch.full((1 << 20,), -1, device="cuda")
    want = [c.cpu() for c in caches]
    for start, new in (([0, 3, 9], [2, 7, 20]), ([-2, 6, 0], [1, 8, 4])):
        lengths.copy_(torch.tensor(start))
        kept.copy_(torch.tensor(new))
        for entry in entries:
            entry.add_(1)
        graph.replay()
        now = torch.tensor(start)
        reference.kv_append_(want, [e.cpu() + 1 for e in entries], now)
        now += 4
        reference.kv_truncate_(want, now, torch.tensor(new), True)
        for i, (got, cache) in enumerate(zip(caches, want, strict=True)):
            same(f"caches[{i}]", got, cache)
        assert lengths.tolist() == now.tolist()


def test_a_captured_compaction_replays_with_other_paths():
    """The path changes on the device between replays."""
    caches = [torch.randn(3, 2, 30, 16, device="cuda").half() for _ in range(70)]
    base = torch.tensor([0, 7, 14], device="cuda")
    path = torch.zeros(3, 5, dtype=torch.int32, device="cuda")
    graph = _capture(lambda: sk.kv_compact_(caches, base, path))
    want = [c.cpu() for c in caches]
    for nodes in ([[0, 2, 5, 9, 11], [1, 2, -1, -1, -1], [0, 1, 2, 3, 15]], [[3, 4, 8, 9, -1]] * 3):
        path.copy_(torch.tensor(nodes))
        graph.replay()
        reference.kv_compact_(want, base.cpu(), torch.tensor(nodes))
        for i, (got, cache) in enumerate(zip(caches, want, strict=True)):
            same(f"caches[{i}]", got, cache)


def test_a_captured_round_in_persistent_buffers_allocates_nothing():
    """Two ops take turns in one workspace; rows and positions change between replays."""
    b, gamma, v = 3, 4, 5003
    target, draft = (torch.randn(b, n, v, device="cuda") for n in (gamma + 1, gamma))
    seeds = positions = torch.arange(b, device="cuda")
    each = torch.arange(b * gamma, device="cuda")

    def one_round(drawn=None, verdict=None, workspace=None):
        kept = {"seeds": each, "positions": each, "workspace": workspace}
        drawn = sk.sample(draft.view(-1, v), top_k=50, out=drawn, **kept)
        tokens, *sampled = (x.view(b, gamma) for x in (drawn.tokens, *drawn[2:4]))
        q = sk.SampledDraft(draft, *sampled, 1.0)
        kept = {"seeds": seeds, "positions": positions, "workspace": workspace}
        return drawn, sk.verify_chain(
            target, tokens, q, rule="block", top_p=0.9, out=verdict, **kept
        )

    def allocations(*buffers):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        one_round(*buffers)
        return torch.cuda.memory_stats()["allocation.all.allocated"] - before

    needed = sk.verify_chain_workspace_bytes(b, gamma, v, rule="block")
    size = max(needed, sk.sample_workspace_bytes(b * gamma, v))
    buffers = (*one_round(), torch.full((size,), 255, dtype=torch.uint8, device="cuda"))
    assert (allocations(*buffers), allocations() >= 12) == (0, True)
    graph = _capture(lambda: one_round(*buffers))
    for _ in range(4):
        for x in (target, draft):
            x.normal_()
        for x in (each, positions):
            x.add_(7)
        graph.replay()
        proofs.assert_all_equal(proofs.tensors(buffers[:2]), proofs.tensors(one_round()))
    few = buffers[2][: needed - 1]
    with pytest.raises(RuntimeError, match=f"^workspace must have at least {needed} bytes"):
        one_round(*buffers[:2], few)


def test_opcheck_on_the_device():
    caches = [torch.zeros(2, 2, 6, 3, device="cuda"), torch.zeros(2, 1, 4, 5, device="cuda")]
    entries = [torch.ones(2, 2, 3, 3, device="cuda"), torch.ones(2, 1, 1, 5, device="cuda")]
    index = [torch.tensor(v, device="cuda") for v in ([4, -1], [4, 2], [1, 3])]
    torch.library.opcheck(append, (caches, entries, index[0]))
    torch.library.opcheck(truncate, (caches, index[1], index[2], True))


@pytest.mark.parametrize(
    "file", ["on_device", "trees_on_device", "tree_layout_on_device", "compiled_on_device"]
)
def test_triton_ops_on_the_device(file):
    """Triton's compiler needs a process in which its interpreter is off."""
    output_of("-m", "pytest", "-q", "-p", "no:randomly", HERE / f"{file}.py", TRITON_INTERPRET="0")
