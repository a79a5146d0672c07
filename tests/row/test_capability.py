"""The CPU kernels are built for several instruction sets; each runs here in its own process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
from proofs import assert_outputs_close, assert_outputs_equal
from support.sources import ROOT

import specdec_kernels

pytestmark = pytest.mark.full  # three processes that import everything

CODE = """
import pickle, sys, torch, specdec_kernels
import proofs
out = {
    (case.op, case.id): [t.float() if t.dtype == torch.bfloat16 else t for t in
              proofs.providers(case.op)["cpp"](*case.args())]
    for op in OPS for case in proofs.cases(op, heavy=True)
}
pickle.dump((specdec_kernels.cpu_capability(), out), sys.stdout.buffer)
"""
OPS = ("sample", "verify_chain", "verify_tree", "expand_tree")
LEVELS = ["plain", "avx2", "avx512"]


@pytest.fixture(scope="module")
def results():
    """The outputs of each instruction set, by op and case."""
    found = {}
    for level in LEVELS:
        path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        chosen = {"SPECDEC_CPU_CAPABILITY": level, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
        env = {**os.environ, **chosen}
        done = subprocess.run(
            [sys.executable, "-c", f"OPS = {OPS}\n{CODE}"],
            env=env, capture_output=True, check=True,
        )  # fmt: skip
        capability, outputs = pickle.loads(done.stdout)
        found[capability] = outputs
    return found


def test_every_set_up_to_the_widest_can_be_asked_for(results):
    here = LEVELS.index(specdec_kernels.cpu_capability())
    assert set(results) == set(LEVELS[: here + 1])


def test_plain_agrees_with_the_widest(results):
    widest = results[specdec_kernels.cpu_capability()]
    for at, outputs in widest.items():
        assert_outputs_close(at[0], results["plain"][at], outputs)


def test_avx2_and_avx512_agree_bit_for_bit(results):
    if "avx512" not in results:
        pytest.skip("this processor has no AVX-512")
    for at, outputs in results["avx2"].items():
        assert_outputs_equal(at[0], outputs, results["avx512"][at])
