"""Invalid rows, ids, statistics and parameters of `sample` and `verify_chain`, in every form.

They set a status; drafts accepted before stay accepted, and no id out of range is emitted. Many are
faults that other projects have shipped: "Elsewhere" says what another implementation did.
"""

from typing import Any, NamedTuple

import numpy as np
import proofs
import pytest
import torch
from proofs import assert_close, assert_outputs_close, assert_outputs_equal
from support.providers import (
    ALL_PROVIDERS,
    FAST_PROVIDERS,
    KERNEL_PROVIDERS,
    philox_uniforms,
    provider,
    sample,
    verify,
)

from specdec_kernels import RULES, RULES_READING_DRAFT, Status, reference
from specdec_kernels.arguments.chain import ChainArguments

TARGET, DRAFT = Status.TARGET_INVALID, Status.DRAFT_INVALID
EMPTY, RANGE, PARAMETER = Status.EMPTY_RESIDUAL, Status.DRAFT_OUT_OF_RANGE, Status.BAD_PARAMETER
NAN, INF = float("nan"), float("inf")
by_provider = pytest.mark.parametrize("name", ALL_PROVIDERS)
by_kernel = pytest.mark.parametrize("name", KERNEL_PROVIDERS)
reading = pytest.mark.parametrize("rule", RULES_READING_DRAFT)
INVALID = pytest.mark.parametrize("value", [NAN, INF, -INF], ids=["nan", "inf", "minus-inf"])


class Decided(NamedTuple):
    """What `verify_chain` returns, the first three as lists."""

    tokens: list[Any]
    accepted: list[int]
    status: list[int]
    logprobs: torch.Tensor
    accept_probs: torch.Tensor


def decided(name, *args, **options):
    out = verify(provider("verify_chain", name), *args, **options)
    return Decided(*(x.tolist() for x in out[:3]), *out[3:])


def drawn(name, *args, **options):
    """(tokens, status) of `sample`."""
    out = sample(provider("sample", name), *args, **options)
    return out[0].tolist(), out[4].tolist()


def u(*values):
    return torch.tensor([values], dtype=torch.float64)


def one(token):
    return torch.tensor([[token]])


def options(rule, gamma=3):
    return dict(rule=rule, rates=torch.ones(gamma) if rule == "synthetic" else None)


def certain(b=4, gamma=3, v=70, token=5):
    """Both models are certain of `token`, so that every draft is accepted."""
    target = torch.zeros(b, gamma + 1, v)
    target[..., token] = 200.0
    return target, torch.full((b, gamma), token), target[:, :gamma].clone()


# Rows of the target.


@pytest.mark.parametrize("rule", RULES)
@INVALID
@by_provider
def test_an_invalid_target_row_keeps_the_drafts_accepted_before(name, value, rule):
    """Elsewhere: an all-NaN row emits a valid-looking id, or ends the whole batch."""
    target, drafts, q = certain()
    target[1, 0], target[2, 2], target[3, 3] = value, value, value
    got = decided(name, target, drafts, q, **options(rule))
    assert got.tokens == [[5, 5, 5, 5], [-1] * 4, [5, 5, -1, -1], [5, 5, 5, -1]]
    assert (got.accepted, got.status) == ([3, 0, 2, 3], [0, TARGET, TARGET, TARGET])
    assert_close("logprobs", got.logprobs, torch.zeros(4, 4), atol=1e-6)


@pytest.mark.parametrize("at", [0, 33, 69])
@pytest.mark.parametrize("value", [NAN, INF], ids=["nan", "inf"])
@by_kernel
def test_one_invalid_entry_anywhere_in_a_target_row_is_detected(name, value, at):
    target, drafts, q = proofs.chain_case(1, 3, 70).args()[:3]
    target[0, 0, at] = value
    got = decided(name, target, drafts, q)
    assert (got.status, got.tokens[0][0]) == ([TARGET], -1)
    for filters in ({}, dict(top_k=3, top_p=0.5, min_p=0.1)):
        assert drawn(name, target[:, 0], **filters) == ([-1], [TARGET])


