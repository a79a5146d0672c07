"""Faults that other projects have shipped, each as a test of `sample` and `verify_chain`.

A docstring that begins with "Elsewhere" says what another published implementation did. Where only
one is known to have done it, it is named.
"""

import numpy as np
import pytest
import torch
from support.providers import (
    ALL_PROVIDERS,
    FAST_PROVIDERS,
    KERNEL_PROVIDERS,
    SIGNIFICANCE,
    assert_close,
    assert_outputs_close,
    assert_outputs_equal,
    chi_square,
    needs_triton,
    philox_uniforms,
    provider,
    sample,
    verify,
)

from specdec_kernels import SampledDraft, Status, reference, testing, verify_chain
from specdec_kernels import sample as public_sample
from specdec_kernels.testing import filtered_distribution

TARGET, DRAFT = Status.TARGET_INVALID, Status.DRAFT_INVALID
EMPTY, RANGE = Status.EMPTY_RESIDUAL, Status.DRAFT_OUT_OF_RANGE
PARAMETER = Status.BAD_PARAMETER
SOME_RULES = ("token", "greedy", "match")
NAN, INF = float("nan"), float("inf")


def batch(b=4, gamma=3, v=70, **kw):
    return testing.chain_case(b, gamma, v, **kw).args()[:3]


@pytest.mark.parametrize("rule", SOME_RULES)
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_an_invalid_target_row_emits_nothing_and_keeps_the_drafts_accepted_before(
    name, value, rule
):
    """Elsewhere: an all-NaN row emits a valid-looking id, or ends the whole batch."""
    target, drafts, q = batch()
    target[:, :, 5] = 30.0  # token 5 is certain
    drafts[:] = 5
    target[1, 0], target[2, 2], target[3, 3] = value, value, value
    q[:, :, 5] = 30.0
    got = verify(provider("verify_chain", name), target, drafts, q, rule=rule)
    assert got[0].tolist() == [[5, 5, 5, 5], [-1] * 4, [5, 5, -1, -1], [5, 5, 5, -1]]
    assert got[1].tolist() == [3, 0, 2, 3]
    assert got[2].tolist() == [0, TARGET, TARGET, TARGET]
    assert_close("logprobs", got[3], torch.zeros(4, 4), atol=1e-6)


@pytest.mark.parametrize("at", [0, 33, 69])
@pytest.mark.parametrize("value", [NAN, INF], ids=["nan", "inf"])
@pytest.mark.parametrize("name", KERNEL_PROVIDERS)
def test_one_invalid_entry_anywhere_in_a_target_row_is_detected(name, value, at):
    target, drafts, q = batch(1)
    target[0, 0, at] = value
    got = verify(provider("verify_chain", name), target, drafts, q)
    assert (int(got[2]), int(got[0][0, 0])) == (TARGET, -1)
    got = sample(provider("sample", name), target[:, 0])
    assert (int(got[4]), int(got[0])) == (TARGET, -1)
    filtered = sample(provider("sample", name), target[:, 0], top_k=3, top_p=0.5, min_p=0.1)
    assert (int(filtered[4]), int(filtered[0])) == (TARGET, -1)


