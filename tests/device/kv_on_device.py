"""Triton's cache ops on a CUDA device, compiled by Triton, by the tests of the CUDA kernels.

test_cuda.py and bench/gpu.sh run this file in a process of its own, as on_device.py.
"""

from __future__ import annotations

import importlib

import pytest
from device.test_cuda import (
    test_a_call_runs_on_the_current_stream_and_does_not_wait,
    test_a_captured_round_replays_with_other_lengths,
    test_random_caches_and_paths,
    test_the_device_addresses_more_than_2_to_the_31_elements,
    test_the_device_leaves_the_bytes_of_the_reference,
)

from specdec_kernels._library import OPS

pytest.importorskip("triton")

__all__ = [
    "test_a_call_runs_on_the_current_stream_and_does_not_wait",
    "test_a_captured_round_replays_with_other_lengths",
    "test_random_caches_and_paths",
    "test_the_device_addresses_more_than_2_to_the_31_elements",
    "test_the_device_leaves_the_bytes_of_the_reference",
]


@pytest.fixture
def op():
    return lambda name: getattr(
        importlib.import_module(f"specdec_kernels.triton.{OPS[name]}"), name
    )


@pytest.fixture
def forget():
    from specdec_kernels.triton.kv import table as kv_table  # noqa: PLC0415 - needs Triton

    return kv_table._uploaded.cache_clear
