"""The ops of this folder on each instruction set of the CPU, in a process of its own.

The other tests of the folder run on the widest one, so `make test` runs what is narrower than any
of today's servers, and `make test-all` all of them.
"""

from __future__ import annotations

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
# Panels of another width are those of another instruction set, and refused.
PROGRAM = """
import importlib, sys
import torch
import specdec_kernels as sk

for file in sys.argv[1:]:
    importlib.import_module(f"forward.test_{file}").on_another_instruction_set()
panels, wrong = sk.pack_linear(torch.ones(40, 3)), torch.zeros(1, 3, 12)
try:
    sk.packed_linear(torch.ones(1, 3), panels._replace(panels=wrong))
except RuntimeError as error:
    print(sk.cpu_capability(), error)
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
    printed = output_of("-c", PROGRAM, *FILES[capability], SPECDEC_CPU_CAPABILITY=capability)
    used, _, error = printed.strip().partition(" ")
    width = {"plain": 8, "avx2": 16}.get(capability, 32)
    assert used == (capability if capability in IN_TEST else "avx512")
    assert error == (
        f"panels must be [{-(-40 // width)}, 3, {width}] for the instruction set of this process, "
        "got [1, 3, 12]"
    )
