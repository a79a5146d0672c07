"""The CPU kernels on one of the instruction sets that they are built for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.sources import ROOT

import specdec_kernels


def run_on(capability: str, code: str) -> str:
    """What Python code prints in a process of this instruction set; skips where there is none.

    Args:
        capability: a value of SPECDEC_CPU_CAPABILITY.
        code: may import the tests.
    """
    widest = specdec_kernels.cpu_capability()
    if capability != "plain" and widest == "plain":
        pytest.skip("this processor has no AVX2")
    if capability not in ("plain", "avx2") and widest != "avx512":
        pytest.skip("this processor has no AVX-512")
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    chosen = {"SPECDEC_CPU_CAPABILITY": capability, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **chosen}, capture_output=True,
        text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
