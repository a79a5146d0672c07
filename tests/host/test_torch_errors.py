"""specdec_host raises what specdec_kernels raises, with "array" where that says "tensor"."""

import re

import numpy as np
import pytest
import specdec_host as host
import torch
from support.error_table import BUILD, TABLE, i64, message_of
from support.host_ops import as_numpy

import specdec_kernels as kernels

OPS = ("sample", "verify_chain", "verify_tree")
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


@pytest.mark.parametrize(
    "bad",
    [
        dict(ids=torch.zeros(1, 2).long()), dict(ids=torch.zeros(2)), dict(ids=[0, 1]),
        dict(ids=torch.tensor([0, 5])), dict(ids=torch.tensor([-1, 3])),
        dict(ids=torch.tensor([2, 3, 2])), dict(ids=i64(0), vocab=0), dict(ids=i64(1), vocab=7.5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", ["from_ids", "from_offsets"])
def test_draft_maps_refuse_the_same(make, bad):
    messages = []
    for package, read in ((kernels, lambda t: t), (host, as_numpy)):
        with pytest.raises((TypeError, ValueError)) as error:
            getattr(package.DraftMap, make)(read(bad["ids"]), bad.get("vocab", 5))
        messages.append((error.type, str(error.value)))
    (kind, text), (ours, our_text) = messages
    said = text.replace("torch.", "").replace("a tensor", "an array")
    assert (ours, our_text) == (kind, said)


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
    "given",
    [(np.array(1), 2, "token"), (np.ones(2), 2, "token"), ([1], 2, "token"),
     (np.array([1]), 2.5, "token"), (np.array([1]), -1, "token"), (np.array([1]), 2, "tokens"),
     (np.array([1]), 2, None), (np.array([1]), 2, np.ones((50, 50)))],
)  # fmt: skip
def test_positions_of_drafts_are_refused_with_the_same_message(given):
    positions, number, rule = given
    messages = []
    for package in (kernels, host):
        x = positions
        if package is kernels and isinstance(positions, np.ndarray):
            x = torch.from_numpy(positions)
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            package.draft_positions(x, number, rule=rule)
        messages.append((error.type, str(error.value)))
    (kind, text), ours = messages
    assert ours == (kind, text.replace("a tensor", "an array"))
    assert len(text) < 200
    if isinstance(rule, str) and rule == "tokens":
        names = re.search("one of (.*), got 'tokens'$", text)[1].split(", ")
        assert sorted(names) == sorted({*kernels.RULES, *kernels.TREE_RULES})
