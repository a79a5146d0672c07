"""`verify_chain`: every provider against the specification, and cases with a known answer."""

import proofs
import pytest
import torch
from proofs import MAX_TIE_RATE, assert_close, assert_outputs_close, assert_outputs_equal
from support.providers import (
    ALL_PROVIDERS,
    KERNEL_PROVIDERS,
    provider,
    provider_cases,
    sample,
    verify,
)

from specdec_kernels import Status, reference


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize(("name", "case"), provider_cases("verify_chain"))
def test_agrees_with_the_specification(name, case):
    got, want = provider("verify_chain", name)(*case.args()), reference.verify_chain(*case.args())
    assert_outputs_close("verify_chain", got, want)


MANY = [
    ("token", "full", "logits", "off"), ("token", "full", "probs", "off"),
    ("token", "none", "logits", "off"), ("token", "none", "probs", "off"),
    ("token", "sampled", "logits", "tensor"), ("token", "sparse", "probs", "tensor"),
    ("token", "wide", "logits", "tensor"), ("block", "full", "logits", "off"),
    ("block", "full", "probs", "off"), ("block", "full", "logits", "tensor"),
    ("block", "none", "logits", "tensor"), ("block", "sampled", "logits", "tensor"),
    ("block", "sparse", "logits", "tensor"), ("block", "mapped", "probs", "tensor"),
    ("block", "wide-sampled", "logits", "off"), ("lenient", "narrow", "logits", "tensor"),
    ("lenient", "mapped-sampled", "logits", "off"), ("typical", "none", "logits", "tensor"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "draft", "kind", "filters"), MANY)
def test_agreement_with_the_specification_on_thousands_of_rows(rule, draft, kind, filters):
    """They may differ only where a uniform lies within rounding of a decision's boundary."""
    b, gamma = 60 if (filters, draft) != ("off", "full") else 200, 4
    case = proofs.chain_case(b, gamma, 257, rule=rule, kind=kind, draft=draft, filters=filters)
    got, want = (provider("verify_chain", n)(*case.args()) for n in ("cpp", "reference"))
    differ = (got[0] != want[0]).any(-1) | (got[1] != want[1]) | (got[2] != want[2])
    assert int(differ.sum()) <= b * (gamma + 1) * MAX_TIE_RATE + 1
    assert_close("logprobs", got[3][~differ], want[3][~differ], atol=1e-4)
    assert_close("accept_probs", got[4][~differ], want[4][~differ], atol=1e-4)


def fixed(v=5):
    """Logits of one sequence, gamma 2: P is uniform over 3 tokens, Q over 2 of them."""
    p = torch.full((1, 3, v), -torch.inf)
    p[..., :3] = 0.0
    q = torch.full((1, 2, v), -torch.inf)
    q[..., 1:3] = 0.0
    return p, q


EDGES = {  # target row, draft row, uniform, whether draft 0 is accepted
    "P=0 is never accepted": ([0.0, 1.0], [0.5, 0.5], 0.0, False),
    "P=Q is always accepted": ([0.3, 0.7], [0.3, 0.7], 1 - 2.0**-53, True),
    "Q=0<P is always accepted": ([0.1, 0.9], [0.0, 1.0], 1 - 2.0**-53, True),
    "P=Q=0 is rejected": ([0.0, 1.0], [0.0, 1.0], 0.0, False),
    "equality is rejected": ([0.25, 0.75], [0.5, 0.5], 0.5, False),
    "below equality is accepted": ([0.25, 0.75], [0.5, 0.5], 0.5 - 2.0**-20, True),
}


# The logarithms of logits are rounded, so equality is tried on probabilities only.
BOTH = [(e, k) for e in EDGES for k in ("probs", "logits") if (e[:8], k) != ("equality", "logits")]


@pytest.mark.parametrize(("edge", "kind"), BOTH)
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_the_acceptance_test_is_strict(name, edge, kind):
    p, q, u, accepted = EDGES[edge]
    p, q = torch.tensor(p), torch.tensor(q)
    if kind == "logits":
        p, q = p.log(), q.log()
    out = verify(
        provider("verify_chain", name), torch.stack([p, p])[None], torch.tensor([[0]]),
        q[None, None], kind=kind, uniforms=torch.tensor([[u, 0.5]], dtype=torch.float64),
    )  # fmt: skip
    assert bool(out[1][0]) == accepted


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_a_uniform_that_equals_a_cumulative_probability_takes_the_token_after_it(name):
    uniforms, none = torch.tensor([[0.5]], dtype=torch.float64), torch.empty(1, 0).long()
    got = verify(provider("verify_chain", name), torch.full((1, 1, 4), 0.25), none, kind="probs",
                 uniforms=uniforms)  # fmt: skip
    assert got[0].tolist() == [[2]]


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("rule", ["token", "block", "lenient", "typical", "greedy", "match"])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_minus_one_ends_the_drafts_and_samples_the_target_not_the_residual(name, rule):
    p, q = fixed()
    drafts = torch.tensor([[-1, 2]])
    seen = set()
    for step in (0, 2, 5):
        uniforms = torch.tensor([[0.0, 0.0, step / 6]]).double() if rule != "match" else None
        got = verify(provider("verify_chain", name), p, drafts, q, rule=rule, uniforms=uniforms,
                     positions=step)  # fmt: skip
        assert int(got[1]) == 0
        assert got[0][0, 1:].tolist() == [-1, -1]
        seen.add(int(got[0][0, 0]))
    assert seen == {"greedy": {0}, "match": seen}.get(rule, {0, 1, 2})


