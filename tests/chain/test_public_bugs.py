"""Faults that other projects have shipped, each as a test of `sample` and `verify_chain`.

A docstring that begins with "Elsewhere" says what another published implementation did. Where only
one is known to have done it, it is named.
"""

import numpy as np
import proofs
import pytest
import torch
from support.providers import (
    ALL_PROVIDERS,
    FAST_PROVIDERS,
    KERNEL_PROVIDERS,
    assert_close,
    assert_outputs_close,
    assert_outputs_equal,
    philox_uniforms,
    provider,
    sample,
    verify,
)

from specdec_kernels import Status, reference

TARGET, DRAFT = Status.TARGET_INVALID, Status.DRAFT_INVALID
EMPTY, RANGE = Status.EMPTY_RESIDUAL, Status.DRAFT_OUT_OF_RANGE
PARAMETER = Status.BAD_PARAMETER
SOME_RULES = ("token", "greedy", "match")
NAN, INF = float("nan"), float("inf")


def batch(b=4, gamma=3, v=70, **kw):
    return proofs.chain_case(b, gamma, v, **kw).args()[:3]


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
    """Elsewhere: floats in (0, 1], or multiples of 2^-24. The smallest of 400,000 decides."""
    u = philox_uniforms(0, np.arange(400_000), stream)
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
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_an_invalid_entry_beside_the_drafted_one_makes_the_draft_row_invalid(name, kind, bad):
    """The residual cannot be computed: the target is sampled instead after a rejection."""
    v = 5000
    p = torch.full((1, 2, v), 1 / v)
    q = torch.full((1, 1, v), 1 / v)
    q[..., 7] = 0.25
    if kind != "probs":
        p, q = p.log(), q.log()
    sampled = (q.double().logsumexp(-1), torch.full((1, 1), -INF), 1.0)
    uniforms = torch.tensor([[0.5, 7.5 / v]]).double()  # of the target: the drafted token itself
    for at in (0, 4999) if name == "triton" else (0, 4096, 4999):
        draft = q.clone()
        draft[..., at] = bad
        got = verify(
            provider("verify_chain", name), p, torch.tensor([[7]]), draft, uniforms=uniforms,
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
