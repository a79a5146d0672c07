"""The plug-in in this process, and what it says to the users of vLLM."""

import logging

import pytest
from specdec_vllm import Settings, vllm_interface
from specdec_vllm.plugin import install


@pytest.fixture
def logged():
    """The messages of its logger."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("vllm.plugins.specdec_vllm")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@pytest.fixture(scope="session")
def kernels():
    """vLLM's own for the platform."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


@pytest.fixture
def plugin():
    """Installs the plug-in with the settings it is called with, until the test ends."""
    yield lambda **given: install(Settings(**given))
    vllm_interface.restore()
