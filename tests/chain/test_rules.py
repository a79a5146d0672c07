"""Emitted tokens of every rule, for every form of the draft, enumerated through the kernels.

Toy models are enumerated over every draft and every cell of the uniforms, so the comparison is
exact to 1e-6; test_negative_controls.py has what the same enumeration rejects.

Lossless rules must give the target's distribution, lossy ones exactly that of their formulas.
"""

import functools
import math

import proofs
import pytest
import torch
from proofs import SIGNIFICANCE, assert_close, chi_square
from proofs.toy_chain import (
    RATES,
    TOLERANCE,
    ToyChain,
    accepted_count_distribution,
    assert_joint_distribution,
    assert_target_distribution,
    chain_joint_distribution,
    lenient_masses,
    logit_tables,
    lossy_joint_distribution,
    rejection_mass,
    top_beta_masses,
    typical_masses,
)
from scipy.special import bdtr, bdtrc
from support.providers import (
    ALL_PROVIDERS,
    ENUMERATED_PROVIDERS,
    FAST_PROVIDERS,
    WHOLE_PROVIDERS,
    enumerated,
    provider,
    sample,
    verify,
    verify_tree,
)

import specdec_kernels as kernels
from specdec_kernels import TREE_RULES, analysis
from specdec_kernels.arguments.checks import float32

FORMS = {
    "logits": dict(), "gamma1-V5": dict(v=5, gamma=1), "gamma3-V2": dict(v=2, gamma=3),
    "bf16": dict(dtype=torch.bfloat16), "f16": dict(dtype=torch.float16),
    "zeros": dict(v=4, holes=True), "equal": dict(same=True), "probs": dict(kind="probs"),
    "probs-zeros": dict(kind="probs", holes=True),
    "probs-filtered": dict(v=4, kind="probs", target_filters=dict(temperature=0.7, top_p=0.8)),
    "probs-cold": dict(kind="probs", target_filters=dict(temperature=0.7)),
    "one-hot": dict(draft="none"), "one-hot-probs": dict(v=4, draft="none", kind="probs"),
    "one-hot-filtered": dict(v=4, draft="none", target_filters=dict(temperature=0.7, top_p=0.8)),
    "hot": dict(target_filters=dict(temperature=2.5)),
    "top-k": dict(v=4, target_filters=dict(top_k=2)),
    "top-p": dict(v=4, target_filters=dict(top_p=0.75)),
    "min-p": dict(v=4, target_filters=dict(min_p=0.3)),
    "temperature-zero": dict(target_filters=dict(temperature=0.0)),
    "sampled": dict(v=4, draft="sampled", draft_filters=dict(temperature=0.6, top_k=2)),
    "sampled-top-p": dict(v=4, draft="sampled", draft_filters=dict(temperature=1.8, top_p=0.7)),
    "sampled-both": dict(
        v=4, draft="sampled", draft_filters=dict(temperature=1.8, top_k=3, min_p=0.1),
        target_filters=dict(temperature=0.8, top_k=3, top_p=0.9, min_p=0.05),
    ),
    "sampled-greedy": dict(draft="sampled", draft_filters=dict(temperature=0.0)),
    "sparse": dict(draft="sparse"), "sparse-probs": dict(v=4, draft="sparse", kind="probs"),
    "sparse-filtered": dict(v=4, draft="sparse", target_filters=dict(temperature=0.7, top_k=3)),
    "mapped": dict(v=4, draft="mapped"), "mapped-probs": dict(draft="mapped", kind="probs"),
    "mapped-sampled": dict(
        v=4, draft="mapped-sampled", draft_filters=dict(temperature=0.6, top_k=2)
    ),
    "wide": dict(draft="wide"), "wide-probs": dict(draft="wide", kind="probs"),
    "wide-sampled": dict(draft="wide-sampled", draft_filters=dict(temperature=1.5, top_k=3)),
    "wide-filtered": dict(draft="wide", target_filters=dict(temperature=0.7, top_k=2)),
    "narrow": dict(draft="narrow"), "narrow-probs": dict(v=4, draft="narrow", kind="probs"),
    "narrow-sampled": dict(
        v=4, draft="narrow-sampled", draft_filters=dict(temperature=0.8, top_k=2)
    ),
    "mask": dict(v=4, mask="target"), "mask-probs": dict(v=4, mask="target", kind="probs"),
    "mask-filtered": dict(v=4, mask="target", target_filters=dict(temperature=0.7, top_k=2)),
    "mask-one-hot": dict(v=4, mask="target", draft="none"),
    "mask-both": dict(
        v=4, mask="both", draft="sampled", draft_filters=dict(temperature=1.4, top_p=0.9)
    ),
}  # fmt: skip
LOSSLESS = [(rule, form) for rule in ("token", "block") for form in FORMS]
# For the providers that take long.
SOME = [
    *(("token", f) for f in ("logits", "probs-zeros", "sparse")),
    *(("block", f) for f in ("logits", "one-hot", "mapped-probs", "sampled-both", "mask-both")),
    ("token", "mask-filtered"),
]


