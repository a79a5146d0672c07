"""SGLang itself, with kernels for CPUs that stand in for those that it has for them."""

import importlib.util
import logging
import os
import sys
from pathlib import Path

import pytest

STANDIN = Path(__file__).parent / "standin"

if importlib.util.find_spec("sglang"):
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # before anything imports SGLang, which reads it once
    sys.path.append(str(STANDIN))


@pytest.fixture
def logged():
    """The warnings of the plug-in."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("specdec_sglang")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
