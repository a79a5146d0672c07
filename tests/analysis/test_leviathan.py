"""The printed figures of Leviathan et al. 2023, against the formulas that they follow from."""

import math
from itertools import product

import pytest

from specdec_kernels import analysis
from specdec_kernels.analysis import TABLE_3, TABLE_4, oracle_factor, walltime_factor

COSTS = (0.01, 0.02, 0.05, 0.1)  # of Figure 3
ALPHAS = [i / 50 for i in range(50)]


def reachable(row, half=0.005):
    """The smallest and largest factor whose alpha and cost are printed as those of a row."""
    return (
        walltime_factor(row.alpha - half, row.gamma, row.cost + half),
        walltime_factor(row.alpha + half, row.gamma, row.cost - half),
    )


# Table 1 is in test_acceptance.py.


def test_the_expected_factors_of_table_4_follow_from_its_alphas_and_costs():
    same = 0
    for row in TABLE_4:
        low, high = reachable(row)
        assert low - 0.05 <= row.expected <= high + 0.05, row
        same += f"{walltime_factor(row.alpha, row.gamma, row.cost):.1f}" == f"{row.expected}"
    assert same == 9  # the others differ in the last digit, because alpha and c are rounded
    # Negative control: with one draft more, some rows cannot be reached.
    more = [row._replace(gamma=row.gamma + 2) for row in TABLE_4]
    assert any(not reachable(row)[0] - 0.05 <= row.expected <= reachable(row)[1] + 0.05
               for row in more)  # fmt: skip


def test_tables_2_and_3_print_the_same_acceptance_rates():
    assert len(TABLE_3) == 32
    rates = {row[:3]: row.alpha for row in TABLE_3}
    assert len(rates) == 32
    for row in TABLE_4:
        assert rates[f"T5-XXL ({row.task})", row.drafter, row.temperature] == row.alpha
    # Section 4.2: a bigram model costs nothing, and three drafts make it 1.25 times as fast.
    assert f"{walltime_factor(rates['T5-XXL (EnDe)', 'bigram', 0], 3, 0):.2f}" == "1.25"


def test_lenience_at_argmax_has_the_printed_speeds_and_sampling_does_not():
    computed = analysis.lenience_speeds()
    for printed, row in zip(analysis.LENIENCE_SPEEDS[:4], computed, strict=False):
        assert f"{row.speed:.1f}" == f"{printed.speed:.1f}"
    assert [f"{row.speed:.2f}" for row in computed[:4]] == ["3.30", "3.30", "3.87", "4.91"]
    for printed, row in zip(analysis.LENIENCE_SPEEDS[4:], computed[4:], strict=True):
        assert 1.04 < printed.speed / row.speed < 1.08
        best = max(walltime_factor(row.alpha, gamma, analysis.LENIENT_COST) for gamma in range(65))
        assert row.speed == best


# Corollary 3.9, section 3.4 and section 3.5.


def test_the_best_gamma_improves_by_corollary_3_9_at_least():
    for alpha, cost in product(ALPHAS, (*COSTS, 0.3, 0.7)):
        bound, best = analysis.improvement_bound(alpha, cost), analysis.optimal_gamma(alpha, cost)
        assert bound <= walltime_factor(alpha, best, cost) + 1e-12
        assert (bound > 1) == (alpha > cost) == (best > 0)
        assert bound == pytest.approx(max(1, (1 + alpha) / (1 + cost)))
    # It holds for the best gamma, and not for every one.
    assert walltime_factor(0.3, 3, 0.25) < 1 < analysis.improvement_bound(0.3, 0.25)


def test_an_oracle_drafts_what_is_accepted_and_no_more():
    for alpha, cost in product((0.0, 0.5, 0.9), COSTS):
        counts = [(n, alpha**n * (1 - alpha)) for n in range(600)]
        tokens = sum((n + 1) * share for n, share in counts)
        seconds = sum((1 + cost * n) * share for n, share in counts)
        assert oracle_factor(alpha, cost) == pytest.approx(tokens / seconds, rel=1e-12)
        assert all(oracle_factor(alpha, cost) >= walltime_factor(alpha, g, cost) for g in range(65))
    assert oracle_factor(1, 0) == math.inf
    assert oracle_factor(1, 0.25) == 4  # every token is a draft
    assert oracle_factor(0.9, 1.5) == 1  # none is


def test_an_oracle_improves_the_best_gamma_by_up_to_60_percent():
    gains = {
        (alpha, cost): oracle_factor(alpha, cost)
        / walltime_factor(alpha, analysis.optimal_gamma(alpha, cost), cost)
        for alpha, cost in product(ALPHAS, COSTS)
    }
    assert min(gains.values()) >= 1
    assert 1.55 < max(gains.values()) < 1.65


def test_weights_are_read_once_a_round():
    for alpha, gamma in product((0.0, 0.6, 0.9), (0, 1, 5)):
        reads = analysis.memory_accesses_factor(alpha, gamma)
        assert reads * analysis.expected_tokens(alpha, gamma) == pytest.approx(1)
        assert reads <= 1 <= analysis.operations_factor(alpha, gamma, 0) + 1e-12
    assert analysis.memory_accesses_factor(0.8, 5) == pytest.approx(1 / 3.68928)
