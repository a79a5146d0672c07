"""The CUDA kernels on a device: the CPU's cases, streams and CUDA graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import kv_cases, kv_moves
from support.kv_cases import KvCase, check_append, check_truncate
from torch.utils._pytree import tree_leaves

import specdec_kernels as sk
from specdec_kernels import reference, testing
from specdec_kernels._library import CACHE_OPS

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(not sk.has_cuda_kernels(), reason="_C.so was built without CUDA kernels"),
]

append = torch.ops.specdec_kernels.kv_append_.default
truncate = torch.ops.specdec_kernels.kv_truncate_.default


def _named(case):
    return f"{case.op}-{case}"


@pytest.mark.parametrize("case", kv_cases.append_cases(), ids=str)
def test_append(case):
    check_append(append, case, "cuda")


@pytest.mark.parametrize("zero_fill", [False, True], ids=["keep", "fill"])
@pytest.mark.parametrize("case", kv_cases.truncate_cases(), ids=str)
def test_truncate(case, zero_fill):
    check_truncate(truncate, case, zero_fill, "cuda")


@pytest.mark.parametrize("seed", range(60))
def test_random(seed):
    added, cut = kv_cases.random_case(seed)
    check_append(append, added, "cuda")
    check_truncate(truncate, cut, zero_fill=True, device="cuda")


def test_many_rows():
    case = KvCase("many-rows", 3, [(8, 900, 600, 128)], [[-7, 400, 890]], torch.bfloat16)
    check_append(append, case, "cuda")
    lengths = [[900, 700, 3], [1, 699, 3]]
    case = KvCase("many-rows-cut", 3, [(8, 900, 0, 128)], lengths, torch.bfloat16, "transposed")
    check_truncate(truncate, case, zero_fill=True, device="cuda")


@pytest.mark.parametrize("case", kv_moves.every_case(), ids=str)
def test_moves(case):
    kv_moves.check(getattr(torch.ops.specdec_kernels, case.op).default, case, "cuda")


@pytest.mark.parametrize("seed", range(60))
def test_random_moves(seed):
    for case in (kv_moves.random_compact(seed), kv_moves.random_paged(seed)):
        kv_moves.check(getattr(torch.ops.specdec_kernels, case.op).default, case, "cuda")


def test_more_than_2_to_the_31_elements_apart():
    kv_cases.check_far_apart(append, truncate, "cuda")


def test_on_the_current_stream():
    """Work queued before on a side stream is seen, and nothing waits for it."""
    cache = torch.zeros(1, 1, 8, 4, device="cuda")
    entry = torch.zeros(1, 1, 2, 4, device="cuda")
    positions = torch.zeros(1, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        entry.fill_(3)
        positions.fill_(5)
        append([cache], [entry], positions)
        assert not stream.query()
    stream.synchronize()
    assert cache[0, 0, :, 0].tolist() == [0, 0, 0, 0, 0, 3, 3, 0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_another_device():
    check_append(append, KvCase("cuda1", 1, [(2, 5, 2, 8)], [[1]]), "cuda:1")
    lengths = torch.zeros(1, dtype=torch.int64, device="cuda:1")
    with pytest.raises(RuntimeError, match=r"caches\[0\] must be on the device of .*, cuda:1, got"):
        truncate([torch.zeros(1, 1, 2, 3, device="cuda:0")], lengths, lengths, True)


def test_mixed_devices_are_refused():
    cache, entry = torch.zeros(1, 1, 2, 3, device="cuda"), torch.zeros(1, 1, 1, 3, device="cuda")
    with pytest.raises(RuntimeError, match=r"caches\[0\] must be on the device of .*, cpu, got"):
        append([cache], [entry], torch.zeros(1, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"entries\[0\] must be on the device of .*, cuda, got"):
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


@pytest.mark.parametrize("count", [2, 100, 300])
def test_graph_replay(count):
    """One captured round, replayed with positions and lengths that change on the device."""
    caches = [torch.randn(3, 2, 11, 16, device="cuda").half() for _ in range(count)]
    entries = [torch.randn(3, 4, 2, 16, device="cuda").half().transpose(1, 2) for _ in caches]
    lengths, kept = (torch.zeros(3, dtype=torch.int64, device="cuda") for _ in range(2))

    def one_round():
        append(caches, entries, lengths)
        lengths.add_(4)
        truncate(caches, lengths, kept, True)

    graph = _capture(one_round)
    want = [c.cpu() for c in caches]
    for start, new in (([0, 3, 9], [2, 7, 20]), ([-2, 6, 0], [1, 8, 4])):
        lengths.copy_(torch.tensor(start))
        kept.copy_(torch.tensor(new))
        for entry in entries:
            entry.add_(1)
        graph.replay()
        now = torch.tensor(start)
        reference.kv_append_(want, [e.cpu() for e in entries], now)
        now += 4
        reference.kv_truncate_(want, now, torch.tensor(new), True)
        for i, (got, cache) in enumerate(zip(caches, want, strict=True)):
            kv_cases.same(f"caches[{i}]", got, cache)
        assert lengths.tolist() == now.tolist()


def test_graph_replay_of_a_compaction():
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
            kv_cases.same(f"caches[{i}]", got, cache)


def test_opcheck():
    caches = [torch.zeros(2, 2, 6, 3, device="cuda"), torch.zeros(2, 1, 4, 5, device="cuda")]
    entries = [torch.ones(2, 2, 3, 3, device="cuda"), torch.ones(2, 1, 1, 5, device="cuda")]
    index = [torch.tensor(v, device="cuda") for v in ([4, -1], [4, 2], [1, 3])]
    torch.library.opcheck(append, (caches, entries, index[0]))
    torch.library.opcheck(truncate, (caches, index[1], index[2], True))


@pytest.mark.parametrize("case", [c for op in CACHE_OPS for c in testing.cases(op)], ids=_named)
def test_cache_ops_agree_with_the_cpu(case):
    """Of every op all arguments, of which some are changed, and what it returns."""
    op = getattr(torch.ops.specdec_kernels, case.op).default
    got, want = case.args("cuda"), case.args()
    found, wanted = tree_leaves((got, op(*got))), tree_leaves((want, op(*want)))
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        if isinstance(y, torch.Tensor):
            kv_cases.same(f"tensor {i}", x.cpu(), y)


@pytest.mark.parametrize("file", ["on_device.py", "trees_on_device.py", "kv_on_device.py"])
def test_triton_ops_on_the_device(file):
    """Through Triton's compiler, in a process without its interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", str(HERE / file)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
