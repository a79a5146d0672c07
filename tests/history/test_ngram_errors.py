"""Invalid arguments of `ngram_propose`: every provider and the fake kernel say the same."""

from __future__ import annotations

import re

import pytest
import torch
from support.check_sites import untripped
from support.providers import ALL_PROVIDERS, provider

from specdec_kernels.arguments import checks as _checks
from specdec_kernels.arguments import history as checks

OP = "ngram_propose"


def i64(*shape):
    return torch.zeros(shape, dtype=torch.int64)


GOOD = dict(history=i64(3, 9), lengths=i64(3), gamma=4, max_ngram=3, min_ngram=2)
TABLE = [
    (dict(history=i64(9)), r"history must be \[B, L\], got \[9\]"),
    (dict(history=i64(3, 9).float()), "history must be int32 or int64, got float32"),
    (dict(history=i64(3, 1).expand(3, 2**31)),
     r"history must have at most 2147483647 columns, got \[3, 2147483648\]"),
    (dict(lengths=i64(4)), r"lengths must be \[3\], got \[4\]"),
    (dict(lengths=i64(3, 1)), r"lengths must be \[3\], got \[3, 1\]"),
    (dict(lengths=i64(3).int()), "lengths must be int64, got int32"),
    (dict(gamma=-1), r"gamma must be in \[0, 2147483647\], got -1"),
    (dict(gamma=2**31), r"gamma must be in \[0, 2147483647\], got 2147483648"),
    (dict(history=i64(1, 9).expand(2**27, 9), lengths=i64(1).expand(2**27), gamma=2**30),
     r"gamma must leave the tokens \[B, gamma\] with less than 2\*\*56 entries, "
     r"got \[134217728, 1073741824\]"),
    (dict(min_ngram=0), "min_ngram must be at least 1, got 0"),
    (dict(max_ngram=1), "max_ngram must be at least min_ngram = 2, got 1"),
    (dict(max_ngram=-1), "max_ngram must be at least min_ngram = 2, got -1"),
]  # fmt: skip


def call(where, arguments):
    if where == "meta":
        arguments = {k: v.to("meta") if torch.is_tensor(v) else v for k, v in arguments.items()}
    return provider(OP, "cpp" if where == "meta" else where)(*arguments.values())


def says(where, arguments):
    with pytest.raises(RuntimeError) as error:
        call(where, arguments)
    return str(error.value).strip().splitlines()[0]


@pytest.mark.parametrize("where", [*ALL_PROVIDERS, "meta"])
def test_a_message_names_the_argument_the_rule_and_the_value(where):
    said = [(says(where, GOOD | bad), message) for bad, message in TABLE]
    assert [pair for pair in said if not re.fullmatch(pair[1], pair[0])] == []


@pytest.mark.parametrize("where", [*ALL_PROVIDERS, "meta"])
def test_good_inputs_raise_nothing(where):
    tokens, counts = call(where, GOOD)
    assert (tokens.shape, counts.shape) == ((3, 4), (3,))
    assert (tokens.dtype, counts.dtype) == (torch.int64, torch.int32)


def test_the_devices_of_the_arguments_are_compared():
    text = says("cpp", GOOD | {"history": GOOD["history"].to("meta")})
    assert text == "lengths must be on the device of history, meta, got cpu"


def test_the_table_covers_every_check(monkeypatch):
    calls = [(OP, lambda bad=bad: checks.ngram_propose(*(GOOD | bad).values())) for bad, _ in TABLE]
    assert untripped(monkeypatch, (checks,), calls, shared=(_checks,)) == ([], [])
