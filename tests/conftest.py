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
# Files in which most tests take seconds, by measurement: they enumerate trees, run programs or
# build the package.
SLOW_FILES = {
    "analysis/test_tree_acceptance.py",
    "hf/test_cli.py",
    "hf/test_cli_failures.py",
    "hf/test_tree_calls.py",
    "hf/test_trees.py",
    "project/test_providers.py",
    "project/test_package.py",
    "row/test_capability.py",
    "tree/test_tree_distribution.py",
    "tree/test_tree_negative_controls.py",
}
SLOW_ROOMS = {"benchmarks", "device"}
TOY_MODELS = {"gpt2", "qwen2", "qwen3", "gemma2"}  # beside llama, which `make quick` runs


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
    path = Path(item.path).relative_to(TESTS)
    room, file = path.parts[0], path.name
    if room in SLOW_ROOMS or str(path) in SLOW_FILES:
        yield "slow"
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
        if isinstance(value, str) and value in TOY_MODELS:
            yield "slow"
        if getattr(value, "heavy", False):
            yield "slow"


@pytest.hookimpl(tryfirst=True)  # before pytest reads the markers for -m
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(item.path).is_relative_to(TESTS):
            for marker in _markers(item):
                item.add_marker(marker)
