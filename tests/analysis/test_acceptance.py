"""Acceptance rates and counts against rational numbers, formulas and sums over all drafts."""

import math
from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from proofs import SIGNIFICANCE, assert_close
from proofs.toy_chain import (
    accepted_count_distribution,
    lenient_masses,
    top_beta_masses,
    typical_masses,
)
from scipy.special import bdtr, bdtrc

from specdec_kernels import analysis, verify_chain
from specdec_kernels.analysis.acceptance import ROW_RULES

pytestmark = pytest.mark.analysis


def normalized(weights):
    """Whole numbers to rational probabilities."""
    total = sum(weights)
    return [Fraction(w, total) for w in weights]


def tensor(probs):
    """[V] float64 of rational probabilities."""
    return torch.tensor([float(x) for x in probs], dtype=torch.float64)


def rational_pairs(rng, n=60, v=5):
    """Rational distributions P and Q: equal, one-hot, with ties, with zeros, dense."""
    last, first = [0] * (v - 1) + [1], [1] + [0] * (v - 1)
    weights = [(last, first), (last, last), ([1] * v, [1] * v), ([1] * v, last)]
    weights += [tuple([*map(int, rng.integers(0, 7, v - 1)), 1] for _ in "pq") for _ in range(n)]
    return [(normalized(p), normalized(q)) for p, q in weights]


# Acceptance in one row.


