"""The environment variables that choose a provider and an instruction set."""

import functools
import importlib.util
import os
import subprocess
import sys

import pytest

import specdec_kernels as sk

pytestmark = pytest.mark.slow

SHOW = """
import torch, specdec_kernels as sk
print(sk.cpu_capability())
for op, served in sk.providers().items():
    has = torch._C._dispatch_has_kernel_for_dispatch_key(f"specdec_kernels::{op}", "CUDA")
    print(op, served["cuda"], has)
"""
HAS = {"cuda": sk.has_cuda_kernels(), "triton": importlib.util.find_spec("triton") is not None}


@functools.cache
def started_with(provider, capability):
    """A new process, because the variables are read when the package is imported.

    A start takes seconds, so tests of the same values read one process.
    """
    variables = {"SPECDEC_CUDA_PROVIDER": provider, "SPECDEC_CPU_CAPABILITY": capability}
    return subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def served(done):
    """Op -> (the provider that is reported for CUDA, whether the dispatcher has a kernel)."""
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    return {op: (name, has == "True") for op, name, has in rows}


def test_the_cuda_kernels_come_first():
    done = started_with("", "")
    want = next((name for name, there in HAS.items() if there), "none")
    assert served(done)["verify_chain"][0] == want, done.stderr


@pytest.mark.parametrize("asked", HAS)
def test_a_provider_that_is_asked_for_serves_or_is_reported_missing(asked):
    done = started_with(asked, "")
    if HAS[asked]:
        assert served(done)["verify_chain"][0] == asked, done.stderr
    else:
        assert f"ImportError: SPECDEC_CUDA_PROVIDER is {asked}, but" in done.stderr


@pytest.mark.parametrize("asked", ["", *(name for name, there in HAS.items() if there)])
def test_the_provider_that_is_reported_is_registered_for_every_op(asked):
    done = started_with(asked, "")
    ops = served(done)
    assert set(ops) == set(sk.providers()), done.stderr
    assert all(has == (name != "none") for name, has in ops.values()), done.stdout
    if asked == "triton":
        assert {name for name, _ in ops.values()} == {"triton"}


def test_an_unknown_provider_is_refused():
    done = started_with("fast", "")
    message = "ImportError: SPECDEC_CUDA_PROVIDER must be one of cuda, triton, got fast"
    assert message in done.stderr


def test_an_unknown_instruction_set_is_refused():
    done = started_with("", "avx-2")
    message = "ImportError: SPECDEC_CPU_CAPABILITY must be one of avx512, avx2, plain, got avx-2"
    assert message in done.stderr


@pytest.mark.parametrize("asked", ["", "plain"])
def test_a_known_instruction_set_is_used(asked):
    done = started_with("", asked)
    widest = {"": ("avx512", "avx2", "plain"), "plain": ("plain",)}
    assert done.stdout.partition("\n")[0] in widest[asked], done.stderr
