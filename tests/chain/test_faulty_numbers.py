"""Numbers that are no uniforms, and zeros with a sign, in chains and in trees.

A uniform outside [0, 1) is a fault of the data of its sequence. A negative one would accept drafts
that P excludes, among them ids beyond the target's vocabulary. A probability of -0 is 0.
"""

import proofs
import pytest
import torch
from proofs import assert_close, assert_outputs_equal
from support.providers import ALL_PROVIDERS, WHOLE_PROVIDERS, provider, verify

from specdec_kernels import RULES, RULES_READING_DRAFT, TREE_RULES, Status
from specdec_kernels.arguments.chain import ChainArguments
from specdec_kernels.arguments.rules import TREE_RULES_READING_DRAFT
from specdec_kernels.arguments.tree import TreeArguments

NAN, INF = float("nan"), float("inf")
NO_UNIFORMS = [-(2.0**-1074), -0.25, -1e300, 1.0, 1.5, INF, -INF, NAN]
B = len(NO_UNIFORMS) + 2  # the last two sequences have no fault


def pairs(rules, providers=ALL_PROVIDERS):
    """(provider, rule) without match, which takes no uniforms."""
    return [(n, r) for n in providers for r in rules if r != "match"]


def uniforms(columns):
    """[B, columns] in [0, 1)."""
    g = torch.Generator().manual_seed(5)
    return torch.rand(B, columns, generator=g, dtype=torch.float64)


def with_faults(given):
    """The same with one fault in each sequence but the last two, in a column of its own."""
    given = given.clone()
    for b, value in enumerate(NO_UNIFORMS):
        given[b, (b * 3 + 1) % given.shape[1]] = value
    return given


def assert_faulty_sequences_emit_nothing(got, want, path=()):
    """Outputs from tokens to accept_probs; `want` are those without faults."""
    n = len(NO_UNIFORMS)
    tokens, num_accepted, status, logprobs, accept_probs = (x[:n] for x in got)
    assert status.tolist() == [Status.BAD_PARAMETER] * n
    assert (tokens == -1).all()
    assert not num_accepted.any()
    assert not logprobs.any()
    assert accept_probs.isnan().all()
    assert all((x[:n] == -1).all() for x in path)
    assert not want[2].any()
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_close(f"output {i} of the other sequences", g[n:], w[n:])


OPS = {
    "verify_chain": (proofs.chain_case, ChainArguments, 4),
    "verify_tree": (proofs.tree_case, TreeArguments, 7),
}


@pytest.mark.parametrize(
    ("op", "name", "rule"),
    [
        *(("verify_chain", *pair) for pair in pairs(RULES)),
        *(("verify_tree", *pair) for pair in pairs(TREE_RULES, WHOLE_PROVIDERS)),
    ],
)
def test_a_uniform_outside_the_unit_interval_emits_nothing(op, name, rule):
    case, arguments, columns = OPS[op]
    a = arguments(*case(B, 3, 37, rule=rule).args())._replace(with_accept_probs=True)
    given = uniforms(columns)
    got, want = (provider(op, name)(*a._replace(uniforms=u)) for u in (with_faults(given), given))
    path = len(got) - 5  # of trees, the first output
    assert_faulty_sequences_emit_nothing(got[path:], want[path:], path=got[:path])


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_every_uniform_of_a_long_chain_is_checked(name):
    """Triton checks 32 at a time."""
    given = torch.zeros(2, 41, dtype=torch.float64)
    given[0, 3] = given[1, 40] = 1.0
    got = verify(provider("verify_chain", name), torch.zeros(2, 41, 3),
                 torch.zeros(2, 40, dtype=torch.int64), rule="greedy", uniforms=given)  # fmt: skip
    assert got[2].tolist() == [Status.BAD_PARAMETER] * 2
    assert (got[0] == -1).all()


# Probabilities of -0. The target's rows at odd tokens and the draft's at every third one are 0.


def signed_zeros(x):
    return torch.where(x == 0, -torch.zeros((), dtype=x.dtype), x)


def assert_zeros_have_no_sign(name, case, drafted):
    """In rows in which some tokens have probability 0, among them drafted ones."""
    op, a = provider(case.op, name), OPS[case.op][1](*case.args())
    target, draft, tokens = (x.clone() for x in (a.target, a.draft, getattr(a, drafted)))
    target[..., 1::2] = 0
    draft[..., ::3] = 0
    tokens[:, 0] = 3 * torch.arange(len(tokens)) % 36  # Q = 0, and P = 0 for every other one
    a = a._replace(target=target, draft=draft, with_accept_probs=True, **{drafted: tokens})
    got = op(*a._replace(target=signed_zeros(target), draft=signed_zeros(draft)))
    assert_outputs_equal(case.op, got, op(*a))
    assert not (got[-1] < 0).any()  # accept_probs


FORMS = [
    *(("full", filters) for filters in ("off", "zero", "topp")),
    *((form, "off") for form in ("mapped", "wide", "narrow", "sparse")),
    ("sparse", "topp"),
]


@pytest.mark.parametrize("rule", RULES_READING_DRAFT)
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_probabilities_of_minus_zero_are_zero(name, rule):
    short = name in ("triton", "reference")
    for form, filters in FORMS[:: 6 if short else 1]:
        case = proofs.chain_case(2 if short else 12, 2, 37, rule=rule, kind="probs", draft=form,
                                  filters=filters)  # fmt: skip
        assert_zeros_have_no_sign(name, case, "draft_token_ids")


@pytest.mark.parametrize("rule", TREE_RULES_READING_DRAFT)
@pytest.mark.parametrize("name", WHOLE_PROVIDERS)
def test_probabilities_of_minus_zero_are_zero_in_trees(name, rule):
    for form in ("full", "sparse"):
        case = proofs.tree_case(12, 4, 37, rule=rule, kind="probs", draft=form, rows="shared")
        assert_zeros_have_no_sign(name, case, "tree_tokens")
