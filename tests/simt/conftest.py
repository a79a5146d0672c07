import pytest
from support import simt_ops


@pytest.fixture(scope="session")
def simt():
    """The CUDA kernels, compiled for the CPU."""
    return simt_ops.library()
