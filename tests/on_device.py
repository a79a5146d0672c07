"""`sample` and `verify_chain` on a CUDA device against the C++ kernels: run by test_cuda.py.

A process of its own: the suite's other tests need Triton's interpreter, this one its compiler.
"""

from __future__ import annotations

import pytest
import torch
from providers import identical, same_outputs

from specdec_kernels import testing

OPS = ("sample", "verify_chain")
CASES = [case for op in OPS for case in testing.cases(op, heavy=True)]


def on_device(case):
    return getattr(torch.ops.specdec_kernels, case.op).default(*case.args("cuda"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_cpu(case):
    want = testing.providers(case.op)["cpp"](*case.args())
    same_outputs(case.op, [t.cpu() for t in on_device(case)], want)


@pytest.mark.parametrize("case", CASES[:: len(CASES) // 24], ids=str)
def test_schedules_agree_bit_for_bit(case, monkeypatch):
    from specdec_kernels.triton import launch  # noqa: PLC0415 - nothing of Triton before the ops

    results = []
    for split in (False, True):
        monkeypatch.setattr(launch, "force_row_parallel", split)
        results.append([t.cpu() for t in on_device(case)])
    identical(case.op, *results)


@pytest.mark.parametrize("op", OPS)
def test_graph_capture_and_replay(op):
    case = next(c for c in testing.cases(op) if c.rows > 1)
    args = case.args("cuda")
    call = getattr(torch.ops.specdec_kernels, op).default
    want = [t.cpu() for t in call(*args)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*args)
    for t in out:
        t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    identical(op, [t.cpu() for t in out], want)