@pytest.mark.parametrize("name", KERNEL_PROVIDERS)
def test_match_emits_what_sampling_with_shared_noise_draws(name):
    """Whatever the drafts, emitted tokens are those of plain sampling at the same positions."""
    b, gamma, v = {"cpp": 200, "cuda": 40}.get(name, 2), 3, 67
    generator = torch.Generator().manual_seed(12)
    target = proofs.zipf_logits(b * (gamma + 1), v, generator).view(b, gamma + 1, v)
    seeds, positions = torch.arange(b) - 2, torch.arange(b) * 1000
    temperature = torch.rand(b, generator=generator) + 0.3
    temperature[1] = 0.0
    filters = dict(top_k=20) if name == "triton" else dict(top_k=20, top_p=0.9)
    plain = sample(
        provider("sample", name), target.reshape(-1, v), noise="shared",
        seeds=seeds.repeat_interleave(gamma + 1),
        positions=(positions[:, None] + torch.arange(gamma + 1)).flatten(),
        temperature=temperature.repeat_interleave(gamma + 1), **filters,
    )  # fmt: skip
    tokens, logprobs = (x.view(b, gamma + 1) for x in plain[:2])
    drafts = torch.where(torch.rand(b, gamma, generator=generator) < 0.8, tokens[:, :gamma], 3)
    got = verify(provider("verify_chain", name), target, drafts, rule="match", seeds=seeds,
                 positions=positions, temperature=temperature, **filters)  # fmt: skip
    emitted = torch.arange(gamma + 1) <= got[1][:, None]
    assert_close("tokens", got[0], torch.where(emitted, tokens, -1))
    assert_close("logprobs", got[3], torch.where(emitted, logprobs, 0.0), atol=1e-5)
    matches = (drafts == tokens[:, :gamma]).int().cumprod(-1).sum(-1)
    assert_close("num_accepted", got[1], matches.int())


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_a_sampled_draft_has_no_mass_below_its_threshold(name):
    """Q is certain of token 0, although its other logits are little smaller."""
    target, q = torch.zeros(1, 2, 1024), torch.zeros(1, 1, 1024)
    q[..., 0] = 1.0
    sampled = (torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 0.5), 1.0)
    got = verify(provider("verify_chain", name), target, torch.tensor([[0]]), q, sampled=sampled,
                 uniforms=torch.full((1, 2), 0.5, dtype=torch.float64))  # fmt: skip
    assert (got[0].tolist(), int(got[2])) == ([[512, -1]], 0)


def ragged(target, draft, lengths):
    """The rows of a padded batch that sequences of these lengths have."""
    used = torch.arange(target.shape[1]) <= lengths[:, None]
    target_indptr = torch.cat([torch.zeros(1).long(), (lengths + 1).cumsum(0)]).to(torch.int32)
    return target[used], draft[used[:, 1:]], target_indptr


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param(n, r, marks=pytest.mark.full if n == "triton" else [])
        for n in KERNEL_PROVIDERS
        for r in ("token", "block", "match")
        if n != "triton" or r == "block"  # the interpreter takes a second for each row
    ],
)
def test_ragged_equals_padded(name, rule):
    b, gamma = 6, 3
    target, drafts, q, *_ = proofs.chain_case(b, gamma, 131, rule=rule).args()
    lengths = torch.tensor([3, 0, 1, 2, 3, 1])
    drafts = torch.where(torch.arange(gamma) < lengths[:, None], drafts, -1)
    op = provider("verify_chain", name)
    padded = verify(op, target, drafts, q, rule=rule, positions=100)
    rows, q_rows, target_indptr = ragged(target, q, lengths)
    for given in (q_rows, q):
        got = verify(op, rows, drafts, given, rule=rule, positions=100, target_indptr=target_indptr)
        assert_outputs_equal("verify_chain", got, padded)


