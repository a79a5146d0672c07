"""Every integer tensor that an op takes may be int32 or int64, and the results are the same."""

from __future__ import annotations

import numpy as np
import proofs
import pytest
import specdec_host
import torch
from project.wrong_calls import CALLS, IDS, arguments_of
from proofs import tensors
from support.providers import provider
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import specdec_kernels as sk
from specdec_kernels import _library

OTHER = {torch.int32: torch.int64, torch.int64: torch.int32}
# Public functions make int32 of some of these, and kernels read nothing else.
INT32_ONLY = {
    "top_ks", "draft_columns", "token_bitmask", "draft_bitmask", "token_counts", "prompt_mask",
}  # fmt: skip
LAST = 2**31 - 1


def _integers(op):
    """(name, case) for each integer argument that some case gives, with a small such case."""
    found = {}
    for case in sorted(proofs.cases(op), key=lambda c: c.rows * c.vocabulary):
        for name, value in zip(arguments_of(op), case.args(), strict=True):
            integer = torch.is_tensor(value) and value.dtype in OTHER and value.numel()
            if integer and name not in INT32_ONLY and 0 not in map(len, tensors([*case.args()])):
                found.setdefault(name, case)
    return found


WIDTHS = [(op, name, case) for op in _library.OPS for name, case in _integers(op).items()]


def test_every_integer_argument_is_looked_at():
    """All that wrong_calls.py declares to be int32 or int64."""
    declared = {(op, name) for op, calls in CALLS.items() for _, rules in calls
                for name, rule in rules.items() if rule[1] == IDS}  # fmt: skip
    assert {(op, name) for op, name, _ in WIDTHS} >= declared


def _case_of(op, name, case, width):
    """The arguments with one of them in this width, and no number beyond int32."""
    args = [
        a.clamp(-LAST, LAST) if torch.is_tensor(a) and a.dtype == torch.int64 else a
        for a in case.args()
    ]
    at = arguments_of(op).index(name)
    args[at] = args[at].to(width)
    return args


# Triton's interpreter takes 7 s for the draft's ids.
OF_PROVIDERS = [(by, *width) for width in WIDTHS for by in proofs.providers(width[0])
                if (by, width[1]) != ("triton", "draft_ids")]  # fmt: skip


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize(
    ("by", "op", "name", "case"), OF_PROVIDERS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_both_widths_give_the_same_results(by, op, name, case):
    results = []
    for width in OTHER:
        args = _case_of(op, name, case, width)
        out = tensors([provider(op, by)(*args)])
        assert args[arguments_of(op).index(name)].dtype == width
        results.append([x.double() for x in [*out, *tensors(args)]])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize(
    ("op", "name", "case"), WIDTHS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_fake_tensors_have_the_dtypes_of_the_results(op, name, case):
    for width in OTHER:
        args, call = _case_of(op, name, case, width), provider(op, "cpp")
        with FakeTensorMode() as mode:
            fakes = tensors([call(*tree_map_only(torch.Tensor, mode.from_tensor, args))])
        assert [x.dtype for x in fakes] == [x.dtype for x in tensors([call(*args)])]


def test_a_draft_map_may_be_int64():
    """A column beyond int32 is none, as any other beyond the draft's rows."""
    g = torch.Generator().manual_seed(1)
    target, draft = torch.randn(2, 3, 6, generator=g), torch.randn(2, 2, 4, generator=g)
    columns = torch.tensor([2, -1, 0, 3, 1, 2**32])
    given = torch.tensor([[2, 4], [0, 3]]), draft
    noise = {"seeds": torch.arange(2), "positions": torch.arange(2)}
    both = [columns, columns.clamp(max=LAST).to(torch.int32)]
    one, other = (sk.verify_chain(target, *given, draft_map=sk.DraftMap(c), **noise) for c in both)
    assert torch.equal(one.accept_probs, other.accept_probs)
    assert torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_positions_of_drafts_do_not_overflow(dtype):
    positions = np.array([LAST], dtype=dtype)
    for rule, want in (("match", LAST + 1), ("token", LAST + (2 << 32))):
        got = sk.draft_positions(torch.from_numpy(positions), 2, rule=rule)
        assert got.dtype == torch.int64
        assert int(got[0, 1]) == want
        assert specdec_host.draft_positions(positions, 2, rule=rule)[0, 1] == want


def test_specdec_host_takes_both_widths():
    g = np.random.default_rng(1)
    target, drafted = g.normal(size=(5, 6)).astype(np.float32), np.array([[1, 2], [3, -1]])
    limits = {"target_indptr": [0, 3, 5], "eos_token_ids": [4], "max_new_tokens": [2, 3]}
    results = []
    for dtype in (np.int32, np.int64):
        numbers = {"seeds": [-7, 3], "positions": [LAST, 5]} | limits
        arrays = {name: np.array(x, dtype=dtype) for name, x in numbers.items()}
        strided = {name: np.repeat(x, 2)[::2] for name, x in arrays.items()}
        for given in (arrays, strided):
            results.append(specdec_host.verify_chain(target, drafted, **given).tokens)
        tree = specdec_host.Tree(drafted, np.array([[-1, 0], [-1, 0]], dtype=dtype))
        results.append(specdec_host.verify_tree(target, tree, rule="match", **arrays).tokens)
        results.append(
            specdec_host.sample(target[:2], seeds=arrays["seeds"], positions=arrays["positions"])
            .tokens
        )  # fmt: skip
    for one, other in zip(results[:4], results[4:], strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(results[0], results[1])