@pytest.mark.parametrize("v", [131_073, 4097])
@pytest.mark.parametrize("value", [NAN, INF], ids=["nan", "inf"])
@pytest.mark.parametrize("method", ["cdf", "gumbel"])
def test_an_invalid_entry_in_the_last_tile_of_a_large_row_is_detected(v, value, method):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.zeros(1, v, dtype=dtype)
        logits[0, -1] = value
        for filters in ({}, dict(top_k=4), dict(top_p=0.5), dict(min_p=0.5), dict(temperature=0.0)):
            got = sample(provider("sample", "cpp"), logits, method=method, **filters)
            assert (int(got[0]), int(got[4])) == (-1, TARGET), filters


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_an_invalid_draft_row_counts_as_no_draft(name, kind):
    """Elsewhere: a NaN draft row re-emits the token that it just rejected, or accepts it."""
    b = 64 if name != "triton" else 8
    p = torch.zeros(b, 2, 4) if kind == "logits" else torch.full((b, 2, 4), 0.25)
    drafts = torch.full((b, 1), 2)
    uniforms = torch.stack([torch.zeros(b), (torch.arange(b) + 0.5) / b], 1).double()
    q = torch.full((b, 1, 4), NAN)
    got = verify(provider("verify_chain", name), p, drafts, q, kind=kind, uniforms=uniforms)
    want = torch.arange(b) * 4 // b  # drawn from the whole target, token 2 included
    assert_close("tokens", got[0][:, 0], want)
    assert (got[2] == DRAFT).all()
    assert not got[1].any()


@pytest.mark.parametrize(
    ("logsumexp", "threshold", "fault"), [(NAN, 0.0, True), (INF, 0.0, True), (1.0, 5.0, False)]
)
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_the_statistics_of_a_sampled_draft_are_validated_too(name, logsumexp, threshold, fault):
    """A logsumexp that is not finite is a fault; a draft below its threshold has Q = 0 < P."""
    p, q = torch.zeros(1, 2, 4), torch.zeros(1, 1, 4)
    sampled = (torch.tensor([[logsumexp]]).double(), torch.tensor([[threshold]]), 1.0)
    uniforms = torch.tensor([[0.999, 0.6]]).double()
    got = verify(provider("verify_chain", name), p, torch.tensor([[1]]), q, sampled=sampled,
                 uniforms=uniforms)  # fmt: skip
    assert int(got[2]) == (DRAFT if fault else 0)
    assert int(got[1]) == (0 if fault else 1)


@pytest.mark.parametrize("rule", SOME_RULES)
@pytest.mark.parametrize("bad", [70, 71, 2**31 - 1, -2, -(2**31)])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_a_draft_id_out_of_range_is_never_an_index(name, bad, rule):
    """Elsewhere: id == V reads the next row, -1 reads the previous one."""
    target, drafts, q = batch(2)
    op = provider("verify_chain", name)
    missing = drafts.clone()
    missing[1, 1] = -1
    drafts[1, 1] = bad
    for ids in (torch.int64, torch.int32)[: 1 if name == "triton" else 2]:
        got = verify(op, target, drafts.to(ids), q, rule=rule, positions=8)
        want = verify(op, target, missing.to(ids), q, rule=rule, positions=8)
        reached = int(want[1][1]) >= 1
        for g, w in zip((got[0], got[1], got[3]), (want[0], want[1], want[3]), strict=True):
            assert_close("like -1", g, w)
        assert got[2].tolist() == [int(want[2][0]), RANGE if reached else 0]


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_an_id_above_32_bits_is_not_cut_to_a_valid_one(name):
    target, drafts, q = batch(1)
    drafts[0, 0] = 2**32 + 3
    got = verify(provider("verify_chain", name), target, drafts, q)
    assert int(got[2]) == RANGE


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_an_empty_residual_falls_back_to_the_target(name):
    """Elsewhere: uninitialised memory or V-1. Here Q >= P everywhere, so the residual is empty."""
    p = torch.tensor([[[0.5, 0.25, 0.25, 0.0]] * 2])
    q = torch.tensor([[[1.0, 0.5, 0.5, 0.5]]])
    for last, want in ((0.0, 0), (0.6, 1), (0.99999, 2)):
        uniforms = torch.tensor([[0.75, last]]).double()
        got = verify(provider("verify_chain", name), p, torch.tensor([[0]]), q, kind="probs",
                     uniforms=uniforms)  # fmt: skip
        assert got[0].tolist() == [[want, -1]]
        assert int(got[2]) == EMPTY


