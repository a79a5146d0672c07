"""Programs of Python in processes of their own, also on another instruction set of the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import specdec_kernels


def output_of(*arguments, timeout: float | None = None, **variables: str) -> str:
    """What Python prints with these arguments; it fails unless it ends with status 0.

    Args:
        arguments: of the command line; the program may import the tests.
        timeout: seconds.
        variables: of the environment.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


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
    return output_of("-c", code, SPECDEC_CPU_CAPABILITY=capability).strip()
