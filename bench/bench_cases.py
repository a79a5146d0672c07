"""Times the cases of the correctness tests: a quick look at every rule, draft and filter."""

from __future__ import annotations

import pytest

from specdec_kernels import testing

OPS = ("sample", "verify_chain", "verify_tree")
CASES = [case for op in OPS for case in testing.cases(op, heavy=True)]


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case}")
def test_case(benchmark, case):
    args = case.args()
    benchmark.pedantic(testing.providers(case.op)["cpp"], args, warmup_rounds=2, rounds=10)
