"""vLLM's own tests of its rejection sampler, with the plug-in in place of it."""

from collections import Counter

import pytest
from support import vllm_suite

pytest.importorskip("vllm", reason="`make more TASK=test-vllm` installs vLLM")
pytestmark = [
    pytest.mark.skipif(
        vllm_suite.source() is None,
        reason="vLLM's wheel holds no tests: VLLM_SOURCE must name a source tree of this version",
    ),
    pytest.mark.timeout(580),
]


@pytest.fixture(scope="module")
def v1(tmp_path_factory):
    """Outcomes of all tests with the plug-in, of some without it, and what pytest printed."""
    calls = [{"plugin": True, "only": ""}, {"plugin": False, "only": "test_top_k"}]
    found, printed = vllm_suite.run(vllm_suite.V1, calls, tmp_path_factory.mktemp("v1"))
    return *found, printed


@pytest.fixture(scope="module")
def v2(tmp_path_factory):
    """The same, and without the plug-in a wrong verification."""
    calls = [{"plugin": True, "only": ""}, {"plugin": False, "only": "test_stochastic"}]
    found, printed = vllm_suite.run(vllm_suite.V2, calls, tmp_path_factory.mktemp("v2"))
    return *found, printed


@pytest.mark.parametrize(("runner", "least"), [("v1", 50), ("v2", 42)])
def test_they_pass_but_for_those_excepted_by_name(request, runner, least):
    with_plugin, *_, printed = request.getfixturevalue(runner)
    counts = Counter(with_plugin.values())
    assert counts.keys() == {"passed", "excepted"}, printed[-6000:]
    assert counts["passed"] >= least, counts


@pytest.mark.parametrize(
    ("runner", "file"), [("v1", vllm_suite.V1), ("v2", vllm_suite.V2)], ids=["v1", "v2"]
)
def test_every_exception_names_a_test_and_a_reason(request, runner, file):
    excepted = vllm_suite.excepted(file)
    found = request.getfixturevalue(runner)[0]
    assert {name.partition("[")[0] for name, how in found.items() if how == "excepted"} == {
        *excepted
    }
    assert all(reason.count(" ") > 3 for reason in excepted.values())


def test_without_the_plugin_some_of_them_fail_on_the_cpu(v1):
    from vllm.platforms import current_platform  # noqa: PLC0415

    if not current_platform.is_cpu():
        pytest.skip("other platforms are not affected")
    assert "failed" in v1[1].values()


def test_a_verification_with_another_draft_fails_those_of_v2(v2):
    assert {*v2[1].values()} >= {"failed", "excepted"}
