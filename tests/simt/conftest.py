import pytest
from support import simt_ops


@pytest.fixture(scope="session")
def simt():
    """The CUDA kernels, compiled for the CPU."""
    if not simt_ops.available:
        pytest.skip("needs g++ and the sources of the CUDA kernels")
    return simt_ops.library()
