"""Set up before anything imports torch or triton."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
# Threads that wait busily take the processor from the tests beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch


@pytest.fixture(autouse=True)
def _global_state():
    """No test leaves a thread count or a mode behind."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
