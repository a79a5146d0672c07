"""Environment of every test run, and the markers by which `make quick` leaves tests out."""

import atexit
import functools
import gc
import os
import re

if "PYTEST_XDIST_WORKER" in os.environ:
    # To free every object of a run takes a process ten seconds. What is registered first runs last.
    atexit.register(os._exit, 0)

# Triton decides at import whether kernels are interpreted; every test of them needs that here.
os.environ.setdefault("TRITON_INTERPRET", "1")
# OpenMP threads that spin while they wait take the processor from the tests beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from pathlib import Path

import pytest
import torch
from support import lanes, shared_build, unchanged

from specdec_kernels.arguments.rules import ALL_RULES, TRITON_RULES

# Threads of one process would wait for the processors that the tests of another use.
torch.set_num_threads(
    max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
)

TESTS = Path(__file__).parent
# Provider in a test's parameters -> marker. "cuda" is the CUDA source, compiled for the CPU.
PROVIDERS = {"cuda": "simt", "triton": "triton"}
# Whole rooms that `make quick` leaves out, and whose modules take seconds to import.
SLOW_ROOMS = {"benchmarks", "device", "sharded"}
# `make quick` runs what is marked `quick` in this room, and imports nothing else of it.
LOOP = "hf"
# A file whose every test is marked `build`, so that other lanes need not import it.
BUILDS = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.build\b", re.M)
# Beside llama and t5, which `make quick` runs.
TOY_MODELS = {"gpt2", "qwen2", "qwen3", "gemma2", "bart", "whisper"}


pytest_addoption = unchanged.pytest_addoption


def pytest_configure(config):
    shared_build.provide_folder(config)
    unchanged.configure(config)


@pytest.fixture(autouse=True)
def _global_state():
    """Seed the default generator; restore thread count and determinism, which tests may change."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if torch.are_deterministic_algorithms_enabled():  # the call imports inductor
        torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@functools.cache
def _place(path):
    """The path of a test below this folder, or None where it is elsewhere."""
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else None


def _markers(item):
    """Markers that follow from where a test is, its parameters and its fixtures."""
    room, file = _place(item.path).split("/")[0], item.path.name
    if room in SLOW_ROOMS or (room == LOOP and not item.get_closest_marker("quick")):
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
        if room == "kv" and value == "cuda":
            yield "build"  # of an emulator for these ops alone
        if isinstance(value, str) and value in TOY_MODELS:
            yield "slow"
        if getattr(value, "heavy", False):
            yield "slow"


def pytest_ignore_collect(collection_path, config):
    """Do not import what `make quick` and `make test` leave out."""
    left_out, is_test = config.option.markexpr, collection_path.match("test_*.py")
    if "not build" in left_out and is_test and BUILDS.search(collection_path.read_text()):
        return True
    rooms = SLOW_ROOMS if "not slow" in left_out else set()
    rooms = rooms | {"simt"} if "not simt" in left_out else rooms
    if collection_path.parent == TESTS:
        return True if collection_path.name in rooms else None
    if "not slow" in left_out and collection_path.parent == TESTS / LOOP:
        return True if is_test and "mark.quick" not in collection_path.read_text() else None
    return None


def _is_served(item):
    """Whether the provider in the parameters of a test has the rule among them."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    words = {x for x in values if isinstance(x, str)}
    lacking = {"verify_tree", *ALL_RULES}.difference(TRITON_RULES)
    return "triton" not in words or not words & lacking


@pytest.hookimpl(tryfirst=True)  # before pytest reads the markers for -m
def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if not _place(item.path) or _is_served(item)]
    ours = [item for item in items if _place(item.path)]
    for item in ours:
        for marker in sorted(set(_markers(item))):
            item.add_marker(marker)
    for item, marker in lanes.leave_out(ours):
        item.add_marker(marker)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """To search for garbage takes seconds here, and finds none: what is loaded stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(700, 10, 50)  # a whole search takes long among so many models
        gc.enable()
        atexit.register(gc.unfreeze)  # so that libraries find nothing leaked at the end
