import pytest
from kv import edge_cases
from simt import kv_emulator
from support.providers import provider


@pytest.fixture(params=edge_cases.PROVIDERS)
def ops(request, capfd):
    """A function from the name of an op to a provider's op.

    The test fails if the undefined-behaviour sanitizer of the SIMT emulator reports something.
    """
    if request.param != "cuda":
        yield lambda name: provider(name, request.param)
        return
    yield kv_emulator.library().op
    assert "runtime error" not in capfd.readouterr().err