@pytest.mark.covering(test=3, emulated=1)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("draft", ["full", "sampled", "sparse"])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_chosen_draft_rows_equal_copied_ones(name, draft, flat):
    """The store has rows of other requests, one of which two drafts share."""
    target, _, q, ids, _, logsumexp, threshold, temperatures, *_ = proofs.chain_case(
        3, 2, 67, draft=draft
    ).args()
    op = provider("verify_chain", name)
    index = torch.tensor([[5, 1], [3, 3], [0, 4]] if flat else [[1, 0], [1, 1], [0, 1]])
    every = torch.arange(3)[:, None]

    def chosen(x):
        return x if x is None else x.flatten(0, 1)[index] if flat else x[every, index]

    def sampled(pick):
        both = pick(logsumexp), pick(threshold)
        return None if logsumexp is None else (*both, temperatures)

    drafts = chosen(q).argmax(-1)
    if ids is not None:
        drafts = chosen(ids).gather(-1, drafts[..., None])[..., 0]
    want = verify(op, target, drafts, chosen(q), ids=chosen(ids), sampled=sampled(chosen))

    def stored(x):
        return x.flatten(0, 1) if flat and x is not None else x

    given = dict(ids=stored(ids), sampled=sampled(stored), draft_rows=index.to(torch.int32))
    got = verify(op, target, drafts, stored(q), **given)
    assert_outputs_equal("verify_chain", got, want)
    for wrong in (-1, len(stored(q)) if flat else 2, -(2**62), 2**62):
        given["draft_rows"] = index.clone()
        given["draft_rows"][1, 0] = wrong
        got = verify(op, target, drafts, stored(q), **given)
        assert got[2].tolist() == [0, Status.DRAFT_INVALID, 0]
        assert got[1][1] == 0
        assert torch.equal(got[0][::2], want[0][::2])


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_drafts_beyond_a_ragged_sequence_are_not_read(name):
    target, drafts, q, *_ = proofs.chain_case(3, 2, 67, rule="greedy").args()
    rows, _, target_indptr = ragged(target, q, torch.tensor([1, 0, 2]))
    op = provider("verify_chain", name)
    got = verify(op, rows, drafts, rule="greedy", target_indptr=target_indptr)
    other = drafts.clone()
    other[0, 1:] = other[1] = 10**9
    assert_outputs_equal(
        "verify_chain", verify(op, rows, other, rule="greedy", target_indptr=target_indptr), got
    )
    assert not got[2].any()


@pytest.mark.parametrize(
    "target_indptr", [[0, 0, 4], [-5, 2, 4], [0, 2, 99], [3, 1, 4], [7, 9, 11]]
)
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_row_offsets_out_of_range_are_clamped(name, target_indptr):
    """Offsets are data: no provider may read outside the target for them."""
    target = torch.zeros(4, 9)
    drafts = torch.zeros(2, 1, dtype=torch.int64)
    offsets = torch.tensor(target_indptr, dtype=torch.int32)
    got = verify(
        provider("verify_chain", name), target, drafts, target_indptr=offsets, rule="greedy"
    )
    want = verify(reference.verify_chain, target, drafts, target_indptr=offsets, rule="greedy")
    assert_outputs_equal("verify_chain", got, want)


FAULTY = [
    [0.0] * 4,
    [0.5, 0.5, float("nan"), 0.0], [0.5, 0.75, -0.25, 0.0], [0.5, 0.5, 0.0, torch.inf],
]  # fmt: skip


@pytest.mark.covering(test=3)
@pytest.mark.parametrize("rule", ["token", "greedy", "match"])
@pytest.mark.parametrize("row", FAULTY, ids=["zero", "nan", "negative", "inf"])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_invalid_target_probabilities_emit_nothing_where_the_row_is_read(name, row, rule):
    target = torch.tensor([[row, [0.25] * 4]])
    for draft in (-1, 3):
        got = verify(provider("verify_chain", name), target, torch.tensor([[draft]]), None,
                     kind="probs", rule=rule)  # fmt: skip
        assert [x.tolist() for x in got[:4]] == [[[-1, -1]], [0], [1], [[0.0, 0.0]]]


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_an_accepted_draft_reads_one_probability_and_a_rejected_one_the_whole_row(name):
    target = torch.tensor([[[0.5, float("nan"), 0.5, 0.0], [0.0, 0.0, 0.0, 1.0]]])
    q = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])
    for u, tokens, status in ((0.4, [0, 3], 0), (0.6, [-1, -1], 1)):
        uniforms = torch.tensor([[u, 0.5]]).double()
        got = verify(provider("verify_chain", name), target, torch.tensor([[0]]), q, kind="probs",
                     uniforms=uniforms)  # fmt: skip
        assert (got[0].tolist(), int(got[2])) == ([tokens], status)
