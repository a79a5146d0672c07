"""Bad inputs raise, and every provider and the fake kernels raise the same message for each.

The reference is left out: it is a specification of valid arguments.
"""

import collections.abc
import contextlib
import functools
import re
import types
import typing

import numpy as np
import proofs
import pytest
import torch
from project.wrong_calls import (
    BUILD,
    CALLS,
    GOOD,
    SQUARE,
    TABLE,
    THREE,
    arguments_of,
    devices,
    f32,
    f64,
    i64,
    message_of,
)
from proofs import tensors
from support.providers import provider
from torch._subclasses.fake_tensor import FakeTensorMode

import specdec_kernels
from specdec_kernels import _library

# Where each row runs: "meta" and "fake" are the fake kernel.
WHERE = [
    (op, where)
    for op in BUILD
    for where in [*(n for n in proofs.providers(op) if n != "reference"), "meta", "fake"]
]
ONE = i64(1)


def without_values(args, device="meta"):
    """The arguments as tensors without values; a tensor that occurs twice does so again."""

    @functools.cache
    def empty(a):
        return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=device)

    def moved(a):
        if isinstance(a, list):
            return [moved(x) for x in a]
        return empty(a) if isinstance(a, torch.Tensor) else a

    return tuple(moved(a) for a in args)


def given_to(where, args):
    """(provider, arguments) of a call on a provider or on the fake kernel."""
    if where not in ("meta", "fake"):
        return where, args
    with FakeTensorMode() if where == "fake" else contextlib.nullcontext():
        return "cpp", without_values(args, "cpu" if where == "fake" else "meta")


def test_every_argument_of_an_op_is_declared():
    """But flags, and the sizes of weights, whose rows are in special_calls.py."""
    for op in set(_library.OPS) - {"decoder_layers_", "grow_tree_"}:
        declared = {name for _, rules in CALLS[op] for name in rules}
        arguments = getattr(torch.ops.specdec_kernels, op).default._schema.arguments
        rest = {a.name for a in arguments if str(a.type) != "bool"} - declared
        assert rest <= {"in_features", "out_features"}, op


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize(("op", "where"), WHERE)
def test_names_the_argument_the_rule_and_the_value(op, where):
    wrong = []
    for bad, message in [row[1:] for row in TABLE if row[0] == op]:
        if "overlap" in message and where in ("meta", "fake"):
            continue  # nothing overlaps without memory
        name, args = given_to(where, BUILD[op](**bad))
        text = message_of(provider(op, name), args)
        if not re.fullmatch(message, text):
            wrong.append((text, message))
    assert wrong == []


@pytest.mark.parametrize("op", BUILD)
def test_devices_are_checked(op):
    """One argument stays on the CPU, all the others are on another device."""
    for given, name, message in devices(op):
        args = list(without_values(BUILD[op](**given)))
        at = arguments_of(op).index(name)
        args[at] = BUILD[op](**given)[at]
        assert re.fullmatch(message, message_of(provider(op, "cpp"), args))


@pytest.mark.parametrize(("op", "where"), WHERE)
def test_good_inputs_raise_nothing(op, where):
    """And fake kernels give the shapes and dtypes of the specification."""
    name, args = given_to(where, BUILD[op]())
    got, want = (tensors([provider(op, n)(*a)])
                 for n, a in ((name, args), ("reference", BUILD[op]())))  # fmt: skip
    assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in want]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_wrong_shape_is_named_under_compilation(dynamic):
    """While the graph is traced or, where sizes are symbolic, when it runs."""
    graph = torch.compile(specdec_kernels.sample, backend="eager", dynamic=dynamic)
    graph(torch.zeros(3, 7), seeds=i64(3), positions=i64(3))
    with pytest.raises(RuntimeError, match=r"seeds must be \[4\], got \[5\]"):
        graph(torch.zeros(4, 7), seeds=i64(5), positions=i64(4))


# Public functions: types are those of their annotations.

