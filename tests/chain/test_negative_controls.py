"""Rule block in exact arithmetic, and verifiers that are wrong: the suite must reject each."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from row.test_reference import rational_pick, sixteenths
from support.providers import ALL_PROVIDERS, FAST_PROVIDERS, assert_close, provider, verify
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

# Multiples of 1/16 against powers of two: every ratio, product and sum is a short binary fraction,
# so floats of either size decide as rationals do, and ties are ties.
DYADIC = [[8, 4, 2, 2], [4, 4, 4, 4], [8, 8, 0, 0], [16, 0, 0, 0], [8, 4, 4, 0]]


def dyadic_rows(rng, shape):
    rows = [rng.permutation(DYADIC[k]) for k in rng.integers(0, len(DYADIC), int(np.prod(shape)))]
    return np.array(rows, dtype=np.float64).reshape(*shape, 4) / 16


def rational_block(p, q, drafts, coins, last):
    """Rule block on one sequence: emitted tokens and the chances h."""
    c = [Fraction(1)]
    for i, x in enumerate(drafts):
        c.append(min(Fraction(1), c[-1] * p[i][x] / q[i][x]) if q[i][x] else Fraction(0))
    chances = []
    for i in range(1, len(drafts)):
        common = sum(min(c[i] * a, b) for a, b in zip(p[i], q[i], strict=True))
        chances.append((c[i] - common) / (1 - common) if common < 1 else Fraction(1))
    chances.append(c[-1])
    tau = max([i for i, h in enumerate(chances, 1) if coins[i - 1] < h], default=0)
    weights = p[tau]
    if tau < len(drafts):
        weights = [max(c[tau] * a - b, 0) for a, b in zip(p[tau], q[tau], strict=True)]
    return [*drafts[:tau], rational_pick(weights, last)], chances


@pytest.mark.parametrize("name", ALL_PROVIDERS)
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
        coins = [Fraction(u) for u in uniforms[r]]
        want, chances = rational_block(*rows, drafts[r].tolist(), coins[:gamma], coins[gamma])
        tied += any(0 < h < 1 and h == u for h, u in zip(chances, coins, strict=False))
        assert got[0][r].tolist() == want + [-1] * (gamma + 1 - len(want)), (r, p[r], q[r])
        assert int(got[1][r]) == len(want) - 1
        assert int(got[2][r]) == 0
    assert tied >= n // 100  # the comparison at equality was tried


def rational_law(p, q, gamma=2):
    """Joint law of rule block for i.i.d. rows, by enumeration: what it says it keeps."""
    v = len(p)
    joint = {}
    for x in np.ndindex(*(v,) * gamma):
        reach = Fraction(1)
        for token in x:
            reach *= q[token]
        if reach == 0:
            continue
        rows = ([p] * (gamma + 1), [q] * gamma)
        _, chances = rational_block(*rows, list(x), [Fraction(0)] * gamma, Fraction(0))
        c = [Fraction(1)]
        for token in x:
            c.append(min(Fraction(1), c[-1] * p[token] / q[token]))
        for tau in range(gamma, -1, -1):
            stands = chances[tau - 1] if tau else Fraction(1)
            left = [max(c[tau] * a - b, 0) for a, b in zip(p, q, strict=True)]
            after = p if tau == gamma or sum(left) == 0 else [w / sum(left) for w in left]
            for y in range(v):
                spread(joint, (*x[:tau], y), reach * stands * after[y], p, gamma + 1)
            reach *= 1 - stands
    return joint


def spread(joint, prefix, mass, p, length):
    """The target goes on after what was emitted."""
    if mass == 0:
        return
    if len(prefix) == length:
        joint[prefix] = joint.get(prefix, Fraction(0)) + mass
        return
    for y, w in enumerate(p):
        spread(joint, (*prefix, y), mass * w, p, length)


def test_rule_block_keeps_the_target_law_in_rationals():
    rng = np.random.default_rng(12)
    for _ in range(30):
        p, q = ([int(w) for w in (*rng.integers(0, 6, 2), 1)] for _ in "pq")
        p, q = ([Fraction(w, sum(x)) for w in x] for x in (p, q))
        for prefix, mass in rational_law(p, q).items():
            want = Fraction(1)
            for y in prefix:
                want *= p[y]
            assert mass == want


# Rule block in float64 on probabilities; each part can be replaced by a wrong one.


def capped(c, ratio, last):
    return min(1.0, c * ratio)


def chance(c, p, q):
    less = float((q - c * p).clamp(min=0).sum())
    return float((c * p - q).clamp(min=0).sum()) / less if less > 0 else 1.0


def backward(coins, chances):
    return max([i for i, h in enumerate(chances, 1) if coins[i - 1] < h], default=0)


def forward(coins, chances):
    count = 0
    while count < len(chances) and coins[count] < chances[count]:
        count += 1
    return count


def toy(carry=capped, chance=chance, walk=backward, residual=lambda c, p, q: c * p - q):
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
                c.append(carry(c[-1], float(p[b, i, x[i]] / q[b, i, x[i]]), i == gamma - 1))
            h = [chance(c[i], p[b, i], q[b, i]) for i in range(1, gamma)] + c[-1:]
            tau = walk(a.uniforms[b].tolist(), h)
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


def toy_law(**parts):
    setting = ToyChain(kind="probs", rule="block", seed=3)
    run = setting.verifier(toy(**parts))
    return testing.enumerate_distribution(
        run, setting.draft_probs, setting.target_probs, steps=24
    ), setting


def test_the_machinery_passes_a_correct_block():
    law, setting = toy_law()
    assert_target_distribution(law, setting)
    assert_close(
        "accepted", law.accepted, accepted_count_distribution(setting, "block"), atol=TOLERANCE
    )


WRONG = {
    "residual without c": dict(residual=lambda c, p, q: p - q),
    "residual of P": dict(residual=lambda c, p, q: p),
    "uncapped products": dict(carry=lambda c, ratio, last: c * ratio),
    "last ratio alone": dict(carry=lambda c, ratio, last: min(1.0, ratio if last else c * ratio)),
    "no product": dict(carry=lambda c, ratio, last: min(1.0, ratio)),
    "walking forward": dict(walk=forward),
    "c instead of h": dict(chance=lambda c, p, q: c),
    "h of token's residual": dict(chance=lambda c, p, q: chance(1.0, p, q) * c),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_machinery_rejects_a_block_with(wrong):
    assert_wrong_distribution(*toy_law(**WRONG[wrong]))


def test_rejects_a_chance_that_trusts_rows_to_sum_to_one():
    """(c - M) / (1 - M) on probabilities rounded to bfloat16."""
    case = testing.chain_case(5, 4, 517, torch.bfloat16, "block", kind="probs", acceptance=0.6)
    args = case.args()
    want = reference.verify_chain(*args)[4]
    looked = ~want.isnan()
    looked[2] = False  # its drafts are cut short

    def by_the_formula(c, p, q):
        common = float(torch.minimum(c * p, q).sum())
        return (c - common) / (1 - common)

    for formula, close in ((chance, True), (by_the_formula, False)):
        got = toy(chance=formula)(*(args[:22]), torch.rand(5, 5).double(), *args[23:])[4]
        off = float((got[looked] - want[looked]).abs().max())
        assert (off < 2e-5) == close, off


# Wrong calls of a right kernel, and wrong rules of one line.


RULES = ("token", "block")


def changed(**new):
    return lambda a: {**a, **{k: f(a) for k, f in new.items()}}


CALLS = {
    "a sparse law that was not renormalised": (
        dict(draft="sparse"), changed(draft=lambda a: 0.8 * a["draft"])),
    "a sparse id counted once": (
        dict(draft="sparse"), changed(ids=lambda a: a["ids"].masked_fill(
            torch.tensor([False, False, False, True]), -1))),
    "a sparse draft taken for its rank": (
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


def wrong_call(setting, name, change):
    op = provider("verify_chain", name)

    def run(drafts, uniforms):
        a = change({"tokens": drafts, **setting.arguments(drafts, "cpp")})
        # A wide id that the wrong call does not know is out of range.
        return verify(op, uniforms=uniforms, **a)[:2]

    return run


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_rejects(name, call, rule):
    options, change = CALLS[call]
    setting = ToyChain(**options, rule=rule)
    assert_target_distribution(setting.realized(name), setting)
    run, like = (wrong_call(setting, n, change) for n in (name, BOUNDARY_PROVIDER))
    law = testing.enumerate_distribution(
        run, setting.draft_probs, setting.target_probs, steps=24, like=like
    )
    assert_wrong_distribution(law, setting)


@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_rejects_a_lenient_rule_with_the_residual_of_token(name):
    setting = ToyChain(rule="lenient", lenience=0.5)
    law = setting.realized(name)
    assert_joint_distribution(law, lossy_joint_distribution(setting, lenient_masses, lenience=0.5))
    wrong = lossy_joint_distribution(setting, lenient_masses, lenience=0.5, of_token=True)
    with pytest.raises(AssertionError, match="P\\(y1"):
        assert_joint_distribution(law, wrong)


@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_rejects_a_typical_rule_with_the_entropy_of_the_unfiltered_law(name):
    filters = dict(temperature=1.3, top_k=2)
    setting = ToyChain(v=4, rule="typical", epsilon=0.9, delta=1.1, target_filters=filters)
    full = ToyChain(v=4, target_filters=dict(temperature=1.3))
    kw = dict(epsilon=0.9, delta=1.1)
    rows = zip(setting.target_probs, setting.draft_probs, full.target_probs, strict=False)
    parts = [typical_masses(p, q, **kw, unfiltered=u) for p, q, u in rows]
    wrong = chain_joint_distribution(
        [a for a, _ in parts], [r for _, r in parts], setting.target_probs
    )
    law = setting.realized(name)
    assert_joint_distribution(law, lossy_joint_distribution(setting, typical_masses, **kw))
    with pytest.raises(AssertionError, match="P\\(y1"):
        assert_joint_distribution(law, wrong)


@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_rejects_a_synthetic_rule_with_the_coin_of_token(name):
    setting = ToyChain(rule="synthetic", rates=RATES)
    wrong = ToyChain(rule="token").realized(name)
    a, b = RATES.double().tolist()
    want = torch.tensor([1 - a, a * (1 - b), a * b], dtype=torch.float64)
    assert_close("accepted", setting.realized(name).accepted, want, atol=TOLERANCE)
    with pytest.raises(AssertionError, match="accepted"):
        assert_close("accepted", wrong.accepted, want, atol=TOLERANCE)
    accept = [r * q for r, q in zip((a, b), setting.draft_probs, strict=True)]
    reject = [rejection_mass(x, p) for x, p in zip(accept, setting.target_probs, strict=False)]
    with pytest.raises(AssertionError, match="P\\(y1"):
        assert_joint_distribution(
            wrong, chain_joint_distribution(accept, reject, setting.target_probs)
        )
