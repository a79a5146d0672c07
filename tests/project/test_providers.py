"""The environment variables that choose a provider and an instruction set."""

import importlib.util
import os
import subprocess
import sys

import pytest

import specdec_kernels as sk

SHOW = "import specdec_kernels as sk; print(sk.providers()['verify_chain']['cuda'])"
HAS = {"cuda": sk.has_cuda_kernels(), "triton": importlib.util.find_spec("triton") is not None}


def started_with(asked, show=SHOW, variable="SPECDEC_CUDA_PROVIDER"):
    """A new process, because the variables are read when the package is imported."""
    return subprocess.run(
        [sys.executable, "-c", show],
        env={**os.environ, variable: asked},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_cuda_kernels_come_first():
    want = next((name for name, there in HAS.items() if there), "none")
    assert started_with("").stdout.strip() == want


@pytest.mark.parametrize("asked", HAS)
def test_a_provider_that_is_asked_for_serves_or_is_reported_missing(asked):
    done = started_with(asked)
    if HAS[asked]:
        assert done.stdout.strip() == asked, done.stderr
    else:
        assert f"ImportError: SPECDEC_CUDA_PROVIDER is {asked}, but" in done.stderr


REGISTERED = """
import torch, specdec_kernels as sk
for op, served in sk.providers().items():
    has = torch._C._dispatch_has_kernel_for_dispatch_key(f"specdec_kernels::{op}", "CUDA")
    print(op, served["cuda"], has)
"""


@pytest.mark.parametrize("asked", ["", *(name for name, there in HAS.items() if there)])
def test_the_provider_that_is_reported_is_registered_for_every_op(asked):
    done = started_with(asked, REGISTERED)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {op for op, *_ in lines} == set(sk.providers()), done.stderr
    assert all(has == str(name != "none") for _, name, has in lines), done.stdout
    if asked == "triton":
        assert {name for _, name, _ in lines} == {"triton"}


def test_an_unknown_provider_is_refused():
    done = started_with("fast")
    message = "ImportError: SPECDEC_CUDA_PROVIDER must be one of cuda, triton, got fast"
    assert message in done.stderr


def test_an_unknown_instruction_set_is_refused():
    done = started_with("avx-2", variable="SPECDEC_CPU_CAPABILITY")
    message = "ImportError: SPECDEC_CPU_CAPABILITY must be one of avx512, avx2, plain, got avx-2"
    assert message in done.stderr


@pytest.mark.parametrize("asked", ["", "plain"])
def test_a_known_instruction_set_is_used(asked):
    done = started_with(
        asked, "import specdec_kernels as sk; print(sk.cpu_capability())", "SPECDEC_CPU_CAPABILITY"
    )
    widest = {"": ("avx512", "avx2", "plain"), "plain": ("plain",)}
    assert done.stdout.strip() in widest[asked], done.stderr
