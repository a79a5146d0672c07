"""`warm_up`, with a CPU in place of the CUDA device."""

from __future__ import annotations

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import _warm_up
from specdec_kernels._library import CACHE_OPS, CPU_OPS, OPS

ON_CUDA = [op for op in OPS if op not in CPU_OPS]


@pytest.fixture
def stand_in(monkeypatch):
    """Inputs stay on the CPU, and torch.cuda says that there is a device and that it waits."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    calls = _warm_up._calls
    cpu = torch.device("cpu")
    monkeypatch.setattr(_warm_up, "_calls", lambda where, number: calls(cpu, number))
    served = {op: {"cpu": "cpp", "cuda": "cuda"} for op in ON_CUDA}
    monkeypatch.setattr(_warm_up, "providers", lambda: served)
    return waits


class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
    """The calls of this library's ops: name and arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "specdec_kernels":
            self.calls.append((func._schema.name.split("::")[1], args))
        return func(*args, **(kwargs or {}))


def test_every_op_runs_with_few_and_with_many_caches_and_is_waited_for(stand_in):
    with Recorded() as recorded:
        sk.warm_up()
    assert {op for op, _ in recorded.calls} == set(ON_CUDA)
    assert stand_in == [torch.device("cuda")] * len(ON_CUDA)
    for op in CACHE_OPS:
        few, many = (args for name, args in recorded.calls if name == op)
        lists = [[len(a) for a in args if isinstance(a, (list, tuple))] for args in (few, many)]
        assert all(n <= 64 for n in lists[0]), op
        assert all(n > 64 for n in lists[1]), op


def test_ops_without_a_provider_are_left_out(stand_in, monkeypatch):
    served = {"sample": {"cuda": "cuda"}, "tree_attention": {"cuda": "none"}}
    monkeypatch.setattr(_warm_up, "providers", lambda: served)
    with Recorded() as recorded:
        sk.warm_up("cuda:1")
    assert {op for op, _ in recorded.calls} == {"sample"}
    assert stand_in == [torch.device("cuda:1")]
    served["sample"]["cuda"], served["tree_attention"]["cuda"] = "none", "indexing"
    with pytest.raises(RuntimeError, match=r"no op runs on cuda: _C\.so has no CUDA kernels"):
        sk.warm_up()


def test_an_op_that_does_not_run_is_named_and_a_capture_refused(stand_in, monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="sample does not run on cuda:0: CUDA error: an illegal"):
        sk.warm_up("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="must be called before the capture of a CUDA graph"):
        sk.warm_up()


def test_what_is_no_cuda_device_is_refused_by_name():
    for device, got in (("x", "'x'"), ("cpu", "cpu"), ([1], "[1]")):
        with pytest.raises(ValueError) as caught:
            sk.warm_up(device)
        assert str(caught.value) == f"device must be a CUDA device, got {got}"
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="device is cuda, but torch sees no CUDA device"):
            sk.warm_up()