# What an argument must be, by its annotation, and values of other types.
TYPES = {
    float: ("a number", [None, "a", True, [0.5]]), int: ("an integer", [None, "b", 2.5, True, [1]]),
    bool: ("True or False", [None, "yes", 1, 1.5]), torch.Tensor: ("a tensor", [None, 0.5, [0, 2]]),
    float | torch.Tensor: ("a number or a tensor", [None, "a", True, [0.5]]),
    int | torch.Tensor: ("an integer or a tensor", [None, 0.5, True]),
    specdec_kernels.PackedLinear: ("a PackedLinear", [None]),
}  # fmt: skip
TENSOR_LIST, WEIGHTS = (
    collections.abc.Sequence[t] for t in (torch.Tensor, specdec_kernels.PackedLinear)
)


def wrong_types(name, annotation):
    """(value, error, message) of one argument of a public function."""
    members = typing.get_args(annotation)
    optional = types.NoneType in members and typing.get_origin(annotation) is not typing.Literal
    if optional and len(members) == 2:
        annotation = next(t for t in members if t is not types.NoneType)
    if typing.get_origin(annotation) is typing.Literal:
        names = ", ".join(typing.get_args(annotation))
        yield "wrong", RuntimeError, f"{name} must be one of {names}, got wrong"
        must, values = "a string", [None, 3, True]
    elif annotation == TENSOR_LIST:
        yield [3], TypeError, f"{name}[0] must be a tensor, got 3"
        yield None, TypeError, f"{name} must be a list of tensors, got NoneType"
        yield THREE, TypeError, f"{name} must be a list of tensors, got Tensor"
        return
    elif annotation == WEIGHTS:
        yield SQUARE, TypeError, f"{name} must be a list of PackedLinear, got PackedLinear"
        yield None, TypeError, f"{name} must be a list of PackedLinear, got NoneType"
        some, other = [SQUARE, SQUARE, f32(2, 2)], SQUARE._replace(panels=3)
        yield some, TypeError, f"{name}[2] must be a PackedLinear, got Tensor [2, 2]"
        yield [*some[:2], other], TypeError, f"{name}[2] panels must be a tensor, got 3"
        return
    elif annotation in TYPES:
        must, values = TYPES[annotation]
    else:
        records = ("draft", "draft_map", "draft_token_ids", "tree", "layers", "head", "out")
        assert name in records, f"no wrong types for {name}"
        return
    for value in values:
        if value is not None or not optional:
            yield value, TypeError, f"{name} must be {must}, got {value!r}"


@pytest.mark.parametrize("op", specdec_kernels.providers())
def test_every_argument_of_a_wrong_type_is_named(op):
    function, good = getattr(specdec_kernels, op), GOOD[op]
    function(**good)
    for name, annotation in typing.get_type_hints(function).items():
        if name == "return":
            continue
        for value, kind, message in wrong_types(name, annotation):
            with pytest.raises(kind) as error:
                function(**good | {name: value})
            assert str(error.value) == message


SAMPLED = specdec_kernels.SampledDraft(f32(1, 1, 3), f64(1, 1), f32(1, 1), 1.0)
SPARSE = specdec_kernels.SparseDraft(i64(1, 1, 2), f32(1, 1, 2))
TREE, LAYER = GOOD["verify_tree"]["tree"], GOOD["decoder_layers_"]["layers"].layers[0]
COLUMNS = specdec_kernels.DraftMap(i64(3).int())
RECORDS = [  # an argument that is a record
    *((op, name, record) for op in ("verify_chain", "verify_tree")
      for name, record in (("draft", SAMPLED), ("draft", SPARSE), ("draft_map", COLUMNS))),
    ("verify_tree", "tree", TREE),
]  # fmt: skip


@pytest.mark.parametrize(("op", "name", "record"), RECORDS)
def test_what_a_record_holds_is_named(op, name, record):
    function, good = getattr(specdec_kernels, op), GOOD[op]
    for field, annotation in typing.get_type_hints(type(record)).items():
        label = f"{name} {'probabilities' if field == 'probs' else field}"
        for value, kind, message in wrong_types(label, annotation):
            with pytest.raises(kind) as error:
                function(**good | {name: record._replace(**{field: value})})
            assert str(error.value) == message