@pytest.mark.parametrize("v", [131_073, 4097])
@pytest.mark.parametrize("value", [NAN, INF], ids=["nan", "inf"])
@pytest.mark.parametrize("method", ["cdf", "gumbel"])
def test_an_invalid_entry_in_the_last_tile_of_a_large_row_is_detected(v, value, method):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.zeros(1, v, dtype=dtype)
        logits[0, -1] = value
        for filters in ({}, dict(top_k=4), dict(top_p=0.5), dict(min_p=0.5), dict(temperature=0.0)):
            got = drawn("cpp", logits, method=method, **filters)
            assert got == ([-1], [TARGET]), filters


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("value", [NAN, INF, -0.25], ids=str)
@by_provider
def test_an_invalid_probability_of_a_drafted_token_is_not_accepted(name, value):
    target, drafts = torch.full((2, 3, 4), 0.25), torch.full((2, 2), 2)
    target[1, 1, 2] = value
    got = decided(name, target, drafts, torch.full((2, 2, 4), 0.25), kind="probs")
    assert (got.tokens[0][:2], got.tokens[1]) == ([2, 2], [2, -1, -1])
    assert (got.accepted, got.status) == ([2, 1], [0, TARGET])


# Rows of the draft.


@reading
@INVALID
@by_provider
def test_an_invalid_draft_row_ends_the_drafts(name, value, rule):
    target, drafts, q = certain()
    q[1, 0], q[2, 1], q[3, 2] = value, value, value
    got = decided(name, target, drafts, q, **options(rule))
    assert got.tokens == [[5, 5, 5, 5], [5, -1, -1, -1], [5, 5, -1, -1], [5, 5, 5, -1]]
    assert (got.accepted, got.status) == ([3, 0, 1, 2], [0, DRAFT, DRAFT, DRAFT])


@pytest.mark.parametrize("rule", [r for r in RULES if r not in RULES_READING_DRAFT])
@by_provider
def test_rules_that_do_not_compare_with_the_draft_read_no_draft_row(name, rule):
    target, drafts, q = certain()
    sampled = (torch.full((4, 3), NAN).double(), torch.full((4, 3), NAN), torch.full((4,), -1.0))
    got = decided(name, target, drafts, q * NAN, sampled=sampled, **options(rule))
    assert (got.accepted, got.status) == ([3] * 4, [0] * 4)


@reading
@pytest.mark.parametrize("value", [NAN, INF, -0.25], ids=str)
@by_provider
def test_an_invalid_sparse_probability_ends_the_drafts(name, value, rule):
    """It may be at any entry with an id; an entry without one is not read."""
    target, drafts, _ = certain(3, 2)
    ids = torch.tensor([5, 9, -1]).expand(3, 2, 3).contiguous()
    q = torch.tensor([1.0, 0.0, 0.0]).repeat(3, 2, 1)
    q[0, 1, 0] = q[1, 1, 1] = q[2, :, 2] = value
    got = decided(name, target, drafts, q, ids=ids, **options(rule, 2))
    assert got[:3] == ([[5, 5, -1], [5, 5, -1], [5, 5, 5]], [1, 1, 2], [DRAFT, DRAFT, 0])


@pytest.mark.parametrize(
    ("kind", "bad"),
    [("probs", -0.25), *((k, x) for k in ("logits", "probs", "sampled") for x in (NAN, INF))],
)
@by_provider
def test_an_invalid_entry_beside_the_drafted_one_makes_the_draft_row_invalid(name, kind, bad):
    """The residual cannot be computed: the target is sampled instead after a rejection."""
    v = 5000
    p, q = torch.full((1, 2, v), 1 / v), torch.full((1, 1, v), 1 / v)
    q[..., 7] = 0.25
    if kind != "probs":
        p, q = p.log(), q.log()
    sampled = (q.double().logsumexp(-1), torch.full((1, 1), -INF), 1.0)
    for at in (0, 4999) if name == "triton" else (0, 4096, 4999):
        draft = q.clone()
        draft[..., at] = bad
        got = decided(
            name, p, one(7), draft, kind="probs" if kind == "probs" else "logits",
            uniforms=u(0.5, 7.5 / v),  # of the target: the drafted token itself
            sampled=sampled if kind == "sampled" else None,
        )  # fmt: skip
        assert got[:3] == ([[7, -1]], [0], [DRAFT])


@by_provider
def test_a_bad_probability_beyond_the_target_is_found_when_the_draft_is_rejected(name):
    target, q = torch.zeros(1, 2, 70), torch.zeros(1, 1, 80)
    target[..., 5], q[..., 6], q[..., 75] = 1.0, 1.0, NAN
    for rule in RULES_READING_DRAFT:
        got = decided(name, target, one(6), q, kind="probs", **options(rule, 1))
        assert got[:3] == ([[5, -1]], [0], [DRAFT])


