"""specdec_host gives the bits of the torch ops, raises what they raise, and has their names."""

import inspect
import re

import numpy as np
import proofs
import pytest
import specdec_host as host
import torch
from project.wrong_calls import BUILD, TABLE, arguments_of, i64, message_of
from specdec_host import DraftMap, SampledDraft, SparseDraft, Tree

import specdec_kernels as kernels
from specdec_kernels.arguments import rules

OPS = ("sample", "kept_tokens", "verify_chain", "verify_tree")
PARAMETERS = {f"{name}s": name for name in ("temperature", "top_k", "top_p", "min_p")}
RULES_OF = {"verify_chain": rules.RULES, "verify_tree": rules.TREE_RULES}
NAMES = {"kind": rules.KINDS, "noise": rules.NOISES, "method": rules.METHODS}


def as_numpy(value):
    """A tensor as a NumPy array over its memory; bfloat16 as host.bfloat16."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(host.bfloat16)
    return value.numpy()


def draft_of(given, read):
    """The form of the draft that the arguments of a verifier hold."""
    names = ("draft", "draft_ids", "draft_columns", "draft_logsumexp", "draft_threshold")
    rows, ids, columns, logsumexp, threshold = (read(given.pop(n)) for n in names)
    vector, scalar = read(given.pop("draft_temperatures")), given.pop("draft_temperature")
    bitmask = read(given.pop("draft_bitmask"))
    draft_map = None if columns is None else DraftMap(columns)
    if ids is not None:
        return SparseDraft(ids, rows), draft_map
    if logsumexp is not None:
        temperature = scalar if vector is None else vector
        return SampledDraft(rows, logsumexp, threshold, temperature, bitmask), draft_map
    return rows, draft_map


def call(op, args, read=as_numpy):
    """A public function of specdec_host with the arguments of an op in the order of its schema.

    read: makes an array of each tensor.
    """
    given = dict(zip(arguments_of(op), args, strict=True))
    for vector, scalar in PARAMETERS.items():
        given[scalar] = read(given[scalar] if given[vector] is None else given[vector])
        del given[vector]
    for name, names in NAMES.items():
        if name in given:
            given[name] = names[given[name]]
    if op in RULES_OF:
        given["rule"] = RULES_OF[op][given["rule"]]
        given["draft"], given["draft_map"] = draft_of(given, read)
    if op == "verify_tree":
        given["tree"] = Tree(read(given.pop("tree_tokens")), read(given.pop("parents")))
    given = {n: read(v) if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    return getattr(host, op)(**given)


def check_equal_bits(got, expected):
    """Outputs of a call of specdec_host and of a torch op."""
    assert len(got) == len(expected)
    for name, a, t in zip(got._fields, got, expected, strict=True):
        b = t.numpy()
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.tobytes() == b.tobytes(), f"{name}: {a} is not {b}"


# Bits.

CASES = [
    pytest.param(case, id=f"{op}-{case}", marks=[pytest.mark.full] if case.heavy else [])
    for op in OPS
    for case in proofs.cases(op, heavy=True)
]


def torch_op(op):
    return getattr(torch.ops.specdec_kernels, op).default


@pytest.mark.parametrize("case", CASES)
def test_numpy_arrays_give_the_bits_of_the_torch_op(case):
    args = case.args()
    ours, theirs = call(case.op, args), torch_op(case.op)(*args)
    check_equal_bits(ours, theirs)
    if case.op in RULES_OF:
        result = getattr(kernels, type(ours).__name__)(*theirs)
        assert ours.rows().tolist() == result.rows().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_read_through_dlpack(dtype):
    chain = proofs.chain_case(3, 4, 67, dtype, draft="sampled", layout="sliced", filters="tensor")
    tree = next(c for c in proofs.cases("verify_tree") if "bf16" in c.id)
    for case in (chain, tree):
        args = case.args()
        check_equal_bits(call(case.op, args, lambda t: t), torch_op(case.op)(*args))


def test_the_number_of_threads_changes_no_bit_of_numpy_arrays():
    before = host.get_num_threads()
    try:
        host.set_num_threads(3)
        for b in (1, 9):  # threads share one row, or each takes a sequence
            case = proofs.chain_case(b, 3, 20_000, filters="tensor", draft="sampled")
            args = case.args()
            check_equal_bits(call("verify_chain", args), torch_op("verify_chain")(*args))
    finally:
        host.set_num_threads(before)


# Errors, with "array" where specdec_kernels says "tensor".

# NumPy itself refuses arrays of so many entries.
ROWS = [row for row in TABLE if row[0] in OPS and r"2\*\*56" not in row[2]]


@pytest.mark.parametrize("op", OPS)
def test_the_native_functions_refuse_the_same_arguments(op):
    native, wrong = getattr(host._library, op), []
    native(*[as_numpy(a) for a in BUILD[op]()])
    for bad, message in [row[1:] for row in ROWS if row[0] == op]:
        text = message_of(native, [as_numpy(a) for a in BUILD[op](**bad)])
        if not re.fullmatch(message, text):
            wrong.append((text, message))
    assert wrong == []


def both_refuse(call):
    """The message of specdec_host, after that of specdec_kernels was the same of tensors."""
    messages = []
    for package in (kernels, host):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            call(package, as_numpy if package is host else lambda x: x)
        messages.append((error.type, str(error.value)))
    (kind, text), ours = messages
    assert ours == (kind, text.replace("torch.", "").replace("a tensor", "an array"))
    return ours[1]


@pytest.mark.parametrize(
    ("given", "vocab", "message"),
    [
        (i64(1, 2), 5, "{} must be [D] int32 or int64, got [1, 2] int64"),
        (torch.zeros(2), 5, "{} must be [D] int32 or int64, got [2] float32"),
        ([0, 1], 5, "{} must be an array, got [0, 1]"),
        (torch.tensor([0, 5]), 5, "must be in [0, 5), got 0 to "),
        (torch.tensor([-1, 3]), 5, "must be in [0, 5), got -1 to "),
        (torch.tensor([2, 1, 2]), 5, "must be distinct, got one twice"),
        (i64(0), 0, "vocab must be at least 1, got 0"),
        (i64(1), 7.5, "vocab must be an integer, got 7.5"),
    ],
)
@pytest.mark.parametrize(("make", "name"), [("from_ids", "ids"), ("from_offsets", "d2t")])
def test_draft_maps_refuse_the_same(make, name, given, vocab, message):
    text = both_refuse(lambda package, read: getattr(package.DraftMap, make)(read(given), vocab))
    assert message.format(name) in text


def test_draft_maps_hold_the_same_columns():
    for make in ("from_ids", "from_offsets"):
        ids = torch.tensor([3, 0, 2], dtype=torch.int32) + (make == "from_ids")
        theirs = getattr(kernels.DraftMap, make)(ids, 8).columns
        ours = getattr(host.DraftMap, make)(ids.numpy(), 8).columns
        assert np.array_equal(ours, theirs.numpy())


@pytest.mark.parametrize("rule", [*kernels.RULES, *kernels.TREE_RULES])
def test_positions_of_drafts_are_the_same(rule):
    first = torch.tensor([5, 2**40])
    theirs = kernels.draft_positions(first, 3, rule=rule)
    assert np.array_equal(host.draft_positions(first.numpy(), 3, rule=rule), theirs.numpy())


@pytest.mark.parametrize(
    ("positions", "number", "rule", "message"),
    [
        (torch.tensor(1), 2, "token", "positions must be [B], got []"),
        (torch.ones(2), 2, "token", "positions must be int32 or int64, got float32"),
        ([1], 2, "token", "positions must be "), (i64(1), -1, "token", "number must be "),
        (i64(1), 2.5, "token", "number must be an integer, got 2.5"),
        (i64(1), 2, "tokens", "rule must be "), (i64(1), 2, None, "rule must be "),
        (i64(1), 2, np.ones((50, 50)), "rule must be "),
    ],
)  # fmt: skip
def test_positions_of_drafts_are_refused_with_the_same_message(positions, number, rule, message):
    text = both_refuse(
        lambda package, read: package.draft_positions(read(positions), number, rule=rule)
    )
    assert text.startswith(message)
    assert len(text) < 200


# Names.


FUNCTIONS = (*OPS, "draft_positions")
TUPLES = (
    "Sampled", "KeptTokens", "Verdict", "TreeVerdict", "Tree", "SampledDraft", "SparseDraft",
    "DraftMap",
)  # fmt: skip


@pytest.mark.parametrize("name", [*FUNCTIONS, *TUPLES])
def test_functions_and_tuples_take_the_same_arguments(name):
    """But for tensors of the caller, which the kernels of torch alone write into."""
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (getattr(host, name), getattr(kernels, name))
    )
    assert ours == [one for one in theirs if one[0] not in ("out", "workspace")]