@pytest.mark.parametrize("last", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("v", [1, 5, 4097, 9000])
@pytest.mark.parametrize("name", KERNEL_PROVIDERS)
def test_extreme_uniforms_never_leave_the_vocabulary_or_pick_a_zero(name, v, last):
    """Elsewhere: id == V when rounding leaves the cdf short of the uniform."""
    generator = torch.Generator().manual_seed(v)
    p = 9 * torch.randn(1, 2, v, generator=generator)
    p[..., -1] = -INF if v > 1 else 0.0
    p[..., 0] = -INF if v > 2 else 0.0
    q = 9 * torch.randn(1, 1, v, generator=generator)
    for drafts, draft in ((torch.tensor([[-1]]), None), (torch.tensor([[0]]), q)):
        uniforms = torch.tensor([[1 - 2.0**-53, last]], dtype=torch.float64)
        got = verify(provider("verify_chain", name), p, drafts, draft, uniforms=uniforms)
        n = int(got[1])
        token = int(got[0][0, n])
        assert 0 <= token < v
        assert p[0, n, token] > -INF
        assert got[3][0, n] > -INF


def test_ids_stay_in_the_vocabulary_for_rows_of_every_kind():
    generator = torch.Generator().manual_seed(21)
    b, gamma, v = 400, 3, 37
    target = torch.randn(b, gamma + 1, v, generator=generator) * 10
    q = torch.randn(b, gamma, v, generator=generator) * 10
    odd = torch.tensor([NAN, INF, -INF, 3e38, -3e38, 1e-45])
    for x in (target, q):
        hit = torch.rand(x.shape, generator=generator) < 0.02
        x[hit] = odd[torch.randint(0, 6, (int(hit.sum()),), generator=generator)]
    drafts = torch.randint(-3, v + 3, (b, gamma), generator=generator)
    for rule in SOME_RULES:
        args = dict(rule=rule, positions=torch.arange(b), top_p=0.9, top_k=30)
        got = verify(provider("verify_chain", "cpp"), target, drafts, q, **args)
        assert ((got[0] >= -1) & (got[0] < v)).all()
        written = torch.arange(gamma + 1) < got[1][:, None]
        assert (got[0][written] >= 0).all()
        after = torch.arange(gamma + 1) > got[1][:, None]
        assert (got[0][after] == -1).all()
        assert not got[3].isnan().any()
        want = verify(reference.verify_chain, target, drafts, q, **args)
        assert_outputs_close("verify_chain", got, want)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [0, 1], ids=["accept", "residual"])
def test_small_uniforms_keep_their_bits(stream):
    """Elsewhere: floats in (0, 1], or multiples of 2^-24. The smallest of two million decides."""
    u = philox_uniforms(0, np.arange(2_000_000), stream)
    assert u.max() < 1
    position = int(u.argmin())
    edges = torch.tensor([u[position] * (1 - 1e-4), u[position] * (1 + 1e-4)]).double()
    assert abs(round(u[position] * 2**24) / (u[position] * 2**24) - 1) > 1e-3
    p = torch.stack([edges, 1 - edges], -1).log().float()[:, None].repeat(1, 2, 1)
    q = torch.tensor([0.0, -torch.inf]).repeat(2, 1, 1)
    draft = torch.tensor([[0], [0]]) if stream == 0 else torch.tensor([[-1], [-1]])
    got = verify(provider("verify_chain", "cpp"), p, draft, q, positions=position)
    assert got[0][:, 0].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("kind", "bad"),
    [("probs", -0.25), *((k, x) for k in ("logits", "probs", "sampled") for x in (NAN, INF))],
)
@pytest.mark.parametrize("at", [0, 4096, 4999])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_an_invalid_entry_beside_the_drafted_one_makes_the_draft_row_invalid(name, kind, at, bad):
    """The residual cannot be computed: the target is sampled instead after a rejection."""
    v = 5000
    p = torch.full((1, 2, v), 1 / v)
    q = torch.full((1, 1, v), 1 / v)
    q[..., 7] = 0.25
    if kind != "probs":
        p, q = p.log(), q.log()
    sampled = (q.double().logsumexp(-1), torch.full((1, 1), -INF), 1.0)
    q[..., at] = bad
    uniforms = torch.tensor([[0.5, 7.5 / v]]).double()  # of the target: the drafted token itself
    got = verify(
        provider("verify_chain", name), p, torch.tensor([[7]]), q, uniforms=uniforms,
        kind="probs" if kind == "probs" else "logits",
        sampled=sampled if kind == "sampled" else None,
    )  # fmt: skip
    assert int(got[2]) == DRAFT
    assert got[0].tolist() == [[7, -1]]
    assert not got[1].any()