@functools.cache
def toy_of(rule, form):
    return ToyChain(**FORMS[form], rule=rule)


@pytest.mark.parametrize(("name", "rule", "form"), enumerated(LOSSLESS, SOME))
def test_emitted_tokens_have_the_targets_distribution(name, rule, form):
    toy = toy_of(rule, form)
    realized = toy.realized(name)
    assert_target_distribution(realized, toy)
    counts = accepted_count_distribution(toy, rule)
    assert_close("accepted", realized.accepted, counts, atol=TOLERANCE)


@pytest.mark.parametrize("name", ENUMERATED_PROVIDERS)
@pytest.mark.parametrize(
    "options", [dict(gamma=0), dict(rule="greedy", target_filters=dict(temperature=0.0))], ids=str
)
def test_without_drafts_or_noise_the_distribution_is_the_targets(name, options):
    toy = ToyChain(**options)
    assert_target_distribution(toy.realized(name), toy)


def synthetic_masses(p, q, rate):
    return rate * q, rejection_mass(rate * q, p)


# Triton's interpreter takes seconds for each.
SMALL = {
    "block": dict(rule="block"),
    "block-sparse": dict(rule="block", draft="sparse", gamma=1),
    "token-probs-zeros": dict(v=3, gamma=1, kind="probs", holes=True),
    "token-sampled": dict(gamma=1, draft="sampled", draft_filters=dict(temperature=0.6)),
    "token-wide": dict(draft="wide", gamma=1),
    "token-mapped": dict(draft="mapped", gamma=1),
    "lenient": dict(rule="lenient", gamma=1, lenience=0.5),
}
MASSES = {
    "lenient": functools.partial(lenient_masses, lenience=0.5),
    "typical": functools.partial(typical_masses, epsilon=0.9, delta=0.8),
    "synthetic": functools.partial(synthetic_masses, rate=float(RATES[1])),
    "top-beta": functools.partial(top_beta_masses, beta=2, tau=1.5),
}


@pytest.mark.full
@pytest.mark.parametrize("form", SMALL)
@pytest.mark.parametrize("name", [n for n in ALL_PROVIDERS if n == "triton"])
def test_emitted_tokens_have_the_distribution_of_their_rule_in_triton(name, form):
    toy = ToyChain(**{"v": 2, **SMALL[form]})
    realized = toy.realized(name, steps=24)
    if form in MASSES:
        assert_joint_distribution(realized, lossy_joint_distribution(toy, MASSES[form]))
        assert 0 < realized.mean_accepted < 1
    else:
        assert_target_distribution(realized, toy)


