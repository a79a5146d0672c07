"""`sample` and `verify_chain` on a CUDA device against the C++ kernels: run by test_cuda.py.

A process of its own: the suite's other tests need Triton's interpreter, this one its compiler.
"""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from providers import identical, same_outputs

import specdec_kernels as sk
from specdec_kernels import testing

OPS = ("sample", "verify_chain")
CASES = [case for op in OPS for case in testing.cases(op, heavy=True)]
SOME = CASES[:: max(1, len(CASES) // 40)]
NATIVE = [(s, team) for s in ("lazy", "parallel") for team in (1, 2, 8)]
PROVIDERS = [
    *(["cuda"] if sk.has_cuda_kernels() else []),
    *(["triton"] if importlib.util.find_spec("triton") else []),
]

each_provider = pytest.mark.parametrize("name", PROVIDERS)


def implementation(name, op):
    """What serves the op: the CUDA kernels behind the dispatcher, or Triton's own function."""
    if name == "cuda":
        assert sk.providers()[op]["cuda"] == "cuda"
        return getattr(torch.ops.specdec_kernels, op).default
    module = {"sample": "sample", "verify_chain": "chain"}[op]
    return getattr(importlib.import_module(f"specdec_kernels.triton.{module}"), op)


def on_device(name, case):
    return [t.cpu() for t in implementation(name, case.op)(*case.args("cuda"))]


@each_provider
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_cpu(name, case):
    want = testing.providers(case.op)["cpp"](*case.args())
    same_outputs(case.op, on_device(name, case), want)


@pytest.fixture
def schedule():
    """Forces how the CUDA kernels share work out."""
    force = torch.ops.specdec_kernels.set_cuda_schedule.default
    yield force
    force("auto", 0)


@pytest.mark.skipif("cuda" not in PROVIDERS, reason="_C.so was built without CUDA kernels")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_schedules_and_teams_agree_bit_for_bit(case, schedule):
    want = on_device("cuda", case)
    for forced in NATIVE:
        schedule(*forced)
        identical(case.op, on_device("cuda", case), want)


@pytest.mark.skipif("triton" not in PROVIDERS, reason="Triton is not installed")
@pytest.mark.parametrize("case", SOME, ids=str)
def test_schedules_of_triton_agree_bit_for_bit(case, monkeypatch):
    from specdec_kernels.triton import launch  # noqa: PLC0415 - nothing of Triton before the ops

    results = []
    for split in (False, True):
        monkeypatch.setattr(launch, "force_row_parallel", split)
        results.append(on_device("triton", case))
    identical(case.op, *results)


@each_provider
@pytest.mark.parametrize("case", SOME, ids=str)
def test_again_gives_the_same_bits(name, case):
    want = on_device(name, case)
    for _ in range(4):
        identical(case.op, on_device(name, case), want)


@each_provider
def test_calls_on_two_streams_do_not_disturb_each_other(name):
    chosen = [c for c in CASES if c.rows > 1][:8]
    want = [on_device(name, c) for c in chosen]
    inputs = [c.args("cuda") for c in chosen]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(10):
        got = []
        for i, (case, args) in enumerate(zip(chosen, inputs, strict=True)):
            with torch.cuda.stream(streams[i % 2]):
                got.append(implementation(name, case.op)(*args))
        torch.cuda.synchronize()
        for case, g, w in zip(chosen, got, want, strict=True):
            identical(case.op, [t.cpu() for t in g], w)


@each_provider
def test_a_call_reads_what_the_call_before_it_wrote(name):
    """Launches may overlap: each must wait for the inputs that another kernel still writes."""
    case = next(c for c in testing.cases("verify_chain") if c.rows > 1)
    args = list(case.args("cuda"))
    call = implementation(name, "verify_chain")
    target = args[0].clone()
    for i in range(20):
        shifted = target.roll(i, -1)
        want = [t.cpu() for t in call(shifted, *args[1:])]
        args[0].zero_()
        args[0].copy_(shifted)
        identical("verify_chain", [t.cpu() for t in call(*args)], want)


def capture(name, op, args):
    call = implementation(name, op)
    call(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*args)
    return graph, out


@each_provider
@pytest.mark.parametrize("op", OPS)
def test_graph_capture_and_replay(name, op):
    """Inputs that change between replays; one launch after the other, and out of order."""
    chosen = [c for c in testing.cases(op) if c.rows > 1][:6]
    graphs = []
    for case in chosen:
        args = case.args("cuda")
        graphs.append((case, args, *capture(name, op, args)))
    for turn in range(3):
        for case, args, graph, out in graphs[:: -1 if turn % 2 else 1]:
            args[0].copy_(args[0].roll(1, 0))
            for t in out:
                t.zero_()
            graph.replay()
            want = [t.cpu() for t in implementation(name, op)(*args)]
            identical(case.op, [t.cpu() for t in out], want)


@pytest.mark.skipif("cuda" not in PROVIDERS, reason="_C.so was built without CUDA kernels")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("forced", NATIVE, ids=lambda f: f"{f[0]}-team{f[1]}")
def test_every_schedule_is_captured_and_replayed(op, forced, schedule):
    case = next(c for c in testing.cases(op) if c.rows > 1)
    want = on_device("cuda", case)
    schedule(*forced)
    graph, out = capture("cuda", op, case.args("cuda"))
    for _ in range(5):
        for t in out:
            t.zero_()
        graph.replay()
        identical(op, [t.cpu() for t in out], want)