def test_each_position_has_its_own_acceptance_uniform():
    """Elsewhere: reseeding inside the loop gives every position the same uniform; or u is 0."""
    n, gamma = 3000, 3
    p = torch.tensor([0.6, 0.4]).log().expand(n, gamma + 1, 2)
    q = torch.tensor([1.0, 0.0]).log().expand(n, gamma, 2)
    drafts = torch.zeros(n, gamma, dtype=torch.int64)
    positions = torch.arange(n) * 17
    got = verify(provider("verify_chain", "cpp"), p, drafts, q, positions=positions)
    uniforms = philox_uniforms(0, positions.numpy()[:, None] + np.arange(gamma), 0)
    near = np.abs(uniforms - 0.6).min(-1) < 1e-5
    want = np.cumprod(uniforms < 0.6, -1).sum(-1)
    np.testing.assert_array_equal(got[1].numpy()[~near], want[~near])


def test_equal_seeds_and_positions_give_equal_results_anywhere_in_the_batch():
    target, drafts, q = batch(1)
    args = (target.expand(50, -1, -1), drafts.expand(50, -1), q.expand(50, -1, -1))
    got = verify(provider("verify_chain", "cpp"), *args, seeds=11, positions=3)
    assert all((x == x[:1]).all() for x in got)


def test_seeds_and_positions_use_all_64_bits():
    logits = torch.zeros(1, 4096)
    base = [(0, 0), (1, 0), (2**32, 0), (-(2**63), 0), (0, 1), (0, 2**32), (0, 2**62), (0, -1)]
    tokens = {int(sample(provider("sample", "cpp"), logits, seeds=torch.tensor([s]),
                         positions=torch.tensor([p]))[0]) for s, p in base}  # fmt: skip
    assert len(tokens) == len(base)


PER_SEQUENCE = [
    ("temperature", torch.tensor([0.1, 1.0, 4.0])),
    ("top_k", torch.tensor([1, 3, 50], dtype=torch.int32)),
    ("top_p", torch.tensor([0.05, 0.6, 1.0])),
    ("min_p", torch.tensor([1.0, 0.2, 0.0])),
]


@pytest.mark.parametrize(("parameter", "values"), PER_SEQUENCE, ids=[p for p, _ in PER_SEQUENCE])
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_parameters_of_each_sequence_are_the_ones_used(name, parameter, values):
    """vLLM on the CPU: the vectors expanded to rows were uninitialised memory. Strided ones too."""
    target, drafts, q = batch(3, 2, 300)
    wide = values.repeat_interleave(3)
    for given in (values, wide[::3]):
        got = verify(provider("verify_chain", name), target, drafts, q, **{parameter: given})
        for b in range(3):
            alone = verify(
                provider("verify_chain", name), target[b : b + 1], drafts[b : b + 1],
                q[b : b + 1], **{parameter: values[b].item()},
            )  # fmt: skip
            assert_outputs_equal("verify_chain", [x[b : b + 1] for x in got], alone)
    rows = torch.arange(50.0).div(8).expand(3, 50).contiguous()
    thresholds = sample(provider("sample", name), rows, **{parameter: values})
    assert len({float(x) for x in thresholds[2]}) == 3


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
    target, drafts, q = batch(3, 2)
    op = provider("verify_chain", name)
    got, want = verify(op, target, drafts, q, **vector), verify(op, target, drafts, q, **good)
    assert_outputs_equal("verify_chain", [x[::2] for x in got], [x[::2] for x in want])
    assert (got[0][1].tolist(), int(got[1][1]), int(got[2][1])) == ([-1] * 3, 0, PARAMETER)
    assert not got[3][1].any()
    drawn = sample(provider("sample", name), target[:, 0], **vector)
    assert (int(drawn[0][1]), int(drawn[4][1])) == (-1, PARAMETER)
    assert drawn[4][::2].tolist() == [0, 0]