def test_rule_match_accepts_as_often_as_its_formula():
    """Shared noise: alpha = sum_x 1 / sum_y max(P_y/P_x, Q_y/Q_x)."""
    n, v = 100_000, 7
    p, q = logit_tables(torch.Generator().manual_seed(4), v, 1)[0], torch.linspace(0, 2, v)
    positions = torch.arange(n)
    draft = sample(provider("sample", "cpp"), q.expand(n, v), positions=positions, noise="shared")
    got = verify(
        provider("verify_chain", "cpp"), p.expand(n, 2, v), draft[0][:, None], rule="match",
        positions=positions,
    )  # fmt: skip
    alpha = float(analysis.acceptance_rate(*(x.double().softmax(-1) for x in (p, q)), rule="match"))
    hits = int(got[1].sum())
    assert min(bdtr(hits, n, alpha), bdtrc(hits - 1, n, alpha)) > SIGNIFICANCE
    assert chi_square(got[0][:, 0], p.double().softmax(-1)) > SIGNIFICANCE


# Lossy rules: the distribution is that of the rule's formula.


LENIENT = {
    "logits": dict(),
    "V4-gamma1": dict(v=4, gamma=1),
    "probs-zeros": dict(kind="probs", holes=True),
    "one-hot": dict(draft="none", target_filters=dict(temperature=0.8, top_k=2)),
    "filtered": dict(v=4, target_filters=dict(temperature=0.8, top_k=3)),
    "sparse": dict(draft="sparse"),
    "wide": dict(draft="wide"),
    "mapped-sampled": dict(v=4, draft="mapped-sampled", draft_filters=dict(top_k=2)),
}


LENIENCE = [*((f, 0.5) for f in LENIENT), ("logits", 1.0), ("probs-zeros", 0.125), ("wide", 0.125)]


@pytest.mark.parametrize(
    ("name", "form", "lenience"), enumerated(LENIENCE, [("logits", 0.5), ("wide", 0.125)])
)
def test_lenient_has_the_distribution_of_its_formula(name, form, lenience):
    toy = ToyChain(**LENIENT[form], rule="lenient", lenience=lenience)
    realized = toy.realized(name)
    want = lossy_joint_distribution(toy, lenient_masses, lenience=lenience)
    assert_joint_distribution(realized, want)
    first = realized.joint.flatten(1).sum(-1)
    assert (first <= toy.target_probs[0] / lenience + TOLERANCE).all()
    if lenience == 1:
        assert_target_distribution(realized, toy)
    elif form == "logits":
        without = analysis.mean_accepted(toy.draft_probs, toy.target_probs)
        assert realized.mean_accepted > without + 0.01


TYPICAL = {
    "medusa": dict(v=4),
    "strict": dict(v=4, epsilon=0.9, delta=1.1),
    "entropy": dict(v=4, epsilon=0.9, delta=0.6),
    "filtered": dict(v=4, epsilon=0.9, delta=0.8, target_filters=dict(temperature=1.3, top_k=2)),
    "probs": dict(v=4, epsilon=0.5, delta=0.7, kind="probs"),
    "all": dict(epsilon=0.0),
}


@pytest.mark.parametrize(("name", "form"), enumerated(TYPICAL, ["entropy", "filtered"]))
def test_typical_has_the_distribution_of_its_formula(name, form):
    toy = ToyChain(**TYPICAL[form], rule="typical")
    epsilon, delta = (toy.options.get(k, x) for k, x in (("epsilon", 0.09), ("delta", 0.3)))
    realized = toy.realized(name)
    assert_joint_distribution(
        realized, lossy_joint_distribution(toy, typical_masses, epsilon=epsilon, delta=delta)
    )
    assert form != "all" or float(realized.accepted[-1]) == pytest.approx(1, abs=1e-9)
    assert form == "all" or 0 < realized.mean_accepted < toy.gamma


TOP_BETA = {
    "both": dict(v=4, beta=2, tau=1.3),
    "rank": dict(v=4, beta=2, tau=float("inf")),
    "distance": dict(v=4, beta=4, tau=1.0),
    "top": dict(v=4),
    "filtered": dict(v=4, beta=3, tau=1.5, target_filters=dict(temperature=1.3, top_k=2)),
    "probs": dict(v=4, beta=2, tau=0.8, kind="probs"),
    "zeros": dict(v=4, beta=4, tau=float("inf"), holes=True),
}


