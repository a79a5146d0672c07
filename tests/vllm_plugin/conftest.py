"""What the plug-in says to the users of vLLM."""

import logging

import pytest


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
