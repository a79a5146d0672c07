import pytest
from support import kv_cases, simt_kv
from support.providers import provider


@pytest.fixture(params=kv_cases.PROVIDERS)
def ops(request, capfd):
    """A function from the name of an op to a provider's op.

    The test fails if the undefined-behaviour sanitizer of the SIMT emulator reports something.
    """
    if request.param != "cuda":
        yield lambda name: provider(name, request.param)
        return
    yield simt_kv.library().op
    assert "runtime error" not in capfd.readouterr().err
