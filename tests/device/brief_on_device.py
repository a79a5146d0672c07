"""Twenty cases of `sample` and `verify_chain`: what bench/gpu.sh checks before it times."""

from __future__ import annotations

import proofs
import pytest
import torch
from device.on_device import CASES, LARGE, on_device
from proofs import assert_outputs_close

import specdec_kernels as sk

BRIEF = [*CASES[:: len(CASES) // 13][:13], *LARGE]

pytestmark = pytest.mark.skipif(not sk.has_cuda_kernels(), reason="_C.so has no CUDA kernels")


@pytest.mark.parametrize("case", BRIEF, ids=str)
def test_cuda_agrees_with_the_cpu_in_brief(case):
    want = proofs.providers(case.op)["cpp"](*case.args())
    assert_outputs_close(case.op, on_device("cuda", case), want)


@pytest.mark.parametrize("value", [float("nan"), -0.5, 1.5, float("inf")], ids=str)
def test_cuda_reads_nothing_astray_for_a_uniform_outside_the_unit_interval(value):
    target = torch.randn(2, 3, 4097, generator=torch.Generator().manual_seed(0))
    tokens, seeds = torch.zeros(2, 2, dtype=torch.int64), torch.arange(2)
    uniforms = torch.full((2, 3), value, dtype=torch.float64)

    def verified(device):
        given = [t.to(device) for t in (target, tokens, target[:, 1:])]
        rest = dict(seeds=seeds, positions=seeds, uniforms=uniforms)
        verdict = sk.verify_chain(*given, **{k: v.to(device) for k, v in rest.items()})
        return verdict.tokens.tolist(), verdict.status.tolist()

    assert verified("cuda") == verified("cpu")