def test_a_field_of_a_wrong_type_is_named():
    hints = typing.get_type_hints(specdec_kernels.PackedDecoderLayer)
    fields = {name: getattr(LAYER, name) for name in hints if name[0] != "_"}
    for name in fields:
        for value, kind, message in wrong_types(name, hints[name]):
            with pytest.raises(kind) as error:
                specdec_kernels.PackedDecoderLayer(**fields | {name: value})
            assert str(error.value) == message


FORMS = "draft must be None, a tensor, a SampledDraft or a SparseDraft, got"


@pytest.mark.parametrize(
    ("op", "name", "value", "message"),
    [
        ("verify_chain", "draft", [0.5], f"{FORMS} list"),
        ("verify_tree", "draft", tuple(SPARSE), f"{FORMS} tuple"),
        ("verify_chain", "draft_map", i64(3), "draft_map must be a DraftMap or None, got Tensor"),
        ("verify_tree", "draft_map", i64(3), "draft_map must be a DraftMap or None, got Tensor"),
        ("verify_tree", "tree", tuple(TREE), "tree must be a Tree, got tuple"),
        ("apply_penalties_", "draft_token_ids", [[1]],
         "draft_token_ids must be a tensor, got [[1]]"),
        ("decoder_layers_", "layers", None, "layers must be a PackedDecoderLayers, got None"),
        ("grow_tree_", "head", None, "head must be a PackedHead, got None"),
        ("output_norm_mlp", "output", SQUARE._replace(panels=None),
         "output panels must be a tensor, got None"),
        ("sample", "top_k", torch.tensor([2.9]), "top_k must be int32 or int64, got torch.float32"),
        ("sample", "temperature", torch.tensor(0.5),
         "temperature must be a number or a tensor [B], got a 0-dim tensor"),
    ],
)  # fmt: skip
def test_what_is_no_record_or_parameter_is_named(op, name, value, message):
    with pytest.raises((TypeError, ValueError)) as error:
        getattr(specdec_kernels, op)(**GOOD[op] | {name: value})
    assert str(error.value) == message


def test_a_draft_map_from_offsets_is_the_one_from_ids():
    d2t = torch.tensor([3, 0, 2], dtype=torch.int32)
    want = specdec_kernels.DraftMap.from_ids(torch.tensor([3, 1, 4]), 6).columns
    assert torch.equal(specdec_kernels.DraftMap.from_offsets(d2t, 6).columns, want)


def sampled(**given):
    return specdec_kernels.sample(torch.arange(5.0)[None], seeds=ONE, positions=ONE, **given)


def test_a_count_beyond_int32_keeps_every_token():
    for k in (2**63, torch.tensor([2**40 + 1])):
        assert sampled(top_k=k).threshold.tolist() == [-torch.inf]


def test_a_count_below_int32_is_out_of_range_and_not_wrapped():
    out = sampled(top_k=torch.tensor([-(2**40)]))
    assert (out.tokens.tolist(), out.status.tolist()) == ([-1], [16])


@pytest.mark.parametrize(
    ("changed", "got"),
    [
        (torch.Tensor.to_sparse, "torch.sparse_coo"),
        (lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.quint8), "torch.quint8"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_that_are_not_dense_are_named(changed, got):
    for op, name in (("sample", "logits"), ("verify_chain", "draft"), ("kv_truncate_", "caches")):
        value = GOOD[op].get(name, THREE[:, :1])
        value = [value[0], changed(value[0])] if isinstance(value, list) else changed(value)
        with pytest.raises(RuntimeError) as caught:
            getattr(specdec_kernels, op)(**GOOD[op] | {name: value})
        assert str(caught.value) == f"{name} must be a dense tensor, got {got}"


def test_numbers_of_numpy_are_numbers():
    good = GOOD["verify_chain"]
    specdec_kernels.verify_chain(**good, rule="lenient", lenience=np.float64(0.5))
    specdec_kernels.verify_chain(**good, rule="lenient", lenience=np.float32(0.5))
    specdec_kernels.tree_attention(**GOOD["tree_attention"] | {"slots": np.int64(3)})
