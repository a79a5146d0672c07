"""Python and C++ agree on the schemas of ops and on the numbers that names have there."""

import re
import typing

import pytest
import torch
from support.sources import CSRC

import specdec_kernels
from specdec_kernels import _library, reference
from specdec_kernels.arguments import rules
from specdec_kernels.arguments.chain import ChainArguments
from specdec_kernels.arguments.sample import SampleArguments
from specdec_kernels.arguments.tree import TreeArguments

TYPES = {torch.Tensor: "Tensor", torch.Tensor | None: "Optional[Tensor]"} | {
    scalar: scalar.__name__ for scalar in (int, float, bool)
}
RECORDS = {"sample": SampleArguments, "verify_chain": ChainArguments, "verify_tree": TreeArguments}


def schema(op):
    return getattr(torch.ops.specdec_kernels, op).default._schema


@pytest.mark.parametrize("op", RECORDS)
def test_a_record_has_the_types_of_the_schema_and_no_more(op):
    types = {n: TYPES[t] for n, t in typing.get_type_hints(RECORDS[op]).items() if t in TYPES}
    assert types == {a.name: str(a.real_type) for a in schema(op).arguments}


NOT_OPS = {"built_with_cuda", "cpu_capability"}
VALIDATION = {f"validate_{op}" for op in _library.REGISTERED}
SIZES = {f"{op}_workspace_bytes" for op in _library.OUT_OPS}


def test_the_table_of_ops_lists_every_op_of_the_library():
    schemas = torch._C._jit_get_all_schemas()
    native = {s.name.removeprefix("specdec_kernels::") for s in schemas
              if s.name.startswith("specdec_kernels::")}  # fmt: skip
    assert native - NOT_OPS == {*_library.REGISTERED} | VALIDATION | SIZES


@pytest.mark.parametrize("op", _library.REGISTERED)
def test_the_validation_of_an_op_takes_its_arguments(op):
    mine, other = ([(a.name, str(a.type)) for a in schema(name).arguments]
                   for name in (op, f"validate_{op}"))  # fmt: skip
    assert mine == other


@pytest.mark.parametrize("op", _library.OPS)
def test_every_op_has_a_public_function_and_a_reference(op):
    assert callable(getattr(specdec_kernels, op))
    assert getattr(reference, op).__module__ == f"specdec_kernels.reference.{_library.OPS[op]}"


ENUMERATIONS = [
    ("include/specdec/chain.h", "Rule", rules.RULES),
    ("include/specdec/tree.h", "TreeRule", rules.TREE_RULES),
    ("include/specdec/draft.h", "Kind", rules.KINDS), ("arguments/sample.h", "Noise", rules.NOISES),
    ("arguments/sample.h", "Method", rules.METHODS),
]  # fmt: skip


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