@pytest.mark.parametrize(("name", "form"), enumerated(TOP_BETA, ["both", "filtered"]))
def test_top_beta_has_the_distribution_of_its_formula(name, form):
    """The control: without its bound on the rank, or on the distance, it is another one."""
    toy = ToyChain(**TOP_BETA[form], rule="top_beta")
    beta, tau = (toy.options.get(k, x) for k, x in (("beta", 1), ("tau", 0.0)))
    realized = toy.realized(name)
    want = lossy_joint_distribution(toy, top_beta_masses, beta=beta, tau=tau)
    assert_joint_distribution(realized, want)
    assert 0 < realized.mean_accepted < toy.gamma
    for other in (dict(beta=9, tau=tau), dict(beta=beta, tau=9.0)) if form == "both" else ():
        unlike = lossy_joint_distribution(toy, top_beta_masses, **other)
        with pytest.raises(AssertionError, match="P\\(y1"):
            assert_joint_distribution(realized, unlike)


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("name", WHOLE_PROVIDERS)
def test_top_beta_at_temperature_zero_counts_at_temperature_one(name, kind):
    """Tokens of rank 0 to 4, the last impossible; ln(0.4 / 0.3) = 0.29, ln(0.4 / 0.1) = 1.39."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0]).expand(5, 2, 5)
    drafts = torch.arange(5)[:, None]
    for beta, tau, accepted in (
        (1, 9.0, [0]), (2, 9.0, [0, 1]), (9, 0.3, [0, 1]), (9, 0.2, [0]), (3, 1.0, [0, 1, 2]),
        (9, float("inf"), [0, 1, 2, 3]),
    ):  # fmt: skip
        got = verify(provider("verify_chain", name), p if kind == "probs" else p.log(), drafts,
                     kind=kind, rule="top_beta", beta=beta, tau=tau, temperature=0.0)  # fmt: skip
        hits = [int(x in accepted) for x in range(5)]
        assert got[1].tolist() == got[4][:, 0].tolist() == hits
        assert got[0].tolist() == [[x, 0] if hit else [0, -1] for x, hit in enumerate(hits)]
        assert not got[3].any()


TIED = {0: 2.0, 1: 2.0, 2: 1.0, 3: -9.0}
APART = {0: 1.0, 1: 0.0, 2: -1.0}  # a distance of 2 at temperature 0.5
TILED = {3: 3.0, 4_500: 2.0, 9_000: 1.0, 4_501: 0.5}  # before and after the tile of 4,501
TOP_BETA_COUNTS = [  # logits, V, draft, temperature, beta, tau, whether the draft is accepted
    *((TIED, 4, x, t, beta, 9.0, x < 2 or beta > 2)
      for x in range(3) for t in (0.0, 1.0) for beta in (1, 2, 3)),
    *((APART, 3, 1, t, 3, tau, tau * t > 1)
      for t, tau in ((0.5, 1.9), (0.5, 2.1), (2.0, 0.4), (2.0, 0.6))),
    *((TILED, 9_001, 4_501, 1.0, beta, 9.0, beta > 3) for beta in (3, 4)),
]  # fmt: skip


@pytest.mark.parametrize("name", WHOLE_PROVIDERS)
def test_top_beta_counts_likelier_tokens_of_the_whole_row_and_ties_as_one_rank(name):
    for logits, v, x, temperature, beta, tau, accepted in TOP_BETA_COUNTS:
        target = torch.zeros(1, 2, v)
        target[..., [*logits]] = torch.tensor([*logits.values()])
        got = verify(provider("verify_chain", name), target, torch.tensor([[x]]), rule="top_beta",
                     beta=beta, tau=tau, temperature=temperature)  # fmt: skip
        assert bool(got[1]) == accepted, (logits, x, temperature, beta, tau)


@pytest.mark.parametrize("target", [dict(), dict(temperature=0.8, top_k=2), dict(temperature=0.0)])
@pytest.mark.parametrize("name", ENUMERATED_PROVIDERS)
def test_synthetic_accepts_at_its_rates_and_recovers_with_the_target(name, target):
    toy = ToyChain(
        rule="synthetic", rates=RATES, target_filters=target, draft_filters=dict(temperature=1.0)
    )
    realized = toy.realized(name)
    a, b = RATES.double().tolist()
    want = torch.tensor([1 - a, a * (1 - b), a * b], dtype=torch.float64)
    assert_close("accepted", realized.accepted, want, atol=TOLERANCE)
    accept = [r * q for r, q in zip((a, b), toy.draft_probs, strict=True)]
    reject = [rejection_mass(x, p) for x, p in zip(accept, toy.target_probs, strict=False)]
    assert_joint_distribution(realized, chain_joint_distribution(accept, reject, toy.target_probs))


@pytest.mark.parametrize("name", WHOLE_PROVIDERS)
def test_synthetic_rates_at_or_beyond_0_and_1_decide_every_draft(name):
    target, drafts = torch.zeros(1, 4, 3), torch.zeros(1, 3, dtype=torch.int64)
    top = 1 - 2.0**-53
    uniforms = torch.tensor([[top, top, 0.0, 0.5]], dtype=torch.float64)
    for rates, count, probabilities in (
        ([1.0, 7.0, 0.0], 2, [1, 1, 0]), ([-1.0, 1.0, 1.0], 0, [0]),
        ([torch.nan, 1.0, 1.0], 0, []), ([-torch.inf, 1.0, 1.0], 0, []),
    ):  # fmt: skip
        got = verify(provider("verify_chain", name), target, drafts, rule="synthetic",
                     rates=torch.tensor(rates), uniforms=uniforms)  # fmt: skip
        assert (int(got[1]), int(got[2]), int(got[0][0, count])) == (count, 0, 1)
        assert got[4][0, : len(probabilities)].tolist() == probabilities


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_lenient_at_temperature_zero_accepts_a_token_at_its_bound(name):
    """P(x) is exactly lenience * max P; with a lenience of 1, x ties with the argmax."""
    p, tied = torch.tensor([[[0.5, 0.25, 0.25]] * 2]), torch.tensor([[[2.0, 2.0, 0.0]] * 2])
    for target, kind, lenience in ((p, "probs", 0.5), (tied, "logits", 1.0)):
        got = verify(provider("verify_chain", name), target, torch.tensor([[1]]), kind=kind,
                     rule="lenient", lenience=lenience, temperature=0.0)  # fmt: skip
        assert got[0].tolist() == [[1, 0]]
        assert not got[3].any(), "all that is emitted has a probability of 1 at temperature 0"


@pytest.mark.parametrize("name", WHOLE_PROVIDERS)
def test_the_bound_of_typical_is_strict(name):
    """A certain token has P = 1 and entropy 0, which is not above a bound of 1.

    Whatever its logit is: a kernel may round the weight of the maximum, and then P, either way.
    """
    target = torch.full((4, 2, 3), -torch.inf)
    target[..., 0] = torch.tensor([[0.0], [0.3], [1.7], [-2.9]])
    drafts = torch.zeros(4, 1, dtype=torch.int64)
    for delta, count in ((1.0, 0), (0.999, 1)):
        got = verify(provider("verify_chain", name), target, drafts, rule="typical", epsilon=1.0,
                     delta=delta)  # fmt: skip
        tree = verify_tree(provider("verify_tree", name), target, drafts, drafts - 1,
                           rule="typical", epsilon=1.0, delta=delta)  # fmt: skip
        for tokens, accepted, *_, probabilities in (got, tree[1:]):
            assert accepted.tolist() == [count] * 4
            assert not tokens[:, 0].any()
            assert probabilities.tolist() == [[count]] * 4


ENTROPIES = [(t, k) for t in (0.4, 1.0, 3.0) for k in (0, 12)]
ENTROPY_CASES = [(n, *c) for n in WHOLE_PROVIDERS for c in ENTROPIES]


@pytest.mark.parametrize(("name", "temperature", "top_k"), ENTROPY_CASES)
def test_the_bound_of_typical_takes_the_entropy_at_the_temperature(name, temperature, top_k):
    """Just under P(x) the bound accepts, and just above it rejects."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2))
    kept = torch.where(logits >= logits.sort().values[-top_k], logits.double(), -torch.inf)
    p = (kept / float32(temperature)).softmax(0)
    entropy = -float((p * p.clamp(min=1e-300).log()).sum())
    x = int(logits.sort().indices[-3])
    target, one = logits.expand(1, 2, 40), torch.tensor([[x]])
    for factor, accepted in ((0.99, 1), (1.01, 0)):
        options = dict(rule="typical", epsilon=1.0, temperature=temperature, top_k=top_k,
                       delta=factor * float(p[x]) * math.exp(entropy))  # fmt: skip
        got = verify(provider("verify_chain", name), target, one, **options)
        assert got[1].tolist() == [accepted]
        got = verify_tree(provider("verify_tree", name), target, one, one * 0 - 1, **options)
        assert got[2].tolist() == [accepted]


