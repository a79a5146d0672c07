"""Environment of every test run, and the markers by which `make quick` leaves tests out."""

import os

# Triton decides at import whether kernels are interpreted; every test of them needs that here.
os.environ.setdefault("TRITON_INTERPRET", "1")
# OpenMP threads that spin while they wait take the processor from the tests beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
# Provider in a test's parameters -> marker. "cuda" is the CUDA source, compiled for the CPU.
PROVIDERS = {"cuda": "simt", "triton": "triton"}


@pytest.fixture(autouse=True)
def _global_state():
    """Restore thread count and determinism settings, which tests may change."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def _markers(item):
    """Markers that follow from where a test is, its parameters and its fixtures."""
    room, *_, file = Path(item.path).relative_to(TESTS).parts
    if room == "simt":
        yield "simt"
    if file.startswith("test_triton"):
        yield "triton"
    if "smollm" in item.fixturenames:
        yield "model"
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for value in parameters.values():
        if isinstance(value, str) and value in PROVIDERS:
            yield PROVIDERS[value]
        if getattr(value, "heavy", False):
            yield "slow"


@pytest.hookimpl(tryfirst=True)  # before pytest reads the markers for -m
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(item.path).is_relative_to(TESTS):
            for marker in _markers(item):
                item.add_marker(marker)