# Statistics and parameters.


@by_provider
@pytest.mark.parametrize("bad", [-1.0, NAN, INF])
def test_a_draft_temperature_out_of_range_sets_the_parameter_bit_of_its_sequence_only(name, bad):
    target = torch.zeros(2, 2, 5)
    sampled = (torch.zeros(2, 1).double(), torch.zeros(2, 1), torch.tensor([bad, 1.0]))
    got = decided(name, target, torch.tensor([[1], [2]]), target[:, :1], sampled=sampled)
    assert (got.status[0], got.tokens[0]) == (PARAMETER, [-1, -1])
    assert not got.status[1] & PARAMETER


@pytest.mark.parametrize(
    ("logsumexp", "threshold", "fault"),
    [(NAN, 0.0, True), (INF, 0.0, True), (0.0, NAN, True), (1.0, 5.0, False)],
)
@by_provider
def test_the_statistics_of_a_sampled_draft_are_validated_too(name, logsumexp, threshold, fault):
    """A logsumexp that is not finite is a fault; a draft below its threshold has Q = 0 < P."""
    sampled = (u(logsumexp), torch.tensor([[threshold]]), 1.0)
    got = decided(name, torch.zeros(1, 2, 4), one(1), torch.zeros(1, 1, 4), sampled=sampled,
                  uniforms=u(0.999, 0.6))  # fmt: skip
    assert (got.status, got.accepted) == (([DRAFT], [0]) if fault else ([0], [1]))
    assert 0 <= got.tokens[0][0] < 4


