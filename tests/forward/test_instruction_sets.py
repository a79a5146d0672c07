"""The ops of this folder on each instruction set of the CPU, in a process of its own.

The other tests of the folder run on the widest one, so `make test` runs what is narrower than any
of today's servers, and `make test-all` all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import output_of

import specdec_kernels

# A value of SPECDEC_CPU_CAPABILITY -> the files whose ops have code of their own for it.
FILES = {
    "plain": ("linear", "attention", "decoder_layer"),
    "avx2": ("linear", "decoder_layer"),
    "avx512": ("linear", "attention", "decoder_layer"),
    "avx512_bf16": ("linear",),
    "amx_bf16": ("linear",),
}
IN_TEST = ("plain", "avx2")
PROGRAM = """
import specdec_kernels as sk
import torch

print(sk.cpu_capability(), sk.pack_linear(torch.ones(40, 3)).panels.shape[2])
"""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "capability", [pytest.param(c, marks=[] if c in IN_TEST else [pytest.mark.full]) for c in FILES]
)
def test_every_instruction_set_keeps_the_contract(capability):
    widest = specdec_kernels.cpu_capability()
    if capability != "plain" and widest == "plain":
        pytest.skip("this processor has no AVX2")
    if capability not in IN_TEST and widest != "avx512":
        pytest.skip("this processor has no AVX-512")
    width = {"plain": 8, "avx2": 16}.get(capability, 32)
    used = capability if capability in IN_TEST else "avx512"
    printed = output_of("-c", PROGRAM, SPECDEC_CPU_CAPABILITY=capability)
    assert printed.split() == [used, str(width)]
    files = [Path(__file__).parent / f"test_{file}.py" for file in FILES[capability]]
    command = ("-m", "pytest", "-q", "-n", "0", "-m", "not full and not build and not slow")
    print(output_of(*command, *files, SPECDEC_CPU_CAPABILITY=capability))
