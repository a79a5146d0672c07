"""vLLM's own tests of its rejection sampler, with the plug-in in place of it."""

from collections import Counter

import pytest
from vllm_plugin import vllm_suite

pytest.importorskip("vllm", reason="`make more TASK=test-vllm` installs vLLM")
pytestmark = [
    pytest.mark.skipif(
        vllm_suite.source() is None,
        reason="vLLM's wheel holds no tests: VLLM_SOURCE must name a source tree of this version",
    ),
    pytest.mark.timeout(580),
]


# For each runner a file of vLLM, the least number of its tests that pass, and those that must fail
# without the plug-in (V1, on the CPU) or with a wrong verification (V2).
SUITES = {"v1": (vllm_suite.V1, 50, "test_top_k"), "v2": (vllm_suite.V2, 42, "test_stochastic")}


@pytest.mark.parametrize("runner", SUITES)
def test_those_of_vllm_pass_but_for_those_excepted_and_fail_without_the_plugin(runner, tmp_path):
    from vllm.platforms import current_platform  # noqa: PLC0415

    file, least, only = SUITES[runner]
    calls = [{"plugin": True, "only": ""}, {"plugin": False, "only": only}]
    (with_plugin, without), printed = vllm_suite.run(file, calls, tmp_path)
    counts = Counter(with_plugin.values())
    assert counts.keys() == {"passed", "excepted"}, printed[-6000:]
    assert counts["passed"] >= least, counts
    excepted = vllm_suite.excepted(file)
    left_out = {name.partition("[")[0] for name, how in with_plugin.items() if how == "excepted"}
    assert left_out == {*excepted}
    assert all(reason.count(" ") > 3 for reason in excepted.values())
    if runner == "v2" or current_platform.is_cpu():  # other platforms are not affected
        assert "failed" in without.values()
