"""vLLM's own tests of its rejection sampler, with the plug-in in place of it."""

from collections import Counter

import pytest
from support import vllm_suite

pytest.importorskip("vllm", reason="`make test-vllm` installs vLLM in its own environment")
pytestmark = [
    pytest.mark.skipif(
        vllm_suite.source() is None,
        reason="vLLM's wheel holds no tests: VLLM_SOURCE must name a source tree of this version",
    ),
    pytest.mark.timeout(580),
]

FILE = "tests/v1/sample/test_rejection_sampler.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Those of all tests with the plug-in, of some without it, and what pytest printed."""
    calls = [{"plugin": True, "only": ""}, {"plugin": False, "only": "test_top_k"}]
    found, printed = vllm_suite.run(FILE, calls, tmp_path_factory.mktemp("suite"))
    return *found, printed


def test_they_pass_but_for_those_excepted_by_name(outcomes):
    with_plugin, _, printed = outcomes
    counts = Counter(with_plugin.values())
    assert counts.keys() == {"passed", "excepted"}, printed[-6000:]
    assert counts["passed"] >= 50, counts
    print(f"{FILE}: {dict(counts)}")


def test_every_exception_names_a_test_and_a_reason(outcomes):
    excepted = vllm_suite.excepted(FILE)
    names = {name.partition("[")[0] for name, how in outcomes[0].items() if how == "excepted"}
    assert names == excepted.keys()
    assert all(reason.count(" ") > 3 for reason in excepted.values())


def test_without_the_plugin_some_of_them_fail_on_the_cpu(outcomes):
    from vllm.platforms import current_platform  # noqa: PLC0415

    if not current_platform.is_cpu():
        pytest.skip("other platforms are not affected")
    assert "failed" in outcomes[1].values()
