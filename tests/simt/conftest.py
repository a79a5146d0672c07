import pytest
from simt import emulator


@pytest.fixture(scope="session")
def simt():
    """The CUDA kernels, compiled for the CPU."""
    if not emulator.available:
        pytest.skip("needs g++ and the sources of the CUDA kernels")
    return emulator.library()
