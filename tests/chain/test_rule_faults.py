"""Invalid rows, ids and parameters under every rule and form of the draft.

They set a status; drafts accepted before stay accepted, and no id out of range is emitted.
"""

import proofs
import pytest
import torch
from support.providers import (
    ALL_PROVIDERS,
    FAST_PROVIDERS,
    assert_close,
    assert_outputs_close,
    assert_outputs_equal,
    provider,
    verify,
)

from specdec_kernels import RULES, RULES_READING_DRAFT, Status, reference
from specdec_kernels.arguments.chain import ChainArguments

TARGET, DRAFT = Status.TARGET_INVALID, Status.DRAFT_INVALID
EMPTY, RANGE = Status.EMPTY_RESIDUAL, Status.DRAFT_OUT_OF_RANGE
NAN, INF = float("nan"), float("inf")
INVALID = pytest.mark.parametrize("value", [NAN, INF, -INF], ids=["nan", "inf", "minus-inf"])


def options(rule, gamma=3):
    return dict(rule=rule, rates=torch.ones(gamma) if rule == "synthetic" else None)


def certain(b=4, gamma=3, v=70, token=5):
    """Both models are certain of `token`, so that every draft is accepted."""
    target = torch.zeros(b, gamma + 1, v)
    target[..., token] = 200.0
    return target, torch.full((b, gamma), token), target[:, :gamma].clone()


@pytest.mark.parametrize("rule", RULES)
@INVALID
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_an_invalid_target_row_keeps_the_drafts_accepted_before(name, value, rule):
    """Elsewhere: an all-NaN row emits a valid-looking id, or ends the whole batch."""
    target, drafts, q = certain()
    target[1, 0], target[2, 2], target[3, 3] = value, value, value
    got = verify(provider("verify_chain", name), target, drafts, q, **options(rule))
    assert got[0].tolist() == [[5, 5, 5, 5], [-1] * 4, [5, 5, -1, -1], [5, 5, 5, -1]]
    assert got[1].tolist() == [3, 0, 2, 3]
    assert got[2].tolist() == [0, TARGET, TARGET, TARGET]
    assert_close("logprobs", got[3], torch.zeros(4, 4), atol=1e-6)


@pytest.mark.parametrize("rule", RULES_READING_DRAFT)
@INVALID
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_an_invalid_draft_row_ends_the_drafts(name, value, rule):
    target, drafts, q = certain()
    q[1, 0], q[2, 1], q[3, 2] = value, value, value
    got = verify(provider("verify_chain", name), target, drafts, q, **options(rule))
    assert got[0].tolist() == [[5, 5, 5, 5], [5, -1, -1, -1], [5, 5, -1, -1], [5, 5, 5, -1]]
    assert got[1].tolist() == [3, 0, 1, 2]
    assert got[2].tolist() == [0, DRAFT, DRAFT, DRAFT]


@pytest.mark.parametrize("rule", [r for r in RULES if r not in RULES_READING_DRAFT])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_rules_that_do_not_compare_with_the_draft_read_no_draft_row(name, rule):
    target, drafts, q = certain()
    sampled = (torch.full((4, 3), NAN).double(), torch.full((4, 3), NAN), torch.full((4,), -1.0))
    got = verify(provider("verify_chain", name), target, drafts, torch.full_like(q, NAN),
                 sampled=sampled, **options(rule))  # fmt: skip
    assert got[1].tolist() == [3] * 4
    assert not got[2].any()


@pytest.mark.parametrize("rule", RULES_READING_DRAFT)
@pytest.mark.parametrize("value", [NAN, INF, -0.25], ids=str)
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_an_invalid_sparse_probability_ends_the_drafts(name, value, rule):
    """It may be at any entry with an id; an entry without one is not read."""
    target, drafts, _ = certain(3, 2)
    ids = torch.tensor([5, 9, -1]).expand(3, 2, 3).contiguous()
    q = torch.tensor([1.0, 0.0, 0.0]).repeat(3, 2, 1)
    q[0, 1, 0] = q[1, 1, 1] = q[2, :, 2] = value
    got = verify(provider("verify_chain", name), target, drafts, q, ids=ids, **options(rule, 2))
    assert got[1].tolist() == [1, 1, 2]
    assert got[2].tolist() == [DRAFT, DRAFT, 0]
    assert got[0].tolist() == [[5, 5, -1], [5, 5, -1], [5, 5, 5]]