# The formula with which the kernels of a rule are compared, too, its parameters, and values.
FORMULAS = {
    "lenient": (lenient_masses, ("lenience",), [(1.0,), (0.7,), (0.0625,)]),
    "typical": (
        typical_masses, ("epsilon", "delta"), [(0.09, 0.3), (0.5, 0.9), (0.0, 0.3), (1.0, 0.99)],
    ),
    "top_beta": (
        top_beta_masses, ("top_beta_rank", "top_beta_distance"),
        [(1, 0.3), (2, 0.3), (9, math.inf)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", FORMULAS)
def test_the_accepted_mass_of_a_rule_is_that_of_its_formula(rule):
    formula, names, values = FORMULAS[rule]
    for given in values:
        parameters, outcomes = dict(zip(names, given, strict=True)), set()
        for p, q in rational_pairs(np.random.default_rng(2)):
            a, b = tensor(p), tensor(q)
            want, _ = formula(a, b, *given)
            assert_close("mass", analysis.accepted_mass(a, b, rule, **parameters), want, atol=1e-15)
            rate = float(analysis.acceptance_rate(a, b, rule, **parameters))
            assert rate == pytest.approx(float(want.sum()), abs=1e-15)
            outcomes |= set((want == b)[b > 0].tolist())
            if rule != "lenient":
                chosen = getattr(analysis, f"{rule}_set")(a, *given)
                assert torch.equal(chosen[b > 0], (want > 0)[b > 0])
            elif parameters["lenience"] == 1:
                assert float(analysis.acceptance_rate(a, b)) == rate
                assert float(analysis.divergence(a, b)) == pytest.approx(1 - rate, abs=1e-15)
        assert outcomes == {True, False}
    certain = torch.tensor([0.0, 1.0])
    assert not analysis.typical_set(certain, 1.0, 1.0).any(), "its bound is strict"


def rational_match(p, q):
    """[V] accepted mass of rule match by its formula, in rationals."""
    both = [x for x in range(len(p)) if p[x] and q[x]]
    out = [Fraction(0)] * len(p)
    for x in both:
        ratios = (max(a / p[x], b / q[x]) for a, b in zip(p, q, strict=True))
        out[x] = 1 / sum(ratios)
    return out


def test_acceptance_of_match_by_sorting_equals_the_formula():
    pairs = [pair for v in (1, 2, 5, 9) for pair in rational_pairs(np.random.default_rng(v), 30, v)]
    for p, q in pairs:
        want = rational_match(p, q)
        mass = analysis.accepted_mass(tensor(p), tensor(q), "match")
        assert_close("mass", mass, tensor(want), atol=1e-14)
        tv = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
        assert (1 - tv) / (1 + tv) <= sum(want) <= 1 - tv


def test_acceptance_of_match_over_a_large_vocabulary_in_classes_of_equal_tokens():
    rng = np.random.default_rng(6)
    counts = np.array([1, 3, 40, 2100, 60_000, 200_000])
    p, q = (w / (w @ counts) for w in np.exp(-rng.uniform(0, 14, (2, 6))))
    want = sum(
        n / (counts @ np.maximum(p / a, q / b)) for n, a, b in zip(counts, p, q, strict=True)
    )
    order = rng.permutation(counts.sum())
    wide = [torch.from_numpy(np.repeat(x, counts)[order]) for x in (p, q)]
    assert float(analysis.acceptance_rate(*wide, "match")) == pytest.approx(want, rel=1e-11)
    single = analysis.acceptance_rate(*(x.float() for x in wide), "match")
    assert float(single) == pytest.approx(want, rel=1e-6)


def test_acceptance_of_match_is_how_often_draws_with_shared_noise_agree():
    n, (p, q) = 200_000, torch.tensor([[0.5, 0.2, 0.2, 0.1, 0.0], [0.1, 0.4, 0.2, 0.2, 0.1]])
    generator = torch.Generator().manual_seed(5)
    noise = torch.empty(n, 5, dtype=torch.float64).exponential_(generator=generator)
    target, draft = (noise / p).argmin(-1), (noise / q).argmin(-1)
    hits = draft[target == draft].bincount(minlength=5).tolist()
    for hit, mass in zip(hits, analysis.accepted_mass(p, q, "match").tolist(), strict=True):
        assert min(bdtr(hit, n, mass), bdtrc(hit - 1, n, mass)) > SIGNIFICANCE


@pytest.mark.parametrize("rule", ROW_RULES)
def test_rows_of_a_batch_are_independent(rule):
    p, q = torch.rand(2, 3, 2, 7, generator=torch.Generator().manual_seed(1)).mul(4).softmax(-1)
    got = analysis.accepted_mass(p, q, rule, lenience=0.5)
    assert got.dtype == torch.float64
    for i, j in product(range(3), range(2)):
        want = analysis.accepted_mass(p[i, j], q[i, j], rule, lenience=0.5)
        assert_close("row", got[i, j], want)
    assert bool((got <= q + 1e-6).all())


@pytest.mark.parametrize("rule", [*ROW_RULES, "block"])
def test_a_vocabulary_of_one_token_and_rows_without_a_common_token(rule):
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    assert analysis.mean_accepted([one[0, 0], one[0]], [one[0, 0], one[0], one], rule) == 2
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    assert analysis.mean_accepted([q], [p], rule) == 0
    assert analysis.num_accepted_distribution([], [p], rule).tolist() == [1.0]


ONE = torch.ones(1)
WRONG = {
    "lenience must be in (0, 1], got 0.0": lambda: analysis.acceptance_rate(
        ONE, ONE, "lenient", lenience=0.0),
    "gamma must be at least 0, got -1": lambda: analysis.best_of_tokens(0.5, -1, 2),
    "sequences must be at least 1, got 0": lambda: analysis.best_of_tokens(0.5, 2, 0),
    "limit must be at least 0, got -1": lambda: analysis.optimal_gamma(0.5, 0.1, limit=-1),
    "rule must be one of token,": lambda: analysis.num_accepted_distribution([], [], "tokens"),
    "target must have 1 conditionals or more, got 0": lambda: analysis.mean_accepted([ONE], []),
    "epsilon must not": lambda: analysis.mean_accepted([ONE], [ONE], "block", epsilon=0.5),
    "delta must not": lambda: analysis.mean_accepted([ONE], [ONE], "lenient", delta=0.5),
    "decay must be in (0, 1], got 0": lambda: analysis.AcceptanceEstimate.empty(2, decay=0),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_formulas_name_argument_rule_and_value(message):
    with pytest.raises(ValueError) as error:
        WRONG[message]()
    assert str(error.value).startswith(message)


def test_nothing_waits_for_the_device():
    """On the meta device every read of a value fails."""
    p, q = torch.empty(2, 3, 7, device="meta")
    for rule in (*ROW_RULES, "block"):
        assert analysis.num_accepted_distribution([q[0]], [p[0]], rule).is_meta
    assert analysis.divergence(p, q).is_meta
    assert analysis.lenient_argmax(p, p[..., 0].long(), 0.5).is_meta
    assert analysis.rejection_mass(p, q).is_meta
    assert analysis.block_acceptance(p, q).is_meta
    estimate = analysis.AcceptanceEstimate.empty(7, device="meta").observe(p)
    estimate = estimate.update(torch.empty(3, device="meta", dtype=torch.int32))
    figures = (estimate.alpha, estimate.by_position, estimate.standard_error)
    for value in (*figures, *estimate.interval()):
        assert value.is_meta
    assert estimate.expected_tokens(3).is_meta


def test_lenience_at_argmax_is_that_of_the_op():
    generator = torch.Generator().manual_seed(7)
    logits = 2 * torch.randn(80, 2, 9, generator=generator)
    tokens = torch.randint(9, (80, 1), generator=generator)
    zeros = torch.zeros(80, dtype=torch.int64)
    shares = []
    for l in analysis.LENIENCES:
        verdict = verify_chain(
            logits, tokens, None, rule="lenient", lenience=l, temperature=0.0, seeds=zeros,
            positions=zeros,
        )  # fmt: skip
        accepted = analysis.lenient_argmax(logits[:, 0].softmax(-1), tokens[:, 0], l)
        assert verdict.num_accepted.tolist() == accepted.long().tolist()
        shares.append(int(accepted.sum()))
    assert shares == sorted(set(shares))


# Baselines.


def test_rejection_sampling_accepts_less():
    """Appendix A.2: draft from Q, and accept with p / (M q). See test_baselines.py."""
    fewer = 0
    for p, q in rational_pairs(np.random.default_rng(5)):
        lacks = any(a and not b for a, b in zip(p, q, strict=True))
        m = None if lacks else max(a / b for a, b in zip(p, q, strict=True) if b)
        accepted = [
            b * (a / (m * b)) if b and m else Fraction(0) for a, b in zip(p, q, strict=True)
        ]
        mass = analysis.rejection_mass(tensor(p), tensor(q))
        assert_close("mass", mass, tensor(accepted), atol=1e-15)
        rate = float(analysis.rejection_acceptance(tensor(p), tensor(q)))
        assert rate == pytest.approx(float(sum(accepted)), abs=1e-15)
        alpha = float(analysis.acceptance_rate(tensor(p), tensor(q)))
        assert rate <= alpha + 1e-15
        fewer += rate < alpha - 1e-3
    assert fewer > 40


def lengths(gamma, first, alpha):
    """Tokens of a round of one chain, and their probability, by what is accepted of its drafts."""
    for accepted in product((True, False), repeat=gamma):
        chances = zip(accepted, [first, *[alpha] * gamma], strict=False)
        share = math.prod(chance if yes else 1 - chance for yes, chance in chances)
        yield 1 + [*accepted, False].index(False), share


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_the_best_of_several_chains_has_the_length_that_enumeration_gives(gamma):
    """Of sampled chains the longest; of greedy ones that begin apart, the one that goes on."""
    first, alpha = Fraction(3, 4), Fraction(2, 5)
    for sequences in (1, 2):
        chains = product(lengths(gamma, alpha, alpha), repeat=sequences)
        want = sum(max(n for n, _ in x) * math.prod(share for _, share in x) for x in chains)
        found = analysis.best_of_tokens(float(alpha), gamma, sequences)
        assert found == pytest.approx(float(want), abs=1e-12)
    want = sum(n * share for n, share in lengths(gamma, first, alpha))
    found = analysis.best_of_likeliest_tokens(float(first), float(alpha), gamma)
    assert found == pytest.approx(float(want), abs=1e-12)


# Acceptance in rows that depend on the prefix.


def conditionals(rng, v, rows):
    """Random distributions by prefix, zeros among them, as tables [V] * (i + 1)."""
    out = []
    for i in range(rows):
        weights = [[*map(int, rng.integers(0, 5, v - 1)), 1] for _ in range(v**i)]
        out.append(torch.stack([tensor(normalized(w)) for w in weights]).view((v,) * (i + 1)))
    return out


@pytest.mark.parametrize(("v", "gamma"), [(2, 1), (4, 1), (3, 2), (2, 3)])
def test_the_accepted_count_of_block_is_the_sum_over_all_drafts(v, gamma):
    rng = np.random.default_rng(10 * v + gamma)
    for _ in range(12):
        target, draft = (conditionals(rng, v, gamma + 1) for _ in "pq")
        tables = SimpleNamespace(gamma=gamma, target_probs=target, draft_probs=draft[:gamma])
        want = accepted_count_distribution(tables, "block")
        counts = analysis.num_accepted_distribution(draft[:gamma], target, "block")
        assert_close("tau", counts, want, atol=1e-14)
        mean, token = (analysis.mean_accepted(draft[:gamma], target, r) for r in ("block", "token"))
        assert mean >= token - 1e-15
        if gamma == 1:
            assert mean == token == float(analysis.acceptance_rate(target[0], draft[0]))
        drafts = torch.cartesian_prod(*[torch.arange(v)] * gamma).view(-1, gamma)
        probs = [torch.stack([t[tuple(drafts[:, : i + 1].T)] for i, t in enumerate(x[:gamma])], -1)
                 for x in (target, draft)]  # fmt: skip
        accepted = analysis.block_acceptance(*probs) * probs[1].prod(-1, keepdim=True)
        assert float(accepted.sum()) == pytest.approx(mean, abs=1e-14)


def test_block_acceptance_of_impossible_tokens():
    p, q = torch.tensor([[0.0, 0.9], [0.0, 0.9], [0.4, 0.0], [0.2, 0.2]]), torch.zeros(4, 2)
    q[:2, 1], q[0, 0], q[3] = 0.1, 0.5, 0.2
    want = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    assert_close("accepted", analysis.block_acceptance(p, q), want)
    assert analysis.block_acceptance(p[:, :0], q[:, :0]).shape == (4, 0)


@pytest.mark.parametrize("rule", ROW_RULES)
def test_the_accepted_count_of_equal_rows_is_geometric(rule):
    p, q = normalized([3, 1, 2]), normalized([1, 4, 2])
    tables = [[tensor(x).expand((3,) * (i + 1)) for i in range(3)] for x in (q, p)]
    parameters = {"lenience": 0.8} if rule == "lenient" else {}
    alpha = float(analysis.acceptance_rate(tensor(p), tensor(q), rule, **parameters))
    counts = analysis.num_accepted_distribution(*tables, rule, **parameters)
    want = [alpha**n * (1 - alpha) for n in range(3)] + [alpha**3]
    assert_close("tau", counts, torch.tensor(want, dtype=torch.float64), atol=1e-15)
    mean = analysis.mean_accepted(*tables, rule, **parameters)
    assert 1 + mean == pytest.approx(analysis.expected_tokens(alpha, 3), abs=1e-14)
