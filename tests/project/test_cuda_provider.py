"""Who serves the ops on CUDA devices, and how one is asked for."""

import importlib.util
import os
import subprocess
import sys

import pytest

import specdec_kernels as sk

SHOW = "import specdec_kernels as sk; print(sk.providers()['verify_chain']['cuda'])"
HAS = {"cuda": sk.has_cuda_kernels(), "triton": importlib.util.find_spec("triton") is not None}


def started_with(asked, show=SHOW):
    return subprocess.run(
        [sys.executable, "-c", show],
        env={**os.environ, "SPECDEC_CUDA_PROVIDER": asked},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_cuda_kernels_come_first():
    want = next((name for name, there in HAS.items() if there), "none")
    assert started_with("").stdout.strip() == want


@pytest.mark.parametrize("asked", HAS)
def test_what_is_asked_for_serves_or_is_missed(asked):
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
def test_who_is_named_is_registered_for_every_op(asked):
    done = started_with(asked, REGISTERED)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {op for op, *_ in lines} == set(sk.providers()), done.stderr
    assert all(has == str(name != "none") for _, name, has in lines), done.stdout
    if asked == "triton":
        assert {name for _, name, _ in lines} == {"triton"}


def test_another_name_is_refused():
    done = started_with("fast")
    assert "SPECDEC_CUDA_PROVIDER must be one of cuda, triton, got fast" in done.stderr
