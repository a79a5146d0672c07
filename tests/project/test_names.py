"""Ops take names as numbers: both languages agree on them, and an unknown name is told."""

import re
from pathlib import Path

import pytest
import torch

import specdec_kernels
from specdec_kernels.arguments import rules

CSRC = Path(__file__).resolve().parents[2] / "csrc"
ENUMERATIONS = [
    ("include/specdec/chain.h", "Rule", rules.RULES),
    ("include/specdec/tree.h", "TreeRule", rules.TREE_RULES),
    ("include/specdec/draft.h", "Kind", rules.KINDS),
    ("arguments/sample.h", "Noise", rules.NOISES),
    ("arguments/sample.h", "Method", rules.METHODS),
    ("include/specdec/cuda_plan.h", "Schedule", rules.SCHEDULES),
]


@pytest.mark.parametrize(("file", "enumeration", "names"), ENUMERATIONS)
def test_a_name_has_the_number_of_its_enumerator(file, enumeration, names):
    text = (CSRC / file).read_text()
    listed = re.search(rf"enum class {enumeration} : \w+ {{([^}}]*)}}", text)[1]
    words = [re.sub(r"(?<!^)(?=[A-Z])", "_", e.strip()[1:]).lower() for e in listed.split(",")]
    assert words == list(names)


def test_no_schema_holds_a_string():
    """PyTorch's stable ABI leaks each string that an op is called with or returns."""
    for s in torch._C._jit_get_all_schemas():
        if s.name.startswith("specdec_kernels::"):
            assert not any(str(a.type) == "str" for a in [*s.arguments, *s.returns]), s


ONE = torch.zeros(1, dtype=torch.int64)
TREE = specdec_kernels.Tree(torch.zeros_like(ONE)[None], torch.full((1, 1), -1))
GOOD = {
    "sample": dict(logits=torch.zeros(1, 7)),
    "verify_chain": dict(target=torch.zeros(1, 2, 7), draft_token_ids=ONE[None]),
    "verify_tree": dict(target=torch.zeros(1, 2, 7), tree=TREE, rule="greedy"),
}


@pytest.mark.parametrize(
    ("op", "name", "value", "names"),
    [
        ("sample", "noise", "accept", rules.NOISES),
        ("sample", "method", "gumble", rules.METHODS),
        ("verify_chain", "kind", "logprobs", rules.KINDS),
        ("verify_chain", "rule", "tokens", rules.RULES),
        ("verify_tree", "kind", "", rules.KINDS),
        ("verify_tree", "rule", "token", rules.TREE_RULES),
    ],
)
def test_the_message_for_an_unknown_name_lists_the_known_ones(op, name, value, names):
    good = GOOD[op] | dict(seeds=ONE, positions=ONE)
    getattr(specdec_kernels, op)(**good)
    with pytest.raises(RuntimeError) as error:
        getattr(specdec_kernels, op)(**good | {name: value})
    assert str(error.value) == f"{name} must be one of {', '.join(names)}, got {value}"
