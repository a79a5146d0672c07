"""Times the cases of the correctness tests: a quick look at every rule, draft and filter."""

from __future__ import annotations

import proofs
import pytest

OPS = ("sample", "verify_chain", "verify_tree")
CASES = [case for op in OPS for case in proofs.cases(op, heavy=True)]


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case}")
def test_case(benchmark, case):
    args = case.args()
    benchmark.pedantic(proofs.providers(case.op)["cpp"], args, warmup_rounds=2, rounds=10)