@pytest.mark.parametrize("rule", RULES_READING_DRAFT)
@pytest.mark.parametrize("column", [-1, -(2**31), 70, 2**31 - 1])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_a_draft_column_out_of_range_is_never_an_index(name, column, rule):
    """Columns are data: a token with such a column has Q = 0, and no provider may read there."""
    target, drafts, q = certain(2, 2)
    columns = torch.arange(70, dtype=torch.int32)
    columns[7] = columns[69] = column
    op = provider("verify_chain", name)
    got = verify(op, target, drafts, q, columns=columns, **options(rule, 2))
    assert got[0].tolist() == [[5, 5, 5]] * 2
    drafts[:] = 7
    target[..., 7] = 250.0
    got = verify(op, target, drafts, q, columns=columns, **options(rule, 2))
    assert not got[2].any()
    assert got[0].tolist() == [[7, 7, 7]] * 2
    want = verify(reference.verify_chain, target, drafts, q, columns=columns, **options(rule, 2))
    assert_outputs_close("verify_chain", got, want)


@pytest.mark.parametrize("form", ["none", "full", "sparse", "mapped", "narrow"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ALL_PROVIDERS)
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


@pytest.mark.parametrize("rule", RULES_READING_DRAFT)
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_a_wide_draft_may_name_ids_beyond_the_target_but_not_beyond_itself(name, rule):
    target, _, _ = certain(2, 1)
    q = torch.zeros(2, 1, 80)
    got = verify(provider("verify_chain", name), target, torch.tensor([[79], [80]]), q,
                 **options(rule, 1))  # fmt: skip
    assert got[0].tolist() == [[5, -1]] * 2
    assert got[1].tolist() == [0, 0]
    assert got[2].tolist() == [0, RANGE]
    assert float(got[4][0, 0]) == 0


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_a_bad_entry_beyond_the_target_makes_the_draft_row_unusable(name):
    target, drafts, _ = certain(2, 1)
    for rule in RULES_READING_DRAFT:
        q = torch.zeros(2, 1, 80)
        q[:, :, 5] = 100.0
        q[1, 0, 75] = NAN
        got = verify(provider("verify_chain", name), target, drafts, q, **options(rule, 1))
        assert got[2].tolist() == [0, DRAFT]
        assert got[0][1].tolist() == [5, -1]


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_a_bad_probability_beyond_the_target_is_found_when_the_draft_is_rejected(name):
    target, q = torch.zeros(1, 2, 70), torch.zeros(1, 1, 80)
    target[..., 5], q[..., 6], q[..., 75] = 1.0, 1.0, NAN
    for rule in RULES_READING_DRAFT:
        got = verify(provider("verify_chain", name), target, torch.tensor([[6]]), q, kind="probs",
                     **options(rule, 1))  # fmt: skip
        assert (got[0].tolist(), int(got[1]), int(got[2])) == ([[5, -1]], 0, DRAFT)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("value", [NAN, INF, -0.25], ids=str)
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_an_invalid_probability_of_a_drafted_token_is_not_accepted(name, value):
    target, drafts = torch.full((2, 3, 4), 0.25), torch.full((2, 2), 2)
    target[1, 1, 2] = value
    got = verify(provider("verify_chain", name), target, drafts, torch.full((2, 2, 4), 0.25),
                 kind="probs")  # fmt: skip
    assert got[0][0, :2].tolist() == [2, 2]
    assert got[0][1].tolist() == [2, -1, -1]
    assert (got[1].tolist(), got[2].tolist()) == ([2, 1], [0, TARGET])


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_synthetic_rates_of_nan_never_accept(name):
    target, drafts, q = certain(2, 2)
    drafts[:] = 6
    for rates in ([NAN, 1.0], [-INF, 1.0]):
        got = verify(provider("verify_chain", name), target, drafts, q, rule="synthetic",
                     rates=torch.tensor(rates))  # fmt: skip
        assert got[0].tolist() == [[5, -1, -1]] * 2
        assert not got[2].any()


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_an_empty_residual_of_rule_block_falls_back_to_the_target(name):
    """Q >= c P everywhere. The last id or uninitialised memory would be wrong."""
    p = torch.tensor([0.5, 0.25, 0.25, 0.0]).expand(1, 3, 4)
    q = torch.tensor([1.0, 0.5, 0.5, 0.5]).expand(1, 2, 4)
    uniforms = torch.tensor([[0.999, 0.999, 0.6]]).double()
    got = verify(provider("verify_chain", name), p, torch.tensor([[0, 0]]), q, kind="probs",
                 rule="block", uniforms=uniforms)  # fmt: skip
    assert (got[0].tolist(), int(got[2])) == ([[1, -1, -1]], EMPTY)


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_an_empty_residual_of_rule_block_is_drawn_from_its_own_row(name):
    """The logits of the row after it have another sum."""
    p = torch.tensor([[[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0], [0.25] * 4]]).log()
    # The logsumexp of the first draft row is wrong by log 2: Q is twice P.
    sampled = (-torch.tensor([[2.0, 1.0]]).double().log(), torch.full((1, 2), -INF), 1.0)
    uniforms = torch.tensor([[0.999, 0.999, 0.6]]).double()
    got = verify(provider("verify_chain", name), p, torch.tensor([[0, 2]]), p[:, :2],
                 sampled=sampled, rule="block", uniforms=uniforms)  # fmt: skip
    assert (got[0].tolist(), int(got[2])) == ([[1, -1, -1]], EMPTY)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("form", ["whole", "mapped", "wide"])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_an_infinite_q_of_finite_logits_leaves_an_empty_residual(name, form):
    """No fault of the row: its logsumexp is that of twice the temperature, and 3e38 / T no float.

    Rule block must reject the first draft, too, because Q exceeds P in the row after it.
    """
    v, columns = 6, None
    q = torch.zeros(1, 2, v + 3 if form == "wide" else v)
    q[:, 1] = 3e38
    if form == "mapped":
        columns = torch.arange(v, dtype=torch.int32)
    logsumexp = q.double().logsumexp(-1) + torch.tensor([1.0, 0.0])  # Q < P in the first row
    sampled = (logsumexp, q.amin(-1), 0.5)
    uniforms = torch.tensor([[0.5, 0.5, 0.7]]).double()
    for rule in RULES_READING_DRAFT:
        got = verify(provider("verify_chain", name), torch.zeros(1, 3, v), torch.ones(1, 2).long(),
                     q, sampled=sampled, columns=columns, uniforms=uniforms, rule=rule)  # fmt: skip
        tokens, status = ([4, -1, -1], 0) if rule == "block" else ([1, 4, -1], EMPTY)
        assert (got[0].tolist(), int(got[2])) == ([tokens], status)
        assert float(got[4][0, 1]) == 0


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("form", ["whole", "mapped", "wide"])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_an_infinite_q_subtracts_nothing_where_it_is_0(name, form):
    """Its logsumexp is that of twice the temperature: Q is exp(95) at one token, else exp(-95)."""
    v, columns = 6, None
    q = torch.zeros(1, 1, v + 3 if form == "wide" else v)
    q[..., 1] = 95.0
    if form == "mapped":
        columns = torch.arange(v, dtype=torch.int32)
    sampled = (q.double().logsumexp(-1), q.amin(-1), 0.5)
    uniforms = torch.tensor([[0.5, 0.7]]).double()
    for rule in RULES_READING_DRAFT:
        got = verify(provider("verify_chain", name), torch.zeros(1, 2, v), torch.tensor([[1]]), q,
                     sampled=sampled, columns=columns, uniforms=uniforms, rule=rule)  # fmt: skip
        assert (got[0].tolist(), int(got[2])) == ([[4, -1]], 0)


def certain_rows(*tokens, kind):
    """[1, rows, 3]: each row is certain of a token."""
    rows = torch.nn.functional.one_hot(torch.tensor([tokens]), 3).float()
    return rows if kind == "probs" else rows.log()


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_a_draft_that_neither_model_can_draw_has_acceptance_probability_0(name, kind):
    """P(x) = Q(x) = 0."""
    target, q = certain_rows(0, 0, kind=kind), certain_rows(1, kind=kind)
    uniforms = torch.tensor([[0.0, 0.5]]).double()
    for rule in RULES_READING_DRAFT:
        got = verify(provider("verify_chain", name), target, torch.tensor([[2]]), q, kind=kind,
                     rule=rule, uniforms=uniforms)  # fmt: skip
        assert (got[0].tolist(), got[4].tolist(), int(got[2])) == ([[0, -1]], [[0]], 0)


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_rule_block_accepts_nothing_after_an_impossible_draft(name, kind):
    """Not even a draft with Q = 0 < P: 0 times an infinite ratio is 0."""
    target, q = certain_rows(0, 0, 0, kind=kind), certain_rows(1, 2, kind=kind)
    uniforms = torch.tensor([[0.5, 0.5, 0.5]]).double()
    got = verify(provider("verify_chain", name), target, torch.tensor([[1, 0]]), q, kind=kind,
                 rule="block", uniforms=uniforms)  # fmt: skip
    assert got[0].tolist() == [[0, -1, -1]]
    assert got[4].tolist() == [[0, 0]]


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_the_residual_of_a_mapped_draft_reads_the_columns_of_every_tile(name):
    """Q holds all the mass that P has at token 6000, so the recovered token is 5."""
    target, columns = torch.zeros(1, 2, 9000), torch.full((9000,), -1, dtype=torch.int32)
    target[..., [5, 6000]] = 0.5
    columns[6000], columns[7000] = 0, 1
    uniforms = torch.tensor([[0.5, 0.9]]).double()
    for rule in RULES_READING_DRAFT:
        got = verify(provider("verify_chain", name), target, torch.tensor([[7000]]),
                     torch.full((1, 1, 2), 0.5), columns=columns, kind="probs", rule=rule,
                     uniforms=uniforms)  # fmt: skip
        assert got[0].tolist() == [[5, -1]]


@pytest.mark.parametrize("form", ["full", "sparse", "mapped", "wide", "narrow", "wide-sampled"])
@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("rule", ["block", "token", "lenient"])
def test_ids_stay_in_the_vocabulary_for_data_of_every_kind(rule, kind, form):
    """Random faults in every tensor of floats and ids; outputs equal the specification's."""
    g = torch.Generator().manual_seed(31)
    b, gamma, v = 60, 3, 37
    case = proofs.chain_case(b, gamma, v, rule=rule, kind=kind, draft=form, filters="off")
    args = ChainArguments(*case.args())
    odd = torch.tensor([NAN, INF, -INF, 20.0, -20.0, 1e-45])
    for x in (args.target, args.draft, args.draft_logsumexp, args.draft_threshold):
        if x is not None:
            hit = torch.rand(x.shape, generator=g) < 0.01
            x[hit] = odd[torch.randint(0, 6, (int(hit.sum()),), generator=g)].to(x)
    for x in (args.draft_token_ids, args.draft_ids):
        if x is not None:
            hit = torch.rand(x.shape, generator=g) < 0.1
            x[hit] = torch.randint(-3, v + 9, (int(hit.sum()),), generator=g)
    if args.draft_columns is not None:
        args.draft_columns[torch.rand(v, generator=g) < 0.2] = 10**6
    got = provider("verify_chain", "cpp")(*args)
    assert ((got[0] >= -1) & (got[0] < v)).all()
    emitted = torch.arange(gamma + 1) < got[1][:, None]
    assert (got[0][emitted] >= 0).all()
    assert not got[3].isnan().any()
    assert_outputs_close("verify_chain", got, reference.verify_chain(*args))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_missing_drafts_have_no_acceptance_probability(name, rule):
    target, drafts, q = certain(3)
    drafts[0, 1:] = drafts[1] = -1
    got = verify(provider("verify_chain", name), target, drafts, q, **options(rule))
    assert got[1].tolist() == [1, 0, 3]
    decided = ~got[4].isnan()
    if rule == "block":  # it decides the last draft first, and no other where that one is accepted
        assert decided.tolist() == [[True, False, False], [False] * 3, [False, False, True]]
    else:
        assert decided.tolist() == [[True, False, False], [False] * 3, [True] * 3]
    assert_close("accept_probs", got[4][decided], torch.ones(int(decided.sum())), atol=1e-6)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_ids_above_16_bits_are_not_cut(name, ids_dtype):
    v, token = 70_000, 66_000
    target = torch.zeros(1, 3, v)
    target[..., token] = 200.0
    drafts = torch.full((1, 2), token, dtype=ids_dtype)
    sparse = torch.tensor([[[464, token, -1]] * 2], dtype=ids_dtype)  # 464 is its lower half
    op = provider("verify_chain", name)
    for rule in RULES_READING_DRAFT:
        got = verify(op, target, drafts, torch.tensor([[[0.5, 0.5, 0.0]] * 2]), ids=sparse,
                     rule=rule)  # fmt: skip
        assert got[0].tolist() == [[token] * 3]
    columns = torch.full((v,), -1, dtype=torch.int32)
    columns[token] = 1
    q = torch.zeros(1, 2, 3)
    for rule in RULES_READING_DRAFT:
        got = verify(op, target, drafts, q, columns=columns, rule=rule)
        assert got[0].tolist() == [[token] * 3]


@pytest.mark.parametrize(
    ("parameter", "values"),
    [("temperature", [0.1, 1.0, 4.0]), ("top_k", [1, 3, 50]), ("top_p", [0.05, 0.6, 1.0]),
     ("min_p", [1.0, 0.2, 0.0]), ("max_new_tokens", [0, 1, 3])],
)  # fmt: skip
@pytest.mark.parametrize("rule", ["token", "block", "typical", "top_beta", "lenient"])
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_parameters_of_each_sequence_are_the_ones_used(name, parameter, values, rule):
    """vLLM on the CPU: the vectors expanded to rows were uninitialised memory. Strided ones too."""
    dtypes = {"top_k": torch.int32, "max_new_tokens": torch.int64}
    values = torch.tensor(values, dtype=dtypes.get(parameter))
    target, drafts, q = proofs.chain_case(3, 2, 300, rule=rule).args()[:3]
    op = provider("verify_chain", name)
    wide = values.repeat_interleave(3)
    for given in (values, wide[::3]):
        got = verify(op, target, drafts, q, rule=rule, **{parameter: given})
        for b in range(3):
            one = slice(b, b + 1)
            alone = verify(op, target[one], drafts[one], q[one], rule=rule,
                           **{parameter: values[one]})  # fmt: skip
            assert_outputs_equal("verify_chain", [x[one] for x in got], alone)
