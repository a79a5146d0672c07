"""Triton's cache ops on a CUDA device, compiled by Triton.

test_cuda.py and bench/gpu.sh run this file in a process of its own, as on_device.py.
"""

from __future__ import annotations

import importlib

import proofs
import pytest
import torch
from support import kv_cases, kv_path_cases
from support.kv_buffers import check, check_far_apart, same

from specdec_kernels import reference
from specdec_kernels._library import CACHE_OPS, OPS

pytest.importorskip("triton")


def op(name):
    return getattr(importlib.import_module(f"specdec_kernels.triton.{OPS[name]}"), name)


CASES = [
    *(c for o in CACHE_OPS for c in proofs.cases(o)),
    *kv_cases.append_cases(),
    *kv_cases.truncate_cases(),
    *kv_path_cases.move_cases(),
    *kv_cases.large_cases(),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}{case}")
def test_leaves_the_bytes_of_the_reference(case):
    check(op(case.op), case, "cuda")


@pytest.mark.parametrize("seed", range(60))
def test_random_caches_and_paths(seed):
    cases = *kv_cases.random_append_and_truncate(seed), *kv_path_cases.random_moves(seed)
    for case in cases:
        check(op(case.op), case, "cuda")


def test_addresses_beyond_2_to_the_31_elements():
    check_far_apart(op("kv_append_"), op("kv_truncate_"), "cuda")


def test_a_call_does_not_wait_for_the_table_of_another_stream():
    """Each stream copies its own table, so that no call waits for work queued before."""
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
def test_a_captured_graph_holds_its_own_table(count):
    """The entries are allocated during capture, and the cached tables are gone before replay."""
    from specdec_kernels.triton.kv import table as kv_table  # noqa: PLC0415 - needs Triton

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
            same(f"caches[{i}]", got, cache)
        assert lengths.tolist() == now.tolist()
