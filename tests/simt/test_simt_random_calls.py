"""Random calls of the CUDA source beside the C++ kernels; random_calls.py makes thousands."""

from collections import Counter

import pytest
from simt import random_calls

from specdec_kernels.arguments.rules import RULES, TREE_RULES

SEED = 34


def reached_by(simt, calls):
    reached = Counter()
    for i in calls:
        random_calls.compare(simt, SEED, i, reached)
    return reached


def test_random_calls_give_the_tokens_of_the_cpu_kernels(simt):
    reached = reached_by(simt, range(24))
    assert sum(n for (group, _), n in reached.items() if group == "calls") == 24


@pytest.mark.full
def test_random_calls_reach_every_rule_and_filter(simt):
    reached = reached_by(simt, range(600))
    wanted = {
        "rule": ["sample cdf", "sample gumbel", *(f"chain {rule}" for rule in RULES),
                 *(f"tree {rule}" for rule in TREE_RULES)],
        "filter": ["none", "temperature", "top_k", "top_p", "min_p"], "kind": ["logits", "probs"],
        "dtype": ["float32", "bfloat16", "float16"], "warp tiles": ["one", "several"],
        "rows": ["aligned to 16 bytes", "at odd addresses", "empty batch"],
        "draft": ["none", "rows", "sampled", "sparse", "rows, mapped", "sampled, mapped"],
    }  # fmt: skip
    missing = [(group, name) for group in wanted for name in wanted[group]
               if not reached[group, name]]  # fmt: skip
    assert not missing
    assert reached["by rounding", "empty residual"] <= 2