@needs_triton
def test_parameters_of_each_sequence_are_the_ones_used_and_validated_in_triton():
    target, drafts, q = batch(4, 1)
    vectors = dict(
        temperature=torch.tensor([0.7, NAN, 1.3, 0.0]),
        top_k=torch.tensor([0, 3, 5, 2], dtype=torch.int32),
        top_p=torch.tensor([0.6, 1.0, 0.9, 0.0]),
        min_p=torch.tensor([0.0, 0.1, 0.05, 0.2]),
    )
    got = verify(provider("verify_chain", "triton"), target, drafts, q, **vectors)
    assert_outputs_close(
        "verify_chain", got, verify(reference.verify_chain, target, drafts, q, **vectors)
    )
    assert got[2].tolist() == [0, PARAMETER, 0, PARAMETER]
    drawn = sample(provider("sample", "triton"), target[:, 0], **vectors)
    assert_outputs_close("sample", drawn, sample(reference.sample, target[:, 0], **vectors))


def test_greedy_is_deterministic():
    """Elsewhere: "greedy" is a stochastic test at a small temperature, which near ties reveal."""
    target = torch.zeros(500, 2, 8)
    target[:, :, 3] = 1e-6
    drafts = torch.full((500, 1), 3)
    for rule, temperature in (("greedy", 1.0), ("token", 0.0), ("match", 0.0)):
        got = verify(provider("verify_chain", "cpp"), target, drafts, rule=rule,
                     temperature=temperature, positions=torch.arange(500))  # fmt: skip
        assert (got[0] == 3).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", KERNEL_PROVIDERS)
def test_the_draft_distribution_is_that_of_the_dtype_sampled_from(name, dtype):
    """Elsewhere: drafts sampled from bfloat16 rows were verified against float32 ones."""
    logits = testing.zipf_logits(6, 257, torch.Generator().manual_seed(4)).to(dtype)
    low = sample(provider("sample", name), logits, temperature=0.8, top_k=40)
    full = sample(provider("sample", name), logits.float(), temperature=0.8, top_k=40)
    # The CUDA kernels add four neighbours of float32 as floats, and eight of a 16-bit dtype.
    agree = assert_outputs_close if name == "cuda" else assert_outputs_equal
    agree("sample", low, full)


def test_filters_may_keep_different_tokens_of_target_and_draft():
    """Elsewhere: the residual was taken by index over two differently filtered lists."""
    b, v = 40_000, 12
    generator = torch.Generator().manual_seed(17)
    logits = 1.5 * torch.randn(v, generator=generator)
    target = (logits + torch.randn(v, generator=generator)).expand(b, 2, v)
    positions = torch.arange(b)
    kw = dict(seeds=torch.zeros(b, dtype=torch.int64), positions=positions)
    drawn = public_sample(logits.expand(b, v), top_k=3, temperature=1.4, **kw)
    statistics = drawn.logsumexp[:, None], drawn.threshold[:, None]
    sampled = SampledDraft(logits.expand(b, 1, v), *statistics, 1.4)
    got = verify_chain(target, drawn.tokens[:, None], sampled, top_p=0.8, **kw)
    assert (
        chi_square(got.tokens[:, 0], filtered_distribution(target[0, 0], top_p=0.8)) > SIGNIFICANCE
    )