@pytest.mark.parametrize("fault", [
    dict(temperature=NAN), dict(temperature=-1.0), dict(temperature=INF), dict(top_k=-1),
    dict(top_p=0.0), dict(top_p=NAN), dict(top_p=1.1), dict(min_p=-0.1), dict(min_p=NAN),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_a_parameter_out_of_range_stops_its_own_sequence_only(name, fault):
    good = dict(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01)
    (key, bad), = fault.items()  # fmt: skip
    dtype = torch.int32 if key == "top_k" else torch.float32
    vector = {**good, key: torch.tensor([good[key], bad, good[key]], dtype=dtype)}
    args = proofs.chain_case(3, 2, 70).args()[:3]
    op = provider("verify_chain", name)
    got, want = verify(op, *args, **vector), verify(op, *args, **good)
    assert_outputs_equal("verify_chain", [x[::2] for x in got], [x[::2] for x in want])
    assert (got[0][1].tolist(), int(got[1][1]), int(got[2][1])) == ([-1] * 3, 0, PARAMETER)
    assert not got[3][1].any()
    tokens, status = drawn(name, args[0][:, 0], **vector)
    assert (tokens[1], status) == (-1, [0, PARAMETER, 0])


# Ids.


@reading
@pytest.mark.parametrize("column", [-1, -(2**31), 70, 2**31 - 1])
@by_provider
def test_a_draft_column_out_of_range_is_never_an_index(name, column, rule):
    """Columns are data: a token with such a column has Q = 0, and no provider may read there."""
    target, drafts, q = certain(2, 2)
    columns = torch.arange(70, dtype=torch.int32)
    columns[7] = columns[69] = column
    kw = dict(columns=columns, **options(rule, 2))
    assert decided(name, target, drafts, q, **kw).tokens == [[5, 5, 5]] * 2
    drafts[:] = 7
    target[..., 7] = 250.0
    got = decided(name, target, drafts, q, **kw)
    assert (got.tokens, got.status) == ([[7, 7, 7]] * 2, [0, 0])
    want = decided("reference", target, drafts, q, **kw)
    for g, w in zip(got[3:], want[3:], strict=True):
        assert_close("probabilities", g, w, atol=2e-5)


@pytest.mark.parametrize("form", ["none", "full", "sparse", "mapped", "narrow"])
@pytest.mark.parametrize("rule", RULES)
@by_provider
def test_a_draft_id_out_of_range_is_never_an_index(name, rule, form):
    """Elsewhere: id == V reads the next row, -1 the previous one, and 2^32 + 3 is cut to 3."""
    case = proofs.chain_case(2, 2, 70, rule=rule, draft=form)
    op = provider("verify_chain", name)
    for ids in (torch.int64, torch.int32):
        target, drafts, q, listed, columns = case.args()[:5]
        drafts = drafts.to(ids)
        kw = dict(ids=listed, columns=columns, positions=8, **options(rule, 2))
        drafts[1, 1] = -1
        want = verify(op, target, drafts, q, **kw)
        bad_ids = (70, -2) if name == "triton" else (70, 71, 2**31 - 1, -2, -(2**31))
        for bad in (*bad_ids, 2**32 + 3) if ids == torch.int64 else bad_ids:
            drafts[1, 1] = bad
            got = verify(op, target, drafts, q, **kw)
            for i in (0, 1, 3, 4):
                assert_close("like -1", got[i], want[i])
            assert got[2].tolist() == [int(want[2][0]), RANGE if int(want[1][1]) == 1 else 0]


@reading
@by_provider
def test_a_wide_draft_may_name_ids_beyond_the_target_but_not_beyond_itself(name, rule):
    target, _, _ = certain(2, 1)
    drafts, q = torch.tensor([[79], [80]]), torch.zeros(2, 1, 80)
    got = decided(name, target, drafts, q, **options(rule, 1))
    assert got[:3] == ([[5, -1]] * 2, [0, 0], [0, RANGE])
    assert float(got.accept_probs[0, 0]) == 0


@pytest.mark.parametrize("rule", RULES)
@by_provider
def test_missing_drafts_have_no_acceptance_probability(name, rule):
    target, drafts, q = certain(3)
    drafts[0, 1:] = drafts[1] = -1
    got = decided(name, target, drafts, q, **options(rule))
    assert got.accepted == [1, 0, 3]
    known = ~got.accept_probs.isnan()
    # Block decides the last draft first, and no other where that one is accepted.
    last = [False, False, True] if rule == "block" else [True] * 3
    assert known.tolist() == [[True, False, False], [False] * 3, last]
    assert_close("p", got.accept_probs[known], torch.ones(int(known.sum())), atol=1e-6)


# Residuals that are empty, or whose Q is infinite or 0.


@by_provider
def test_an_empty_residual_falls_back_to_the_target(name):
    """Elsewhere: uninitialised memory or V-1. Here Q >= P everywhere, so the residual is empty."""
    p, q = torch.tensor([0.5, 0.25, 0.25, 0.0]), torch.tensor([1.0, 0.5, 0.5, 0.5])
    for rule, n, last, want in (
        ("token", 1, 0.0, 0), ("token", 1, 0.6, 1), ("token", 1, 0.99999, 2), ("block", 2, 0.6, 1),
    ):  # fmt: skip
        got = decided(name, p.expand(1, n + 1, 4), torch.zeros(1, n).long(), q.expand(1, n, 4),
                      kind="probs", rule=rule, uniforms=u(*[0.999] * n, last))  # fmt: skip
        assert (got.tokens, got.status) == ([[want] + [-1] * n], [EMPTY])


@by_provider
def test_an_empty_residual_of_rule_block_is_drawn_from_its_own_row(name):
    """The logits of the row after it have another sum."""
    p = torch.tensor([[[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0], [0.25] * 4]]).log()
    # The logsumexp of the first draft row is wrong by log 2: Q is twice P.
    sampled = (-u(2.0, 1.0).log(), torch.full((1, 2), -INF), 1.0)
    got = decided(name, p, torch.tensor([[0, 2]]), p[:, :2], sampled=sampled, rule="block",
                  uniforms=u(0.999, 0.999, 0.6))  # fmt: skip
    assert (got.tokens, got.status) == ([[1, -1, -1]], [EMPTY])


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("form", ["whole", "mapped", "wide"])
@by_provider
def test_an_infinite_q_of_finite_logits_leaves_an_empty_residual(name, form):
    """No fault of the row: its logsumexp is that of twice the temperature, and 3e38 / T no float.

    Rule block must reject the first draft, too, because Q exceeds P in the row after it. And an
    infinite Q at one token subtracts nothing where it is 0: exp(95) there, else exp(-95).
    """
    v = 6
    columns = torch.arange(v, dtype=torch.int32) if form == "mapped" else None
    q = torch.zeros(1, 2, v + 3 if form == "wide" else v)
    q[:, 1] = 3e38
    logsumexp = q.double().logsumexp(-1) + torch.tensor([1.0, 0.0])  # Q < P in the first row
    sampled, target = (logsumexp, q.amin(-1), 0.5), torch.zeros(1, 3, v)
    peak = torch.zeros(1, 1, q.shape[-1])
    peak[..., 1] = 95.0
    for rule in RULES_READING_DRAFT:
        kw = dict(columns=columns, rule=rule)
        got = decided(name, target, torch.ones(1, 2).long(), q, sampled=sampled,
                      uniforms=u(0.5, 0.5, 0.7), **kw)  # fmt: skip
        tokens, status = ([4, -1, -1], 0) if rule == "block" else ([1, 4, -1], EMPTY)
        assert (got.tokens, got.status) == ([tokens], [status])
        assert float(got.accept_probs[0, 1]) == 0
        wrong = (peak.double().logsumexp(-1), peak.amin(-1), 0.5)
        got = decided(name, target[:, :2], one(1), peak, sampled=wrong, uniforms=u(0.5, 0.7), **kw)
        assert (got.tokens, got.status) == ([[4, -1]], [0])


def certain_rows(*tokens, kind):
    """[1, rows, 3]: each row is certain of a token."""
    rows = torch.nn.functional.one_hot(torch.tensor([tokens]), 3).float()
    return rows if kind == "probs" else rows.log()


@pytest.mark.parametrize("kind", ["logits", "probs", "masked"])
@by_provider
def test_a_draft_that_neither_model_can_draw_has_acceptance_probability_0(name, kind):
    """P(x) = Q(x) = 0, also where both mask x by the smallest float, as Transformers does."""
    masked, kind = kind == "masked", kind.replace("masked", "logits")
    target, q = certain_rows(0, 0, kind=kind), certain_rows(1, kind=kind)
    if masked:
        target, q = (x.clamp(min=torch.finfo(x.dtype).min) for x in (target, q))
    for rule in RULES_READING_DRAFT:
        got = decided(name, target, one(2), q, kind=kind, rule=rule, uniforms=u(0.0, 0.5))
        assert (got.tokens, got.accept_probs.tolist(), got.status) == ([[0, -1]], [[0]], [0])


@pytest.mark.parametrize("kind", ["logits", "probs"])
@by_provider
def test_rule_block_accepts_nothing_after_an_impossible_draft(name, kind):
    """Not even a draft with Q = 0 < P: 0 times an infinite ratio is 0."""
    target, q = certain_rows(0, 0, 0, kind=kind), certain_rows(1, 2, kind=kind)
    got = decided(name, target, torch.tensor([[1, 0]]), q, kind=kind, rule="block",
                  uniforms=u(0.5, 0.5, 0.5))  # fmt: skip
    assert (got.tokens, got.accept_probs.tolist()) == ([[0, -1, -1]], [[0, 0]])


@by_provider
def test_the_residual_of_a_mapped_draft_reads_the_columns_of_every_tile(name):
    """Q holds all the mass that P has at token 6000, so the recovered token is 5."""
    target, columns = torch.zeros(1, 2, 9000), torch.full((9000,), -1, dtype=torch.int32)
    target[..., [5, 6000]] = 0.5
    columns[6000], columns[7000] = 0, 1
    for rule in RULES_READING_DRAFT:
        got = decided(name, target, one(7000), torch.full((1, 1, 2), 0.5), columns=columns,
                      kind="probs", rule=rule, uniforms=u(0.5, 0.9))  # fmt: skip
        assert got.tokens == [[5, -1]]


# Random faults, and the ends of uniforms.


def spoil(x, values, share, g):
    hit = torch.rand(x.shape, generator=g) < share
    x[hit] = values[torch.randint(0, len(values), (int(hit.sum()),), generator=g)].to(x)


def assert_valid_and_specified(args, v):
    """Ids are in the vocabulary, none follows the last one, and outputs are the specification's."""
    got = reference.verify_chain, provider("verify_chain", "cpp")
    want, got = (op(*args) for op in got)
    places = torch.arange(got[0].shape[1])
    assert ((got[0] >= -1) & (got[0] < v)).all()
    assert (got[0][places < got[1][:, None]] >= 0).all()
    assert (got[0][places > got[1][:, None]] == -1).all()
    assert not got[3].isnan().any()
    assert_outputs_close("verify_chain", got, want)


def test_ids_stay_in_the_vocabulary_for_rows_of_every_kind():
    g = torch.Generator().manual_seed(21)
    b, gamma, v = 400, 3, 37
    target = torch.randn(b, gamma + 1, v, generator=g) * 10
    q = torch.randn(b, gamma, v, generator=g) * 10
    for x in (target, q):
        spoil(x, torch.tensor([NAN, INF, -INF, 3e38, -3e38, 1e-45]), 0.02, g)
    drafts = torch.randint(-3, v + 3, (b, gamma), generator=g)
    for rule in ("token", "greedy", "match"):
        filters = dict(rule=rule, positions=torch.arange(b), top_p=0.9, top_k=30)
        args = verify(lambda *a: a, target, drafts, q, **filters)
        assert_valid_and_specified(args, v)


@pytest.mark.parametrize("form", ["full", "sparse", "mapped", "wide", "narrow", "wide-sampled"])
@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("rule", ["block", "token", "lenient"])
def test_ids_stay_in_the_vocabulary_for_data_of_every_kind(rule, kind, form):
    """Random faults in every tensor of floats and ids."""
    g, v = torch.Generator().manual_seed(31), 37
    case = proofs.chain_case(60, 3, v, rule=rule, kind=kind, draft=form, filters="off")
    args = ChainArguments(*case.args())
    for x in (args.target, args.draft, args.draft_logsumexp, args.draft_threshold):
        if x is not None:
            far = 3e38 if kind == "logits" else 20.0
            spoil(x, torch.tensor([NAN, INF, -INF, far, -far, 1e-45]), 0.01, g)
    for x in (args.draft_token_ids, args.draft_ids):
        if x is not None:
            spoil(x, torch.arange(-3, v + 9), 0.1, g)
    if args.draft_columns is not None:
        args.draft_columns[torch.rand(v, generator=g) < 0.2] = 10**6
    assert_valid_and_specified(args, v)


@pytest.mark.parametrize("last", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("v", [1, 5, 4097, 9000])
@by_kernel
def test_extreme_uniforms_never_leave_the_vocabulary_or_pick_a_zero(name, v, last):
    """Elsewhere: id == V when rounding leaves the cdf short of the uniform."""
    generator = torch.Generator().manual_seed(v)
    p = 9 * torch.randn(1, 2, v, generator=generator)
    p[..., -1] = -INF if v > 1 else 0.0
    p[..., 0] = -INF if v > 2 else 0.0
    q = 9 * torch.randn(1, 1, v, generator=generator)
    for drafts, draft in ((one(-1), None), (one(0), q)):
        got = decided(name, p, drafts, draft, uniforms=u(1 - 2.0**-53, last))
        n = got.accepted[0]
        token = got.tokens[0][n]
        assert 0 <= token < v
        assert p[0, n, token] > -INF
        assert got.logprobs[0, n] > -INF


@pytest.mark.slow
@pytest.mark.parametrize("stream", [0, 1], ids=["accept", "residual"])
def test_small_uniforms_keep_their_bits(stream):
    """Elsewhere: floats in (0, 1], or multiples of 2^-24. The smallest of 400,000 decides."""
    drawn = philox_uniforms(0, np.arange(400_000), stream)
    assert drawn.max() < 1
    position = int(drawn.argmin())
    small = drawn[position]
    edges = torch.tensor([small * (1 - 1e-4), small * (1 + 1e-4)]).double()
    assert abs(round(small * 2**24) / (small * 2**24) - 1) > 1e-3
    p = torch.stack([edges, 1 - edges], -1).log().float()[:, None].repeat(1, 2, 1)
    q = torch.tensor([0.0, -torch.inf]).repeat(2, 1, 1)
    drafts = torch.tensor([[0], [0]]) if stream == 0 else torch.tensor([[-1], [-1]])
    got = decided("cpp", p, drafts, q, positions=position)
    assert [row[0] for row in got.tokens] == [1, 0]


def test_each_position_has_its_own_acceptance_uniform():
    """Elsewhere: reseeding inside the loop gives every position the same uniform; or u is 0."""
    n, gamma = 3000, 3
    p = torch.tensor([0.6, 0.4]).log().expand(n, gamma + 1, 2)
    q = torch.tensor([1.0, 0.0]).log().expand(n, gamma, 2)
    positions = torch.arange(n) * 17
    got = decided("cpp", p, torch.zeros(n, gamma).long(), q, positions=positions)
    uniforms = philox_uniforms(0, positions.numpy()[:, None] + np.arange(gamma), 0)
    near = np.abs(uniforms - 0.6).min(-1) < 1e-5
    want = np.cumprod(uniforms < 0.6, -1).sum(-1)
    np.testing.assert_array_equal(np.array(got.accepted)[~near], want[~near])