# Names of parameters, and values that accept or reject a token with P(x) = 0.08. That is above
# 0.1 * exp(-H) and below 0.1.
HANDED_ON = {
    "typical": (("epsilon", "delta"), [(0.9, 0.1)], [(0.1, 0.9)]),
    "top_beta": (("rank", "distance"), [(2, 2.5)], [(1, 3.0), (2, 1.5)]),
}


@pytest.mark.parametrize("rule", HANDED_ON)
def test_the_public_functions_hand_on_the_parameters_of_a_rule(rule):
    names, accepted, rejected = HANDED_ON[rule]
    target, zero = torch.tensor([0.08, 0.92]).log().expand(1, 2, 2), torch.zeros(1).long()
    for values in accepted + rejected:
        given = {f"{rule}_{name}": value for name, value in zip(names, values, strict=True)}
        given |= dict(rule=rule, seeds=zero, positions=zero)
        verdicts = [kernels.verify_chain(target, zero[None], **given)]
        if rule in TREE_RULES:
            tree = kernels.Tree(zero[None], zero[None] - 1)
            verdicts.append(kernels.verify_tree(target, tree, **given))
        assert [int(x.num_accepted) for x in verdicts] == [values in accepted] * len(verdicts)


@pytest.mark.parametrize("rule", ["token", "block", "lenient", "typical", "synthetic"])
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_accept_probs_are_where_the_decision_changes(name, rule):
    """A uniform just below the reported probability accepts, and one just above rejects."""
    lenience = 0.7 if rule == "lenient" else 1.0
    rates = RATES if rule == "synthetic" else None
    toy = ToyChain(v=4, gamma=2, rule=rule, lenience=lenience, rates=rates)
    op = provider("verify_chain", name)
    drafts = proofs.joint_distribution(toy.draft_probs).nonzero()
    args = toy.arguments(drafts, "cpp")
    n = len(drafts)
    for i in range(2):
        # Draft 1 is decided only where draft 0 is accepted, but by rule block the last draft is
        # decided first and draft 0 only where draft 1 is rejected.
        others = 1 - 2.0**-53 if rule == "block" else 0.0
        uniforms = torch.full((n, 3), others, dtype=torch.float64)
        probabilities = verify(op, tokens=drafts, uniforms=uniforms, **args)[4][:, i].double()
        defined = ~probabilities.isnan()
        assert defined.any()
        for shift in (-1e-5, 1e-5):
            tried = defined & (probabilities + shift > 0) & (probabilities + shift < 1)
            uniforms[:, i] = torch.where(tried, probabilities + shift, 0.5)
            count = verify(op, tokens=drafts, uniforms=uniforms, **args)[1][tried]
            accepted = count == 2 if rule != "block" and i else count > i
            assert (accepted == (shift < 0)).all()
