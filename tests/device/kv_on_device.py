"""The cache ops on a CUDA device through Triton's compiler: run by test_cuda.py.

A process of its own, as on_device.py is.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from support import kv_cases, kv_moves
from support.kv_cases import KvCase, check_append, check_truncate
from torch.utils._pytree import tree_leaves

from specdec_kernels import reference, testing
from specdec_kernels._library import CACHE_OPS, OPS

pytest.importorskip("triton")


def op(name):
    return getattr(importlib.import_module(f"specdec_kernels.triton.{OPS[name]}"), name)


@pytest.mark.parametrize("case", [c for o in CACHE_OPS for c in testing.cases(o)], ids=str)
def test_agrees_on_all_arguments(case):
    got, want = case.args("cuda"), case.args()
    found = tree_leaves((got, op(case.op)(*got)))
    wanted = tree_leaves((want, getattr(reference, case.op)(*want)))
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        if torch.is_tensor(y):
            kv_cases.same(f"tensor {i}", x, y)


@pytest.mark.parametrize("case", kv_cases.append_cases(), ids=str)
def test_append(case):
    check_append(op("kv_append_"), case, "cuda")


@pytest.mark.parametrize("case", kv_cases.truncate_cases(), ids=str)
def test_truncate(case):
    check_truncate(op("kv_truncate_"), case, zero_fill=True, device="cuda")


@pytest.mark.parametrize("case", kv_moves.every_case(), ids=str)
def test_moves(case):
    kv_moves.check(op(case.op), case, "cuda")


@pytest.mark.parametrize("seed", range(60))
def test_random(seed):
    added, cut = kv_cases.random_case(seed)
    check_append(op("kv_append_"), added, "cuda")
    check_truncate(op("kv_truncate_"), cut, zero_fill=True, device="cuda")
    for case in (kv_moves.random_compact(seed), kv_moves.random_paged(seed)):
        kv_moves.check(op(case.op), case, "cuda")


def test_many_rows():
    case = KvCase("many-rows", 3, [(8, 900, 600, 128)], [[-7, 400, 890]], torch.bfloat16)
    check_append(op("kv_append_"), case, "cuda")
    lengths = [[900, 700, 3], [1, 699, 3]]
    case = KvCase("many-rows-cut", 3, [(8, 900, 0, 128)], lengths, torch.bfloat16, "transposed")
    check_truncate(op("kv_truncate_"), case, zero_fill=True, device="cuda")


def test_more_than_2_to_the_31_elements_apart():
    kv_cases.check_far_apart(op("kv_append_"), op("kv_truncate_"), "cuda")


def test_a_table_of_another_stream_is_not_waited_for():
    """Each stream copies its own; nothing waits for the work that was queued before."""
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


@pytest.mark.parametrize("count", [2, 100])
def test_a_graph_needs_no_table_from_elsewhere(count):
    """Of entries made while it is captured; what was kept before is gone when it is replayed."""
    from specdec_kernels.triton.kv import table as kv_table

    caches = [torch.randn(3, 2, 11, 16, device="cuda").half() for _ in range(count)]
    entries = [torch.randn(3, 4, 2, 16, device="cuda").half().transpose(1, 2) for _ in caches]
    lengths, kept = (torch.zeros(3, dtype=torch.int64, device="cuda") for _ in range(2))

    def one_round():
        op("kv_append_")(caches, [e + 1 for e in entries], lengths)
        lengths.add_(4)
        op("kv_truncate_")(caches, lengths, kept, True)

    one_round()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_round()
    kv_table._uploaded.cache_clear()
    torch.full((1 << 20,), -1, device="cuda")
    want = [c.cpu() for c in caches]
    for start, new in (([0, 3, 9], [2, 7, 20]), ([-2, 6, 0], [1, 8, 4])):
        lengths.copy_(torch.tensor(start))
        kept.copy_(torch.tensor(new))
        graph.replay()
        now = torch.tensor(start)
        reference.kv_append_(want, [e.cpu() + 1 for e in entries], now)
        now += 4
        reference.kv_truncate_(want, now, torch.tensor(new), True)
        for i, (got, cache) in enumerate(zip(caches, want, strict=True)):
            kv_cases.same(f"caches[{i}]", got, cache)
        assert lengths.tolist() == now.tolist()
