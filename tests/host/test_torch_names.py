"""specdec_host has the names, arguments and defaults of specdec_kernels."""

import inspect

import pytest
import specdec_host as host

import specdec_kernels as kernels
from specdec_kernels.arguments import rules


def test_names_have_the_same_numbers():
    for name in ("RULES", "TREE_RULES", "KINDS", "NOISES", "METHODS"):
        assert getattr(host.arguments.rules, name) == getattr(rules, name)
    assert {s.name: s.value for s in host.Status} == {s.name: s.value for s in kernels.Status}


@pytest.mark.parametrize("name", ["sample", "verify_chain", "verify_tree", "draft_positions"])
def test_functions_take_the_same_arguments(name):
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (getattr(host, name), getattr(kernels, name))
    )
    assert ours == theirs


@pytest.mark.parametrize(
    "name",
    ["Sampled", "Verdict", "TreeVerdict", "Tree", "SampledDraft", "SparseDraft", "DraftMap"],
)
def test_tuples_have_the_same_fields(name):
    ours, theirs = getattr(host, name), getattr(kernels, name)
    assert (ours._fields, ours._field_defaults) == (theirs._fields, theirs._field_defaults)
