"""Rule block in rational arithmetic, and negative controls that the suite must reject."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from row.test_reference import rational_pick, sixteenths
from support.providers import (
    ENUMERATED_PROVIDERS,
    KERNEL_PROVIDERS,
    assert_close,
    provider,
    verify,
)
from support.toy_chain import (
    BOUNDARY_PROVIDER,
    RATES,
    TOLERANCE,
    ToyChain,
    accepted_count_distribution,
    assert_joint_distribution,
    assert_target_distribution,
    assert_wrong_distribution,
    chain_joint_distribution,
    lenient_masses,
    lossy_joint_distribution,
    rejection_mass,
    typical_masses,
)

from specdec_kernels import reference, testing
from specdec_kernels.arguments.chain import ChainArguments

# Target probabilities are multiples of 1/16 and draft probabilities powers of two. Every ratio,
# product and sum is then a short binary fraction, so float32 decides exactly as rationals do.
DYADIC = [[8, 4, 2, 2], [4, 4, 4, 4], [8, 8, 0, 0], [16, 0, 0, 0], [8, 4, 4, 0]]


def dyadic_rows(rng, shape):
    rows = [rng.permutation(DYADIC[k]) for k in rng.integers(0, len(DYADIC), int(np.prod(shape)))]
    return np.array(rows, dtype=np.float64).reshape(*shape, 4) / 16


def rational_block(p, q, drafts, uniforms, last):
    """Rule block on one sequence: emitted tokens and acceptance probabilities h."""
    c = [Fraction(1)]
    for i, x in enumerate(drafts):
        c.append(min(Fraction(1), c[-1] * p[i][x] / q[i][x]) if q[i][x] else Fraction(0))
    accept_probs = []
    for i in range(1, len(drafts)):
        common = sum(min(c[i] * a, b) for a, b in zip(p[i], q[i], strict=True))
        accept_probs.append((c[i] - common) / (1 - common) if common < 1 else Fraction(1))
    accept_probs.append(c[-1])
    tau = max([i for i, h in enumerate(accept_probs, 1) if uniforms[i - 1] < h], default=0)
    weights = p[tau]
    if tau < len(drafts):
        weights = [max(c[tau] * a - b, 0) for a, b in zip(p[tau], q[tau], strict=True)]
    return [*drafts[:tau], rational_pick(weights, last)], accept_probs


@pytest.mark.parametrize(
    "name", [pytest.param("reference", marks=pytest.mark.slow), *KERNEL_PROVIDERS]
)
def test_rule_block_decides_as_exact_arithmetic_does_ties_included(name):
    rng = np.random.default_rng(6)
    n, gamma, v = (24 if name == "triton" else 2000), 2, 4
    p, q = sixteenths(rng, (n, gamma + 1, v)), dyadic_rows(rng, (n, gamma))
    drafts = np.array([[rng.choice(v, p=row) for row in rows] for rows in q])
    uniforms = rng.integers(0, 16, (n, gamma + 1)) / 16
    got = verify(
        provider("verify_chain", name), torch.from_numpy(p).float(), torch.from_numpy(drafts),
        torch.from_numpy(q).float(), kind="probs", rule="block",
        uniforms=torch.from_numpy(uniforms),
    )  # fmt: skip
    tied = 0
    for r in range(n):
        rows = [[[Fraction(x) for x in row] for row in m] for m in (p[r], q[r])]
        exact = [Fraction(u) for u in uniforms[r]]
        want, accept_probs = rational_block(*rows, drafts[r].tolist(), exact[:gamma], exact[gamma])
        tied += any(0 < h < 1 and h == u for h, u in zip(accept_probs, exact, strict=False))
        assert got[0][r].tolist() == want + [-1] * (gamma + 1 - len(want)), (r, p[r], q[r])
        assert int(got[1][r]) == len(want) - 1
        assert int(got[2][r]) == 0
    assert tied >= n // 100  # equality of h and its uniform occurred


def rational_joint_distribution(p, q, gamma=2):
    """Joint distribution of the emitted tokens of rule block when all rows are p, or q."""
    v = len(p)
    joint = {}
    for x in np.ndindex(*(v,) * gamma):
        reach = Fraction(1)
        for token in x:
            reach *= q[token]
        if reach == 0:
            continue
        rows = ([p] * (gamma + 1), [q] * gamma)
        _, accept_probs = rational_block(*rows, list(x), [Fraction(0)] * gamma, Fraction(0))
        c = [Fraction(1)]
        for token in x:
            c.append(min(Fraction(1), c[-1] * p[token] / q[token]))
        for tau in range(gamma, -1, -1):
            accept = accept_probs[tau - 1] if tau else Fraction(1)
            residual = [max(c[tau] * a - b, 0) for a, b in zip(p, q, strict=True)]
            after = (
                p if tau == gamma or sum(residual) == 0 else [w / sum(residual) for w in residual]
            )
            for y in range(v):
                spread(joint, (*x[:tau], y), reach * accept * after[y], p, gamma + 1)
            reach *= 1 - accept
    return joint


def spread(joint, prefix, mass, p, length):
    """Add a prefix to the joint distribution; the target continues what is too short."""
    if mass == 0:
        return
    if len(prefix) == length:
        joint[prefix] = joint.get(prefix, Fraction(0)) + mass
        return
    for y, w in enumerate(p):
        spread(joint, (*prefix, y), mass * w, p, length)


def test_rule_block_keeps_the_target_distribution_in_rationals():
    rng = np.random.default_rng(12)
    for _ in range(30):
        p, q = ([int(w) for w in (*rng.integers(0, 6, 2), 1)] for _ in "pq")
        p, q = ([Fraction(w, sum(x)) for w in x] for x in (p, q))
        for prefix, mass in rational_joint_distribution(p, q).items():
            want = Fraction(1)
            for y in prefix:
                want *= p[y]
            assert mass == want


# Rule block in float64 on probabilities. A negative control replaces one of its steps.


def capped(c, ratio, last):
    return min(1.0, c * ratio)


def accept_prob(c, p, q):
    less = float((q - c * p).clamp(min=0).sum())
    return float((c * p - q).clamp(min=0).sum()) / less if less > 0 else 1.0


def last_acceptance(uniforms, accept_probs):
    return max([i for i, h in enumerate(accept_probs, 1) if uniforms[i - 1] < h], default=0)


def first_rejection(uniforms, accept_probs):
    count = 0
    while count < len(accept_probs) and uniforms[count] < accept_probs[count]:
        count += 1
    return count


def block_verifier(
    next_c=capped,
    accept_prob=accept_prob,
    decide=last_acceptance,
    residual=lambda c, p, q: c * p - q,
):
    def run(*args):
        a = ChainArguments(*args)
        n, gamma = a.draft_token_ids.shape
        p, q = a.target.double(), a.draft.double()
        tokens = torch.full((n, gamma + 1), -1)
        accepted = torch.zeros(n, dtype=torch.int32)
        acceptance = torch.zeros(n, gamma)
        for b in range(n):
            x, c = a.draft_token_ids[b].tolist(), [1.0]
            for i in range(gamma):
                c.append(next_c(c[-1], float(p[b, i, x[i]] / q[b, i, x[i]]), i == gamma - 1))
            h = [accept_prob(c[i], p[b, i], q[b, i]) for i in range(1, gamma)] + c[-1:]
            tau = decide(a.uniforms[b].tolist(), h)
            weights = p[b, tau]
            if tau < gamma:
                weights = residual(c[tau], p[b, tau], q[b, tau]).clamp(min=0)
            weights = weights if float(weights.sum()) > 0 else p[b, tau]
            tokens[b, :tau] = a.draft_token_ids[b, :tau]
            tokens[b, tau] = reference.pick(weights, float(a.uniforms[b, -1]))
            accepted[b] = tau
            acceptance[b] = torch.tensor(h)
        return tokens, accepted, torch.zeros(n, dtype=torch.int32), torch.zeros(n), acceptance

    return run


def enumerated(**steps):
    toy = ToyChain(kind="probs", rule="block", seed=3)
    run = toy.verifier(block_verifier(**steps))
    return testing.enumerate_distribution(run, toy.draft_probs, toy.target_probs, steps=24), toy


def test_the_enumeration_passes_a_correct_block_verifier():
    realized, toy = enumerated()
    assert_target_distribution(realized, toy)
    assert_close(
        "accepted", realized.accepted, accepted_count_distribution(toy, "block"), atol=TOLERANCE
    )


WRONG = {
    "residual without c": dict(residual=lambda c, p, q: p - q),
    "residual of P": dict(residual=lambda c, p, q: p),
    "uncapped products": dict(next_c=lambda c, ratio, last: c * ratio),
    "last ratio alone": dict(next_c=lambda c, ratio, last: min(1.0, ratio if last else c * ratio)),
    "no product": dict(next_c=lambda c, ratio, last: min(1.0, ratio)),
    "stopping at the first rejection": dict(decide=first_rejection),
    "c instead of h": dict(accept_prob=lambda c, p, q: c),
    "h of token's residual": dict(accept_prob=lambda c, p, q: accept_prob(1.0, p, q) * c),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_enumeration_rejects_a_block_verifier_with(wrong):
    assert_wrong_distribution(*enumerated(**WRONG[wrong]))


def test_an_acceptance_probability_that_relies_on_rows_summing_to_one_is_rejected():
    """(c - M) / (1 - M) needs rows that sum to one, and those rounded to bfloat16 do not."""
    case = testing.chain_case(5, 4, 517, torch.bfloat16, "block", kind="probs", acceptance=0.6)
    args = ChainArguments(*case.args())
    want = reference.verify_chain(*args)[4]
    looked = ~want.isnan()
    looked[2] = False  # some drafts of this sequence are missing

    def by_the_formula(c, p, q):
        common = float(torch.minimum(c * p, q).sum())
        return (c - common) / (1 - common)

    for formula, close in ((accept_prob, True), (by_the_formula, False)):
        drawn = args._replace(uniforms=torch.rand(5, 5).double())
        got = block_verifier(accept_prob=formula)(*drawn)[4]
        off = float((got[looked] - want[looked]).abs().max())
        assert (off < 2e-5) == close, off


# Correct kernels that are called wrongly, and lossy rules with one wrong term.


def changed(**new):
    return lambda a: {**a, **{k: f(a) for k, f in new.items()}}


CALLS = {
    "sparse probabilities that were not renormalised": (
        dict(draft="sparse"), changed(draft=lambda a: 0.8 * a["draft"])),
    "a sparse id counted once": (
        dict(draft="sparse"), changed(ids=lambda a: a["ids"].masked_fill(
            torch.tensor([False, False, False, True]), -1))),
    "a sparse draft whose ids are ranks": (
        dict(draft="sparse"), changed(ids=lambda a: torch.tensor([0, -1, 1, 0]).expand(
            a["ids"].shape).contiguous())),
    "a mapped draft compared by column": (
        dict(v=4, draft="mapped"), changed(columns=lambda a: None)),
    "wide ids taken for missing drafts": (
        dict(draft="wide"), changed(tokens=lambda a: torch.where(
            a["tokens"] >= 3, -1, a["tokens"]))),
    "a narrow draft filled with zeros as logits": (
        dict(draft="narrow"), changed(draft=lambda a: torch.nn.functional.pad(a["draft"], (0, 1)))),
}  # fmt: skip


def wrong_call(toy, name, change):
    op = provider("verify_chain", name)

    def run(drafts, uniforms):
        a = change({"tokens": drafts, **toy.arguments(drafts, "cpp")})
        # Ids of a wide draft may be out of range here, so status is not looked at.
        return verify(op, uniforms=uniforms, **a)[:2]

    return run


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ENUMERATED_PROVIDERS)
def test_the_enumeration_rejects(name, call, rule):
    options, change = CALLS[call]
    toy = ToyChain(**options, rule=rule)
    assert_target_distribution(toy.realized(name), toy)
    run, like = (wrong_call(toy, n, change) for n in (name, BOUNDARY_PROVIDER))
    realized = testing.enumerate_distribution(
        run, toy.draft_probs, toy.target_probs, steps=24, like=like
    )
    assert_wrong_distribution(realized, toy)


@pytest.mark.parametrize("name", ENUMERATED_PROVIDERS)
def test_the_formula_of_lenient_with_the_residual_of_token_is_rejected(name):
    toy = ToyChain(rule="lenient", lenience=0.5)
    realized = toy.realized(name)
    assert_joint_distribution(realized, lossy_joint_distribution(toy, lenient_masses, lenience=0.5))
    wrong = lossy_joint_distribution(toy, lenient_masses, lenience=0.5, of_token=True)
    with pytest.raises(AssertionError, match="P\\(y1"):
        assert_joint_distribution(realized, wrong)


@pytest.mark.parametrize("name", ENUMERATED_PROVIDERS)
def test_the_formula_of_typical_with_the_unfiltered_entropy_is_rejected(name):
    filters = dict(temperature=1.3, top_k=2)
    toy = ToyChain(v=4, rule="typical", epsilon=0.9, delta=1.1, target_filters=filters)
    full = ToyChain(v=4, target_filters=dict(temperature=1.3))
    kw = dict(epsilon=0.9, delta=1.1)
    rows = zip(toy.target_probs, toy.draft_probs, full.target_probs, strict=False)
    masses = [typical_masses(p, q, **kw, unfiltered=u) for p, q, u in rows]
    wrong = chain_joint_distribution(
        [a for a, _ in masses], [r for _, r in masses], toy.target_probs
    )
    realized = toy.realized(name)
    assert_joint_distribution(realized, lossy_joint_distribution(toy, typical_masses, **kw))
    with pytest.raises(AssertionError, match="P\\(y1"):
        assert_joint_distribution(realized, wrong)


@pytest.mark.parametrize("name", ENUMERATED_PROVIDERS)
def test_the_accepted_counts_of_rule_token_are_rejected_for_synthetic(name):
    toy = ToyChain(rule="synthetic", rates=RATES)
    wrong = ToyChain(rule="token").realized(name)
    a, b = RATES.double().tolist()
    want = torch.tensor([1 - a, a * (1 - b), a * b], dtype=torch.float64)
    assert_close("accepted", toy.realized(name).accepted, want, atol=TOLERANCE)
    with pytest.raises(AssertionError, match="accepted"):
        assert_close("accepted", wrong.accepted, want, atol=TOLERANCE)
    accept = [r * q for r, q in zip((a, b), toy.draft_probs, strict=True)]
    reject = [rejection_mass(x, p) for x, p in zip(accept, toy.target_probs, strict=False)]
    with pytest.raises(AssertionError, match="P\\(y1"):
        assert_joint_distribution(wrong, chain_joint_distribution(accept, reject, toy.target_probs))
