"""The formulas against exact rational enumeration, brute force and what others published."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import linprog
from support.providers import SIGNIFICANCE, assert_close

from specdec_kernels import analysis


def law_of(weights):
    total = sum(weights)
    return [Fraction(w, total) for w in weights]


def tensor(law):
    """[V] float64 of a rational law."""
    return torch.tensor([float(x) for x in law], dtype=torch.float64)


def pairs(rng, n=60, v=5):
    """Rational laws p and q: dense, with zeros, with ties, equal, point masses."""
    point, other = [0] * (v - 1) + [1], [1] + [0] * (v - 1)
    weights = [(point, other), (point, point), ([1] * v, [1] * v), ([1] * v, point)]
    weights += [tuple([*map(int, rng.integers(0, 7, v - 1)), 1] for _ in "pq") for _ in range(n)]
    return [(law_of(p), law_of(q)) for p, q in weights]


def chain_counts(p, q, gamma):
    """[gamma + 1] law of the accepted count for i.i.d. rows, by enumeration of drafts."""
    counts = [Fraction(0)] * (gamma + 1)
    for drafts in product(range(len(p)), repeat=gamma):
        reach = Fraction(1)
        for i, x in enumerate(drafts):
            accept = min(Fraction(1), p[x] / q[x]) if q[x] else Fraction(0)
            counts[i] += reach * q[x] * (1 - accept) * math.prod(q[y] for y in drafts[i + 1 :])
            reach *= q[x] * accept
        counts[gamma] += reach
    return counts


def test_expected_tokens_is_the_rational_enumeration():
    p, q = law_of([3, 1, 2]), law_of([1, 4, 2])
    counts = chain_counts(p, q, 3)
    assert sum(counts) == 1
    alpha = float(analysis.acceptance_rate(tensor(p), tensor(q)))
    mean = float(sum(n * c for n, c in enumerate(counts)))
    assert analysis.expected_tokens(alpha, 3) == pytest.approx(1 + mean, rel=1e-12)


def test_expected_tokens_of_the_toy_model():
    """P = (1/3, 2/3), Q = (2/3, 1/3), gamma = 2: 10/9 accepted (ALGORITHMS.md, rule block)."""
    counts = chain_counts(law_of([1, 2]), law_of([2, 1]), 2)
    assert sum(n * c for n, c in enumerate(counts)) == Fraction(10, 9)
    assert analysis.expected_tokens(2 / 3, 2) == pytest.approx(1 + 10 / 9)


def test_factors_are_leviathans():
    """Table 1 of the paper: operations and speed for c = c-hat = 0.01."""
    for alpha, gamma, operations, speed in [
        (0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71), (0.9, 10, 1.60, 6.86),
    ]:  # fmt: skip
        assert analysis.operations_factor(alpha, gamma, 0.0) == pytest.approx(operations, abs=6e-3)
        assert analysis.walltime_factor(alpha, gamma, 0.0) == pytest.approx(speed, abs=6e-3)


def test_optimal_gamma_is_the_best_of_all_and_zero_when_drafting_costs_more_than_it_gives():
    for alpha, cost in product((0.3, 0.6, 0.9), (0.01, 0.1, 0.5)):
        best = analysis.optimal_gamma(alpha, cost)
        factor = analysis.walltime_factor(alpha, best, cost)
        assert all(factor >= analysis.walltime_factor(alpha, g, cost) for g in range(65))
        assert (best > 0) == (alpha > cost)
    assert analysis.optimal_gamma(0.9, 0.0, verification=lambda g: 1 + 3 * g) == 0


# One row.


def enumerated(p, q, accept, after):
    """Accept mass and emitted law of one row: accept(x) its probability, after the law if not."""
    mass = [b * accept(x) for x, b in enumerate(q)]
    rejected = 1 - sum(mass)
    return mass, [m + rejected * y for m, y in zip(mass, after, strict=True)]


def rational_residual(p, q, scale=1):
    left = [max(scale * a - b, 0) for a, b in zip(p, q, strict=True)]
    return [x / sum(left) for x in left] if sum(left) else p


@pytest.mark.parametrize("lenience", [Fraction(1), Fraction(7, 10), Fraction(1, 16)], ids=str)
def test_lenient_and_token_are_the_rational_enumeration(lenience):
    for p, q in pairs(np.random.default_rng(1)):
        scaled = [lenience * b for b in q]
        mass, law = enumerated(
            p, q, lambda x, p=p, s=scaled: min(1, p[x] / s[x]) if s[x] else 0,
            rational_residual(p, scaled),
        )  # fmt: skip
        l, a, b = float(lenience), tensor(p), tensor(q)
        assert_close("law", analysis.lenient_distribution(a, b, l), tensor(law), atol=1e-15)
        alpha = analysis.lenient_acceptance(a, b, l)
        assert float(alpha) == pytest.approx(float(sum(mass)), abs=1e-15)
        assert all(y <= x / lenience for x, y in zip(p, law, strict=True))
        if lenience == 1:
            assert law == p
            assert float(analysis.acceptance_rate(a, b)) == float(alpha)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.5, 0.9), (0.0, 0.3), (1.0, 1.0)])
def test_typical_is_the_enumeration(epsilon, delta):
    seen = set()
    for p, q in pairs(np.random.default_rng(2)):
        entropy = -sum(float(x) * math.log(x) for x in p if x)
        bound = min(epsilon, delta * math.exp(-entropy))
        if bound and any(abs(x - bound) < 1e-12 for x in p):
            continue  # rounding decides
        accepted = [x > bound for x in p]
        seen |= set(accepted)
        mass, law = enumerated(p, q, lambda x, a=accepted: int(a[x]), p)
        a, b = tensor(p), tensor(q)
        assert analysis.typical_set(a, epsilon, delta).tolist() == accepted
        assert_close(
            "law", analysis.typical_distribution(a, b, epsilon, delta), tensor(law), atol=1e-15
        )
        alpha = float(analysis.typical_acceptance(a, b, epsilon, delta))
        assert alpha == pytest.approx(float(sum(mass)), abs=1e-15)
    assert seen == {True, False}


def test_residual_is_rational_and_falls_back_on_the_target():
    for p, q in pairs(np.random.default_rng(3)):
        for scale in (Fraction(1), Fraction(1, 4), Fraction(0)):
            got = analysis.residual(tensor(p), tensor(q), float(scale))
            assert_close("residual", got, tensor(rational_residual(p, q, scale)), atol=1e-13)
    p, q = torch.linspace(0, 9, 144).sin().view(2, 3, 4, 6).softmax(-1)
    scales = torch.linspace(0.5, 1.5, 12).view(3, 4)
    rows = [analysis.residual(*x) for x in zip(*(t.flatten(0, -2) for t in (p, q)),
                                               scales.flatten(), strict=True)]  # fmt: skip
    assert_close("rows", analysis.residual(p, q, scales).flatten(0, 1), torch.stack(rows))


def direct_match(p, q):
    """The formula as it stands, in rationals: [V] mass of each token."""
    both = [x for x in range(len(p)) if p[x] and q[x]]
    out = [Fraction(0)] * len(p)
    for x in both:
        ratios = (max(a / p[x], b / q[x]) for a, b in zip(p, q, strict=True))
        out[x] = 1 / sum(ratios)
    return out


def test_match_by_sorting_is_the_direct_formula():
    laws = [(p, q) for v in (1, 2, 5, 9) for p, q in pairs(np.random.default_rng(v), 30, v)]
    for p, q in laws:
        mass = direct_match(p, q)
        assert_close("mass", analysis.accepted_mass(tensor(p), tensor(q), "match"), tensor(mass),
              atol=1e-14)  # fmt: skip
        tv = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
        assert (1 - tv) / (1 + tv) <= sum(mass) <= 1 - tv


def test_match_over_a_large_vocabulary_in_classes_of_equal_tokens():
    rng = np.random.default_rng(6)
    counts = np.array([1, 3, 40, 2100, 60_000, 200_000])
    p, q = (w / (w @ counts) for w in np.exp(-rng.uniform(0, 14, (2, 6))))
    want = sum(
        n / (counts @ np.maximum(p / a, q / b)) for n, a, b in zip(counts, p, q, strict=True)
    )
    order = rng.permutation(counts.sum())
    wide = [torch.from_numpy(np.repeat(x, counts)[order]) for x in (p, q)]
    assert wide[0].shape == (262_144,)
    assert float(analysis.match_acceptance(*wide)) == pytest.approx(want, rel=1e-11)
    single = analysis.match_acceptance(*(x.float() for x in wide))
    assert float(single) == pytest.approx(want, rel=1e-6)


def test_match_mass_is_what_shared_noise_agrees_on():
    n, (p, q) = 200_000, torch.tensor([[0.5, 0.2, 0.2, 0.1, 0.0], [0.1, 0.4, 0.2, 0.2, 0.1]])
    generator = torch.Generator().manual_seed(5)
    noise = torch.empty(n, 5, dtype=torch.float64).exponential_(generator=generator)
    target, draft = (noise / p).argmin(-1), (noise / q).argmin(-1)
    hits = draft[target == draft].bincount(minlength=5)
    for hit, mass in zip(
        hits.tolist(), analysis.accepted_mass(p, q, "match").tolist(), strict=True
    ):
        assert stats.binomtest(hit, n, mass).pvalue > SIGNIFICANCE


def test_bound_is_the_minimum_over_all_sets():
    for p, q in pairs(np.random.default_rng(7), 20):
        sets = list(product((0, 1), repeat=len(p)))
        rows = [[sum(x for x, s in zip(law, subset, strict=True) if s) for subset in sets]
                for law in (p, q)]  # fmt: skip
        for k in (1, 2, 5):
            want = 1 + min(a - b**k for a, b in zip(*rows, strict=True))
            got = float(analysis.acceptance_bound(tensor(p), tensor(q), k))
            assert got == pytest.approx(float(want), abs=1e-14)
        assert 1 + min(a - b for a, b in zip(*rows, strict=True)) == sum(map(min, p, q))


def test_bound_is_reached_by_the_best_transport():
    """The linear programme over couplings of two drafts and the emitted token."""
    p, q = np.array([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]])
    cells = list(product(range(3), repeat=3))  # x1, x2, y
    gain = [-float(y in (a, b)) for a, b, y in cells]
    rows = [[float(y == t) for _, _, y in cells] for t in range(3)]
    rows += [[float((a, b) == d) for a, b, _ in cells] for d in product(range(3), repeat=2)]
    best = linprog(gain, A_eq=rows, b_eq=[*p, *np.outer(q, q).ravel()])
    got = float(analysis.acceptance_bound(torch.from_numpy(p), torch.from_numpy(q), 2))
    assert got == pytest.approx(-best.fun, abs=1e-9)


def test_bound_of_one_draft_is_the_rate_of_rule_token_though_float32_rows_do_not_sum_to_one():
    generator = torch.Generator().manual_seed(9)
    p, q = torch.randn(2, 3, 100_000, generator=generator).mul(4).softmax(-1) * (1 - 1e-5)
    want = analysis.acceptance_rate(p, q)
    assert_close("bound", analysis.acceptance_bound(p, q), want, rtol=3e-5)


RULES = ["token", "match", "greedy", "typical", "lenient"]


@pytest.mark.parametrize("rule", RULES)
def test_rows_of_a_batch_do_not_see_each_other(rule):
    p, q = torch.rand(2, 3, 2, 7, generator=torch.Generator().manual_seed(1)).mul(4).softmax(-1)
    got = analysis.accepted_mass(p, q, rule, lenience=0.5)
    assert got.dtype == torch.float64
    for i, j in product(range(3), range(2)):
        assert_close("row", got[i, j], analysis.accepted_mass(p[i, j], q[i, j], rule, lenience=0.5))
    assert bool((got <= q + 1e-6).all())


@pytest.mark.parametrize("rule", [*RULES, "block"])
def test_one_token_and_laws_without_a_common_token(rule):
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    assert analysis.mean_accepted([one[0, 0], one[0]], [one[0, 0], one[0], one], rule) == 2
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    assert analysis.mean_accepted([q], [p], rule) == 0
    assert analysis.num_accepted_distribution([], [p], rule).tolist() == [1.0]


def test_errors_name_argument_rule_and_value():
    p = torch.ones(1)
    for lenience in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=rf"^lenience must be in \(0, 1\], got {lenience}$"):
            analysis.lenient_distribution(p, p, lenience)
    with pytest.raises(ValueError, match=r"^rule must be token, match, greedy, .*, got 'block'$"):
        analysis.accepted_mass(p, p, "block")
    with pytest.raises(ValueError, match=r"^limit must be at least 0, got -1$"):
        analysis.optimal_gamma(0.5, 0.1, limit=-1)
    for temperature in (-1.0, math.inf, math.nan):
        with pytest.raises(
            ValueError, match=rf"^temperature must be finite .*, got {temperature}$"
        ):
            analysis.filtered_distribution(torch.zeros(2), temperature=temperature)
    for count in (analysis.num_accepted_distribution, analysis.mean_accepted):
        with pytest.raises(ValueError, match=r"^rule must be one of token, .*, got 'tokens'$"):
            count([], [], "tokens")
        with pytest.raises(ValueError, match=r"^target must have 1 conditionals or more, got 0$"):
            count([p], [])
        for rule, name in (("token", "lenience"), ("block", "epsilon"), ("lenient", "delta")):
            with pytest.raises(ValueError, match=rf"^{name} must not .* rule {rule}, got 0.5$"):
                count([p], [p], rule, **{name: 0.5})
    with pytest.raises(ValueError, match=r"^decay must be in \(0, 1\], got 0$"):
        analysis.AcceptanceEstimate.empty(2, decay=0)


def test_nothing_waits_for_the_device():
    """On the meta device every read of a value fails."""
    p, q = torch.empty(2, 3, 7, device="meta")
    for rule in RULES:
        assert analysis.accepted_mass(p, q, rule).is_meta
    assert analysis.acceptance_bound(p, q, 2).shape == (3,)
    assert analysis.residual(p, q, p[..., 0]).shape == (3, 7)
    assert analysis.lenient_distribution(p, q, 0.5).is_meta
    assert analysis.typical_distribution(p, q).is_meta
    assert analysis.block_acceptance(p, q).shape == (3, 7)
    for rule in (*RULES, "block"):
        assert analysis.num_accepted_distribution([q[0]], [p[0]], rule).is_meta
    seen = analysis.AcceptanceEstimate.empty(7, device="meta").observe(p)
    seen = seen.update(torch.empty(3, device="meta", dtype=torch.int32))
    for value in (seen.alpha, seen.by_position, seen.standard_error, *seen.interval()):
        assert value.is_meta
    assert seen.expected_tokens(3).is_meta


# Conditionals on a prefix.


def conditionals(rng, v, rows):
    """Random rational laws by prefix, zeros among them, and as tables [V] * (i + 1)."""
    laws, out = {}, []
    for i in range(rows):
        prefixes = list(product(range(v), repeat=i))
        laws |= {x: law_of([*map(int, rng.integers(0, 5, v - 1)), 1]) for x in prefixes}
        out.append(torch.stack([tensor(laws[x]) for x in prefixes]).view((v,) * (i + 1)))
    return laws, out


def rational_block(p, q, v, gamma):
    """Rule `block` as ALGORITHMS.md states it: law of tau, and joint law of gamma + 1 tokens."""
    counts, joint = [Fraction(0)] * (gamma + 1), {}
    for x in product(range(v), repeat=gamma):
        weight, c, rows = math.prod(q[x[:i]][x[i]] for i in range(gamma)), [Fraction(1)], []
        if weight == 0:
            continue
        for i in range(gamma):
            c.append(min(1, c[i] * p[x[:i]][x[i]] / q[x[:i]][x[i]]))
            scaled = [c[i] * a for a in p[x[:i]]]
            kept = sum(map(min, scaled, q[x[:i]]))
            h = (c[i] - kept) / (1 - kept) if kept != 1 else Fraction(1)
            rows.append((h if i else Fraction(1), rational_residual(p[x[:i]], q[x[:i]], c[i])))
        rows.append((c[gamma], p[x]))
        for n, (h, last) in reversed(list(enumerate(rows))):
            counts[n] += weight * h
            for y, rest in product(range(v), product(range(v), repeat=gamma - n)):
                tokens = (*x[:n], y, *rest)
                after = math.prod(p[tokens[:i]][tokens[i]] for i in range(n + 1, gamma + 1))
                joint[tokens] = joint.get(tokens, 0) + weight * h * last[y] * after
            weight *= 1 - h
    return counts, joint


@pytest.mark.parametrize(("v", "gamma"), [(2, 1), (4, 1), (3, 2), (2, 3)])
def test_accepted_law_of_block_is_the_rational_enumeration(v, gamma):
    rng = np.random.default_rng(10 * v + gamma)
    for _ in range(12):
        (p, target), (q, draft) = (conditionals(rng, v, gamma + 1) for _ in "pq")
        counts, joint = rational_block(p, q, v, gamma)
        for tokens, mass in joint.items():
            assert mass == math.prod(p[tokens[:i]][tokens[i]] for i in range(gamma + 1))
        law = analysis.num_accepted_distribution(draft[:gamma], target, "block")
        assert_close("tau", law, tensor(counts), atol=1e-15)
        mean, token = (analysis.mean_accepted(draft[:gamma], target, r) for r in ("block", "token"))
        assert mean >= token - 1e-15
        if gamma == 1:
            assert mean == token == float(analysis.acceptance_rate(target[0], draft[0]))
        paths = torch.cartesian_prod(*[torch.arange(v)] * gamma).view(-1, gamma)
        rows = [torch.stack([t[tuple(paths[:, : i + 1].T)] for i, t in enumerate(x[:gamma])], -1)
                for x in (target, draft)]  # fmt: skip
        kept = analysis.block_acceptance(*rows) * rows[1].prod(-1, keepdim=True)
        assert float(kept.sum()) == pytest.approx(mean, abs=1e-14)


def test_block_beats_token_on_the_toy_model():
    """10/9 and 11/9 (ALGORITHMS.md, rule block)."""
    p, q = (torch.tensor(x, dtype=torch.float64) / 3 for x in ([1, 2], [2, 1]))
    draft, target = [q, q.expand(2, 2)], [p, p.expand(2, 2)]
    assert analysis.mean_accepted(draft, target) == pytest.approx(10 / 9, abs=1e-15)
    assert analysis.mean_accepted(draft, target, "block") == pytest.approx(11 / 9, abs=1e-15)


def test_block_acceptance_of_impossible_tokens():
    p, q = torch.tensor([[0.0, 0.9], [0.0, 0.9], [0.4, 0.0], [0.2, 0.2]]), torch.zeros(4, 2)
    q[:2, 1], q[0, 0], q[3] = 0.1, 0.5, 0.2
    want = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    assert_close("kept", analysis.block_acceptance(p, q), want)
    assert analysis.block_acceptance(p[:, :0], q[:, :0]).shape == (4, 0)


@pytest.mark.parametrize("rule", RULES)
def test_accepted_law_of_equal_rows_is_geometric(rule):
    p, q = tensor(law_of([3, 1, 2])), tensor(law_of([1, 4, 2]))
    tables = [[x.expand((3,) * (i + 1)) for i in range(3)] for x in (q, p)]
    alpha = float(analysis.accepted_mass(p, q, rule, lenience=0.8).sum())
    parameters = {"lenience": 0.8} if rule == "lenient" else {}
    law = analysis.num_accepted_distribution(*tables, rule, **parameters)
    want = [alpha**n * (1 - alpha) for n in range(3)] + [alpha**3]
    assert_close("tau", law, torch.tensor(want, dtype=torch.float64), atol=1e-15)
    mean = analysis.mean_accepted(*tables, rule, **parameters)
    assert 1 + mean == pytest.approx(analysis.expected_tokens(alpha, 3), abs=1e-14)
    if rule == "token":
        assert_close(
            "tau", law, tensor(chain_counts(law_of([3, 1, 2]), law_of([1, 4, 2]), 3)), atol=1e-15
        )
