"""The printed figures of Leviathan et al. 2023, against the formulas that they follow from."""

import math
from itertools import product

import pytest

from specdec_kernels import analysis
from specdec_kernels.analysis import TABLE_4, oracle_factor, walltime_factor

pytestmark = pytest.mark.analysis

COSTS = (0.01, 0.02, 0.05, 0.1)  # of Figure 3


def test_the_printed_factors_of_tables_1_and_4_follow_from_their_alphas_and_costs():
    for computed, printed in zip(analysis.table_1(), analysis.TABLE_1, strict=True):
        assert [f"{x:.2f}" for x in computed] == [f"{x:.2f}" for x in printed]
    same = 0
    for row in TABLE_4:  # which prints alpha and cost to two digits, and the factor to one
        most = walltime_factor(row.alpha + 0.005, row.gamma, row.cost - 0.005)
        least = walltime_factor(row.alpha - 0.005, row.gamma, row.cost + 0.005)
        assert least - 0.05 <= row.expected <= most + 0.05, row
        same += f"{walltime_factor(row.alpha, row.gamma, row.cost):.1f}" == f"{row.expected}"
    assert (len(analysis.TABLE_1), same) == (6, 9)


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


def test_the_best_gamma_has_the_largest_factor_and_improves_by_corollary_3_9_at_least():
    for alpha, cost in product((0.0, 0.3, 0.6, 0.9), (*COSTS, 0.3, 0.7)):
        bound, best = analysis.improvement_bound(alpha, cost), analysis.optimal_gamma(alpha, cost)
        factors = [walltime_factor(alpha, gamma, cost) for gamma in range(65)]
        assert factors[best] == max(factors) >= bound - 1e-12
        assert (bound > 1) == (alpha > cost) == (best > 0)
        assert bound == pytest.approx(max(1, (1 + alpha) / (1 + cost)))
    assert analysis.optimal_gamma(0.9, 0.0, verification=lambda g: 1 + 3 * g) == 0
    assert analysis.optimal_gamma(0.9, 0.0, limit=5) == 5


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


def test_the_factors_of_reads_and_operations_are_those_of_a_counted_round():
    for alpha, gamma, ratio in product((0.0, 0.6, 0.9), (0, 1, 5), (0.0, 0.2)):
        tokens = analysis.expected_tokens(alpha, gamma)
        reads = analysis.memory_accesses_factor(alpha, gamma)
        assert reads * tokens == pytest.approx(1)  # weights are read once a round
        operations = analysis.operations_factor(alpha, gamma, ratio)
        assert operations * tokens == pytest.approx(gamma * ratio + gamma + 1)
